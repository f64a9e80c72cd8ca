// NCCL: the functions of libnccl, which is loaded at run time, so that one build works with and
// without it.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "gradwire/cuda/nccl/nccl_abi.h"

namespace gradwire::cuda {

struct Nccl {
  static constexpr const char* kLibrary = "libnccl.so.2";
  // Since 2.19, any thread may abort a communicator whose group is under way; before, only the
  // group's own thread could end it. Communicators that do not block, and ncclCommFinalize, exist
  // since 2.14.
  static constexpr int kOldest = 21900;

  // Returns the first library that loads, of
  //   the file that GRADWIRE_NCCL_SO names, and then nothing else;
  //   libnccl.so.2, where this process has loaded it already, as torch does;
  //   `search`, the files of pip's wheels;
  //   libnccl.so.2, where the system's loader looks.
  // Throws InvalidArgument with the reason and the remedy where there is none, or where the found
  // one is too old or is not NCCL. Loads once for each value of GRADWIRE_NCCL_SO; after a failure
  // it looks again.
  static const Nccl& load(const std::vector<std::string>& search = {});

  int version = 0;      // 22809 is 2.28.9
  std::string library;  // the file
  std::string origin;   // how it was found, for people

  nccl::Result (*get_version)(int* version);
  nccl::Result (*get_unique_id)(nccl::UniqueId* id);
  nccl::Result (*comm_init_rank_config)(nccl::Comm** comm, int size, nccl::UniqueId id, int rank,
                                        nccl::Config* config);
  nccl::Result (*comm_get_async_error)(nccl::Comm* comm, nccl::Result* error);
  nccl::Result (*comm_finalize)(nccl::Comm* comm);
  nccl::Result (*comm_destroy)(nccl::Comm* comm);
  nccl::Result (*comm_abort)(nccl::Comm* comm);
  nccl::Result (*group_start)();
  nccl::Result (*group_end)();
  nccl::Result (*send)(const void* data, std::size_t count, nccl::DataType type, int peer,
                       nccl::Comm* comm, Stream stream);
  nccl::Result (*recv)(void* data, std::size_t count, nccl::DataType type, int peer,
                       nccl::Comm* comm, Stream stream);
  nccl::Result (*all_reduce)(const void* in, void* out, std::size_t count, nccl::DataType type,
                             nccl::RedOp op, nccl::Comm* comm, Stream stream);
  nccl::Result (*reduce_scatter)(const void* in, void* out, std::size_t count_out,
                                 nccl::DataType type, nccl::RedOp op, nccl::Comm* comm,
                                 Stream stream);
  nccl::Result (*all_gather)(const void* in, void* out, std::size_t count_in, nccl::DataType type,
                             nccl::Comm* comm, Stream stream);
  nccl::Result (*broadcast)(const void* in, void* out, std::size_t count, nccl::DataType type,
                            int root, nccl::Comm* comm, Stream stream);
  nccl::Result (*reduce)(const void* in, void* out, std::size_t count, nccl::DataType type,
                         nccl::RedOp op, int root, nccl::Comm* comm, Stream stream);
  // Since 2.28; null where it is missing.
  nccl::Result (*all_to_all)(const void* in, void* out, std::size_t count, nccl::DataType type,
                             nccl::Comm* comm, Stream stream);
  const char* (*get_error_string)(nccl::Result result);
  const char* (*get_last_error)(nccl::Comm* comm);
};

// Returns the text of a version: "2.28.9".
std::string version_text(int version);

}  // namespace gradwire::cuda

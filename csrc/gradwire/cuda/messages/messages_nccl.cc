#include "gradwire/cuda/messages/messages_nccl.h"

#include <string>

#include "gradwire/base/error.h"
#include "gradwire/cuda/nccl/nccl_comm.h"

namespace gradwire::cuda {
nccl::UniqueId make_unique_id(const Nccl& nccl) {
  nccl::UniqueId id{};
  const nccl::Result result = nccl.get_unique_id(&id);
  if (result == nccl::kSuccess) return id;
  const char* last = nccl.get_last_error(nullptr);
  throw TransportError(
      std::string("ncclGetUniqueId: ") + nccl.get_error_string(result) + " (" +
          std::to_string(result) + ")" +
          (last == nullptr || *last == '\0' ? "" : std::string("; NCCL said: ") + last),
      kNoPeer);
}

std::unique_ptr<Messages> make_nccl_messages(const Nccl& nccl, const nccl::UniqueId& id,
                                             const NcclSettings& settings) {
  return std::make_unique<NcclComm>(nccl, id, settings);
}

}  // namespace gradwire::cuda

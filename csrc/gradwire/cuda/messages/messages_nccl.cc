#include "gradwire/cuda/messages/messages_nccl.h"

#include <utility>
#include <vector>

#include "gradwire/base/error.h"
#include "gradwire/cuda/nccl/nccl_comm.h"

namespace gradwire::cuda {
namespace {

class NcclMessages final : public Messages {
 public:
  NcclMessages(const Nccl& nccl, const nccl::UniqueId& id, NcclSettings settings)
      : size_(settings.size), comm_(nccl, id, telling(std::move(settings))) {}

  std::string_view name() const noexcept override { return "nccl"; }

  void begin() override {
    comm_.require_alive();
    posted_.clear();
  }
  void send(const std::byte* data, std::size_t bytes, Rank peer,
            std::span<const Slotted> /*layout*/) override {
    post({data, nullptr, bytes, peer});
  }
  void receive(std::byte* data, std::size_t bytes, Rank peer,
               std::span<const Slotted> /*layout*/) override {
    post({nullptr, data, bytes, peer});
  }
  void end(Stream stream) override {
    comm_.require_alive();
    if (!posted_.empty()) comm_.exchange(posted_, stream);
  }
  bool has_collectives() const noexcept override { return true; }
  void run_native(std::span<const NativeCollective> collectives, Stream stream) override {
    comm_.require_alive();
    comm_.run(collectives, stream);
  }
  void check() override { comm_.check(); }
  void abort() noexcept override { comm_.abort(); }

 private:
  NcclSettings telling(NcclSettings settings) {
    settings.before_abort = [this] { lose(); };
    return settings;
  }
  void post(const NcclComm::Message& message) {
    if (message.peer < 0 || message.peer >= size_)
      throw InvalidArgument("there is no rank " + std::to_string(message.peer) + " among " +
                            std::to_string(size_));
    if (message.bytes > 0) posted_.push_back(message);
  }

  const int size_;
  std::vector<NcclComm::Message> posted_;
  NcclComm comm_;
};

}  // namespace

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
                                             NcclSettings settings) {
  return std::make_unique<NcclMessages>(nccl, id, std::move(settings));
}

}  // namespace gradwire::cuda

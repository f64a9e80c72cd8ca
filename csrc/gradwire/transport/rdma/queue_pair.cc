#include "gradwire/transport/rdma/queue_pair.h"

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "gradwire/base/error.h"

namespace gradwire::transport {
namespace {

constexpr std::uint8_t kRetries = 6;  // 7 means for ever on some devices
constexpr std::uint8_t kHops = 64;
constexpr std::uint8_t kReceiverNotReady = 12;  // 0.64 ms until the next try; there is always room

// Inline bytes to ask for, in turn, until a device accepts; the more, the fewer reads of memory it
// needs.
constexpr std::array<std::uint32_t, 4> kInline = {220, 128, 64, 0};

// Returns whether a verb succeeded. On failure, devices return an error, or -1 and set errno; errno
// is then set in both cases.
bool succeeded(int result) noexcept {
  if (result > 0) errno = result;
  return result == 0;
}

ibv::Qp* create(const RdmaDevices& devices, const RdmaPort& port, ibv::Cq* cq, int sends,
                int receives, std::size_t& most_inline) {
  for (std::uint32_t bytes : kInline) {
    ibv::QpInitAttr wanted{};
    wanted.send_cq = wanted.recv_cq = cq;
    wanted.cap = {static_cast<std::uint32_t>(sends), static_cast<std::uint32_t>(receives), 1, 1,
                  bytes};
    wanted.qp_type = ibv::kReliableConnection;
    ibv::Qp* made = devices.verbs().create_qp(port.pd, &wanted);
    if (made == nullptr) continue;
    most_inline = wanted.cap.max_inline_data;
    return made;
  }
  throw Error(system_message(port.device + ": ibv_create_qp", errno));
}

}  // namespace

QueuePair::QueuePair(const RdmaDevices& devices, const RdmaPort& port, ibv::Cq* cq, int sends,
                     int receives)
    : devices_(devices),
      port_(port),
      qp_(create(devices, port, cq, sends, receives, most_inline_), devices.verbs().destroy_qp) {
  ibv::QpAttr wanted{};
  wanted.qp_state = ibv::kQpInit;
  wanted.port_num = port.number;
  wanted.qp_access_flags = ibv::kRemoteWrite;
  change(wanted, ibv::kQpState | ibv::kQpPkeyIndex | ibv::kQpPort | ibv::kQpAccessFlags, "INIT");
}

void QueuePair::change(ibv::QpAttr& attributes, int mask, const char* to) {
  const int error = devices_.verbs().modify_qp(qp_.get(), &attributes, mask);
  if (error != 0) throw Error(system_message(port_.describe() + ": ibv_modify_qp to " + to, error));
}

void QueuePair::connect(std::uint32_t number, std::uint32_t first_packet,
                        const RdmaAddress& address, std::uint32_t own_first_packet) {
  const RdmaSettings& settings = devices_.settings();
  ibv::QpAttr receive{};
  receive.qp_state = ibv::kQpReadyToReceive;
  receive.path_mtu = std::min(port_.address.mtu, address.mtu);
  receive.dest_qp_num = number;
  receive.rq_psn = first_packet;
  receive.min_rnr_timer = kReceiverNotReady;
  ibv::AhAttr& to = receive.ah_attr;
  to.port_num = port_.number;
  to.sl = static_cast<std::uint8_t>(settings.service_level);
  to.dlid = address.lid;
  to.is_global = port_.address.link_layer == ibv::kLinkEthernet || address.lid == 0;
  to.grh.dgid = address.gid;
  to.grh.sgid_index = static_cast<std::uint8_t>(port_.gid_index);
  to.grh.hop_limit = kHops;
  to.grh.traffic_class = static_cast<std::uint8_t>(settings.traffic_class);
  change(receive,
         ibv::kQpState | ibv::kQpAv | ibv::kQpPathMtu | ibv::kQpDestQpn | ibv::kQpRqPsn |
             ibv::kQpMaxDestRdAtomic | ibv::kQpMinRnrTimer,
         "RTR");
  ibv::QpAttr send{};
  send.qp_state = ibv::kQpReadyToSend;
  send.timeout = static_cast<std::uint8_t>(settings.timeout);
  send.retry_cnt = kRetries;
  send.rnr_retry = kRetries;
  send.sq_psn = own_first_packet;
  change(send,
         ibv::kQpState | ibv::kQpTimeout | ibv::kQpRetryCount | ibv::kQpRnrRetry | ibv::kQpSqPsn |
             ibv::kQpMaxRdAtomic,
         "RTS");
}

void QueuePair::break_off() noexcept {
  ibv::QpAttr wanted{};
  wanted.qp_state = ibv::kQpError;
  devices_.verbs().modify_qp(qp_.get(), &wanted, ibv::kQpState);
}

bool QueuePair::post(const Write& write) noexcept {
  ibv::Sge part{reinterpret_cast<std::uintptr_t>(write.from), write.bytes, write.key};
  ibv::SendWr request{};
  request.wr_id = write.id;
  request.sg_list = &part;
  request.num_sge = write.bytes == 0 ? 0 : 1;
  request.opcode = ibv::kRdmaWriteWithImm;
  request.imm_data = htonl(write.word);
  request.remote_addr = write.to;
  request.rkey = write.to_key;
  if (write.bytes <= most_inline_) request.send_flags |= ibv::kSendInline;
  if (write.signaled) request.send_flags |= ibv::kSendSignaled;
  ibv::SendWr* bad = nullptr;
  return succeeded(qp_->context->ops.post_send(qp_.get(), &request, &bad));
}

bool QueuePair::post_receive(std::uint64_t id) noexcept {
  ibv::RecvWr request{};
  request.wr_id = id;
  ibv::RecvWr* bad = nullptr;
  return succeeded(qp_->context->ops.post_recv(qp_.get(), &request, &bad));
}

}  // namespace gradwire::transport

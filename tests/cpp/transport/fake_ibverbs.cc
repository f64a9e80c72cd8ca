// See fake_ibverbs.h. One mutex for all: what a write does is over when post_send returns.
#define GRADWIRE_FAKE_IBVERBS ""
#include "fake_ibverbs.h"

#include <arpa/inet.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "gradwire/transport/rdma/verbs_abi.h"

namespace ibv = gradwire::transport::ibv;
using gradwire::transport::FakeIbverbs;

struct ibv::Pd {
  ibv::Context* context;
};

namespace {

struct FakeCq;
struct FakeChannel : ibv::CompChannel {
  std::deque<FakeCq*> rung;
};
struct Completion {
  ibv::Wc found;
  std::uint64_t sends_over = 0;  // of the queue pair, with it
};
struct FakeCq : ibv::Cq {
  FakeChannel* channel = nullptr;
  std::size_t room = 0;
  std::deque<Completion> found;
  bool armed = false;
};
struct FakeQp : ibv::Qp {
  int state = ibv::kQpReset;
  std::uint32_t peer = 0;
  std::uint32_t most_inline = 0;
  std::size_t most_sends = 0;
  std::size_t most_receives = 0;
  std::uint64_t sends = 0;
  std::uint64_t sends_over = 0;  // of these, as the completions tell that were polled
  std::deque<std::uint64_t> receives;
};

struct Failure {
  int error = 0;
  int after = 0;
};

std::mutex mutex;
FakeIbverbs::Hardware hardware_now;
std::map<std::string, Failure> failures;
std::map<std::string, int> calls_of;
std::map<std::uint32_t, FakeQp*> queue_pairs;
std::map<int, ibv::QpAttr> modified_to;
std::set<ibv::Mr*> regions;
std::array<ibv::Device, 4> devices;
std::uint32_t next_number = 100;
int breaks_with = 0;
int living = 0;

using Lock = std::lock_guard<std::mutex>;

// Counts the call; the error it has to fail with, or 0.
int called(const std::string& verb) {
  ++calls_of[verb];
  const auto found = failures.find(verb);
  if (found == failures.end()) return 0;
  return found->second.after-- > 0 ? 0 : (found->second.after = 0, found->second.error);
}

// For verbs that return null or -1.
bool fails(const char* verb) {
  const int error = called(verb);
  if (error != 0) errno = error;
  return error != 0;
}

void push(FakeCq& cq, const Completion& completion) {
  if (cq.found.size() == cq.room) ++calls_of["overflow"];
  cq.found.push_back(completion);
  if (!cq.armed) return;
  cq.armed = false;
  cq.channel->rung.push_back(&cq);
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(cq.channel->fd, &one, sizeof one);
}

void complete(FakeQp& qp, std::uint64_t id, int status, int opcode, std::uint32_t word = 0) {
  ibv::Wc found{};
  found.wr_id = id;
  found.status = status;
  found.opcode = opcode;
  found.imm_data = word;
  found.qp_num = qp.qp_num;
  const bool sent = opcode == ibv::kWcRdmaWrite;
  push(*static_cast<FakeCq*>(sent ? qp.send_cq : qp.recv_cq), {found, sent ? qp.sends : 0});
}
void complete_send(FakeQp& qp, std::uint64_t id, int status) {
  complete(qp, id, status, ibv::kWcRdmaWrite);
}
void complete_receive(FakeQp& qp, std::uint64_t id, int status, std::uint32_t word = 0) {
  complete(qp, id, status, ibv::kWcRecvRdmaWithImm, word);
}

void break_down(FakeQp& qp) {
  qp.state = ibv::kQpError;
  for (std::uint64_t id : qp.receives) complete_receive(qp, id, ibv::kWcFlushed);
  qp.receives.clear();
}

bool registered(std::uint64_t address, std::uint64_t bytes, std::uint32_t key) {
  for (const ibv::Mr* each : regions) {
    const auto begin = reinterpret_cast<std::uintptr_t>(each->addr);
    if (each->rkey == key && address >= begin && address + bytes <= begin + each->length)
      return true;
  }
  return false;
}

// The status with which a write ends; does it where it can be done.
int deliver(FakeQp& qp, const ibv::SendWr& request) {
  if (breaks_with != 0) return std::exchange(breaks_with, 0);
  const auto found = queue_pairs.find(qp.peer);
  if (found == queue_pairs.end()) return ibv::kWcRetryExceeded;
  FakeQp& peer = *found->second;
  if (peer.state != ibv::kQpReadyToReceive && peer.state != ibv::kQpReadyToSend)
    return ibv::kWcRetryExceeded;
  if (peer.receives.empty()) return ibv::kWcRnrExceeded;
  if (request.num_sge == 1) {
    const ibv::Sge& part = *request.sg_list;
    constexpr int kLocalProtection = 4, kRemoteAccess = 10;
    const bool by_value = (request.send_flags & ibv::kSendInline) != 0;
    if (!by_value && !registered(part.addr, part.length, part.lkey)) return kLocalProtection;
    if (!registered(request.remote_addr, part.length, request.rkey)) return kRemoteAccess;
    std::memcpy(reinterpret_cast<void*>(request.remote_addr),
                reinterpret_cast<const void*>(part.addr), part.length);
  }
  complete_receive(peer, peer.receives.front(), ibv::kWcSuccess, request.imm_data);
  peer.receives.pop_front();
  return ibv::kWcSuccess;
}

int poll_cq(ibv::Cq* handle, int entries, ibv::Wc* out) {
  const Lock lock(mutex);
  if (fails("poll_cq")) return -1;
  auto& found = static_cast<FakeCq*>(handle)->found;
  int count = 0;
  for (; count < entries && !found.empty(); ++count, found.pop_front()) {
    out[count] = found.front().found;
    const auto qp = queue_pairs.find(out[count].qp_num);
    if (qp != queue_pairs.end())
      qp->second->sends_over = std::max(qp->second->sends_over, found.front().sends_over);
  }
  return count;
}

int req_notify_cq(ibv::Cq* handle, int) {
  const Lock lock(mutex);
  static_cast<FakeCq*>(handle)->armed = true;
  return called("req_notify_cq");
}

int post_send(ibv::Qp* handle, ibv::SendWr* request, ibv::SendWr** bad) {
  const Lock lock(mutex);
  auto& qp = *static_cast<FakeQp*>(handle);
  *bad = request;
  if (const int error = called("post_send"); error != 0) return error;
  if (qp.state != ibv::kQpReadyToSend && qp.state != ibv::kQpError) return EINVAL;
  if (qp.sends - qp.sends_over == qp.most_sends) return ENOMEM;
  const bool by_value = (request->send_flags & ibv::kSendInline) != 0;
  const bool tells = (request->send_flags & ibv::kSendSignaled) != 0;
  if (by_value && request->num_sge == 1 && request->sg_list->length > qp.most_inline) return EINVAL;
  calls_of["post_send inline"] += by_value && request->num_sge == 1;
  calls_of["post_send signaled"] += tells;
  const int status = qp.state == ibv::kQpError ? ibv::kWcFlushed : deliver(qp, *request);
  ++qp.sends;
  if (status != ibv::kWcSuccess || tells) complete_send(qp, request->wr_id, status);
  if (status != ibv::kWcSuccess) break_down(qp);
  return 0;
}

int post_recv(ibv::Qp* handle, ibv::RecvWr* request, ibv::RecvWr** bad) {
  const Lock lock(mutex);
  auto& qp = *static_cast<FakeQp*>(handle);
  *bad = request;
  if (const int error = called("post_recv"); error != 0) return error;
  if (qp.receives.size() == qp.most_receives) return ENOMEM;
  if (qp.state == ibv::kQpError)
    complete_receive(qp, request->wr_id, ibv::kWcFlushed);
  else
    qp.receives.push_back(request->wr_id);
  return 0;
}

void reset() {
  const Lock lock(mutex);
  hardware_now = {};
  failures.clear();
  calls_of.clear();
  modified_to.clear();
  breaks_with = 0;
}
FakeIbverbs::Hardware* hardware() { return &hardware_now; }
void fail(const char* verb, int error, int after) {
  const Lock lock(mutex);
  failures[verb] = {error, after};
}
void break_next(int status) {
  const Lock lock(mutex);
  breaks_with = status;
}
void inject(unsigned word) {
  const Lock lock(mutex);
  for (auto& [number, qp] : queue_pairs) {
    if (qp->receives.empty()) continue;
    complete_receive(*qp, qp->receives.front(), ibv::kWcSuccess, htonl(word));
    qp->receives.pop_front();
  }
}
int alive() {
  const Lock lock(mutex);
  return living;
}
int calls(const char* verb) {
  const Lock lock(mutex);
  return calls_of[verb];
}
ibv::QpAttr modified(int state) {
  const Lock lock(mutex);
  return modified_to[state];
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

extern const FakeIbverbs fake_ibverbs_table;  // what is const is local otherwise
const FakeIbverbs fake_ibverbs_table = {reset,  hardware, fail,  break_next,
                                        inject, alive,    calls, modified};

int ibv_fork_init() { return 0; }

ibv::Device** ibv_get_device_list(int* count) {
  const Lock lock(mutex);
  *count = hardware_now.devices;
  if (fails("ibv_get_device_list")) return nullptr;
  if (*count < 0) return errno = ENOSYS, nullptr;
  auto** list = new ibv::Device*[devices.size() + 1]();
  for (int i = 0; i < *count; ++i) {
    ibv::Device& device = devices[static_cast<std::size_t>(i)];
    const std::string number = std::to_string(i);
    std::strcpy(device.name.data(), ("fake" + number).c_str());
    std::strcpy(device.dev_name.data(), ("uverbs" + number).c_str());
    device.transport_type = hardware_now.transport_type;
    list[i] = &device;
  }
  return list;
}
void ibv_free_device_list(ibv::Device** list) { delete[] list; }

ibv::Context* ibv_open_device(ibv::Device* device) {
  const Lock lock(mutex);
  if (fails("ibv_open_device")) return nullptr;
  auto* context = new ibv::Context();
  context->device = device;
  context->ops.poll_cq = poll_cq;
  context->ops.req_notify_cq = req_notify_cq;
  context->ops.post_send = post_send;
  context->ops.post_recv = post_recv;
  ++living;
  return context;
}
int ibv_close_device(ibv::Context* context) {
  const Lock lock(mutex);
  delete context;
  --living;
  return 0;
}

int ibv_query_device(ibv::Context*, ibv::DeviceAttr* found) {
  const Lock lock(mutex);
  found->phys_port_cnt = static_cast<std::uint8_t>(hardware_now.ports);
  return called("ibv_query_device");
}
int ibv_query_port(ibv::Context*, std::uint8_t, ibv::PortAttr* found) {
  const Lock lock(mutex);
  found->state = hardware_now.port_state;
  found->link_layer = static_cast<std::uint8_t>(hardware_now.link_layer);
  found->active_mtu = found->max_mtu = hardware_now.active_mtu;
  found->gid_tbl_len = 8;
  found->lid = hardware_now.link_layer == ibv::kLinkInfiniBand ? 7 : 0;
  found->max_msg_sz = hardware_now.max_message;
  return called("ibv_query_port");
}

// 0: link-local of RoCE v1; 1: of v2; 2: 127.0.0.N of RoCE v2, N the number of the port; the rest
// is empty.
int _ibv_query_gid_ex(ibv::Context* context, std::uint32_t port, std::uint32_t index,
                      ibv::GidEntry* found, std::uint32_t, std::size_t) {
  const Lock lock(mutex);
  if (const int error = called("ibv_query_gid_ex"); error != 0) return error;
  if (index > (hardware_now.has_ipv4 ? 2U : 1U)) return ENODATA;
  *found = {};
  found->gid_index = index;
  found->port_num = port;
  found->gid_type = index == 0 ? ibv::kGidRoceV1 : ibv::kGidRoceV2;
  const auto device = static_cast<std::uint8_t>(context->device->name[4] - '0');
  if (index == 2)
    found->gid = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1};
  else
    found->gid = {0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, device, 1};
  return 0;
}

ibv::Pd* ibv_alloc_pd(ibv::Context* context) {
  const Lock lock(mutex);
  if (fails("ibv_alloc_pd")) return nullptr;
  ++living;
  return new ibv::Pd{context};
}
int ibv_dealloc_pd(ibv::Pd* pd) {
  const Lock lock(mutex);
  delete pd;
  --living;
  return 0;
}

ibv::Mr* ibv_reg_mr(ibv::Pd* pd, void* address, std::size_t bytes, int) {
  const Lock lock(mutex);
  if (fails("ibv_reg_mr")) return nullptr;
  auto* mr = new ibv::Mr{pd->context, pd, address, bytes, 0, ++next_number, next_number};
  regions.insert(mr);
  ++living;
  return mr;
}
int ibv_dereg_mr(ibv::Mr* mr) {
  const Lock lock(mutex);
  regions.erase(mr);
  delete mr;
  --living;
  return 0;
}

ibv::CompChannel* ibv_create_comp_channel(ibv::Context* context) {
  const Lock lock(mutex);
  if (fails("ibv_create_comp_channel")) return nullptr;
  auto* channel = new FakeChannel();
  channel->context = context;
  channel->fd = ::eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
  ++living;
  return channel;
}
int ibv_destroy_comp_channel(ibv::CompChannel* channel) {
  const Lock lock(mutex);
  ::close(channel->fd);
  delete static_cast<FakeChannel*>(channel);
  --living;
  return 0;
}

ibv::Cq* ibv_create_cq(ibv::Context* context, int entries, void*, ibv::CompChannel* channel, int) {
  const Lock lock(mutex);
  if (fails("ibv_create_cq")) return nullptr;
  auto* cq = new FakeCq();
  cq->context = context;
  cq->channel = static_cast<FakeChannel*>(channel);
  cq->room = static_cast<std::size_t>(entries);
  ++living;
  return cq;
}
int ibv_destroy_cq(ibv::Cq* cq) {
  const Lock lock(mutex);
  delete static_cast<FakeCq*>(cq);
  --living;
  return 0;
}

// The channel's descriptor does not block where gradwire has said so.
int ibv_get_cq_event(ibv::CompChannel* handle, ibv::Cq** cq, void** context) {
  std::uint64_t one = 0;
  if (::read(handle->fd, &one, sizeof one) != sizeof one) return -1;
  const Lock lock(mutex);
  auto& rung = static_cast<FakeChannel*>(handle)->rung;
  *cq = rung.front();
  *context = nullptr;
  rung.pop_front();
  return 0;
}
void ibv_ack_cq_events(ibv::Cq*, unsigned) {}

ibv::Qp* ibv_create_qp(ibv::Pd* pd, ibv::QpInitAttr* wanted) {
  const Lock lock(mutex);
  if (fails("ibv_create_qp")) return nullptr;
  if (wanted->cap.max_inline_data > hardware_now.most_inline) return errno = EINVAL, nullptr;
  auto* qp = new FakeQp();
  qp->context = pd->context;
  qp->pd = pd;
  qp->send_cq = wanted->send_cq;
  qp->recv_cq = wanted->recv_cq;
  qp->qp_num = ++next_number;
  qp->most_inline = wanted->cap.max_inline_data;
  qp->most_sends = wanted->cap.max_send_wr;
  qp->most_receives = wanted->cap.max_recv_wr;
  queue_pairs[qp->qp_num] = qp;
  ++living;
  return qp;
}
int ibv_modify_qp(ibv::Qp* handle, ibv::QpAttr* wanted, int mask) {
  const Lock lock(mutex);
  auto& qp = *static_cast<FakeQp*>(handle);
  const std::string verb = "ibv_modify_qp " + std::to_string(wanted->qp_state);
  if (const int error = called(verb); error != 0) return error;
  modified_to[wanted->qp_state] = *wanted;
  if ((mask & ibv::kQpDestQpn) != 0) qp.peer = wanted->dest_qp_num;
  if (wanted->qp_state == ibv::kQpError)
    break_down(qp);
  else
    qp.state = wanted->qp_state;
  return 0;
}
int ibv_destroy_qp(ibv::Qp* handle) {
  const Lock lock(mutex);
  queue_pairs.erase(handle->qp_num);
  delete static_cast<FakeQp*>(handle);
  --living;
  return 0;
}

const char* ibv_wc_status_str(int status) {
  switch (status) {
    case ibv::kWcFlushed:
      return "Work Request Flushed Error";
    case ibv::kWcRetryExceeded:
      return "transport retry counter exceeded";
    case ibv::kWcRnrExceeded:
      return "RNR retry counter exceeded";
    default:
      return "some other error";
  }
}

}  // extern "C"
#pragma GCC visibility pop

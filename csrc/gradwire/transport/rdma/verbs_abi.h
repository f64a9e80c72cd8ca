// The part of libibverbs' binary interface that gradwire uses, declared here: the library is loaded
// at run time, and its headers are not needed to build. Fields are named as in <infiniband/verbs.h>
// (rdma-core, ABI of IBVERBS_1.1, fixed since 2006), with which
// tests/cpp/transport/transport_verbs_abi_test.cc compares sizes and offsets where it is installed.
#pragma once

#include <pthread.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace gradwire::transport::ibv {

struct Pd;

struct Device {
  std::array<void*, 2> unused;
  int node_type;
  int transport_type;
  std::array<char, 64> name;
  std::array<char, 64> dev_name;
  std::array<char, 256> dev_path;
  std::array<char, 256> ibdev_path;
};

struct Cq;
struct Qp;
struct SendWr;
struct RecvWr;
struct Wc;

// The functions that are called for every message are not symbols: each device provides its own.
struct ContextOps {
  std::array<void*, 11> unused_to_poll_cq;
  int (*poll_cq)(Cq* cq, int entries, Wc* found);
  int (*req_notify_cq)(Cq* cq, int solicited_only);
  std::array<void*, 12> unused_to_post_send;
  int (*post_send)(Qp* qp, SendWr* request, SendWr** bad);
  int (*post_recv)(Qp* qp, RecvWr* request, RecvWr** bad);
  std::array<void*, 5> unused;
};

struct Context {
  Device* device;
  ContextOps ops;
  int cmd_fd;
  int async_fd;
  int num_comp_vectors;
  pthread_mutex_t mutex;
  void* abi_compat;
};

struct CompChannel {
  Context* context;
  int fd;
  int refcnt;
};

struct Mr {
  Context* context;
  Pd* pd;
  void* addr;
  std::size_t length;
  std::uint32_t handle;
  std::uint32_t lkey;
  std::uint32_t rkey;
};

// Only the beginning of Cq and Qp is declared: the library allocates them.
struct Cq {
  Context* context;
};

struct Qp {
  Context* context;
  void* qp_context;
  Pd* pd;
  Cq* send_cq;
  Cq* recv_cq;
  void* srq;
  std::uint32_t handle;
  std::uint32_t qp_num;
};

using Gid = std::array<std::uint8_t, 16>;

enum GidType : std::uint32_t { kGidIb, kGidRoceV1, kGidRoceV2 };

struct GidEntry {
  alignas(8) Gid gid;
  std::uint32_t gid_index;
  std::uint32_t port_num;
  std::uint32_t gid_type;
  std::uint32_t ndev_ifindex;
};

struct DeviceAttr {
  std::array<char, 64> fw_ver;
  std::array<std::uint64_t, 4> unused_ids;
  std::array<std::uint32_t, 3> unused_vendor;
  int max_qp;
  int max_qp_wr;
  unsigned device_cap_flags;
  int max_sge;
  int max_sge_rd;
  int max_cq;
  int max_cqe;
  std::array<int, 22> unused;
  std::uint16_t max_pkeys;
  std::uint8_t local_ca_ack_delay;
  std::uint8_t phys_port_cnt;
};

enum PortState : int { kPortActive = 4 };
enum LinkLayer : std::uint8_t { kLinkUnspecified, kLinkInfiniBand, kLinkEthernet };
enum Mtu : int { kMtu256 = 1, kMtu512, kMtu1024, kMtu2048, kMtu4096 };

struct PortAttr {
  int state;
  int max_mtu;
  int active_mtu;
  int gid_tbl_len;
  std::uint32_t port_cap_flags;
  std::uint32_t max_msg_sz;
  std::array<std::uint32_t, 2> unused_counters;
  std::uint16_t pkey_tbl_len;
  std::uint16_t lid;
  std::uint16_t sm_lid;
  std::array<std::uint8_t, 8> unused;
  std::uint8_t link_layer;
  std::uint8_t flags;
  std::uint16_t port_cap_flags2;
};

struct GlobalRoute {
  alignas(8) Gid dgid;
  std::uint32_t flow_label;
  std::uint8_t sgid_index;
  std::uint8_t hop_limit;
  std::uint8_t traffic_class;
};

struct AhAttr {
  GlobalRoute grh;
  std::uint16_t dlid;
  std::uint8_t sl;
  std::uint8_t src_path_bits;
  std::uint8_t static_rate;
  std::uint8_t is_global;
  std::uint8_t port_num;
};

struct QpCap {
  std::uint32_t max_send_wr;
  std::uint32_t max_recv_wr;
  std::uint32_t max_send_sge;
  std::uint32_t max_recv_sge;
  std::uint32_t max_inline_data;
};

enum QpType : int { kReliableConnection = 2 };
enum QpState : int { kQpReset, kQpInit, kQpReadyToReceive, kQpReadyToSend, kQpError = 6 };

struct QpInitAttr {
  void* qp_context;
  Cq* send_cq;
  Cq* recv_cq;
  void* srq;
  QpCap cap;
  int qp_type;
  int sq_sig_all;
};

enum QpAttrMask : int {
  kQpState = 1 << 0,
  kQpAccessFlags = 1 << 3,
  kQpPkeyIndex = 1 << 4,
  kQpPort = 1 << 5,
  kQpAv = 1 << 7,
  kQpPathMtu = 1 << 8,
  kQpTimeout = 1 << 9,
  kQpRetryCount = 1 << 10,
  kQpRnrRetry = 1 << 11,
  kQpRqPsn = 1 << 12,
  kQpMaxRdAtomic = 1 << 13,
  kQpMinRnrTimer = 1 << 15,
  kQpSqPsn = 1 << 16,
  kQpMaxDestRdAtomic = 1 << 17,
  kQpDestQpn = 1 << 20,
};

struct QpAttr {
  int qp_state;
  int cur_qp_state;
  int path_mtu;
  int path_mig_state;
  std::uint32_t qkey;
  std::uint32_t rq_psn;
  std::uint32_t sq_psn;
  std::uint32_t dest_qp_num;
  unsigned qp_access_flags;
  QpCap cap;
  AhAttr ah_attr;
  AhAttr alt_ah_attr;
  std::uint16_t pkey_index;
  std::uint16_t alt_pkey_index;
  std::uint8_t en_sqd_async_notify;
  std::uint8_t sq_draining;
  std::uint8_t max_rd_atomic;
  std::uint8_t max_dest_rd_atomic;
  std::uint8_t min_rnr_timer;
  std::uint8_t port_num;
  std::uint8_t timeout;
  std::uint8_t retry_cnt;
  std::uint8_t rnr_retry;
  std::uint8_t alt_port_num;
  std::uint8_t alt_timeout;
  std::uint32_t rate_limit;
};

struct Sge {
  std::uint64_t addr;
  std::uint32_t length;
  std::uint32_t lkey;
};

enum WrOpcode : int { kRdmaWrite, kRdmaWriteWithImm };
enum SendFlags : unsigned { kSendSignaled = 1 << 1, kSendInline = 1 << 3 };
enum AccessFlags : int { kLocalWrite = 1 << 0, kRemoteWrite = 1 << 1 };

struct SendWr {
  std::uint64_t wr_id;
  SendWr* next;
  Sge* sg_list;
  int num_sge;
  int opcode;
  unsigned send_flags;
  std::uint32_t imm_data;  // big endian
  std::uint64_t remote_addr;
  std::uint32_t rkey;
  std::array<std::uint32_t, 19> unused;
};

struct RecvWr {
  std::uint64_t wr_id;
  RecvWr* next;
  Sge* sg_list;
  int num_sge;
};

enum WcStatus : int { kWcSuccess = 0, kWcFlushed = 5, kWcRetryExceeded = 12, kWcRnrExceeded = 13 };
enum WcOpcode : int { kWcRdmaWrite = 1, kWcRecvRdmaWithImm = 129 };

struct Wc {
  std::uint64_t wr_id;
  int status;
  int opcode;
  std::uint32_t vendor_err;
  std::uint32_t byte_len;
  std::uint32_t imm_data;  // big endian
  std::uint32_t qp_num;
  std::uint32_t src_qp;
  unsigned wc_flags;
  std::uint16_t pkey_index;
  std::uint16_t slid;
  std::uint8_t sl;
  std::uint8_t dlid_path_bits;
};

}  // namespace gradwire::transport::ibv

// gradwire's own words for libibverbs' binary interface, against the real header where it is.
#include <gtest/gtest.h>

#include "gradwire/transport/rdma/verbs_abi.h"

#if __has_include(<infiniband/verbs.h>)
#include <infiniband/verbs.h>

namespace ours = gradwire::transport::ibv;

#define SAME_SIZE(type, theirs) static_assert(sizeof(ours::type) == sizeof(theirs))
#define SAME_FIELD(type, theirs, field)                                   \
  static_assert(offsetof(ours::type, field) == offsetof(theirs, field) && \
                sizeof(ours::type::field) == sizeof(theirs::field))
#define SAME_VALUE(name, theirs) static_assert(static_cast<int>(ours::name) == theirs)

SAME_SIZE(Device, ibv_device);
SAME_FIELD(Device, ibv_device, node_type);
SAME_FIELD(Device, ibv_device, transport_type);
SAME_FIELD(Device, ibv_device, name);
SAME_FIELD(Device, ibv_device, ibdev_path);
SAME_SIZE(ContextOps, ibv_context_ops);
SAME_FIELD(ContextOps, ibv_context_ops, poll_cq);
SAME_FIELD(ContextOps, ibv_context_ops, req_notify_cq);
SAME_FIELD(ContextOps, ibv_context_ops, post_send);
SAME_FIELD(ContextOps, ibv_context_ops, post_recv);
SAME_SIZE(Context, ibv_context);
SAME_FIELD(Context, ibv_context, device);
SAME_FIELD(Context, ibv_context, ops);
SAME_FIELD(Context, ibv_context, cmd_fd);
SAME_FIELD(Context, ibv_context, async_fd);
SAME_FIELD(Context, ibv_context, num_comp_vectors);
SAME_FIELD(Context, ibv_context, abi_compat);
SAME_SIZE(CompChannel, ibv_comp_channel);
SAME_FIELD(CompChannel, ibv_comp_channel, fd);
SAME_SIZE(Mr, ibv_mr);
SAME_FIELD(Mr, ibv_mr, addr);
SAME_FIELD(Mr, ibv_mr, length);
SAME_FIELD(Mr, ibv_mr, lkey);
SAME_FIELD(Mr, ibv_mr, rkey);
SAME_FIELD(Cq, ibv_cq, context);
SAME_FIELD(Qp, ibv_qp, context);
SAME_FIELD(Qp, ibv_qp, pd);
SAME_FIELD(Qp, ibv_qp, send_cq);
SAME_FIELD(Qp, ibv_qp, recv_cq);
SAME_FIELD(Qp, ibv_qp, qp_num);
SAME_SIZE(Gid, ibv_gid);
SAME_SIZE(GidEntry, ibv_gid_entry);
SAME_FIELD(GidEntry, ibv_gid_entry, gid);
SAME_FIELD(GidEntry, ibv_gid_entry, gid_index);
SAME_FIELD(GidEntry, ibv_gid_entry, port_num);
SAME_FIELD(GidEntry, ibv_gid_entry, gid_type);
SAME_FIELD(GidEntry, ibv_gid_entry, ndev_ifindex);
SAME_SIZE(DeviceAttr, ibv_device_attr);
SAME_FIELD(DeviceAttr, ibv_device_attr, max_qp);
SAME_FIELD(DeviceAttr, ibv_device_attr, max_qp_wr);
SAME_FIELD(DeviceAttr, ibv_device_attr, max_sge);
SAME_FIELD(DeviceAttr, ibv_device_attr, max_cqe);
SAME_FIELD(DeviceAttr, ibv_device_attr, phys_port_cnt);
SAME_SIZE(PortAttr, ibv_port_attr);
SAME_FIELD(PortAttr, ibv_port_attr, state);
SAME_FIELD(PortAttr, ibv_port_attr, active_mtu);
SAME_FIELD(PortAttr, ibv_port_attr, gid_tbl_len);
SAME_FIELD(PortAttr, ibv_port_attr, max_msg_sz);
SAME_FIELD(PortAttr, ibv_port_attr, lid);
SAME_FIELD(PortAttr, ibv_port_attr, link_layer);
SAME_SIZE(GlobalRoute, ibv_global_route);
SAME_FIELD(GlobalRoute, ibv_global_route, dgid);
SAME_FIELD(GlobalRoute, ibv_global_route, sgid_index);
SAME_FIELD(GlobalRoute, ibv_global_route, hop_limit);
SAME_FIELD(GlobalRoute, ibv_global_route, traffic_class);
SAME_SIZE(AhAttr, ibv_ah_attr);
SAME_FIELD(AhAttr, ibv_ah_attr, dlid);
SAME_FIELD(AhAttr, ibv_ah_attr, sl);
SAME_FIELD(AhAttr, ibv_ah_attr, is_global);
SAME_FIELD(AhAttr, ibv_ah_attr, port_num);
SAME_SIZE(QpCap, ibv_qp_cap);
SAME_FIELD(QpCap, ibv_qp_cap, max_inline_data);
SAME_SIZE(QpInitAttr, ibv_qp_init_attr);
SAME_FIELD(QpInitAttr, ibv_qp_init_attr, send_cq);
SAME_FIELD(QpInitAttr, ibv_qp_init_attr, recv_cq);
SAME_FIELD(QpInitAttr, ibv_qp_init_attr, cap);
SAME_FIELD(QpInitAttr, ibv_qp_init_attr, qp_type);
SAME_FIELD(QpInitAttr, ibv_qp_init_attr, sq_sig_all);
SAME_SIZE(QpAttr, ibv_qp_attr);
SAME_FIELD(QpAttr, ibv_qp_attr, qp_state);
SAME_FIELD(QpAttr, ibv_qp_attr, path_mtu);
SAME_FIELD(QpAttr, ibv_qp_attr, rq_psn);
SAME_FIELD(QpAttr, ibv_qp_attr, sq_psn);
SAME_FIELD(QpAttr, ibv_qp_attr, dest_qp_num);
SAME_FIELD(QpAttr, ibv_qp_attr, qp_access_flags);
SAME_FIELD(QpAttr, ibv_qp_attr, ah_attr);
SAME_FIELD(QpAttr, ibv_qp_attr, pkey_index);
SAME_FIELD(QpAttr, ibv_qp_attr, max_rd_atomic);
SAME_FIELD(QpAttr, ibv_qp_attr, max_dest_rd_atomic);
SAME_FIELD(QpAttr, ibv_qp_attr, min_rnr_timer);
SAME_FIELD(QpAttr, ibv_qp_attr, port_num);
SAME_FIELD(QpAttr, ibv_qp_attr, timeout);
SAME_FIELD(QpAttr, ibv_qp_attr, retry_cnt);
SAME_FIELD(QpAttr, ibv_qp_attr, rnr_retry);
SAME_SIZE(Sge, ibv_sge);
SAME_FIELD(Sge, ibv_sge, length);
SAME_FIELD(Sge, ibv_sge, lkey);
SAME_SIZE(SendWr, ibv_send_wr);
SAME_FIELD(SendWr, ibv_send_wr, sg_list);
SAME_FIELD(SendWr, ibv_send_wr, num_sge);
SAME_FIELD(SendWr, ibv_send_wr, opcode);
SAME_FIELD(SendWr, ibv_send_wr, send_flags);
SAME_FIELD(SendWr, ibv_send_wr, imm_data);
static_assert(offsetof(ours::SendWr, remote_addr) == offsetof(ibv_send_wr, wr.rdma.remote_addr));
static_assert(offsetof(ours::SendWr, rkey) == offsetof(ibv_send_wr, wr.rdma.rkey));
SAME_SIZE(RecvWr, ibv_recv_wr);
SAME_FIELD(RecvWr, ibv_recv_wr, sg_list);
SAME_FIELD(RecvWr, ibv_recv_wr, num_sge);
SAME_SIZE(Wc, ibv_wc);
SAME_FIELD(Wc, ibv_wc, status);
SAME_FIELD(Wc, ibv_wc, opcode);
SAME_FIELD(Wc, ibv_wc, vendor_err);
SAME_FIELD(Wc, ibv_wc, byte_len);
SAME_FIELD(Wc, ibv_wc, imm_data);
SAME_FIELD(Wc, ibv_wc, qp_num);

SAME_VALUE(kGidRoceV1, IBV_GID_TYPE_ROCE_V1);
SAME_VALUE(kGidRoceV2, IBV_GID_TYPE_ROCE_V2);
SAME_VALUE(kPortActive, IBV_PORT_ACTIVE);
SAME_VALUE(kLinkInfiniBand, IBV_LINK_LAYER_INFINIBAND);
SAME_VALUE(kLinkEthernet, IBV_LINK_LAYER_ETHERNET);
SAME_VALUE(kMtu4096, IBV_MTU_4096);
SAME_VALUE(kReliableConnection, IBV_QPT_RC);
SAME_VALUE(kQpInit, IBV_QPS_INIT);
SAME_VALUE(kQpReadyToReceive, IBV_QPS_RTR);
SAME_VALUE(kQpReadyToSend, IBV_QPS_RTS);
SAME_VALUE(kQpError, IBV_QPS_ERR);
SAME_VALUE(kQpState, IBV_QP_STATE);
SAME_VALUE(kQpAccessFlags, IBV_QP_ACCESS_FLAGS);
SAME_VALUE(kQpPkeyIndex, IBV_QP_PKEY_INDEX);
SAME_VALUE(kQpPort, IBV_QP_PORT);
SAME_VALUE(kQpAv, IBV_QP_AV);
SAME_VALUE(kQpPathMtu, IBV_QP_PATH_MTU);
SAME_VALUE(kQpTimeout, IBV_QP_TIMEOUT);
SAME_VALUE(kQpRetryCount, IBV_QP_RETRY_CNT);
SAME_VALUE(kQpRnrRetry, IBV_QP_RNR_RETRY);
SAME_VALUE(kQpRqPsn, IBV_QP_RQ_PSN);
SAME_VALUE(kQpMaxRdAtomic, IBV_QP_MAX_QP_RD_ATOMIC);
SAME_VALUE(kQpMinRnrTimer, IBV_QP_MIN_RNR_TIMER);
SAME_VALUE(kQpSqPsn, IBV_QP_SQ_PSN);
SAME_VALUE(kQpMaxDestRdAtomic, IBV_QP_MAX_DEST_RD_ATOMIC);
SAME_VALUE(kQpDestQpn, IBV_QP_DEST_QPN);
SAME_VALUE(kRdmaWrite, IBV_WR_RDMA_WRITE);
SAME_VALUE(kRdmaWriteWithImm, IBV_WR_RDMA_WRITE_WITH_IMM);
SAME_VALUE(kSendSignaled, IBV_SEND_SIGNALED);
SAME_VALUE(kSendInline, IBV_SEND_INLINE);
SAME_VALUE(kLocalWrite, IBV_ACCESS_LOCAL_WRITE);
SAME_VALUE(kRemoteWrite, IBV_ACCESS_REMOTE_WRITE);
SAME_VALUE(kWcFlushed, IBV_WC_WR_FLUSH_ERR);
SAME_VALUE(kWcRetryExceeded, IBV_WC_RETRY_EXC_ERR);
SAME_VALUE(kWcRnrExceeded, IBV_WC_RNR_RETRY_EXC_ERR);
SAME_VALUE(kWcRdmaWrite, IBV_WC_RDMA_WRITE);
SAME_VALUE(kWcRecvRdmaWithImm, IBV_WC_RECV_RDMA_WITH_IMM);

TEST(VerbsAbi, IsThatOfTheHeader) { SUCCEED() << "compared when this was compiled"; }
#else
TEST(VerbsAbi, IsThatOfTheHeader) { GTEST_SKIP() << "no <infiniband/verbs.h>: libibverbs-dev"; }
#endif

"""torch's DistributedTest over gradwire: collectives, messages, objects, DDP and its hooks."""

from __future__ import annotations

import unittest
from typing import Any

import over_gradwire

# Beside what torch's own decorators skip: GPUs, NCCL, and what torch itself knows to fail.
SKIPPED = {
    "torch lets no other backend than gloo have monitored_barrier": (
        "test_monitored_barrier_failure_order",
        "test_monitored_barrier_gloo",
        "test_monitored_barrier_gloo_rank_0_timeout",
        "test_monitored_barrier_gloo_subgroup",
        "test_monitored_barrier_wait_all_ranks",
    ),
    "compares gloo's words for a timeout; ours: 'its timeout=1 s; it waits for rank 3'": (
        "test_barrier_timeout_full_group",
        "test_barrier_timeout_global",
        "test_barrier_timeout_group",
    ),
}

# Of each kind one, for every change; all others are `nightly`.
QUICK = (
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_all_gather_coalesced_complex",
    "test_all_reduce_coalesced_max_complex_unsupported",
    "test_all_reduce_full_group_product",
    "test_all_to_all_single_unequal_split_group",
    "test_gather_object_subgroup",
    "test_reduce_group_max",
    "test_scatter_full_group",
    "test_send_recv_any_source_torch_profiler",
    "test_sparse_all_reduce_sum",
)

suite = over_gradwire.distributed_test()


class TestOverGradwire(
    over_gradwire.Forked, suite.TestDistBackend, suite.DistributedTest._DistTestBase
):
    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


def _skip(reason: str, name: str) -> None:
    def skipped(self: Any) -> None:
        """Overrides torch's test."""

    setattr(TestOverGradwire, name, unittest.skip(reason)(skipped))


for _reason, _names in SKIPPED.items():
    for _name in _names:
        _skip(_reason, _name)

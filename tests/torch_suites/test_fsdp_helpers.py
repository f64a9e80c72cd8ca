"""torch's helpers for tests of FSDP over gradwire: their models against DDP, or one process."""

from __future__ import annotations

import copy
import itertools
from unittest import mock

import over_gradwire
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.testing._internal import common_fsdp
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_fsdp import DEVICEInitMode, FSDPInitMode, MLPStack
from torch.testing._internal.distributed.common_state_dict import VerifyStateDictMixin

QUICK = ("test_fsdp2_beside_tensor_parallelism",)

if not hasattr(common_fsdp, "FSDPTestMixin"):
    pytest.skip("this torch's helpers for FSDP need GPUs", allow_module_level=True)


class TestFsdp(
    over_gradwire.Forked, VerifyStateDictMixin, common_fsdp.FSDPTestMixin, MultiProcessTestCase
):
    world_size = over_gradwire.RANKS
    destroy_pg_upon_exit = False

    @classmethod
    def _run(cls, *args: object, **kwargs: object) -> None:
        with mock.patch.object(common_fsdp, "DISTRIBUTED_BACKEND", "gradwire"):
            super()._run(*args, **kwargs)

    @property
    def init_method(self) -> str:
        return f"file://{self.file_name}"

    @property
    def process_group(self) -> dist.ProcessGroup:
        return dist.distributed_c10d._get_default_group()

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def _compare_with_ddp(self, model: type) -> None:
        for strategy, original in itertools.product(
            (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP), (False, True)
        ):
            self._test_fsdp_parity(
                model,
                FSDPInitMode.RECURSIVE,
                DEVICEInitMode.DEVICE_BEFORE,
                sharding_strategy=strategy,
                use_orig_params=original,
                device_id=torch.device("cpu"),
            )

    def test_nested_modules(self) -> None:
        self._compare_with_ddp(common_fsdp.NestedWrappedModule)

    def test_each_module_wrapped(self) -> None:
        self._compare_with_ddp(common_fsdp.AlwaysWrapNestedWrappedModule)

    def test_transformer(self) -> None:
        self._compare_with_ddp(common_fsdp.TransformerWithSharedParams)

    def test_without_shards(self) -> None:
        self._test_fsdp_parity(
            common_fsdp.NestedWrappedModule,
            FSDPInitMode.RECURSIVE,
            DEVICEInitMode.DEVICE_BEFORE,
            sharding_strategy=ShardingStrategy.NO_SHARD,
            device_id=torch.device("cpu"),
        )

    def _train_beside_one_process(self, sharded: torch.nn.Module, alone: torch.nn.Module) -> None:
        """Trains a sharded model on all ranks' batches, and the same one on one process."""
        ours = torch.optim.Adam(sharded.parameters(), lr=1e-2)
        theirs = torch.optim.Adam(alone.parameters(), lr=1e-2)
        for step in range(3):
            torch.manual_seed(step)  # the same batch everywhere: averages are the gradient
            batch = torch.randn(4, 16, 16)
            losses = []
            for model, optimizer in ((sharded, ours), (alone, theirs)):
                optimizer.zero_grad()
                losses.append(model(batch).sum())
                losses[-1].backward()
                optimizer.step()
            torch.testing.assert_close(losses[0], losses[1])
        model_state, optimizer_state = get_state_dict(
            sharded, optimizers=ours, options=StateDictOptions()
        )
        self._verify_msd(alone.state_dict(), model_state)
        self._verify_osd(alone, theirs, theirs.state_dict(), optimizer_state)

    def test_fsdp2(self) -> None:
        for reshard in (True, False):
            torch.manual_seed(1)
            alone = MLPStack(16)
            sharded = copy.deepcopy(alone)
            for each in sharded:
                fully_shard(each, reshard_after_forward=reshard)
            fully_shard(sharded, reshard_after_forward=reshard)
            self._train_beside_one_process(sharded, alone)
            common_fsdp.check_sharded_parity(self, alone, sharded)

    def test_hsdp(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        torch.manual_seed(1)
        alone = MLPStack(16)
        sharded = copy.deepcopy(alone)
        for each in sharded:
            fully_shard(each, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        self._train_beside_one_process(sharded, alone)
        common_fsdp.check_sharded_parity(self, alone, sharded)

    def test_fsdp2_beside_tensor_parallelism(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        for again in (False, True):  # activations computed again in backward
            torch.manual_seed(1)
            alone = MLPStack(16)
            sharded = copy.deepcopy(alone)
            sharded.parallelize(mesh["tensor"], mesh["data"], again)
            self._train_beside_one_process(sharded, alone)

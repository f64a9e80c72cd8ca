"""torch's helpers for tests of DTensor over gradwire: operations, and a transformer in parallel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import over_gradwire
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed._tensor import common_dtensor
from torch.testing._internal.distributed._tensor.common_dtensor import with_comms

QUICK = ("test_transformer_in_parallel",)

OPERATIONS: tuple[tuple[Callable[..., torch.Tensor], Any], ...] = (
    (torch.add, ((12, 8), (12, 8))),
    (torch.mm, ((12, 8), (8, 12))),
    (torch.sum, ((12, 8),)),
    (torch.amax, ((12, 8),)),
    (torch.tanh, ((12, 8),)),
    (lambda x: torch.softmax(x, dim=0), ((12, 8),)),
    (lambda x: x.t() @ x, ((12, 8),)),
    (lambda x: torch.cat([x, x], dim=1), ((12, 8),)),
)


class TestDTensor(over_gradwire.Forked, common_dtensor.DTensorTestBase):
    world_size = over_gradwire.RANKS

    def init_pg(self, *_: object) -> None:
        """Overrides torch's, which takes only certain names."""
        dist.init_process_group(
            "gradwire",
            init_method=f"file://{self.file_name}",
            rank=self.rank,
            world_size=self.world_size,
        )

    @with_comms
    def test_operations_in_all_layouts(self) -> None:
        mesh = self.build_device_mesh()
        for operation, shapes in OPERATIONS:
            torch.manual_seed(0)
            self._test_op(mesh, operation, *(torch.randn(*shape) for shape in shapes))

    def _compare_transformers(self, sequence: bool) -> None:
        torch.manual_seed(0)
        arguments = common_dtensor.ModelArgs(dropout_p=0.0)
        alone = common_dtensor.Transformer(arguments)
        shared = copy.deepcopy(alone)
        common_dtensor.Transformer.parallelize(
            shared,
            self.build_device_mesh(),
            use_seq_parallel=sequence,
            local_output_for_attn=True,  # DTensor has no attention on the CPU
        )
        ours = torch.optim.Adam(shared.parameters(), lr=0.01)
        theirs = torch.optim.Adam(alone.parameters(), lr=0.01)
        for _ in range(3):
            tokens = torch.randint(0, arguments.vocab_size, (4, arguments.max_seq_len))
            for model, optimizer in ((alone, theirs), (shared, ours)):
                optimizer.zero_grad()
                model(tokens).sum().backward()
                optimizer.step()
        for mine, one in zip(shared.parameters(), alone.parameters(), strict=True):
            found = mine.full_tensor() if isinstance(mine, DTensor) else mine
            torch.testing.assert_close(found, one, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(shared(tokens), alone(tokens), atol=1e-4, rtol=1e-4)

    @with_comms
    def test_transformer_in_parallel(self) -> None:
        self._compare_transformers(sequence=False)

    @with_comms
    def test_transformer_in_parallel_also_along_the_sequence(self) -> None:
        self._compare_transformers(sequence=True)

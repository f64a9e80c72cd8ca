"""Random generators when ranks die in the middle of a step: alike if they began alike."""

from __future__ import annotations

import os
import random
import signal

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.torch import elastic
from gradwire.torch._ranks.group import communicator_of
from gradwire.torch.elastic import random_state
from torch import nn

VICTIM, STEP = 1, 2


def trained(alike: bool) -> tuple[str, bytes, int]:
    """The random states at the end; rank 0 draws more than others in the step that is broken off.

    Also the buffers of BatchNorm, which that step must not have changed.
    """
    comm = communicator_of(dist.group.WORLD, 30)
    rank = comm.rank
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5 if alike else rank)
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sampler = elastic.Sampler(64, 4)
    with elastic.session(model, optimizer, sampler, wait=0, ranks=comm) as s:
        for batch in s:
            loss = model(batch[:, None].expand(-1, 8) / 64).square().mean()
            if s.steps == STEP and s.changes == 0:
                if rank == VICTIM:
                    os.kill(os.getpid(), signal.SIGKILL)
                if rank == 0:
                    _ = random.random(), np.random.standard_normal(), torch.rand(3)
            s.backward(loss)
            if s.commit():
                optimizer.step()
    s.communicator.close()
    return _ended(model, s)


def _ended(model: nn.Sequential, s: elastic.Session) -> tuple[str, bytes, int]:
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    assert norm.num_batches_tracked is not None
    seen = int(norm.num_batches_tracked)
    return random_state.digest(random_state.capture()), norm.running_mean.numpy().tobytes(), seen


@pytest.mark.parametrize("alike", [True, False])
def test_generators_stay_alike_or_stay_apart(alike: bool) -> None:
    one, _, other = torch_ranks.run(3, trained, alike, dying=(VICTIM,))
    assert (one[0] == other[0]) == alike
    assert one[1:] == other[1:]
    assert one[2] == 2 * 1 + 3 * 2 + 1  # batches: two steps of three ranks, then four of two

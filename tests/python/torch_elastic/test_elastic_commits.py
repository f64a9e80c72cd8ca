"""Steps that are broken off though no rank is lost: nobody commits alone, and no trace is left."""

from __future__ import annotations

from typing import Any

import gradwire
import numpy as np
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.torch import elastic
from gradwire.torch._ranks.group import communicator_of
from torch import nn
from trainer_options import grouped

LOSSY: dict[str, Any] = {"codec": "onebit", "warm_up": 0, "min_elements": 1}
BROKEN = 2  # the step that is


def made(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, elastic.Session]:
    torch.manual_seed(5)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    comm = communicator_of(dist.group.WORLD, 30)
    sampler = elastic.Sampler(48, 4)
    wish = {"ranks": comm, "wait": 0.0, "min_ranks": 2, **options}
    return model, optimizer, elastic.session(model, optimizer, sampler, **grouped(**wish))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, session: elastic.Session
) -> tuple[list[bool], np.ndarray[Any, Any]]:
    """What each commit has said, and the parameters at the end."""
    said = []
    with session as s:
        for batch in s:
            x = (batch[:, None] * torch.arange(1, 9)) % 17 / 8 - 1
            s.backward((model(x) - x[:, :4].sin()).square().mean())
            said.append(s.commit())
            if said[-1]:
                optimizer.step()
    s.communicator.close()
    return said, nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()


def broken_after_averages(breaks: bool) -> Any:
    """All ranks have averages in a step, and then all of them fail."""
    model, optimizer, session = made(**LOSSY)
    finish = session._averager.finish

    def then_fail() -> None:
        finish()
        if breaks and session.steps == BROKEN and not session.changes:
            raise gradwire.TransportError("a link broke")

    session._averager.finish = then_fail  # type: ignore[method-assign]
    return train(model, optimizer, session)


def test_residuals_of_a_broken_step_are_as_they_were() -> None:
    (said, broken), _ = torch_ranks.run(2, broken_after_averages, True)
    (_, whole), _ = torch_ranks.run(2, broken_after_averages, False)
    assert said.count(False) == 1
    assert np.array_equal(broken, whole)


@torch_ranks.on_ranks(2)
def test_no_rank_commits_a_step_that_another_has_not_prepared() -> None:
    """Both ranks have averages in a step, and then rank 1 fails, before it tells rank 0 so."""
    model, optimizer, session = made()
    averager, meet = session._averager, session._averager._barrier
    store = dist.distributed_c10d._get_default_store()

    def then_fail() -> gradwire.Error | None:
        if session.steps != BROKEN or session.changes:
            return meet()
        averager._adopted.wait()
        if session.communicator.rank == 0:
            store.set("averaged", b"")
            return meet()
        store.wait(["averaged"])
        session.communicator.abort("a link broke")
        averager._error = gradwire.TransportError("a link broke")
        return None

    averager._barrier = then_fail  # type: ignore[method-assign]
    (one, first), (other, second) = torch_ranks.gathered(train(model, optimizer, session))
    assert one == other
    assert one.count(False) == 1
    assert np.array_equal(first, second)

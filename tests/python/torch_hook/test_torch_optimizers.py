"""Optimizers that a codec or the hook's momentum does not suit: found wherever they step."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import gradwire
import pytest
import torch
import torch_ranks
from gradwire.torch import Stages, register
from gradwire.torch.exchange.optimizer_watch import is_adaptive
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_training import backward, flat, mlp
from trainer_options import grouped

ADVICE = "ends at a higher loss than without a codec"


def warned_of(
    logged: list[str],
    hook: dict[str, Any],
    make: Callable[[Any], torch.optim.Optimizer],
    given: bool,
    steps: int = 2,
) -> list[str]:
    """What this rank says from `register` on to the last step."""
    before = len(logged)
    ddp = DistributedDataParallel(mlp())
    optimizer = make(ddp.parameters())
    state = register(ddp, **grouped(**hook), optimizer=optimizer if given else None)
    for step in range(steps):
        optimizer.zero_grad()
        backward(ddp, step)
        optimizer.step()
    state.close()
    return logged[before:]


def adam(of: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(of)


def sgd(of: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(of, lr=0.1)


@torch_ranks.on_ranks(2)
def test_a_biased_codec_before_an_adaptive_optimizer_is_warned_of_once() -> None:
    warned = functools.partial(warned_of, torch_ranks.logged())
    later = Stages((0, "int8"), (100, "lowrank"))
    first, second = torch_ranks.gathered(
        {
            "given": warned({"codec": "onebit"}, adam, True),
            "found": warned({"codec": "topk"}, adam, False),
            "later": warned({"codec": later}, adam, True),
            "by a rule": warned({"rules": [("0.weight", "threshold")]}, torch.optim.Adagrad, False),
            "by a function": warned(
                {"codec": ["fp16", "fp16", "onebit"].__getitem__}, adam, True, 3
            ),
            "SGD": warned({"codec": "onebit"}, sgd, False),
            "int8": warned({"codec": "int8", "feedback": True}, adam, True),
        }
    )
    assert not any(second.values())
    assert first.pop("SGD") == first.pop("int8") == []
    for what, (message,) in first.items():
        assert ADVICE in message, what
        instead = "gradwire.torch.OneBitAdam, which compresses after that, or "
        assert f"Use {instead if 'Adam' in message.split()[0] else ''}codec='int8'" in message
    assert first["later"][0].startswith("AdamW after the codec lowrank ends")
    assert first["by a rule"][0].startswith("Adagrad after the codec threshold ends")


class Lion(torch.optim.Optimizer):
    """An optimizer of someone else's."""

    def __init__(self, of: Any) -> None:
        super().__init__(of, {"lr": 0.1, "betas": (0.9, 0.99)})

    def step(self, closure: Any = None) -> None:
        """Does nothing."""


@torch_ranks.on_ranks(1)
def test_adaptive_optimizers_are_known() -> None:
    weight = [nn.Parameter(torch.ones(2, 2))]
    adaptive = ["Adam", "NAdam", "RAdam", "Adamax", "RMSprop", "Adadelta", "Adagrad"]
    assert all(is_adaptive(getattr(torch.optim, each)(weight)) for each in adaptive)
    assert is_adaptive(Lion(weight))
    assert not is_adaptive(torch.optim.SGD(weight, momentum=0.9))
    assert not is_adaptive(torch.optim.LBFGS(weight))


def zero(of: Any) -> Any:
    with warnings.catch_warnings():  # torch's own, of torch.jit
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(of, torch.optim.SGD, lr=0.1, momentum=0.9)


class Scaled:
    """Steps through a GradScaler."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.scaler = optimizer, torch.amp.GradScaler("cpu", init_scale=1.0)
        self.scaler.scale(torch.ones(1))

    def step(self) -> None:
        """Steps, as gradients are finite."""
        self.scaler.step(self.optimizer)


def with_momentum(of: Any, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(of, lr=0.1, momentum=0.9, **options)


def compiled(of: Any) -> Any:
    optimizer = with_momentum(of)
    optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
    return optimizer


def scheduled(of: Any) -> torch.optim.Optimizer:
    optimizer = with_momentum(of)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


FORMS: dict[str, Callable[[Any], Any]] = {
    "fused": lambda of: with_momentum(of, fused=True),
    "foreach": lambda of: with_momentum(of, foreach=True),
    "scaled": lambda of: Scaled(with_momentum(of)),
    "scheduled": scheduled,
    "sharded": zero,
    "compiled": compiled,
}


def momentum_found(forms: Sequence[str]) -> dict[str, str]:
    """By the form of the optimizer's step, the error of the first one; nothing has moved then."""
    found = {}
    for name in forms:
        ddp = DistributedDataParallel(mlp())
        optimizer = FORMS[name](ddp.parameters())
        state = register(ddp, momentum=0.9)
        before = flat(ddp)
        backward(ddp, 0)
        with pytest.raises(gradwire.InvalidArgument) as raised:
            optimizer.step()
        assert before.equal(flat(ddp)), name
        found[name] = str(raised.value)
        state.close()
    return found


@pytest.mark.parametrize(
    "forms",
    [[each for each in FORMS if each != "compiled"], ["compiled"]],
    ids=["most", "compiled"],
)
def test_momentum_is_found_in_all_forms_of_a_step(forms: Sequence[str]) -> None:
    for found in torch_ranks.run(1 if forms == ["compiled"] else 2, momentum_found, forms):
        for name, message in found.items():
            assert "has momentum=0.9 and gradwire's hook momentum= too" in message, name


def accumulate(momentum: bool) -> torch.Tensor:
    """Steps of three backwards, of which the last is averaged."""
    ddp = DistributedDataParallel(mlp())
    if momentum:
        register(ddp, momentum=0.9, clip_norm=1e6)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.0 if momentum else 0.9)
    for step in range(4):
        optimizer.zero_grad()
        with ddp.no_sync():
            backward(ddp, 3 * step)
            backward(ddp, 3 * step + 1)
        backward(ddp, 3 * step + 2)
        optimizer.step()
    return flat(ddp)


@torch_ranks.on_ranks(2)
def test_momentum_of_accumulated_gradients_is_that_of_the_optimizer() -> None:
    assert (accumulate(True) - accumulate(False)).abs().max() < 1e-6

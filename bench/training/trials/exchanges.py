"""Ways in which the ranks of a trial exchange what they have learnt.

An exchange is a text: a method of `methods.py`, as in "gloo:powersgd" or "lowrank:rank=4+int8=0.2",
for gradients; one of COMPRESSED with a codec or without, as in "OneBitAdam" or
"OneBitAdam/topk:density=0.01", for optimizers that compress what they keep; or "DiLoCo/10", for
outer steps every 10 steps. With "-feedback" at the end, what is not sent is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import gradwire
import torch
from gradwire.torch import DiLoCo
from torch import nn
from torch.nn.utils import clip_grad_norm_

from bench.training import methods
from bench.training.methods import FIRST, SMALL, Method
from bench.training.train_runs import MOMENTUM
from bench.training.trials.torch_optimizers import optimizer_of
from bench.training.trials.trial import Trial

COMPRESSED = ("OneBitAdam", "DistributedLion", "DeMo")
LOCAL = "DiLoCo"
_NO_FEEDBACK = "-feedback"


class Training(NamedTuple):
    """A model that is trained in a way, by every rank."""

    model: nn.Module  # to be called for outputs
    optimizer: torch.optim.Optimizer  # whose learning rate changes
    step: Callable[[], object]  # after backward
    finish: Callable[[], object]  # after the last step
    sent: Callable[[], int | None]  # bytes that this rank has sent so far; None: not to be known
    close: Callable[[], object]


def name_of(exchange: str) -> str:
    """What comes before a codec and options: "OneBitAdam", "DiLoCo", "lowrank", "gloo"."""
    name = exchange.removesuffix(_NO_FEEDBACK).partition("/")[0]
    return name if name in (*COMPRESSED, LOCAL) else Method.parse(exchange).family


def replaces_optimizer(exchange: str) -> bool:
    """Whether it is an optimizer itself."""
    return name_of(exchange) in COMPRESSED


def without_feedback(exchange: str) -> str:
    """The same, but what is not sent is lost."""
    return exchange if exchange.endswith(_NO_FEEDBACK) else exchange + _NO_FEEDBACK


def local_steps(exchange: str) -> int:
    """After how many steps all ranks have the same parameters."""
    name, _, every = exchange.partition("/")
    return int(every) if name == LOCAL else 1


def check(exchange: str) -> str:
    """The text; raises InvalidArgument for one that is no exchange."""
    name, _, option = exchange.removesuffix(_NO_FEEDBACK).partition("/")
    if name == LOCAL:
        if not (option.isdigit() and int(option) > 0):
            raise gradwire.InvalidArgument(f"{exchange!r}: say {LOCAL}/10 for every 10 steps")
    elif name in COMPRESSED:
        gradwire.codec.get(option or "none")
    else:
        Method.parse(exchange).check()
    return exchange


def begin(trial: Trial, model: nn.Module) -> Training:
    """Prepares a model for a trial; every rank of torch's default group calls it."""
    name = name_of(trial.exchange)
    if name in COMPRESSED:
        return _compressed(trial, name, model)
    return _local(trial, model) if name == LOCAL else _averaged(trial, model)


def _averaged(trial: Trial, model: nn.Module) -> Training:
    method = Method.parse(trial.exchange)
    momentum = 0.0 if method.options.momentum else MOMENTUM
    optimizer = optimizer_of(trial.optimizer, model, trial.rate, trial.weight_decay, momentum)
    first = round(method.first_share(trial.first) * trial.steps)
    averaging = methods.average(model, method, first_steps=first, optimizer=optimizer)

    def step() -> None:
        _clip(model, trial.clip)
        optimizer.step()

    return Training(averaging.ddp, optimizer, step, lambda: None, averaging.sent, averaging.close)


def _local(trial: Trial, model: nn.Module) -> Training:
    optimizer = optimizer_of(trial.optimizer, model, trial.rate, trial.weight_decay)
    outer = DiLoCo(model, optimizer, local_steps(trial.exchange), pace=False)

    def step() -> None:
        _clip(model, trial.clip)
        optimizer.step()
        outer.step()

    return Training(model, optimizer, step, outer.finish, _sent(outer), outer.close)


def _compressed(trial: Trial, name: str, model: nn.Module) -> Training:
    codec = trial.exchange.removesuffix(_NO_FEEDBACK).partition("/")[2]
    options: dict[str, Any] = {"codec": codec} if codec else {}
    if trial.exchange.endswith(_NO_FEEDBACK):
        options["feedback"] = False
    if name == "OneBitAdam":
        options["warm_up"] = trial.first_steps
    small = [(key, FIRST) for key, each in model.named_parameters() if each.numel() < SMALL]
    optimizer = getattr(gradwire.torch, name)(
        model.named_parameters(),
        lr=trial.rate,
        clip_norm=trial.clip,
        rules=small,
        **options,
    )
    return Training(
        model, optimizer, optimizer.step, lambda: None, _sent(optimizer), optimizer.close
    )


def _sent(exchanging: Any) -> Callable[[], int]:
    return lambda: exchanging.communicator.traffic.bytes_sent


def _clip(model: nn.Module, norm: float | None) -> None:
    if norm is not None:
        clip_grad_norm_(model.parameters(), norm)

"""Ways in which the ranks of a trial exchange what they have learnt.

An exchange is a text: a method of `methods.py`, as in "gloo:powersgd" or "lowrank:rank=4+int8=0.2",
for gradients; one of COMPRESSED, for optimizers that compress themselves, with an option or
without, as in "OneBitAdam" or "OneBitAdam/codec=topk:density=0.01"; or "DiLoCo/10", for outer steps
every 10 steps. "OneBitAdam+int8=0.3" has this share of the steps as its warm-up. With "-feedback"
at the end, what is not sent is lost.
"""

from __future__ import annotations

import re
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

LOCAL = "DiLoCo"
_NO_FEEDBACK = "-feedback"
_WARM_UP = f"+{FIRST}="


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
    name = _parts(exchange)[0]
    return name if name in (*COMPRESSED, LOCAL) else Method.parse(exchange).family


def warm_up(exchange: str) -> float | None:
    """The share of the steps that an optimizer's own warm-up has; None: the trial's."""
    share = _parts(exchange)[2]
    return float(share) if share and name_of(exchange) == "OneBitAdam" else None


def _parts(exchange: str) -> tuple[str, str, str]:
    """Name, option and share of an exchange that is no method."""
    rest, _, share = exchange.removesuffix(_NO_FEEDBACK).partition(_WARM_UP)
    name, _, option = rest.partition("/")
    return name, option, share


def replaces_optimizer(exchange: str) -> bool:
    """Whether it is an optimizer itself."""
    return name_of(exchange) in COMPRESSED


def without_feedback(exchange: str) -> str:
    """The same, but what is not sent is lost."""
    return exchange if exchange.endswith(_NO_FEEDBACK) else exchange + _NO_FEEDBACK


def period(exchange: str) -> int:
    """Of how many steps one ends with the same parameters on all ranks, after the first ones."""
    name, option, _ = _parts(exchange)
    if name == LOCAL:
        return int(option)
    every = _option(option).get("every", 1) if name in COMPRESSED else 1
    return int(every)


def check(exchange: str) -> str:
    """The text; raises InvalidArgument for one that is no exchange."""
    name, option, share = _parts(exchange)
    if name == LOCAL:
        if not (option.isdigit() and int(option) > 0):
            raise gradwire.InvalidArgument(f"{exchange!r}: say {LOCAL}/10 for every 10 steps")
    elif name in COMPRESSED:
        _option(option)
        _check_warm_up(name, share)
    else:
        Method.parse(exchange).check()
    return exchange


def is_known(exchange: str) -> bool:
    """Whether it is an exchange; records may have some that are no more."""
    try:
        return check(exchange) == exchange
    except gradwire.InvalidArgument:
        return False


def words(exchange: str, first: float | None = None) -> str:
    """The exchange for a table's row, where `first` is the share of the steps before it begins."""
    name, option, share = _parts(exchange)
    if name not in COMPRESSED:
        return Method.parse(exchange).words
    key, _, value = option.partition("=")
    said = [f"`{name}`"]
    if option:
        codec = key == "codec"
        said.append(f"momenta in `{value}`" if codec else f"an exchange {key} {value} steps")
    if share or first:
        said.append(f"warm-up of {100 * float(share or first or 0):g} % of the steps")
    if exchange.endswith(_NO_FEEDBACK):
        said.append("without error feedback")
    return ", ".join(said)


def _check_warm_up(name: str, share: str) -> None:
    if share and not (
        name == "OneBitAdam" and re.fullmatch(r"0?\.\d+", share) and 0 < float(share) < 1
    ):
        raise gradwire.InvalidArgument(
            f"{share!r} is no share of the steps that {name} can have as a warm-up: say "
            "OneBitAdam+int8=0.3"
        )


def _option(text: str) -> dict[str, Any]:
    """A codec, a number or a word, as an argument; raises InvalidArgument."""
    key, equals, value = text.partition("=")
    if text and not (key and equals and value):
        raise gradwire.InvalidArgument(f"{text!r} is no option, as in codec=onebit or every=3")
    if key == "codec":
        gradwire.codec.get(value)
    return {key: int(value) if value.isdigit() else value} if text else {}


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
    outer = DiLoCo(model, optimizer, period(trial.exchange), pace=False)

    def step() -> None:
        _clip(model, trial.clip)
        optimizer.step()
        outer.step()

    return Training(model, optimizer, step, outer.finish, _sent(outer), outer.close)


def _compressed(trial: Trial, name: str, model: nn.Module) -> Training:
    options = _option(_parts(trial.exchange)[1])
    keeps = not trial.exchange.endswith(_NO_FEEDBACK)
    if trial.weight_decay is not None:
        options["weight_decay"] = trial.weight_decay
    make = COMPRESSED[name]
    optimizer = make(model, trial, options, keeps)
    return Training(
        model,
        optimizer,
        lambda: optimizer.step(),  # which the schedule of the rate wraps later
        lambda: None,
        _sent(optimizer),
        optimizer.close,
    )


def _one_bit_adam(model: nn.Module, trial: Trial, options: dict[str, Any], keeps: bool) -> Any:
    codec, feedback = options.pop("codec", "onebit"), None if keeps else False
    return gradwire.torch.OneBitAdam(
        model.named_parameters(),
        trial.rate,
        compression=gradwire.torch.Compression(codec, rules=_small(model), feedback=feedback),
        warm_up=trial.first_steps,
        clip_norm=trial.clip,
        **options,
    )


# Optimizers that compress, by name.
COMPRESSED: dict[str, Callable[[nn.Module, Trial, dict[str, Any], bool], Any]] = {
    "OneBitAdam": _one_bit_adam,
}


def _small(model: nn.Module) -> list[tuple[str, str]]:
    return [(name, FIRST) for name, each in model.named_parameters() if each.numel() < SMALL]


def _sent(exchanging: Any) -> Callable[[], int]:
    return lambda: exchanging.communicator.traffic.bytes_sent


def _clip(model: nn.Module, norm: float | None) -> None:
    if norm is not None:
        clip_grad_norm_(model.parameters(), norm)

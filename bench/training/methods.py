"""Ways to average gradients, to be compared: codecs of gradwire, and torch's own over gloo."""

from __future__ import annotations

import socket
import struct
from collections import Counter
from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

import gradwire.torch
import torch
from gradwire import _core
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from bench.network.pacing import tcp_connections
from bench.training.train_runs import MOMENTUM

GLOO, GLOO_FP16, GLOO_POWERSGD = "gloo", "gloo:fp16", "gloo:powersgd"
PEERS = {
    GLOO: "gloo DDP",
    GLOO_FP16: "gloo DDP, fp16 hook",
    GLOO_POWERSGD: "gloo DDP, PowerSGD hook",
}
_ONE_BUCKET_MB = 1 << 12  # torch's PowerSGD hook hangs on CPUs with more than one bucket
_NO_FEEDBACK, _WITH_FEEDBACK = "-feedback", "+feedback"
FIRST = "int8"  # before a biased codec: on a slow link dense steps took most of a run's time
SMALL = 1024  # elements: what gradwire's hook leaves dense where the codec is biased

# The biased codecs as they train the network of `images.py` at the learning rate of all. Without
# these options, measured: onebit ends up to 6 points below none, the sparse ones about 1.
ONEBIT = "onebit:block=8192+momentum+rate+ends=int8+int8=0.2"
THRESHOLD = "threshold:density=0.01+momentum+rate+ends=int8+int8=0.15"
TOPK = "topk:density=0.0029+momentum+rate+ends=int8+int8=0.15"
LOW_RANK = "lowrank+int8=0.05"
TRAINED = ("none", "fp16", "bf16", "int8", "int4", ONEBIT, THRESHOLD, TOPK, LOW_RANK)


class Options(NamedTuple):
    """How gradwire's hook is registered, beyond its defaults."""

    momentum: bool = False  # the hook's, before the codec, in place of the optimizer's
    rate: bool = False  # residuals follow the learning rate
    ends: str | None = None  # the codec of the first layer, the last, and tensors below SMALL
    small: str | None = None  # the codec of tensors below SMALL
    int8: float | None = None  # share of the steps in FIRST, before a biased codec; None: warm-up

    def __str__(self) -> str:
        """As in "+momentum+ends=int8"."""
        return "".join(
            f"+{name}" if value is True else f"+{name}={value}"
            for name, value in self._asdict().items()
            if value is not None and value is not False
        )

    @classmethod
    def parse(cls, texts: list[str]) -> Options:
        """Of what str() writes, without the plus signs; raises InvalidArgument."""
        found: dict[str, Any] = {}
        for text in texts:
            name, equals, value = text.partition("=")
            if name in ("momentum", "rate") and not equals:
                found[name] = True
            elif name in ("ends", "small") and value:
                found[name] = value
            elif name == FIRST and equals:
                found[name] = _share(value)
            else:
                raise gradwire.InvalidArgument(
                    f"{text!r} is none of momentum, rate, ends=CODEC, small=CODEC and int8=SHARE"
                )
        return cls(**found)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1
    if not 0 <= share < 1:
        raise gradwire.InvalidArgument(f"{FIRST}={text} is not from 0 to below 1")
    return share


class Method(NamedTuple):
    """One of PEERS, or a codec of gradwire's with its parameters and the hook's options."""

    codec: str
    feedback: bool | None = None  # None: as gradwire does by default
    options: Options = Options()

    @classmethod
    def parse(cls, text: str) -> Method:
        """Reads what str() writes: "onebit+momentum", or "onebit+momentum-feedback" without."""
        for suffix, feedback in ((_NO_FEEDBACK, False), (_WITH_FEEDBACK, True)):
            if text.endswith(suffix):
                return cls.parse(text[: -len(suffix)])._replace(feedback=feedback)
        codec, *options = text.split("+")
        return cls(codec, None, Options.parse(options))

    def __str__(self) -> str:
        feedback = {None: "", False: _NO_FEEDBACK, True: _WITH_FEEDBACK}[self.feedback]
        return f"{self.codec}{self.options}{feedback}"

    def check(self) -> Method:
        """This one; raises InvalidArgument for a codec that gradwire has not."""
        if self.codec not in PEERS:
            for each in (self.codec, self.options.ends or "none", self.options.small or "none"):
                _core.Codec(each)
        elif self.options != Options():
            raise gradwire.InvalidArgument(f"{self.codec} has no options {self.options}")
        return self

    @property
    def feeds_back(self) -> bool:
        """Whether what is not sent is kept for the next step."""
        return self._biased if self.feedback is None else self.feedback

    @property
    def control(self) -> Method:
        """The same without feedback, as it is named where that is the default."""
        return self._replace(feedback=False if self._biased else None)

    @property
    def _biased(self) -> bool:
        return self.codec not in PEERS and _core.Codec(self.codec).biased

    @property
    def family(self) -> str:
        """The codec's name without parameters; a peer's whole name."""
        return self.codec if self.codec in PEERS else self.codec.partition(":")[0]

    @property
    def title(self) -> str:
        """For a table."""
        return PEERS.get(self.codec, f"gradwire {self}")

    @property
    def short_title(self) -> str:
        """For a table whose methods have options, in the same way or not at all."""
        if self.codec in PEERS:
            return self.title
        suffix = {None: "", False: " without feedback", True: " with feedback"}[self.feedback]
        return f"gradwire {self.family}{suffix}"

    @property
    def words(self) -> str:
        """For a table whose readers do not know how methods are written."""
        its = self.options
        said = {
            PEERS.get(self.codec, f"`{self.codec}`"): True,
            "momentum in the hook": its.momentum,
            "residuals that follow the rate": its.rate,
            f"first and last layer and small tensors in `{its.ends}`": its.ends,
            f"small tensors in `{its.small}`": its.small,
            f"`{FIRST}` in the first {100 * (its.int8 or 0):g} % of the steps": its.int8,
            "with error feedback": self.feedback,
            "without error feedback": self.feedback is False,
        }
        return ", ".join(text for text, holds in said.items() if holds)

    def first_share(self, warm_up: float) -> float:
        """Of the steps, those in FIRST: a biased codec's, in a run with such a warm-up."""
        if not self._biased:
            return 0
        return warm_up if self.options.int8 is None else self.options.int8

    def optimizer(self, model: torch.nn.Module, rate: float) -> torch.optim.SGD:
        """With MOMENTUM, unless the hook has it."""
        momentum = 0 if self.options.momentum else MOMENTUM
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)


def titles(names: Iterable[str]) -> dict[str, str]:
    """Of methods, for one table: without parameters and options, where no two are alike then."""
    parsed = {name: Method.parse(name) for name in names}
    count = Counter(each.short_title for each in parsed.values())
    return {
        name: each.short_title if count[each.short_title] == 1 else each.title
        for name, each in parsed.items()
    }


def legend(names: Iterable[str]) -> list[str]:
    """Lines to follow such a table: what its titles leave out."""
    named = titles(names)
    left = [
        f"{title}: `{name}`"
        for name, title in named.items()
        if title != Method.parse(name).title and not _is_opposite(name, named)
    ]
    return ["", f"{'; '.join(left)}."] if left else []


def _is_opposite(name: str, names: Container[str]) -> bool:
    """Of one of the names, in feedback alone."""
    method = Method.parse(name)
    return method.feedback is not None and str(method._replace(feedback=None)) in names


class Averaging(NamedTuple):
    """A model whose gradients are averaged by a method."""

    ddp: DistributedDataParallel
    sent: Callable[[], int | None]  # bytes that this rank has sent so far; None: not to be known
    close: Callable[[], None]
    traffic: Callable[[], gradwire.Traffic] | None = None  # None: torch's gloo counts nothing


def average(
    model: torch.nn.Module,
    method: Method,
    algorithm: str = "auto",
    first_steps: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
) -> Averaging:
    """Every rank of torch's default group calls it; `optimizer` is the method's own of the model.

    The codec begins after so many steps in FIRST.
    """
    if method.codec in PEERS:
        return Averaging(_gloo(model, method.codec), tcp_bytes_sent, lambda: None)
    ddp = DistributedDataParallel(model)
    options: dict[str, Any] = {}
    if method.options.momentum:
        options["momentum"] = MOMENTUM
    if method.options.rate:
        options["optimizer"] = optimizer
    state = gradwire.torch.register(
        ddp,
        gradwire.torch.Compression(
            _after(first_steps, method.codec),
            rules=[*_at_ends(model, method.options.ends), *_small(model, method.options.small)],
            feedback=method.feedback,
            warm_up=0,
        ),
        algorithm=algorithm,
        **options,
    )
    return Averaging(
        ddp,
        lambda: state.communicator.traffic.bytes_sent,
        state.close,
        lambda: state.communicator.traffic,
    )


def without_averaging(model: torch.nn.Module) -> Averaging:
    """DDP whose hook returns each bucket as it is: the quickest that any hook can be."""
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, debugging_hooks.noop_hook)
    return Averaging(ddp, lambda: 0, lambda: None)


def _after(first_steps: int, codec: str) -> Any:
    return gradwire.torch.Stages((0, FIRST), (first_steps, codec)) if first_steps else codec


def _at_ends(model: torch.nn.Module, codec: str | None) -> list[tuple[str, str]]:
    """A rule for each tensor that "ends" speaks of."""
    if codec is None:
        return []
    layers = {name: name.rpartition(".")[0] for name, _ in model.named_parameters()}
    ends = next(iter(layers.values())), next(reversed(layers.values()))
    return [
        (name, codec)
        for name, each in model.named_parameters()
        if layers[name] in ends or each.numel() < SMALL
    ]


def _small(model: torch.nn.Module, codec: str | None) -> list[tuple[str, str]]:
    """A rule for each tensor that "small" speaks of."""
    if codec is None:
        return []
    return [(name, codec) for name, each in model.named_parameters() if each.numel() < SMALL]


def _gloo(model: torch.nn.Module, which: str) -> DistributedDataParallel:
    if which == GLOO_POWERSGD:
        ddp = DistributedDataParallel(model, bucket_cap_mb=_ONE_BUCKET_MB)
        # From its second step on, not the thousandth: the first is DDP's own way to its buckets.
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=4, start_powerSGD_iter=2
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return ddp
    ddp = DistributedDataParallel(model)
    if which == GLOO_FP16:
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return ddp


def tcp_bytes_sent() -> int | None:
    """Bytes that this process's TCP connections have sent, by the kernel's count; None: unknown.

    gloo counts nothing itself.
    """
    total = 0
    for connection in tcp_connections():
        with connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        if len(info) < 208:  # tcpi_bytes_sent came with Linux 4.19
            return None
        total += struct.unpack_from("=Q", info, 200)[0]
    return total


def interface_bytes_sent() -> int:
    """Bytes that this network namespace's interfaces but `lo` have sent, headers and all."""
    with open("/proc/thread-self/net/dev") as file:
        rows = (line.split(":") for line in file.readlines()[2:])
        return sum(int(counts.split()[8]) for name, counts in rows if name.strip() != "lo")

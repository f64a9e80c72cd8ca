"""Ways to average gradients, to be compared: codecs of gradwire, and torch's own over gloo."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gradwire.torch
import torch
from gradwire import _core
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

GLOO, GLOO_FP16, GLOO_POWERSGD = "gloo", "gloo:fp16", "gloo:powersgd"
PEERS = {
    GLOO: "gloo DDP",
    GLOO_FP16: "gloo DDP, fp16 hook",
    GLOO_POWERSGD: "gloo DDP, PowerSGD hook",
}
_ONE_BUCKET_MB = 1 << 12  # torch's PowerSGD hook hangs on CPUs with more than one bucket
_NO_FEEDBACK, _WITH_FEEDBACK = "-feedback", "+feedback"


class Method(NamedTuple):
    """One of PEERS, or a codec of gradwire's with its parameters."""

    codec: str
    feedback: bool | None = None  # None: as gradwire does by default

    @classmethod
    def parse(cls, text: str) -> Method:
        """Reads what str() writes: "onebit", or "onebit-feedback" for one without."""
        for suffix, feedback in ((_NO_FEEDBACK, False), (_WITH_FEEDBACK, True)):
            if text.endswith(suffix):
                return cls.parse(text[: -len(suffix)])._replace(feedback=feedback)
        return cls(text)

    def __str__(self) -> str:
        return self.codec + {None: "", False: _NO_FEEDBACK, True: _WITH_FEEDBACK}[self.feedback]

    def check(self) -> Method:
        """This one; raises InvalidArgument for a codec that gradwire has not."""
        if self.codec not in PEERS:
            _core.Codec(self.codec)
        return self

    @property
    def family(self) -> str:
        """The codec's name without parameters; a peer's whole name."""
        return self.codec if self.codec in PEERS else self.codec.partition(":")[0]

    @property
    def title(self) -> str:
        """For a table."""
        return PEERS.get(self.codec, f"gradwire {self}")


class Averaging(NamedTuple):
    """A model whose gradients are averaged by a method."""

    ddp: DistributedDataParallel
    sent: Callable[[], int | None]  # bytes that this rank has sent so far; None: not to be known
    close: Callable[[], None]


def average(
    model: torch.nn.Module, method: Method, algorithm: str = "auto", dense_steps: int = 0
) -> Averaging:
    """Every rank of torch's default group calls it.

    A codec of gradwire's that is biased begins after so many dense steps.
    """
    if method.codec in PEERS:
        return Averaging(_gloo(model, method.codec), tcp_bytes_sent, lambda: None)
    ddp = DistributedDataParallel(model)
    options: dict[str, Any] = {} if method.feedback is None else {"feedback": method.feedback}
    codec: Any = method.codec
    if dense_steps > 0 and _core.Codec(codec).biased:
        codec = gradwire.torch.Stages((0, "none"), (dense_steps, codec))
    state = gradwire.torch.register(ddp, codec=codec, algorithm=algorithm, **options)
    return Averaging(ddp, lambda: state.communicator.traffic.bytes_sent, state.close)


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
    for connection in _tcp_connections():
        with connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        if len(info) < 208:  # tcpi_bytes_sent came with Linux 4.19
            return None
        total += struct.unpack_from("=Q", info, 200)[0]
    return total


def _tcp_connections() -> Iterator[socket.socket]:
    """Every open TCP socket of this process, as a duplicate to be closed."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # closed since it was listed
            continue
        internet = duplicate.family in (socket.AF_INET, socket.AF_INET6)
        if internet and duplicate.type == socket.SOCK_STREAM:
            yield duplicate
        else:
            duplicate.close()

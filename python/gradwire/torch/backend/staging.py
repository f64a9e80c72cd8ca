"""Staging: contiguous stand-ins for the tensors that gradwire cannot read or write in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradwire._errors import InvalidArgument
from gradwire.torch.backend.operations import Finished, ResultStream, Waited
from gradwire.torch.exchange.payloads import Payloads

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DIVIDED = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)  # by torch


class Staging:
    """The tensors of one call, of which those written are copied back by `finish`.

    This one is for tensors on the CPU.
    """

    __slots__ = ("_copies", "_decodes", "_last")

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._decodes: list[tuple[Payloads, torch.Tensor, torch.Tensor]] = []
        self._last: Callable[[], None] | None = None

    def read(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor, or a copy of it, of another dtype if one is given, to be read."""
        tensor = _there(tensor)
        return tensor if self._in_place(tensor, dtype) else self._copy(tensor, dtype)

    def update(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor, or a copy of it that `finish` copies back, to be read and written."""
        tensor = _there(tensor)
        if self._in_place(tensor, dtype):
            return tensor
        return self._stand_in(tensor, self._copy(tensor, dtype))

    def write(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor, or memory that `finish` copies back, to be written."""
        tensor = _there(tensor)
        if self._in_place(tensor, dtype):
            return tensor
        return self._stand_in(tensor, self._memory(tensor, dtype))

    def read_bytes(self, tensor: torch.Tensor, payloads: Payloads | None) -> torch.Tensor:
        """The tensor's bytes, or its payload, to be read."""
        given = self.read(tensor)
        if payloads is None:
            return as_bytes(given)
        made = torch.empty(payloads.size(given.numel()), dtype=torch.uint8, device="cpu")
        payloads.encode(given, made)
        return made

    def write_bytes(self, tensor: torch.Tensor, payloads: Payloads | None) -> torch.Tensor:
        """The tensor's memory, or that of a payload which `finish` decodes, to be written."""
        given = self.write(tensor)
        if payloads is None:
            return as_bytes(given)
        made = torch.empty(payloads.size(given.numel()), dtype=torch.uint8, device="cpu")
        return self.decoded(given, made, payloads)

    def decoded(self, tensor: torch.Tensor, made: torch.Tensor, payloads: Payloads) -> torch.Tensor:
        """Memory of a payload that `finish` decodes into the tensor."""
        self._decodes.append((payloads, made, tensor))
        return made

    def copied(self, tensor: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """Memory of the tensor's shape that `finish` copies back into it."""
        require_cpu(tensor)
        return self._stand_in(tensor, made)

    def averages(
        self,
        named: dict[str, Any],
        size: int,
        results: Sequence[torch.Tensor],
        *,
        here: bool = True,
    ) -> dict[str, Any]:
        """The keywords of a reduction. Integers are summed, and `finish` divides, if `here`.

        As in NCCL, fractions are cut off.
        """
        if named["op"] != "avg" or results[0].dtype not in _DIVIDED:
            return named

        def divide() -> None:
            for each in results:
                each.div_(size, rounding_mode="trunc")

        if here:
            self.at_the_end(divide)
        return {**named, "op": "sum"}

    def at_the_end(self, call: Callable[[], None]) -> None:
        """Has `finish` make a call, after its copies."""
        self._last = call

    def finish(self) -> None:
        """Copies back what was written."""
        for payloads, made, tensor in self._decodes:
            payloads.decode(made, tensor)
        with torch.no_grad():
            for tensor, made in self._copies:
                tensor.copy_(made, non_blocking=True)
        if self._last is not None:
            self._last()
        self._decodes.clear()
        self._copies.clear()
        self._last = None

    @property
    def late(self) -> bool:
        """Whether `finish` has work to do."""
        return bool(self._copies or self._decodes or self._last)

    def finished(self, work: Waited) -> Waited:
        """The work of the call, with `finish` at its end."""
        return Finished(work, self.finish) if self.late else work

    def stream(self, work: Waited) -> ResultStream | None:  # noqa: ARG002
        """The stream of the work's results; None for the CPU, where they are there."""
        return None

    def _in_place(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> bool:
        """Whether the call can use the tensor itself; raises InvalidArgument for its device."""
        require_cpu(tensor)
        return is_plain(tensor, dtype)

    def _copy(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """A contiguous copy, which the call reads."""
        with torch.no_grad():
            if dtype is not None:
                return tensor.to(dtype, memory_format=torch.contiguous_format, copy=True)
            return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)

    def _memory(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """Contiguous memory for what the call writes."""
        return tensor.new_empty(tensor.shape, dtype=dtype)

    def _stand_in(self, tensor: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        self._copies.append((tensor, made))
        return made


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as one dimension."""
    return tensor.view(-1)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, for calls that only move data."""
    return tensor.view(-1).view(torch.uint8)


def require_cpu(tensor: torch.Tensor) -> None:
    """Raises InvalidArgument for a tensor on another device than the CPU."""
    if not tensor.is_cpu:
        raise several_devices(tensor.device, "the CPU")


def several_devices(one: object, other: object) -> InvalidArgument:
    """The error for tensors of one call on several devices."""
    return InvalidArgument(
        f"a tensor is on {one}, and another one of the same call on {other}: one call has one "
        "device; use x.to()"
    )


def _there(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; or for the result of a functional collective what it wraps, once that is there.

    Torch's own process groups have its dispatcher for that.
    """
    if type(tensor) in _PLAIN or not hasattr(tensor, "trigger_wait"):
        return tensor
    wrapped: torch.Tensor = tensor.trigger_wait()
    return wrapped


def is_plain(tensor: torch.Tensor, dtype: torch.dtype | None) -> bool:
    """Whether gradwire can read and write the tensor as one of this dtype, or of its own."""
    if dtype is not None and tensor.dtype is not dtype:
        return False
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())

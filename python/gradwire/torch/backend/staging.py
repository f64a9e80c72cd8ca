"""Staging: contiguous stand-ins for the tensors that gradwire cannot read or write in place."""

from __future__ import annotations

import torch

from gradwire._errors import InvalidArgument
from gradwire.torch._step.payloads import Payloads

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Staging:
    """The tensors of one call, of which those written are copied back by `finish`."""

    __slots__ = ("_copies", "_decodes")

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._decodes: list[tuple[Payloads, torch.Tensor, torch.Tensor]] = []

    def read(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor, or a copy of it, of another dtype if one is given, to be read."""
        tensor = _there(tensor)
        return tensor if _is_plain(tensor, dtype) else _copy(tensor, dtype)

    def update(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor, or a copy of it that `finish` copies back, to be read and written."""
        tensor = _there(tensor)
        if _is_plain(tensor, dtype):
            return tensor
        return self._stand_in(tensor, _copy(tensor, dtype))

    def write(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor, or memory that `finish` copies back, to be written."""
        tensor = _there(tensor)
        if _is_plain(tensor, dtype):
            return tensor
        made = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=tensor.device)
        return self._stand_in(tensor, made)

    def read_bytes(self, tensor: torch.Tensor, payloads: Payloads | None) -> torch.Tensor:
        """The tensor's bytes, or its payload, to be read."""
        given = self.read(tensor)
        if payloads is None:
            return as_bytes(given)
        made = torch.empty(payloads.size(given.numel()), dtype=torch.uint8)
        payloads.encode(given, made)
        return made

    def write_bytes(self, tensor: torch.Tensor, payloads: Payloads | None) -> torch.Tensor:
        """The tensor's memory, or that of a payload which `finish` decodes, to be written."""
        given = self.write(tensor)
        if payloads is None:
            return as_bytes(given)
        made = torch.empty(payloads.size(given.numel()), dtype=torch.uint8)
        return self.decoded(given, made, payloads)

    def decoded(self, tensor: torch.Tensor, made: torch.Tensor, payloads: Payloads) -> torch.Tensor:
        """Memory of a payload that `finish` decodes into the tensor."""
        self._decodes.append((payloads, made, tensor))
        return made

    def copied(self, tensor: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """Memory of the tensor's shape that `finish` copies back into it."""
        require_cpu(tensor)
        return self._stand_in(tensor, made)

    def finish(self) -> None:
        """Copies back what was written."""
        for payloads, made, tensor in self._decodes:
            payloads.decode(made, tensor)
        with torch.no_grad():
            for tensor, made in self._copies:
                tensor.copy_(made)
        self._decodes.clear()
        self._copies.clear()

    @property
    def late(self) -> bool:
        """Whether `finish` has work to do."""
        return bool(self._copies or self._decodes)

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
        raise InvalidArgument(
            f"a tensor is on {tensor.device}, and the backend gradwire works on the CPU: use "
            "x.cpu(), or gradwire.torch.register(ddp) over another backend"
        )


def _there(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; or for the result of a functional collective what it wraps, once that is there.

    Torch's own process groups have its dispatcher for that.
    """
    if type(tensor) in _PLAIN or not hasattr(tensor, "trigger_wait"):
        return tensor
    wrapped: torch.Tensor = tensor.trigger_wait()
    return wrapped


def _is_plain(tensor: torch.Tensor, dtype: torch.dtype | None) -> bool:
    require_cpu(tensor)
    if dtype is not None and tensor.dtype is not dtype:
        return False
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _copy(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    with torch.no_grad():
        if dtype is not None:
            return tensor.to(dtype, memory_format=torch.contiguous_format, copy=True)
        return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)

"""ModelBuffers: tensors that are no parameters; after a step those of rank 0 on all ranks."""

from __future__ import annotations

import operator
from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import nn

from gradwire._communicator import Communicator
from gradwire._errors import InvalidArgument


class BufferSlot(NamedTuple):
    """The place of a buffer in its module, which may put another tensor there at any time."""

    name: str
    owner: MutableMapping[str, torch.Tensor | None]
    key: str

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor that is there now; a ScriptModule's mapping has no `get`."""
        return self.owner[self.key] if self.key in self.owner else None  # noqa: SIM401


class _Found(NamedTuple):
    """A tensor that was found in a place."""

    tensor: torch.Tensor
    address: int
    whole: torch.Tensor  # its memory, also when the tensor's `data` is replaced
    once: torch.Tensor  # each element of an expanded one once

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Found:
        whole = tensor.detach()
        return cls(tensor, tensor.data_ptr(), whole, without_repeats(whole))


_TENSOR, _ADDRESS = operator.attrgetter("tensor"), operator.attrgetter("address")
_DATA_PTR = operator.methodcaller("data_ptr")


class ModelBuffers:
    """The buffers of a model: their copies from before a step, and their way to the other ranks.

    A module may assign a buffer anew (``self.seen = self.seen + 1``), so they are looked up before
    a step and after it. Their names, shapes, types and devices stay those of the beginning.
    """

    def __init__(self, model: nn.Module) -> None:
        """Takes the buffers that the model has."""
        self._model = model
        self._owners = [module._buffers for module in model.modules()]
        self._places, self._empty = places(model), _named(model, empty=True)
        self._names = len(self._places) + len(self._empty)
        self._now = [_Found.of(each.owner[each.key]) for each in self._places]
        self._kinds = [_kind(each.tensor) for each in self._now]
        self._before: list[_Found] = []  # what `keep` found
        self._copies = [torch.empty_like(each.once) for each in self._now]
        self._outdated: set[int] = set()  # copies of another tensor, with its strides
        self._sent: list[torch.Tensor] = []  # the tensors, or contiguous copies of them
        self._overlapping = _overlapping([each.once for each in self._now])
        types = [(dtype, device) for _, dtype, device in self._kinds]
        self._groups = [[i for i, kind in enumerate(types) if kind == one] for one in set(types)]
        self._groups.sort()  # alike on all ranks

    def keep(self) -> None:
        """Keeps tensors and their values, for `restore`; raises InvalidArgument as `share` does."""
        self._look()
        for i in self._outdated:
            self._copies[i] = torch.empty_like(self._now[i].once)
        self._outdated.clear()
        self._before = list(self._now)
        _copy(self._copies, [each.once for each in self._before])

    def restore(self) -> None:
        """Puts back the tensors that the last `keep` found, with their values."""
        for place, each in zip(self._places, self._before, strict=True):
            if place.tensor is not each.tensor:
                place.owner[place.key] = each.tensor
            if (each.tensor.data_ptr(), each.tensor.shape) != (each.address, each.whole.shape):
                each.tensor.data = each.whole
        _copy([each.once for each in self._before], self._copies)
        self._now = list(self._before)
        self._overlapping = _overlapping([each.once for each in self._now])
        self._outdated.clear()

    def share(self, communicator: Communicator) -> Iterator[Any]:
        """Starts to send rank 0's to the others; `take` ends it when the Works are over.

        Raises InvalidArgument for a buffer that came, went, or changed its shape, type or device.
        """
        self._look()
        self._sent = [
            each.once.clone(memory_format=torch.contiguous_format)
            if i in self._overlapping
            else each.once.contiguous()
            for i, each in enumerate(self._now)
        ]
        for group in self._groups:
            yield communicator.broadcast([self._sent[i] for i in group], root=0, async_op=True)

    def take(self) -> None:
        """Takes what has come."""
        moved = [i for i, each in enumerate(self._sent) if each is not self._now[i].once]
        _copy([self._now[i].once for i in moved], [self._sent[i] for i in moved])
        self._sent = []

    def _look(self) -> None:
        """Finds the tensors that are in the places now."""
        if self._as_before():
            return
        self._require_no_others()
        for i, (place, old) in enumerate(zip(self._places, self._now, strict=True)):
            tensor = place.tensor
            if tensor is None or tensor is not old.tensor or tensor.data_ptr() != old.address:
                self._now[i] = _Found.of(self._require_kind(i, tensor))
                self._outdated.add(i)
        self._overlapping = _overlapping([each.once for each in self._now])

    def _as_before(self) -> bool:
        """Whether nothing has changed, as after most steps: this must take little time."""
        try:
            tensors = [owner[key] for _, owner, key in self._places]
            others = [owner[key] for _, owner, key in self._empty]
        except KeyError:
            return False
        return (
            all(map(operator.is_, tensors, map(_TENSOR, self._now)))
            and list(map(_DATA_PTR, tensors)) == list(map(_ADDRESS, self._now))
            and sum(map(len, self._owners)) == self._names
            and all(each is None for each in others)
        )

    def _require_no_others(self) -> None:
        known = {each.name for each in self._places}
        names = [each.name for each in places(self._model) if each.name not in known]
        if names:
            raise InvalidArgument(
                f"buffers {names} came after the session was made: register them before, or keep "
                "them as plain attributes, which the session leaves alone"
            )
        self._empty = _named(self._model, empty=True)
        self._names = len(self._places) + len(self._empty)

    def _require_kind(self, i: int, tensor: torch.Tensor | None) -> torch.Tensor:
        if tensor is None or _kind(tensor) != self._kinds[i]:
            now = "gone" if tensor is None else _shown(_kind(tensor))
            raise InvalidArgument(
                f"the buffer {self._places[i].name!r} was {_shown(self._kinds[i])} when the "
                f"session was made, and is {now}: a session needs the same on all ranks at all "
                "times; keep such values as plain attributes, which the session leaves alone"
            )
        return tensor


def places(model: nn.Module) -> list[BufferSlot]:
    """The places of all buffers, in the model's order; a tensor in two places counts twice."""
    return _named(model, empty=False)


def _named(model: nn.Module, empty: bool) -> list[BufferSlot]:
    return [
        BufferSlot(f"{path}.{key}" if path else key, module._buffers, key)
        for path, module in model.named_modules()
        for key, tensor in module._buffers.items()
        if (tensor is None) == empty
    ]


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _shown(kind: tuple[torch.Size, torch.dtype, torch.device]) -> str:
    shape, dtype, device = kind
    return f"{dtype} of shape {tuple(shape)} on {device}"


def _overlapping(tensors: list[torch.Tensor]) -> set[int]:
    """Numbers of the contiguous tensors that begin within another one's memory."""
    spans = sorted(
        (str(each.device), each.data_ptr(), each.nbytes, i)
        for i, each in enumerate(tensors)
        if each.nbytes and each.is_contiguous()
    )
    found: set[int] = set()
    last, end = "", 0
    for device, begin, size, i in spans:
        if device == last and begin < end:
            found.add(i)
        end = max(end, begin + size) if device == last else begin + size
        last = device
    return found


def _copy(to: list[torch.Tensor], of: list[torch.Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, of)


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """The view with each element of an expanded tensor once."""
    for i, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(i, 0, 1)
    return tensor

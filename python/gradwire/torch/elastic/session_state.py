"""SessionState: the state that is the same on all ranks, and that a joiner must get."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gradwire._errors import InvalidArgument
from gradwire.torch.elastic.model_buffers import places, without_repeats
from gradwire.torch.elastic.transfer import pack


class SessionState:
    """A model, its optimizer, and other objects with a state, on one rank."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, carry: Sequence[Any]
    ) -> None:
        """`carry` are objects with `state_dict` and `load_state_dict`; raises InvalidArgument."""
        self.optimizer, self.carry = optimizer, list(carry)
        for each in self.carry:
            if not all(hasattr(each, name) for name in ("state_dict", "load_state_dict")):
                raise InvalidArgument(
                    f"carry= has a {type(each).__name__}, without state_dict() and "
                    "load_state_dict(): give schedulers, scalers and the like"
                )
        self._model = model

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name."""
        found: dict[str, torch.Tensor] = dict(self._model.named_parameters())
        found.update((each.name, each.owner[each.key]) for each in places(self._model))
        return {name: each.detach() for name, each in found.items()}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that must be the same on all ranks."""
        kinds = [(name, str(e.dtype), tuple(e.shape)) for name, e in self.tensors.items()]
        carried = [type(each).__name__ for each in self.carry]
        return {"model": kinds, "optimizer": type(self.optimizer).__name__, "carry": carried}

    def state_dict(self) -> dict[str, Any]:
        """The state, as dicts of tensors and plain values."""
        return {
            "model": self.tensors,
            "optimizer": self.optimizer.state_dict(),
            "carry": [each.state_dict() for each in self.carry],
        }

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces everything by another rank's state."""
        for name, each in self.tensors.items():
            own = without_repeats(each)
            own.copy_(state["model"][name][tuple(slice(size) for size in own.shape)])
        for place in places(self._model):
            found, its = place.owner[place.key], state["model"][place.name]
            if found is not None and not _same_bits(found, its):  # two in one memory, but not there
                place.owner[place.key] = its.to(found.device, copy=True)
        self.optimizer.load_state_dict(state["optimizer"])
        for own, its in zip(self.carry, state["carry"], strict=True):
            own.load_state_dict(its)

    def digest(self) -> str:
        """SHA-256 of all bits of the state."""
        tensors: list[torch.Tensor] = []
        plain = pack(self.state_dict(), tensors)
        found = hashlib.sha256(repr(plain).encode())
        for each in tensors:
            found.update(each.view(-1).view(torch.uint8).numpy())
        return found.hexdigest()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    lines: list[torch.Tensor] = []
    pack([one, other], lines)
    first, second = (each.view(-1).view(torch.uint8) for each in lines)
    return bool(torch.equal(first, second))

"""AccumulationCheck: refuses gradients that would count twice when the hook has momentum."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from gradwire._errors import InvalidArgument


class _Asked(NamedTuple):
    """The answer, on its way from a GPU to the host, which of these parameters were added to."""

    names: Sequence[str]
    added: torch.Tensor
    copied: torch.cuda.Event


class AccumulationCheck:
    """Finds gradients that were added to an average which the hook delivered before.

    DDP would submit their sum, in which momentum would count the earlier gradients again. On a GPU
    nothing waits for what is found there: it counts in one of the next steps.
    """

    def __init__(self, names: Mapping[torch.Tensor, str]) -> None:
        self._delivered: set[str] = set()  # parameters whose .grad may hold an average
        self._added_to: set[str] = set()  # of these, where a gradient was added
        self._added_on_gpu: dict[str, torch.Tensor] = {}  # whether one was, by parameter
        self._asked: deque[_Asked] = deque()
        self._parameters = {name: weakref.ref(parameter) for parameter, name in names.items()}
        check = weakref.ref(self)
        hooks = [
            parameter.register_hook(_GradientHook(check, self._parameters[name], name))
            for parameter, name in names.items()
            if parameter.requires_grad
        ]
        self.remove_hooks = weakref.finalize(self, _remove, hooks)
        self.remove_hooks.atexit = False

    def note_gradient(self, name: str, before: torch.Tensor | None) -> None:
        """Notes that a gradient is about to be added to `before`, which the parameter has."""
        if name not in self._delivered:
            return
        if before is not None and before.is_cuda:
            # False once it was zeroed, whatever is added after that.
            added, still = before.any(), self._added_on_gpu.get(name)
            self._added_on_gpu[name] = added if still is None else added & still
        elif before is not None and bool(before.any()):
            self._added_to.add(name)
        else:  # zeroed since
            self._delivered.discard(name)
            self._added_to.discard(name)
            self._added_on_gpu.pop(name, None)

    def deliver(self, names: Iterable[str]) -> None:
        """Notes that the .grad of these parameters now hold averages."""
        self._delivered.update(names)
        self._added_on_gpu.clear()

    def require_none(self, names: Iterable[str]) -> None:
        """Raises InvalidArgument when one of these was added to an earlier average."""
        names = list(names)
        self._ask_gpu([name for name in names if name in self._added_on_gpu])
        again = sorted(filter(self._is_nonzero, self._added_to.intersection(names)))
        again += self._told_by_gpu()
        if again:
            raise InvalidArgument(
                f"the gradient of {again[0]!r} still holds the average of an earlier backward, "
                "which momentum= or clip_norm= would count again: call zero_grad() between two "
                "backwards that are averaged; to accumulate, run all but the last one, forward "
                "and backward, within no_sync(), or add up the losses"
            )

    def _ask_gpu(self, names: Sequence[str]) -> None:
        """Has the current stream tell the host which of these were added to."""
        held = {name: self._parameters[name]() for name in names}
        found = {
            name: self._added_on_gpu[name] & each.grad.any()  # zero_grad() would have cleared it
            for name, each in held.items()
            if each is not None and each.grad is not None
        }
        if not found:
            return
        added = torch.stack(list(found.values()))
        on_host, copied = pinned(added.shape, added.dtype), torch.cuda.Event()
        on_host.copy_(added, non_blocking=True)
        copied.record(torch.cuda.current_stream(added.device))
        self._asked.append(_Asked(list(found), on_host, copied))

    def _told_by_gpu(self) -> list[str]:
        """The names of those that were added to, as far as the GPU has come.

        No names while a CUDA graph is captured, which no question about an event may disturb.
        """
        found: list[str] = []
        if not self._asked or torch.cuda.is_current_stream_capturing():
            return found
        while self._asked and self._asked[0].copied.query():
            asked = self._asked.popleft()
            pairs = zip(asked.names, asked.added.tolist(), strict=True)
            found += [name for name, added in pairs if added]
        return found

    def _is_nonzero(self, name: str) -> bool:
        """Whether the parameter has a nonzero gradient, which zero_grad() would have cleared."""
        parameter = self._parameters[name]()
        gradient = None if parameter is None else parameter.grad
        return gradient is not None and bool(gradient.any())


def pinned(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Memory of the host into which a stream copies without waiting."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


def _remove(hooks: Iterable[RemovableHandle]) -> None:
    for each in hooks:
        each.remove()


class _GradientHook:
    """A hook on a parameter, which outlives the hook's state and must not keep it alive."""

    def __init__(
        self,
        check: weakref.ref[AccumulationCheck],
        parameter: weakref.ref[torch.Tensor],
        name: str,
    ) -> None:
        self._check, self._parameter, self._name = check, parameter, name

    def __call__(self, _: torch.Tensor) -> None:
        check, parameter = self._check(), self._parameter()
        if check is not None and parameter is not None:
            check.note_gradient(self._name, parameter.grad)

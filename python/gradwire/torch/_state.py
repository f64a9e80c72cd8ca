"""State: what the DDP hook knows between buckets."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from gradwire._communicator import Communicator
from gradwire._errors import InvalidArgument, ScheduleError
from gradwire._feedback import ErrorFeedback
from gradwire._reductions import CodecLike
from gradwire._schedules import Schedule
from gradwire.torch import _saved
from gradwire.torch._clipping import Clipping
from gradwire.torch._guard import Guard
from gradwire.torch._joined import Active
from gradwire.torch._memory import Memory
from gradwire.torch._momentum import Momentum
from gradwire.torch._rules import Rules, Wanted
from gradwire.torch._scales import Scaler
from gradwire.torch._stats import Stats, by_codec
from gradwire.torch._steps import Steps
from gradwire.torch._unused import Unused

_BY_PARAMETER = "use gradwire.torch.register(), or give parameters=ddp.module.named_parameters()"


class State:
    """What the hook knows between buckets; one for each DDP model. Made by `register`.

    `error` is the first error, which is final: the backward that it belongs to raises it, and so
    do all later ones and, where `register` made the state, every forward in training. Gradients are
    undefined then. Build a new DDP model to go on.
    """

    def __init__(
        self,
        communicator: Communicator,
        codec: Wanted = "none",
        algorithm: str = "auto",
        *,
        parameters: Iterable[tuple[str, torch.Tensor]] = (),
        feedback: ErrorFeedback | bool | None = None,
        rules: Sequence[tuple[str, Wanted]] = (),
        min_elements: int = 1024,
        momentum: Momentum | None = None,
        clip_norm: float | None = None,
        scaler: Scaler | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        find_unused: bool = False,
        active: Active | None = None,
        owns_communicator: bool = False,
    ) -> None:
        """`parameters` are the model's, by name; the rest is what `register` says.

        `find_unused` says that DDP looks for parameters without a gradient, `active` which ranks
        still train within `join()`, `owns_communicator` that `close` closes it too. Raises
        InvalidArgument.
        """
        self._names = {parameter: name for name, parameter in parameters}
        self._rules = Rules(codec, rules, min_elements)
        _require_algorithm(algorithm, self._rules.lossy, communicator)
        self.communicator, self.codec, self.algorithm = communicator, codec, algorithm
        kept = _feedback(feedback, self._rules, bool(self._names))
        if not self._names and (momentum is not None or rules):
            raise InvalidArgument(f"momentum= and rules= are by parameter: {_BY_PARAMETER}")
        keeps = kept is not None or momentum is not None
        unused = Unused(self._names) if find_unused and keeps else None
        clipping = None if clip_norm is None else Clipping(clip_norm, communicator.size)
        self._memory = Memory(
            self._names, self._rules, kept, momentum, scaler, optimizer, unused, clipping
        )
        self._steps = Steps(communicator, algorithm, self._memory, active)
        self._guard: Guard | None = None
        # At exit it runs before the interpreter shuts down.
        self._close = weakref.finalize(self, self._steps.close, owns_communicator)

    def __repr__(self) -> str:
        failed = f", error={self.error!r}" if self.error else ""
        return (
            f"State(rank {self.communicator.rank} of {self.communicator.size}, "
            f"codec={self.codec!r}, algorithm={self.algorithm!r}, steps={self.steps}, "
            f"bytes={self.bytes}{failed})"
        )

    @property
    def feedback(self) -> ErrorFeedback | None:
        """The residuals, whose keys are the parameters' names; None where none are kept."""
        return self._memory.feedback

    @property
    def error(self) -> Exception | None:
        """The first one; final."""
        return self._steps.error

    @property
    def steps(self) -> int:
        """How many backward passes had all their gradients averaged."""
        return self._steps.done

    @property
    def buckets(self) -> int:
        """How many buckets these had."""
        return self._steps.counters.buckets

    @property
    def bytes(self) -> int:
        """How many bytes of gradients, before the codec."""
        return self._steps.counters.total.dense_bytes

    @property
    def closed(self) -> bool:
        """Whether close() was called, or the interpreter ends."""
        return self._steps.closed

    def close(self) -> None:
        """Ends the hook's threads, and its communicator if `register` made that; also at exit.

        Aborts the communicator where buckets are on their way. Raises Error, when all is done,
        where the last backward left the hook out.
        """
        self._close()
        self._require_averaged()

    def stats(self) -> Stats:
        """Bytes, ratio and waiting of the last step and of all; residuals as they are now."""
        found = []
        for parameter, name in self._names.items():
            codec = self._codec_of(name, parameter)
            kept = self.feedback.residual(name) if self.feedback is not None else ()
            norm = float(torch.as_tensor(kept).double().norm())
            found.append((codec, parameter.numel(), norm))
        counters = self._steps.counters
        return Stats(counters.last, counters.total, by_codec(found))

    def scale_residuals(self, factor: float) -> None:
        """Multiplies what was held back: for gradients or learning rates that change by it."""
        if self.feedback is not None:
            self.feedback.scale(factor)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and all that the next step depends on; each rank saves its own.

        Tensors and plain values, by parameter name. After an error it is as of the last step that
        ended well. Not to be called within backward. Raises Error where the last backward left the
        hook out.
        """
        self._require_averaged()
        self._steps.drop()
        return {"version": _saved.VERSION, "steps": self.steps, **self._memory.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Goes on from this rank's `state_dict`; every rank calls it, before a step.

        With the same model, ranks and settings, training has the same bits as if it had not been
        interrupted, at whichever step that was. A warning in gradwire's log says where it may not:
        when DDP's buckets turn out to be others, or when two interruptions so close to one another
        that DDP had not rebuilt them in between hide which they are. Stochastic rounding draws
        anew where no feedback is kept. Raises InvalidArgument for the state of another model.
        """
        _require_version(saved)
        self._steps.drop()
        self._memory.load_state_dict(saved)
        self._steps.done = int(saved["steps"])

    def add_residuals(self, saved: Mapping[str, Any]) -> None:
        """Takes over what a rank that left had held back; one rank calls it, before a step.

        `saved` is what the other's `state_dict` returned. Raises InvalidArgument like
        `load_state_dict`.
        """
        _require_version(saved)
        self._steps.drop()
        self._memory.add_residuals(saved)

    def _require_averaged(self) -> None:
        if self._guard is not None and self.error is None:
            self._guard.require_averaged()

    def _codec_of(self, name: str, parameter: torch.Tensor) -> CodecLike:
        """In the last step."""
        if parameter.dtype is not torch.float32:
            return "none"
        return self._rules.codec(name, parameter.numel(), max(self.steps - 1, 0))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a gradwire State holds connections and threads and cannot be copied or saved, nor can "
            "the DDP model that it is registered for: save ddp.module.state_dict() and "
            "state.state_dict(), and call gradwire.torch.register() for the model that is loaded"
        )


def _feedback(
    given: ErrorFeedback | bool | None, rules: Rules, named: bool
) -> ErrorFeedback | None:
    if given is False or (given is None and not rules.needs_feedback):
        return None
    if not named:
        raise InvalidArgument(f"error feedback is kept by parameter: {_BY_PARAMETER}")
    return given if isinstance(given, ErrorFeedback) else ErrorFeedback()


def _require_version(saved: Mapping[str, Any]) -> None:
    if saved.get("version") != _saved.VERSION:
        raise InvalidArgument(
            f"the state's version is {saved.get('version')!r}, and this gradwire reads "
            f"{_saved.VERSION}: give what state.state_dict() returned"
        )


def _require_algorithm(algorithm: str, codec: str | None, communicator: Communicator) -> None:
    if algorithm == "auto":
        return
    try:
        made = Schedule.generate(algorithm, communicator.size, groups=communicator.hosts)
    except ScheduleError as error:
        raise InvalidArgument(f"algorithm={algorithm!r}: {error}") from error
    if codec is not None and not made.verify().in_tree:
        raise InvalidArgument(
            f"algorithm={algorithm!r} adds a partial sum to several others, which the lossy "
            f"codec={codec!r} cannot: use auto, ring, direct or a tree"
        )

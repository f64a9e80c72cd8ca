"""State: what the DDP hook knows between buckets."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from gradwire._calls.reductions import CodecLike
from gradwire._communicator import Communicator
from gradwire._errors import InvalidArgument, ScheduleError
from gradwire._feedback import ErrorFeedback
from gradwire._launch import at_exit
from gradwire._schedules.schedule import Schedule
from gradwire.torch._step import saved as saving
from gradwire.torch._step.buckets import compressible, gradient_elements
from gradwire.torch._step.clipping import Clipping
from gradwire.torch._step.double_counting import require_no_momentum, watch_optimizers
from gradwire.torch._step.guard import Guard
from gradwire.torch._step.joined import Active
from gradwire.torch._step.memory import Memory
from gradwire.torch._step.momentum import Momentum
from gradwire.torch._step.rules import Rules, Wanted, require_matches
from gradwire.torch._step.stats import Stats, by_codec
from gradwire.torch._step.steps import Steps
from gradwire.torch._step.units import Scaler, kept_with
from gradwire.torch._step.unused import Unused

_log = logging.getLogger("gradwire")

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
        if kept is not None:
            kept_with(kept).require_free(self._names)
        if self._names:
            require_matches(rules, self._names.values())
        if not self._names and (momentum is not None or rules):
            raise InvalidArgument(f"momentum= and rules= are by parameter: {_BY_PARAMETER}")
        if momentum is not None and momentum.factor:
            watch_optimizers(self)
            if optimizer is not None:
                require_no_momentum(optimizer, self._names)
        keeps = kept is not None or momentum is not None
        unused = Unused(self._names) if find_unused and keeps else None
        clipping = None if clip_norm is None else Clipping(clip_norm, communicator.size)
        self._memory = Memory(
            self._names,
            self._rules,
            kept,
            momentum,
            scaler,
            optimizer,
            unused,
            clipping,
            communicator.size,
        )
        self._steps = Steps(communicator, algorithm, self._memory, active)
        self._guard: Guard | None = None
        if kept is not None:
            kept_with(kept).state = weakref.ref(self)
        self._close = weakref.finalize(self, self._steps.close, owns_communicator)
        # At exit weakref's turn may come before or after gradwire's, by what was imported first.
        self._close.atexit = False
        at_exit.close_first(self._steps)

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
        """How many backward passes had all their gradients averaged, but for paused ones."""
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
            found.append((codec, gradient_elements(parameter), norm))
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
        return {
            "version": saving.VERSION,
            "rank": self.communicator.rank,
            "world_size": self.communicator.size,
            "steps": self.steps,
            **self._memory.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any], *, resized: bool = False) -> None:
        """Goes on from this rank's `state_dict`; every rank calls it, before a step.

        With the same model, ranks and settings, training has the same bits as if it had not been
        interrupted, at whichever step that was. A warning in gradwire's log says where it may not:
        when DDP's buckets turn out to be others, or when two interruptions so close to one another
        that DDP had not rebuilt them in between hide which they are. Stochastic rounding draws
        anew where no feedback is kept.

        `saved` may also be what `gather_state_dict` returned, of which the rank takes its share,
        also where the number of ranks has changed. Raises InvalidArgument for the state of another
        model, another rank or another number of ranks. With `resized` the latter are taken: for
        ranks that go on when others have left; `add_residuals` brings what these held back.
        """
        communicator = self.communicator
        saving.require_version(saved)
        if "ranks" in saved:
            saving.require_complete(saved)
            saved = saving.share(saved, communicator.rank, communicator.size)
        elif not resized:
            saving.require_own(saved, communicator.rank, communicator.size)
        self._steps.drop()
        self._memory.load_state_dict(saved)
        self._steps.done = int(saved["steps"])

    def add_residuals(self, saved: Mapping[str, Any]) -> None:
        """Takes over what a rank that left had held back; one rank calls it, before a step.

        `saved` is what the other's `state_dict` returned, also in another number of ranks: what
        waited counts for its share in an average over these. Raises InvalidArgument for another
        model's.
        """
        saving.require_version(saved)
        self._steps.drop()
        self._memory.add_residuals(saved)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """For backwards whose gradients are thrown away: averages, and keeps nothing of them.

        Residuals, velocities and `steps` are neither used nor changed. So gradients travel as they
        are where the codec is biased, and are neither clipped nor given momentum. All ranks do so
        in the same backwards. To send nothing at all, run forward and backward within `no_sync()`.
        Raises InvalidArgument within `ddp.join()`, where ranks without inputs could not pause.
        """
        if self._steps.in_join:
            raise InvalidArgument(
                "paused() is not possible within ddp.join(): ranks that have joined cannot pause "
                "with the others; run these backwards within no_sync()"
            )
        before, self._memory.paused = self._memory.paused, True
        try:
            yield
        finally:
            self._memory.paused = before

    def _require_averaged(self) -> None:
        if self._guard is not None and self.error is None:
            self._guard.require_averaged()

    def _codec_of(self, name: str, parameter: torch.Tensor) -> CodecLike:
        """In the last step."""
        if not compressible(parameter):
            return "none"
        return self._rules.codec(name, gradient_elements(parameter), max(self.steps - 1, 0))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Nothing: it holds connections and threads."""
        warn_of_copy()
        return type(None), ()


def warn_of_copy() -> None:
    """Warns that the hook is left out of a copy."""
    _log.warning(
        "a copied or saved model is without gradwire's hook: call gradwire.torch.register() for a "
        "copy that is to be trained; the hook's own state is state.state_dict()"
    )


def _feedback(
    given: ErrorFeedback | bool | None, rules: Rules, named: bool
) -> ErrorFeedback | None:
    if given is False or (given is None and not rules.needs_feedback):
        return None
    if not named:
        raise InvalidArgument(f"error feedback is kept by parameter: {_BY_PARAMETER}")
    return given if isinstance(given, ErrorFeedback) else ErrorFeedback()


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

"""HookSteps: one model's steps, the first error, their counters, and the table of these."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

from gradwire._calls.requests import CodecLike
from gradwire._communicator import Traffic
from gradwire._errors import Aborted, Error
from gradwire.torch.exchange.engine import Exchange
from gradwire.torch.exchange.first_steps import FirstSteps


class StepStats(NamedTuple):
    """Counters of one step of one rank, or the sum over several steps; times are in seconds.

    Bytes sent and times in codecs are those of the communicator while the step lasts; another
    model's traffic over it is counted too.
    """

    steps: int = 0
    kept: int = 0  # steps that changed residuals: no rank had NaN or Inf
    dense_bytes: int = 0  # of the gradients
    ring_bytes: float = 0  # that a ring would send without a codec
    sent_bytes: int = 0  # frame headers included
    encode_seconds: float = 0  # in codecs of the core, on the communicator's own thread
    decode_seconds: float = 0
    waited: float = 0  # seconds at the end of backward until all was averaged

    @property
    def ratio(self) -> float:
        """The bytes that a ring would send without a codec, divided by those that were sent."""
        return self.ring_bytes / self.sent_bytes if self.sent_bytes else math.nan

    def plus(self, other: StepStats) -> StepStats:
        """Adds another's counters, field by field."""
        return StepStats._make(map(add, self, other))


@dataclass
class CodecStats:
    """The parameters that travel with one codec, in the last step."""

    parameters: int = 0
    elements: int = 0
    residual_norm: float = 0  # of this rank's residuals, together


class Stats(NamedTuple):
    """The result of `gradwire.torch.stats`; str() makes the table."""

    last: StepStats
    total: StepStats
    codecs: dict[str, CodecStats]
    why: str = ""  # the codec was chosen, where `register` did that

    def __str__(self) -> str:
        why = [self.why, ""] if self.why else []
        return "\n".join([*why, *self._codec_lines(), "", *self._step_lines()])

    def _codec_lines(self) -> Iterable[str]:
        yield f"{'codec':<28}{'parameters':>11}{'elements':>12}{'residual norm':>16}"
        for name, each in self.codecs.items():
            norm = f"{each.residual_norm:.4g}"
            yield f"{name:<28}{each.parameters:>11,}{each.elements:>12,}{norm:>16}"

    def _step_lines(self) -> Iterable[str]:
        columns = ["steps", "kept", "dense MB", "sent MB", "ratio"]
        columns += ["encode ms", "decode ms", "waited ms"]
        yield f"{'':<10}" + "".join(f"{name:>11}" for name in columns)
        for what, each in (("last step", self.last), ("total", self.total)):
            times = (each.encode_seconds, each.decode_seconds, each.waited)
            yield f"{what:<10}{each.steps:>11,}{each.kept:>11,}" + "".join(
                f"{value:>11,.3f}"
                for value in (
                    each.dense_bytes / 1e6,
                    each.sent_bytes / 1e6,
                    each.ratio,
                    *(seconds * 1e3 for seconds in times),
                )
            )


class Spent(NamedTuple):
    """The bytes that a communicator sent in some time, and the seconds in its codecs."""

    sent_bytes: int = 0
    encode_seconds: float = 0
    decode_seconds: float = 0

    def plus(self, after: Traffic, before: Traffic) -> Spent:
        """Adds the difference between two readings of the communicator's traffic."""
        return Spent(
            self.sent_bytes + after.bytes_sent - before.bytes_sent,
            self.encode_seconds + after.encode_seconds - before.encode_seconds,
            self.decode_seconds + after.decode_seconds - before.decode_seconds,
        )


class Counters:
    """Sums of steps; the thread that ends a step writes them."""

    def __init__(self, ranks: int, passes: int = 2) -> None:
        """`passes` is how often a gradient travels in a ring: once in a reduce_scatter."""
        self._ranks, self._passes = ranks, passes
        self.buckets = 0
        self.last = self.total = StepStats()

    def end_step(self, kept: bool, buckets: int, dense_bytes: int, spent: Spent) -> None:
        """Adds a step, and what the communicator spent in it."""
        self.buckets += buckets
        ring = self._passes * dense_bytes * (self._ranks - 1) / self._ranks
        self.last = StepStats(
            1,
            int(kept),
            dense_bytes,
            ring,
            *spent,
        )
        self.total = self.total.plus(self.last)

    def waited(self, seconds: float) -> None:
        """Adds the seconds that backward waited for the last step."""
        self.last = self.last._replace(waited=seconds)
        self.total = self.total._replace(waited=self.total.waited + seconds)


def by_codec(
    parameters: Iterable[tuple[CodecLike, int, float]],
) -> dict[str, CodecStats]:
    """Sums (codec, elements, residual norm) of parameters by codec."""
    found: dict[str, CodecStats] = {}
    for codec, elements, norm in parameters:
        stats = found.setdefault(str(codec), CodecStats())
        stats.parameters += 1
        stats.elements += elements
        stats.residual_norm = math.hypot(stats.residual_norm, norm)
    return found


class HookSteps:
    """The steps of one model, which its backwards make; the first error is final."""

    _closed_message: str

    def __init__(self, exchange: Exchange, passes: int = 2) -> None:
        """`passes` is how often a gradient's bytes travel in a ring: once in a reduce_scatter."""
        self.exchange, self.communicator = exchange, exchange.communicator
        # A copy that is never raised: a traceback would keep the model alive.
        self.error: Exception | None = None
        self.counters = Counters(exchange.communicator.size, passes)
        self.first_steps: FirstSteps | None = None  # of a codec that may change after them
        self.done = 0  # steps whose gradients were all averaged, without paused ones
        self.closed = False

    def abandon_step(self) -> None:
        """Undoes a step whose backward did not end."""
        self.exchange.end(False)

    def close(self, with_communicator: bool) -> None:  # noqa: ARG002 - a subclass may own one
        """Undoes an unfinished step; backwards raise from now on."""
        self.closed = True
        self.abandon_step()

    def _require_usable(self) -> None:
        if self.error is not None:
            raise without_traceback(self.error)
        if self.closed:
            raise Aborted(self._closed_message)

    def _count(self, kept: bool, buckets: int, nbytes: int, spent: Spent) -> None:
        """Counts a step that has ended."""
        self.counters.end_step(kept, buckets, nbytes, spent)
        self.done += self.exchange.residuals.is_counted

    def _record_error(self, error: Exception) -> None:
        if self.error is None:
            self.error = without_traceback(error)


def without_traceback(error: Exception) -> Exception:
    """A copy of the error without its traceback."""
    try:
        return copy.copy(error)
    except Exception:  # a user's class that cannot be copied from its arguments
        return Error(f"{type(error).__name__}: {error}")

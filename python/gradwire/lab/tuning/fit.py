"""Fit of the cost model to measured times of the running ranks.

Calls of several algorithms and sizes are timed, and the parameters are those under which the
simulator predicts these times best: least squares of the logarithms of predicted / measured, in
the logarithms of the parameters, by the Levenberg-Marquardt method. The built-in values are a weak
prior, which decides what no call has shown. Codecs come last, one factor each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from gradwire import _core, _model
from gradwire._base.group import Group
from gradwire._errors import InvalidArgument
from gradwire._model import HostSet
from gradwire._schedules.schedule import Schedule
from gradwire.lab.tuning import measure
from gradwire.lab.tuning.measure import Case

_Floats = NDArray[np.float64]
Progress = Callable[[float, str], None]  # the share done, from 0 to 1, and the next case

_MOST_FIT_SECONDS = 4.0

_SIZES = (4, 8 << 10, 64 << 10, 512 << 10, 4 << 20, 8 << 20, 16 << 20, 32 << 20)
_OF_CACHES = (8 << 20, 16 << 20)  # tell where the last cache ends; left out where links are slower
_MOST_OF_CACHES = 0.03  # seconds
_PLANS = {  # algorithms to time; broadcasts separate the cost of copies from that of reductions
    "all_reduce": (
        "direct",
        "ring",
        "recursive_doubling",
        "halving_doubling",
        "binary_tree",
        "double_binary_tree",
        "star",
    ),
    "broadcast": ("star", "binary_tree"),
}
# Small broadcasts are left out: unlike a repeated all_reduce they pay for Python's checks.
_LEAST = {"all_reduce": 0, "broadcast": 256 << 10}  # bytes
_OF_TWO_RANKS = ("direct", "recursive_doubling", "star")  # the others are one of these then
_CODEC_BYTES = 4 << 20
# Where NICs limit the rate, the search starts from bursts of some packets, and from this share of a
# byte's time by which a change of the sender prolongs it.
_BURST, _MIXED = 8000.0, 0.1
_NIC_BYTES = 256 << 10  # of a call whose time is mostly that of bytes
_MOST_BETA, _MOST_BURST = 1e-3, 1e9
_ROUNDS = 8
_MOST_CALLS = 5000  # per case and round
_SHORT, _SOME = 2e-3, 30  # seconds of a call, and calls
# Quantile over rounds: other work on the machine only adds time, for a second or longer.
_UNDISTURBED = 0.25
# Weight of a factor e from the built-in value, relative to a case that is off by as much.
_PRIOR = 0.05
_PRIOR_FAR = 0.1  # how much slower distant memory is varies less
_OUTLIER = 0.3  # larger errors count less
_CLOSE = 0.2
_STEP = 0.05  # of a parameter's logarithm, for slopes
_MOST_DAMPING = 1e4


@dataclass(frozen=True)
class Timing:
    """One case with its measured and predicted seconds."""

    case: Case
    measured: float
    predicted: float = math.nan

    @property
    def close(self) -> bool:
        """Whether the prediction is within 20 % of the measurement."""
        return abs(self.predicted - self.measured) <= _CLOSE * self.measured


def tune(
    comm: Group, hosts: HostSet, *, seconds: float, progress: Progress | None
) -> tuple[_core.CostModel, list[Timing]]:
    """Measures and fits a model, the same on all ranks; returns it, and on rank 0 its timings.

    Every rank calls it. It takes about `seconds`, and a few more on rank 0 to compute. Raises
    InvalidArgument.
    """
    if not 0 < seconds < math.inf:
        raise InvalidArgument(f"seconds={seconds!r} is no time to measure for")
    built_in = _model.built_in(hosts)
    names = built_in.parameters
    coded_cases = [coded_case(each) for each in _core.codec_names() if f"{each}.encode" in names]
    timer = PingTimer(comm, seconds, progress)
    packed, timings = timer.fit([*_cases(comm.size), *coded_cases], built_in)
    return _model.unpack(packed), timings


def _cases(ranks: int) -> list[Case]:
    """The cases by size: small ones tell which large ones would take too long."""
    return [
        measure.case_of_bytes(size, ranks, collective=collective, algorithm=algorithm)
        for size in _SIZES
        for collective, algorithms in _PLANS.items()
        if size >= _LEAST[collective]
        for algorithm in algorithms
        if ranks > 2 or algorithm in _OF_TWO_RANKS
    ]


def coded_case(codec: str) -> Case:
    """The case that tells what a codec costs."""
    return Case("all_reduce", _CODEC_BYTES // 4, algorithm="direct", codec=codec)


@dataclass
class _Clocked:
    """A case, the seconds of its first call, and those of a call in each round."""

    case: Case
    call: Callable[[], object]
    once: float
    rounds: list[float] = field(default_factory=list)

    def timing(self) -> Timing:
        found = self.rounds or [self.once]
        return Timing(self.case, float(np.quantile(found, _UNDISTURBED)))


class PingTimer:
    """Times cases on all ranks, which agree on the cases that there is time for.

    Each case is first called once, to know how long it takes. Then come rounds over all of them, so
    that each gets its share of the machine's good and bad seconds.
    """

    def __init__(self, comm: Group, seconds: float, progress: Progress | None) -> None:
        self._comm, self._seconds, self._progress = comm, seconds, progress
        self._start = monotonic()
        self._make_room()
        self._rates: dict[tuple[str, str], float] = {}  # seconds per byte of the last smaller case

    def fit(
        self, cases: Sequence[Case], model: _core.CostModel, most_message: float | None = None
    ) -> tuple[bytes, list[Timing]]:
        """Times the cases; returns the packed model fitted to them, and on rank 0 its timings."""
        every = self.time_all(cases)
        timings = [each for each in every if each.case.codec == "none"]
        found = b""
        if self._comm.rank == 0:
            fit = Fit(self._comm, model, timings, most_message)
            timings = fit.run()
            fit.fit_codecs([each for each in every if each.case.codec != "none"])
            found = _model.pack(fit.model)
        return broadcast(self._comm, found), timings

    def time_all(self, cases: Sequence[Case]) -> list[Timing]:
        """Times the cases for which there is time."""
        share = self._seconds / len(cases)
        tried = [self._try(case, share) for case in cases]
        all_clocked = [each for each in tried if each is not None]
        left = len(all_clocked) * _ROUNDS
        for _ in range(_ROUNDS):
            for each in all_clocked:
                self._time(each, left)
                left -= 1
        return [each.timing() for each in all_clocked]

    def _try(self, case: Case, share: float) -> _Clocked | None:
        """Makes the first calls of a case; None if one would take more than the share of time."""
        self._show(case)
        family = (case.collective, case.algorithm)
        most = min(share, _MOST_OF_CACHES) if case.nbytes in _OF_CACHES else share
        if self._rates.get(family, 0.0) * case.nbytes > most:
            return None
        call = self._call(case)
        call()
        once = self._batch(call, 1)
        if once < _SHORT:  # ranks may come late by more than a call takes
            once = self._batch(call, _SOME)
        self._rates[family] = once / case.nbytes if case.nbytes > _SIZES[1] else 0.0
        return _Clocked(case, call, once)

    def _make_room(self) -> None:
        self._room = np.zeros(max(_SIZES) // 4, np.float32)  # the buffer of all cases

    def _call(self, case: Case) -> Callable[[], object]:
        return measure.timed_call(self._comm, case, self._room[: case.count])

    def _finish(self) -> None:
        """Waits for the calls that were begun."""

    def _time(self, clocked: _Clocked, left: int) -> None:
        """Times a case in one round; `left` such rounds share the remaining time."""
        spent = measure.slowest(self._comm, monotonic() - self._start)
        share = (self._seconds - spent) / left
        calls = min(_MOST_CALLS, int(share / clocked.once))
        if calls < 1 and clocked.rounds:
            return
        self._show(clocked.case)
        clocked.rounds.append(self._batch(clocked.call, max(1, calls)))

    def _show(self, case: Case) -> None:
        if self._progress is not None:
            words = (case.collective, case.algorithm, case.codec, f"{case.nbytes} bytes")
            self._progress(min(0.99, (monotonic() - self._start) / self._seconds), " ".join(words))

    def _batch(self, call: Callable[[], object], calls: int) -> float:
        """The seconds of a call on the slowest rank; the same number on all ranks."""
        self._comm.barrier()
        start = monotonic()
        for _ in range(calls):
            call()
        self._finish()
        return measure.slowest(self._comm, (monotonic() - start) / calls)


class Fit:
    """Finds the parameters that predict the timings best.

    `most_message` is that of `_core.CostModel.predict`; inf where chunks travel whole, as between
    GPUs, whose times do not depend on caches of processors.
    """

    def __init__(
        self,
        comm: Group,
        model: _core.CostModel,
        timings: Sequence[Timing],
        most_message: float | None = None,
    ) -> None:
        self._most_message = most_message
        self._hosts = [list(each) for each in comm.hosts]
        self._ranks = comm.size
        self.model = model
        self._timings = timings
        self._schedules = {
            (each.case.collective, each.case.algorithm): Schedule.generate(
                each.case.algorithm, comm.size, collective=each.case.collective
            )._core
            for each in timings
        }
        if most_message is None:
            self._start_nics()
        self._names = self._free(max(map(len, comm.hosts)))
        weights = [_PRIOR_FAR if name.startswith("far.") else _PRIOR for name in self._names]
        self._prior = np.square(weights)

    def _start_nics(self) -> None:
        """Sets what the largest calls say of the NICs between hosts, from where the search starts.

        In an all_reduce each host sends at least 2 (h - 1) / h of the array.
        """
        hosts = len(self._hosts)
        calls = [each for each in self._timings if each.case.collective == "all_reduce"]
        if hosts == 1 or not calls:
            return
        largest = max(each.case.nbytes for each in calls)
        least = min(each.measured for each in calls if each.case.nbytes == largest)
        beta = least / (2 * (hosts - 1) / hosts * largest)
        if largest > _NIC_BYTES and beta > self.model.parameters["between.beta"]:
            self.model.set("between.beta", min(beta, _MOST_BETA))
        self.model.set("between.burst", _BURST)
        self.model.set("between.mixed", _MIXED * self.model.parameters["between.beta"])

    def _free(self, most_on_a_host: int) -> list[str]:
        """The parameters to fit: those that matter to these ranks and are not zero."""
        given = self.model.parameters
        scopes = [
            *(["within."] if most_on_a_host > 1 else []),
            *(["between."] if len(self._hosts) > 1 else []),
        ]
        names = [name for name in given if name.startswith(tuple(scopes))] if scopes else []
        names += ["call", "round", "move", "gamma"]
        names += [] if self._most_message else [name for name in given if name.startswith("far.")]
        if most_on_a_host * given["sharing"] > given["cores"]:
            names.append("turn")
        return [name for name in names if given[name] > 0]

    def run(self) -> list[Timing]:
        """Fits the model; returns the timings with its predictions."""
        prior = np.log([self.model.parameters[name] for name in self._names])
        at, errors, damping = prior, self._errors(prior), 1e-2
        until = monotonic() + _MOST_FIT_SECONDS
        while monotonic() < until and damping < _MOST_DAMPING:
            normal, pull = self._normal(at, errors, prior)
            before, gain = self._badness(errors, at - prior), 0.0
            while gain <= 0 and damping < _MOST_DAMPING:
                step = -np.linalg.solve(normal + damping * np.diag(np.diag(normal)), pull)
                there = at + np.clip(step, -1.0, 1.0)
                found = self._errors(there)
                gain = before - self._badness(found, there - prior)
                damping = damping / 4 if gain > 0 else damping * 4
            if gain > 0:
                at, errors = there, found
            if gain < 1e-4 * before:
                break
        self._set(at)
        return [replace(each, predicted=self._predict(each.case)) for each in self._timings]

    def _normal(self, at: _Floats, errors: _Floats, prior: _Floats) -> tuple[_Floats, _Floats]:
        """The normal equations, with less weight for outliers."""
        slope = np.empty((len(errors), len(at)))
        for i, step in enumerate(_STEP * np.eye(len(at))):
            slope[:, i] = (self._errors(at + step) - errors) / _STEP
        weights = np.minimum(1.0, _OUTLIER / np.maximum(np.abs(errors), 1e-9))
        normal = slope.T @ (weights[:, None] * slope) + np.diag(self._prior)
        return normal, slope.T @ (weights * errors) + self._prior * (at - prior)

    def _badness(self, errors: _Floats, away: _Floats) -> float:
        """Huber's loss of the errors, plus the prior's loss of the distance `away`."""
        size = np.abs(errors)
        loss = np.where(size <= _OUTLIER, size**2, 2 * _OUTLIER * size - _OUTLIER**2)
        return float(loss.sum() + (self._prior * away**2).sum())

    def fit_codecs(self, timings: Sequence[Timing]) -> None:
        """Fits one factor for both directions of each codec, by bisection."""
        base = self.model.parameters
        for timing in timings:
            name = timing.case.codec
            codec = _core.Codec(name)
            schedule = Schedule.generate("direct", self._ranks)._core
            low, high = math.log(1e-2), math.log(1e3)
            for _ in range(20):
                middle = (low + high) / 2
                for part in ("encode", "decode"):
                    full = f"{name}.{part}"
                    self.model.set(full, base[full] * math.exp(middle))
                predicted = self._seconds(schedule, timing.case.nbytes, codec)
                low, high = (low, middle) if predicted > timing.measured else (middle, high)

    def _errors(self, at: _Floats) -> _Floats:
        self._set(at)
        return np.array(
            [math.log(self._predict(each.case) / each.measured) for each in self._timings]
        )

    def _set(self, at: _Floats) -> None:
        for name, value in zip(self._names, at.tolist(), strict=True):
            most = _MOST_BURST if name.endswith(".burst") else 999.0
            self.model.set(name, math.exp(min(value, math.log(most))))

    def _predict(self, case: Case) -> float:
        schedule = self._schedules[case.collective, case.algorithm]
        return self._seconds(schedule, case.nbytes)

    def _seconds(
        self, schedule: _core.Schedule, nbytes: float, codec: _core.Codec | None = None
    ) -> float:
        if self._most_message is None:
            return self.model.predict(schedule, nbytes, self._hosts, codec)
        return self.model.predict(schedule, nbytes, self._hosts, codec, self._most_message)


def broadcast(comm: Group, data: bytes) -> bytes:
    """Rank 0's bytes, on all ranks."""
    size = np.array([len(data)], np.int64)
    comm.broadcast(size, algorithm="star")
    text = np.frombuffer(data.ljust(int(size[0])), np.uint8).copy()
    comm.broadcast(text, algorithm="star")
    return bytes(text)

"""Exchange: the average of a fragment's outer gradients, on its way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from gradwire._calls.work import Work
from gradwire._communicator import Communicator
from gradwire.torch._step.gradient_scale import GradientScale
from gradwire.torch._step.repacking import Bucket
from gradwire.torch._step.residual_state import Call, ResidualState


class Exchange:
    """One fragment's outer gradients, which become averages in place."""

    def __init__(
        self,
        gradients: Mapping[str, torch.Tensor],
        weight: float = 1.0,
        residuals: ResidualState | None = None,
    ) -> None:
        """`weight` times the sum is the average. Without residuals the gradients are averages."""
        self.gradients, self._weight, self._residuals = gradients, weight, residuals
        self._works: list[Work] = []
        self.finite = True

    def start(self, communicator: Communicator, algorithm: str, step: int) -> None:
        """Starts the reductions with the codecs of an outer step; every rank calls it."""
        assert self._residuals is not None
        self._residuals.open_step(GradientScale(ranks=communicator.size))
        try:
            for bucket in buckets(self.gradients):
                for call in self._residuals.calls(bucket, step):
                    self._works.append(self._sum(communicator, algorithm, call))
        except Exception:
            self.drop()
            raise

    def _sum(self, communicator: Communicator, algorithm: str, call: Call) -> Work:
        assert self._residuals is not None
        work: Work = communicator.all_reduce(
            list(call.arrays),
            algorithm=algorithm,
            codec=call.codec,
            keys=call.keys,
            feedback=False if call.keys is None else self._residuals.feedback,
            async_op=True,
        )
        return work

    def land(self, prepare: Callable[[dict[str, torch.Tensor]], None] | None = None) -> None:
        """Waits for the averages, and keeps residuals if they are finite; again, does nothing.

        Finite averages are given to `prepare` first. Raises its error, and the first one of the
        reductions; then residuals are as they were.
        """
        if self._residuals is None:
            return
        try:
            _wait_for_all(self._works)
        except Exception:
            self.drop()
            raise
        self._works = []
        for each in self.gradients.values():
            each.mul_(self._weight)
        self.finite = are_finite(list(self.gradients.values()))
        if self.finite and prepare is not None:
            try:
                prepare(dict(self.gradients))
            except BaseException:
                self.drop()
                raise
        residuals, self._residuals = self._residuals, None
        residuals.end_step(self.finite)

    def drop(self) -> None:
        """Ends an exchange that failed, when its communicator has: residuals stay as they were."""
        with contextlib.suppress(Exception):
            _wait_for_all(self._works)
        residuals, self._residuals, self._works = self._residuals, None, []
        if residuals is not None:
            residuals.end_step(False)


def buckets(gradients: Mapping[str, torch.Tensor]) -> Iterator[Bucket]:
    """Gradients that can travel together: those of one type, on one device."""
    kinds: dict[object, list[str]] = {}
    for name, each in gradients.items():
        if each.numel():
            kinds.setdefault((each.dtype, each.device), []).append(name)
    for names in kinds.values():
        parts = [gradients[name] for name in names]
        yield Bucket(parts, names, parts)


def _wait_for_all(works: Sequence[Work]) -> None:
    """Waits for all, even if some fail; raises the first error."""
    first: Exception | None = None
    for each in works:
        try:
            each.wait()
        except Exception as error:
            first = first or error
    if first is not None:
        raise first


def are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no element is NaN or Inf."""
    extremes = [torch.stack(torch.aminmax(each)) for each in tensors if each.numel()]
    return all(bool(torch.isfinite(each).all()) for each in extremes)

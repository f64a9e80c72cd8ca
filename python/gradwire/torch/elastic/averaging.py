"""Averager: averages a model's gradients while backward runs, over one communicator after another.

It needs no DistributedDataParallel, whose process group would have to be made anew with each
change. Hooks stand on the parameters once; buckets are formed from their order, the last layer
first, since its gradients come first. (Li et al. 2020, "PyTorch Distributed", sec. 3.2.3)
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from gradwire._communicator import Communicator
from gradwire._errors import Error, InvalidArgument
from gradwire._feedback import ErrorFeedback
from gradwire.torch.elastic.model_buffers import ModelBuffers
from gradwire.torch.exchange.engine import Exchange
from gradwire.torch.exchange.gradient_scale import RatesDifferError, Scaler, ScaleTracker
from gradwire.torch.exchange.residual_state import ResidualState
from gradwire.torch.exchange.rules import Bucket, Rules, gradient_elements, real_view

BUCKET_BYTES = 25 << 20
_FIRST_BYTES = 1 << 20  # so that something travels early

_log = logging.getLogger("gradwire")


class Averaging(NamedTuple):
    """The way in which gradients travel."""

    algorithm: str
    rules: Rules
    feedback: ErrorFeedback | None
    optimizer: torch.optim.Optimizer | None  # whose rates residuals follow
    scaler: Scaler | None = None  # whose scale they follow


class Averager:
    """The averages of one step after the other; errors of a step are kept until `finish`."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        buffers: ModelBuffers,
        how: Averaging,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Puts hooks on the parameters, by name, that are trained; rank 0's `buffers` count."""
        self._names = {each: name for name, each in parameters.items() if each.requires_grad}
        self.buffers, self._how = buffers, how
        self._buckets = list(_cut(reversed(self._names), bucket_bytes))
        self._of_buckets = [frozenset(each) for each in self._buckets]
        self._place = {each: i for i, bucket in enumerate(self._buckets) for each in bucket}
        self._gpus = {each.device for each in self._names if each.is_cuda}
        self._handles = [
            each.register_post_accumulate_grad_hook(self._on_gradient) for each in self._names
        ]
        self._exchange: Exchange | None = None
        self._unconfirmed: Error | None = None  # the error of the barrier
        self._missing: list[set[torch.Tensor]] = []  # by bucket, parameters without gradient
        self._listens = False
        self._error: Exception | None = None

    def close(self) -> None:
        """Removes the hooks."""
        for each in self._handles:
            each.remove()
        self._handles = []

    def adopt(self, communicator: Communicator) -> None:
        """Averages over these ranks from now on; residuals keep their weight."""
        how = self._how
        residuals = ResidualState(
            self._names, communicator.size, how.rules, how.feedback, how.scaler, how.optimizer
        )
        self._exchange = Exchange(communicator, residuals, how.algorithm)

    def begin(self, step: int) -> None:
        """Begins a step without gradients; `step` counts those of the whole training."""
        for each in self._names:
            each.grad = None
        self._missing = [set(each) for each in self._of_buckets]
        self._error = self._unconfirmed = None
        self._next, self._step = 0, step  # the bucket to send next

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has one."""
        return any(each.grad is not None for each in self._names)

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Sends gradients as they come in a backward, the last one of the step; then the rest."""
        self._listens = True
        try:
            yield
        finally:
            self._listens = False
        self.send_rest()

    def send_rest(self) -> None:
        """Sends what has not travelled yet, with zeros where there is no gradient."""
        while self._next < len(self._buckets):
            self._send_next()

    def finish(self, *, confirms: bool = True) -> None:
        """Waits until all gradients are averages, and buffers are rank 0's; raises the first error.

        After an error the gradients are undefined. With `confirms` a barrier follows in the same
        wait. A rank comes to it when its averages are there, since its calls have an order.
        """
        exchange = self._adopted
        self.send_rest()
        if self._error is None:
            self._note_error(self._share_buffers)
        self._note_error(exchange.wait_to_round)
        if confirms and self._error is None and not self._gpus:
            self._unconfirmed = self._barrier()
        self._note_error(exchange.wait)
        self._await_gpus()
        if self._error is not None:
            raise self._error
        self.buffers.take()

    def confirm(self) -> None:
        """Returns when all ranks have finished the step; raises what a failed rank raises."""
        error = self._barrier() if self._gpus else self._unconfirmed
        if error is not None:
            raise error

    def end(self, committed: bool) -> None:
        """Keeps the step's changes of residuals, or undoes them, once its calls are over."""
        if self._exchange is not None:
            self._exchange.end(committed)

    def state_dict(self) -> dict[str, Any]:
        """Saves what a joiner's codecs must know: all but residuals, which each rank has itself.

        A joiner begins without residuals. Those of the others grow with the number of ranks, so
        that all of them together keep their weight in the average.
        """
        saved = self._adopted.residuals.state_dict()
        kept = {n: {**each, "residual": None} for n, each in saved["feedback"].items()}
        return {**saved, "feedback": kept}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Takes another rank's `state_dict`; raises InvalidArgument for another model's."""
        sizes = {name: gradient_elements(each) for each, name in self._names.items()}
        kept = {
            name: {**each, "residual": torch.zeros(sizes[name], dtype=torch.float32, device="cpu")}
            for name, each in saved["feedback"].items()
        }
        self._adopted.residuals.load_state_dict({**saved, "feedback": kept})

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if not self._listens:
            return
        self._missing[self._place[parameter]].discard(parameter)
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        if self._error is None:
            self._note_error(partial(self._send, bucket))

    def _send(self, parameters: Sequence[torch.Tensor]) -> None:
        exchange = self._adopted
        if not exchange.is_open:
            self._open_step(exchange)
        gradients = [real_view(_dense_gradient(each, self._names[each])) for each in parameters]
        names = [self._names[each] for each in parameters]
        exchange.start(Bucket(gradients, names, gradients))

    def _open_step(self, exchange: Exchange) -> None:
        residuals, ranks = exchange.residuals, exchange.communicator.size
        try:
            exchange.open(self._step, replace(residuals.scales.read(), ranks=ranks))
        except RatesDifferError:
            _log.warning(
                "parameter groups change their learning rates by different factors: residuals "
                "follow the rates no more"
            )
            self._how = self._how._replace(optimizer=None)
            residuals.scales = ScaleTracker(self._how.scaler, None)
            exchange.open(self._step, replace(residuals.scales.read(), ranks=ranks))

    @property
    def _adopted(self) -> Exchange:
        assert self._exchange is not None
        return self._exchange

    def _share_buffers(self) -> None:
        for work in self.buffers.share(self._adopted.communicator):
            self._adopted.add(work)

    def _note_error(self, call: Callable[[], None]) -> None:
        """Calls, and keeps the first error of the step for `finish`."""
        try:
            call()
        except Error as error:
            self._error = self._error or error

    def _await_gpus(self) -> None:
        for device in self._gpus:
            torch.cuda.current_stream(device).synchronize()
        if self._gpus and self._error is None:
            self._note_error(self._adopted.communicator._require_success_on_gpu)

    def _barrier(self) -> Error | None:
        try:
            self._adopted.communicator.barrier()
        except Error as error:
            return error
        return None


def _cut(parameters: Iterator[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    """Cuts parameters into buckets of one type and device, and of about `most` bytes."""
    bucket: list[torch.Tensor] = []
    size, limit = 0, min(_FIRST_BYTES, most)
    for each in parameters:
        alike = bucket and (each.dtype, each.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and (size >= limit or not alike):
            yield bucket
            bucket, size, limit = [], 0, most
        bucket.append(each)
        size += each.numel() * each.element_size()
    if bucket:
        yield bucket


def _dense_gradient(parameter: torch.Tensor, name: str) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None:
        parameter.grad = gradient = torch.zeros_like(
            parameter, memory_format=torch.contiguous_format
        )
    elif gradient.layout is not torch.strided:
        raise InvalidArgument(
            f"the gradient of {name!r} is sparse; gradwire averages dense ones: build the "
            "embedding with sparse=False"
        )
    elif not gradient.is_contiguous():
        parameter.grad = gradient = gradient.contiguous()
    return gradient

"""Sandblaster L-BFGS for models of torch: replicas share the samples of each evaluation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

from gradwire import serve
from gradwire._base import arguments
from gradwire._errors import InvalidArgument
from gradwire.torch.backend import cuda_staging

_DTYPES = (torch.float32, torch.float64)


class Sandblaster(serve.DistributedLBFGS):
    """L-BFGS over a batch that replicas share: `serve()` on replicas, `step()` on a coordinator.

    Dean et al. 2012, "Large Scale Distributed Deep Networks", sec. 4.2; see
    `gradwire.serve.DistributedLBFGS`. It is for losses of large batches, best of all samples, that
    are functions of the parameters alone: without dropout, and with normalization by fixed
    statistics. The loss that `step()` reports is the mean over the batch; where `samples` are no
    multiple of `portion`, batches of some samples differ by a few of them, and the mean is over
    their mean number.
    """

    def __init__(
        self,
        params: Iterable[Any],
        loss: Callable[[torch.Tensor], torch.Tensor],
        *,
        samples: int,
        batch: int | Literal["all"] = "all",
        portion: int = 1000,
        iterations_per_batch: int = 10,
        history: int = 10,
        search: Literal["strong_wolfe", "more_thuente"] | None = "strong_wolfe",
        lr: float = 1.0,
        backups: bool = True,
        push_every: int = 8,
        seed: int = 0,
        state: str | os.PathLike[str] | None = None,
        store: str | None = None,
        name: str = "parameters",
        replica: str | None = None,
        secret: bytes | str | None = None,
        timeout: float = 300.0,
    ) -> None:
        """Makes no connection yet. All processes give the same arguments.

        `params` are tensors, all float32 or all float64; those of the first replica are the initial
        values, and `serve()` writes into them. `loss(indices)` returns the sum of the losses of
        these samples, indices below `samples` in an int64 tensor, of which there are at most
        `portion`. A portion is best a sixteenth to an eighth of a replica's share of the batch.

        `batch` is a number of samples, at most `samples`, in whole portions that are drawn with
        `seed`, from samples in an order that is drawn, too. `timeout` is in seconds, and the other
        arguments are those of `gradwire.serve.DistributedLBFGS`. Raises InvalidArgument.
        """
        self._parameters = [each for each in params if each.requires_grad]
        dtypes = {each.dtype for each in self._parameters}
        if len(dtypes) != 1 or not dtypes <= set(_DTYPES):
            names = sorted(map(str, dtypes)) or "none"
            raise InvalidArgument(f"the parameters are {names}: give all float32, or all float64")
        self._samples = arguments.whole(samples, "samples", least=1, bits=64)
        self._portion = arguments.whole(portion, "portion", least=1)
        self._number = -(-self._samples // self._portion)
        size, self._order = self._number, None  # size: in portions
        if batch != "all":
            if arguments.whole(batch, "batch", least=1) > self._samples:
                raise InvalidArgument(f"batch={batch} samples: there are {self._samples}")
            size = max(1, batch // self._portion)
            draw = torch.Generator().manual_seed(arguments.whole(seed, "seed", bits=64))
            self._order = torch.randperm(self._samples, generator=draw, device="cpu")
        # Portions are equal but for one sample, so that this is the mean number of a batch's.
        self._divisor = size * self._samples / self._number
        self._loss = loss
        self._hosts = [_on_host(each) for each in self._parameters]
        super().__init__(
            [each.numpy() for each in self._hosts],
            self._differentiate,
            portions=self._number,
            batch=size,
            iterations_per_batch=iterations_per_batch,
            history=history,
            search=search,
            lr=lr,
            backups=backups,
            push_every=push_every,
            seed=seed,
            state=state,
            store=store,
            name=name,
            replica=replica,
            secret=secret,
            timeout=timeout,
        )

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _install(self) -> None:
        for parameter, host in zip(self._parameters, self._hosts, strict=True):
            parameter.copy_(host)

    def _differentiate(self, _: Any, portion: int) -> tuple[float, list[Any]]:
        """The share of a portion in the mean loss, and its gradients on the CPU."""
        first, last = (each * self._samples // self._number for each in (portion, portion + 1))
        if self._order is None:
            indices = torch.arange(first, last, device="cpu")
        else:
            indices = self._order[first:last]
        with torch.enable_grad():
            loss = self._loss(indices) / self._divisor
            found = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        pairs = zip(found, self._parameters, strict=True)
        dense = [torch.zeros_like(like) if each is None else each for each, like in pairs]
        # Copies where they are on a GPU: the caller keeps them, to add them up.
        hosts = [_on_host(each) if each.is_cuda else each.detach() for each in dense]
        return float(loss.detach()), [each.numpy() for each in hosts]


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, pinned for a tensor on a GPU."""
    if tensor.is_cuda:
        memory = cuda_staging.host_memory(tensor.shape, tensor.dtype)
    else:
        memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return memory.copy_(tensor.detach())

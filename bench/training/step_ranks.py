"""What a rank of step_times.py does: times every method's training steps, in turns."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from gradwire import Communicator, Traffic
from gradwire.torch._ranks.group import communicator_of
from torch.nn.functional import cross_entropy

from bench.common import job
from bench.training import images, replicas
from bench.training.methods import (
    Averaging,
    Method,
    average,
    interface_bytes_sent,
    without_averaging,
)
from bench.training.step_report import EMPTY_HOOK, LOCAL

_CALLS = 9  # of each all_reduce
NETWORKS: dict[str, Callable[[int], torch.nn.Module]] = {  # for images of so many pixels a side
    "cnn": lambda side: images.small_cnn(side, 640),
    "mlp": images.mlp,
}


class Block(NamedTuple):
    """Some steps of a method, back to back."""

    milliseconds: list[float]  # of each step
    processor: float  # seconds of all threads, a step
    sent: float  # bytes a step
    wire: float  # the same of the interfaces, headers and acknowledgements too
    codec: float | None  # seconds in encoders and decoders, a step; None: not to be known
    frames: float | None  # messages a step, one that goes to k peers counting k


class Trainee:
    """A model under training by one method."""

    def __init__(
        self, method: str, model: torch.nn.Module, data: images.Images, batch: int, steps: int
    ) -> None:
        self._averaging: Averaging | None = None
        chosen = Method.parse("none" if method in (LOCAL, EMPTY_HOOK) else method)
        self._optimizer = chosen.optimizer(model, rate=0.02)
        if method == EMPTY_HOOK:
            self._averaging = without_averaging(model)
        elif method != LOCAL:
            self._averaging = average(model, chosen, optimizer=self._optimizer)
        self._model = model if self._averaging is None else self._averaging.ddp
        self._data = data
        rank, ranks, count = dist.get_rank(), dist.get_world_size(), len(data.train_labels)
        self._order = iter(images.batches(count, batch, rank, ranks, 1, steps))

    def block(self, steps: int) -> Block:
        """Trains some more."""
        dist.barrier()
        sent, wire, traffic = self._sent(), interface_bytes_sent(), self._traffic()
        processor = time.process_time()
        milliseconds = [self._step() for _ in range(steps)]
        processor = time.process_time() - processor
        after, codec, frames = self._traffic(), None, None
        if traffic is not None and after is not None:
            codec = after.encode_seconds - traffic.encode_seconds
            codec = (codec + after.decode_seconds - traffic.decode_seconds) / steps
            frames = (after.frames_sent - traffic.frames_sent) / steps
        sent = (self._sent() - sent) / steps
        wire = (interface_bytes_sent() - wire) / steps
        return Block(milliseconds, processor / steps, sent, wire, codec, frames)

    def close(self) -> None:
        """Lets go of the method's connections."""
        if self._averaging is not None:
            self._averaging.close()

    def _step(self) -> float:
        chosen = next(self._order)
        start = time.perf_counter()
        self._optimizer.zero_grad()
        outputs = self._model(self._data.train_images[chosen])
        cross_entropy(outputs, self._data.train_labels[chosen]).backward()
        self._optimizer.step()
        return (time.perf_counter() - start) * 1e3

    def _sent(self) -> float:
        return (self._averaging.sent() or 0) if self._averaging is not None else 0

    def _traffic(self) -> Traffic | None:
        counted = None if self._averaging is None else self._averaging.traffic
        return None if counted is None else counted()


def run(options: argparse.Namespace) -> int:
    """A rank: joins the others, measures, and as rank 0 writes what all found."""
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), options.ranks
    store = dist.FileStore(f"{options.meet}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    found = {"steps": _steps(options), "calls": _calls(options.algorithms, options.calls)}
    if options.tune:
        found["cost_model"] = _tuned(options.tune)
    if rank == 0:
        job.write(options.meet, found)
    replicas.leave(store, rank, ranks)
    return 0


def _steps(options: argparse.Namespace) -> dict[str, Any]:
    """By method. The first round of blocks is not kept."""
    data = _data(options)
    rounds = 1 + -(-options.steps // options.block)
    names = [LOCAL, *options.methods]
    trainees = {
        name: Trainee(name, _model(options, data), data, options.batch, rounds * options.block)
        for name in names
    }
    blocks: dict[str, list[Block]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            blocks[name].append(trainees[name].block(options.block))
    for trainee in trainees.values():
        trainee.close()
    return {name: _summary(kept[1:]) for name, kept in blocks.items()}


def _data(options: argparse.Namespace) -> images.Images:
    if options.network == "mlp":
        return images.random_images(64 * options.batch)
    return images.load_fashion_mnist() if options.data is None else images.load(options.data)


def _model(options: argparse.Namespace, data: images.Images) -> torch.nn.Module:
    """The same for every method and rank."""
    torch.manual_seed(1)
    return NETWORKS[options.network](data.side)


def _summary(blocks: Sequence[Block]) -> dict[str, Any]:
    """Of all ranks."""
    own = torch.tensor([each for block in blocks for each in block.milliseconds])
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    low, middle, high = statistics.quantiles(torch.cat(every).tolist(), n=4)
    return {
        "ms": middle,
        "middle_half_ms": [low, high],
        "steps": len(own),
        "blocks_ms": [statistics.median(each.milliseconds) for each in blocks],  # of rank 0
        "processor_ms": replicas.mean(statistics.median(b.processor for b in blocks)) * 1e3,
        "sent": replicas.mean(statistics.median(b.sent for b in blocks)),
        "wire": replicas.mean(statistics.median(b.wire for b in blocks)),
        "codec_ms": _mean_of_known([b.codec for b in blocks], 1e3),
        "frames": _mean_of_known([b.frames for b in blocks]),
    }


def _mean_of_known(values: Sequence[float | None], scale: float = 1) -> float | None:
    """Over ranks, of their medians; None where they are not known, on any rank alike."""
    known = [each for each in values if each is not None]
    return scale * replicas.mean(statistics.median(known)) if known else None


def _calls(
    algorithms: Sequence[str], sizes: Sequence[int]
) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds of one all_reduce on the slowest rank: by library, algorithm and bytes."""
    group = dist.distributed_c10d._get_default_group()
    with communicator_of(group) as comm:
        times = {
            f"gradwire {algorithm}": _timed(
                lambda x, algorithm=algorithm: comm.all_reduce(x, algorithm=algorithm), sizes, comm
            )
            for algorithm in algorithms
        }
        return {
            **times,
            "gloo": _timed(lambda x: dist.all_reduce(torch.from_numpy(x)), sizes, comm),
        }


def _tuned(seconds: float) -> dict[str, float]:
    """The parameters of a cost model of the ranks' links."""
    with communicator_of(dist.distributed_c10d._get_default_group()) as comm:
        return comm.tune(seconds=seconds).parameters


def _timed(
    call: Callable[[np.ndarray], object], sizes: Sequence[int], comm: Communicator
) -> dict[str, float]:
    return {str(nbytes): _time(call, nbytes, comm) for nbytes in sizes}


def _time(call: Callable[[np.ndarray], object], nbytes: int, comm: Communicator) -> float:
    x, found = np.zeros(nbytes // 4, np.float32), []
    for _ in range(1 + _CALLS):
        comm.barrier()
        start = time.perf_counter()
        call(x)
        own = np.array([time.perf_counter() - start])
        found.append(float(comm.all_reduce(own, op="max")[0]) * 1e3)
    return statistics.median(found[1:])

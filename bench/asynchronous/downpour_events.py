"""Downpour SGD in virtual time: real gradients and codecs, in an order that a clock gives.

A replica's gradient lasts its time. Its push and the values that it pulls then occupy the network
cards of all servers, one after another in each direction, and the servers' processors. All waiting
is virtual, so that 64 replicas run in one thread, and other work on the machine changes nothing.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import gradwire
import torch
from gradwire import serve
from gradwire.torch import Compression
from gradwire.torch._downpour_codecs import START, PushCodecs
from torch import nn
from torch.nn.functional import cross_entropy

from bench.asynchronous import perceptron
from bench.asynchronous.downpour_service import Client, Service
from bench.training import images

SHARDS = 2
POINTS = 30  # of a curve
_JITTER = 0.1  # a gradient's time varies by so much to both sides


class Plan(NamedTuple):
    """One run."""

    rule: serve.Rule
    replicas: int
    warm_start: int = 0
    push_codec: str = "none"
    pull_codec: str = "none"
    staleness: str = "keep"
    max_staleness: int | None = None
    slow: float = 1.0  # times a gradient of the last replica
    warm_up: int | None = 0  # as Downpour's
    rules: tuple[tuple[str, str], ...] = ()
    int8_every: int = 0  # pushes of a replica of which one goes in int8
    int8_from: float = 1.0  # share of all pushes after which the others do


class Network(NamedTuple):
    """The servers' cards, and what a push and a pull cost a server beside them."""

    bytes_per_second: float  # of a card, in each direction
    latency: float  # seconds, of a message
    serving: float  # seconds of all servers' processors for a push and a pull


class Task(NamedTuple):
    """What is trained, with batches of `batch` images."""

    data: images.Images
    network: Callable[[int], nn.Module]  # of a seed
    batch: int
    gradient: float  # seconds
    perceptron: bool = False  # two linear layers with ReLU, whose gradients need no autograd


def train(
    task: Task, plan: Plan, network: Network, seed: int, total: int, points: int = POINTS
) -> dict[str, Any]:
    """Trains until `total` gradients are pushed; accuracy over virtual seconds, and staleness."""
    run = _Run(task, plan, network, seed, total, points)
    run.go()
    return {"curve": run.curve, "staleness": run.service.mean_staleness}


def measure_serving(task: Task) -> float:
    """Seconds that a push and a pull take of real servers that do nothing else: least of 50."""
    arrays = _arrays(task.network(0).parameters())
    with (
        serve.Server(SHARDS) as server,
        serve.connect(arrays, serve.Adagrad(lr=0.02), store=server.store) as ps,
    ):
        times = []
        for _ in range(50):
            began = time.perf_counter()
            ps.push(arrays, strict=True)
            ps.pull(arrays)
            times.append(time.perf_counter() - began)
        return min(times)


def payload_bytes(model: nn.Module, codec: str) -> int:
    """Bytes of all parameters in a codec."""
    native = gradwire.codec.get(codec)
    return sum(len(native.encode(each.detach())) for each in model.parameters())


class _Replica:
    """One client, with its model, its images and its residuals."""

    def __init__(self, rank: int, task: Task, plan: Plan, seed: int, service: Service) -> None:
        self.rank, self._task, self._plan = rank, task, plan
        self.model = task.network(seed)
        parameters = list(self.model.parameters())
        self._zeroed = [torch.zeros_like(each) for each in parameters]
        for each, gradient in zip(parameters, self._zeroed, strict=True):
            each.grad = gradient
        self._values = _arrays(parameters)
        self._gradients = _arrays(self._zeroed)
        self._batches = _batches(task, plan.replicas, rank, seed)
        self._ps = Client(service, self._values)
        known = {str(place): each for place, each in enumerate(parameters)}
        self._codecs = PushCodecs(
            Compression(plan.push_codec, rules=plan.rules, warm_up=plan.warm_up), known
        )
        keeps = len(self._codecs.used) > 1 or plan.max_staleness is not None
        self._feedback = gradwire.ErrorFeedback() if keeps else None
        self._pushes = 0
        self._ps.pull(self._values)

    def differentiate(self) -> None:
        """Computes the gradient of the next batch at the values that it has."""
        batch, data = next(self._batches), self._task.data
        if self._task.perceptron:
            shown, labels = (each.numpy()[batch] for each in (data.train_images, data.train_labels))
            perceptron.gradients(self._values, shown, labels, self._gradients)
            return
        torch._foreach_zero_(self._zeroed)
        cross_entropy(self.model(data.train_images[batch]), data.train_labels[batch]).backward()

    def push(self, done: float = 0.0) -> None:
        """Pushes the gradient, when a share of all pushes is done."""
        self._pushes += 1
        codec, rules = self._codecs.at(min(self._ps.versions))
        every = self._plan.int8_every
        if done >= self._plan.int8_from or (every and self._pushes % every == 0):
            codec = START
        self._ps.push(self._gradients, codec=codec, rules=rules, feedback=self._feedback)

    def pull(self) -> None:
        """Takes the servers' values."""
        self._ps.pull(self._values, codec=self._plan.pull_codec)


class _Run:
    """The clock, what is due, and when the servers' cards and processors are free."""

    def __init__(
        self, task: Task, plan: Plan, network: Network, seed: int, total: int, points: int
    ) -> None:
        self._task, self._plan, self._network, self._total = task, plan, network, total
        self._every = max(1, total // points)  # pushes from a point of the curve to the next
        self._random = random.Random(seed)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number, self._pushed, self._now = 0, 0, 0.0
        self._free = {"in": 0.0, "out": 0.0, "servers": 0.0}
        divide = plan.staleness == "divide"
        self.service = Service(plan.rule, divide=divide, max_staleness=plan.max_staleness)
        self._replicas = [
            _Replica(rank, task, plan, seed, self.service) for rank in range(plan.replicas)
        ]
        model = self._replicas[0].model
        self._up = payload_bytes(model, plan.push_codec) / network.bytes_per_second
        self._down = payload_bytes(model, plan.pull_codec) / network.bytes_per_second
        self._shown = task.network(seed)
        self._values = _arrays(self._shown.parameters())
        self._watcher = Client(self.service, self._values)
        self.curve: list[list[float]] = []

    def go(self) -> None:
        """Runs until enough is pushed; the replicas but the first one wait for the warm start."""
        self._compute(self._replicas[0])
        waiting = self._replicas[1:]
        while self._pushed < self._total:
            if waiting and self._pushed >= self._plan.warm_start:
                for each in waiting:
                    self._ask(each)
                waiting = []
            self._now, _, action = heapq.heappop(self._due)
            action()

    def _compute(self, replica: _Replica) -> None:
        slow = self._plan.slow if replica.rank == self._plan.replicas - 1 else 1.0
        spread = 1 + _JITTER * self._random.uniform(-1, 1)
        replica.differentiate()
        self._at(self._now + self._task.gradient * slow * spread, lambda: self._send(replica))

    def _send(self, replica: _Replica) -> None:
        self._at(self._through("in", self._up), lambda: self._serve(replica))

    def _serve(self, replica: _Replica) -> None:
        """The servers apply the push, and answer the pull that came with it."""
        done = max(self._now, self._free["servers"]) + self._network.serving
        self._free["servers"] = done
        self._at(done, lambda: self._apply(replica))

    def _apply(self, replica: _Replica) -> None:
        replica.push(self._pushed / self._total)
        self._pushed += 1
        if self._pushed % self._every == 0 or self._pushed == self._total:
            self._watcher.pull(self._values)
            right = images.accuracy(self._shown, self._task.data)
            self.curve.append([self._now, self._pushed, right])
        self._ask(replica)

    def _ask(self, replica: _Replica) -> None:
        """A pull reads the values as it is served; they arrive when the cards have sent them."""
        replica.pull()
        self._at(self._through("out", self._down), lambda: self._compute(replica))

    def _through(self, way: str, seconds: float) -> float:
        """When a message arrives: each of the servers' cards has its share, a replica's all."""
        sent = max(self._now, self._free[way]) + seconds / SHARDS
        self._free[way] = sent
        return max(sent, self._now + seconds) + self._network.latency

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._due, (when, self._number, action))


def _batches(task: Task, replicas: int, rank: int, seed: int) -> Iterator[torch.Tensor]:
    """The indices of a replica's batches, a pass through the images at a time."""
    count = len(task.data.train_labels)
    steps = count // (task.batch * replicas)
    for epoch in itertools.count():
        yield from images.batches(count, task.batch, rank, replicas, 1000 * seed + epoch, steps)


def _arrays(parameters: Iterable[torch.Tensor]) -> list[Any]:
    """The parameters' memory."""
    return [each.detach().numpy() for each in parameters]

"""DiLoCo whose ranks come and go: rounds of outer gradients on a parameter server."""

from __future__ import annotations

import glob
import logging
import operator
import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import nn

from gradwire import serve
from gradwire._base.arguments import number, seconds, whole
from gradwire._base.deadline import Deadline
from gradwire._calls.requests import native
from gradwire._errors import InvalidArgument, Timeout
from gradwire._feedback import ErrorFeedback
from gradwire.codec import NativeCodec
from gradwire.torch.backend import cuda_staging
from gradwire.torch.exchange.compression import Compression, CompressionLike, compression_of
from gradwire.torch.exchange.engine import are_finite
from gradwire.torch.outer import checks
from gradwire.torch.outer.outer import copies

_LOOK_SECONDS = 0.02  # between two looks whether servers are reached, or a round is over
_NOTHING = 1e-20  # a weight beside those of inner steps

Tensors = dict[str, torch.Tensor]

_log = logging.getLogger("gradwire")


class DiLoCo:
    """DiLoCo among ranks that come and go, of which none waits for another::

        outer = gradwire.torch.elastic.DiLoCo(model, optimizer, every=50)
        for inputs, labels in batches:
            optimizer.zero_grad()
            loss(model(inputs), labels).backward()
            optimizer.step()
            outer.step()
        outer.finish()

    It needs servers, as in ``gradwire run -n 4 --servers 1 --keep-going --restarts 10 train.py``.
    A rank pushes its outer gradient to them and goes on. They end a round when all ranks have
    pushed, or some seconds after a quorum has, and move the common values by the mean by weight
    (`gradwire.serve.Rounds`). Each rank fetches them when it learns of it, while it trains, and
    adds what it has learnt since its push.

    A rank without which a round ended pushes what it has, which counts in the next one. One that
    joins begins with the common values; of one that is lost, what it has not pushed is lost. Ranks'
    parameters differ while they train (Douillard et al. 2023, "DiLoCo"; with overlap, 2025,
    "Streaming DiLoCo").
    """

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        every: int = 50,
        *,
        lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
        quorum: int = 1,
        grace: float = 10.0,
        compression: CompressionLike = "none",
        pull_codec: str = "none",
        store: str | None = None,
        name: str = "parameters",
        replica: str | None = None,
        secret: bytes | str | None = None,
        timeout: float = 300.0,
        reconnect: float | None = None,
    ) -> None:
        """Connects to the servers, and takes their values, or brings them the first ones.

        `every` inner steps make an outer gradient. `inner_optimizer`, `lr`, `momentum` and
        `nesterov` are as in `gradwire.torch.DiLoCo`, and all ranks give the same. `quorum` and
        `grace` are those of `gradwire.serve.Rounds`: a round goes on without the others `grace`
        seconds after `quorum` ranks have pushed, while all train on. Half the time of a round is a
        good choice: pushes that count late cost loss.

        `compression` is the codec of pushes, or a `Compression` of names; what they lose goes with
        the next push, unless its `feedback` is False. With `pull_codec` int8, int4 or onebit,
        differences travel. With `reconnect` training goes on while a server that has ended is
        dialled, for so many seconds. These and the other arguments are those of
        `gradwire.serve.connect`, whose errors this raises. Parameters must be float32. Buffers stay
        each rank's own.
        """
        self.every = whole(every, "every", least=1)
        checks.require_outer_optimizer(lr, momentum)
        trained = checks.trained_parameters(model, inner_optimizer)
        self._values = {name: each.detach() for name, each in trained.items()}
        _require_float32(self._values)
        self._start = copies(self._values)  # of what is not pushed yet
        self._outgoing, self._fetched = _on_host(self._values), _on_host(self._values)
        given = compression_of(compression, warms_up=False)
        if given.decay != 1:
            raise InvalidArgument(f"decay={given.decay} is for trainers that average: leave it out")
        self._codec, self._rules = _names_of(given)
        self._rules = _for_small(given, self._values) + self._rules
        codecs = dict.fromkeys(["none", self._codec, *(each for _, each in self._rules)])
        own = given.feedback if isinstance(given.feedback, ErrorFeedback) else ErrorFeedback()
        loses = len(codecs) > 1 and given.feedback is not False
        self._feedback: ErrorFeedback | Literal[False] = own if loses else False
        self._pull_codec, self._timeout = pull_codec, seconds(timeout)
        self._server = serve.connect(
            self._fetched,
            serve.Rounds(lr, momentum, nesterov, quorum, grace),
            codecs=list(dict.fromkeys([*codecs, pull_codec])),
            store=store,
            name=name,
            replica=replica,
            secret=secret,
            timeout=timeout,
            reconnect=reconnect,
            while_dialling="raise",
        )
        self._steps, self._weight = 0, 0.0  # that are not pushed
        self._push: serve.Pending | None = None
        self._pull: serve.Pending | None = None
        self._next: serve.Pending | None = None  # is over when the round is
        self._awaited: list[int] = []  # the version of each shard that has all that was pushed
        self._has_pushed = False  # since it took values
        self._has_dialled = False
        self._taken = 0  # times
        self.versions: list[int] = []
        self.fetch()

    @property
    def server(self) -> serve.ParameterServer:
        """The connection to the servers, for its statistics and checkpoints."""
        return self._server

    @property
    def rounds(self) -> int:
        """The rounds that are in the common values which this rank took last."""
        return min(self.versions)

    def step(self, weight: float = 1.0) -> bool:
        """Counts an inner step, and sends and takes what is due; waits for nobody.

        `weight` is the step's, such as the number of its tokens. Returns whether it took common
        values. Raises TransportError, which names a server that has ended, and InvalidArgument
        where inner steps ended in NaN or Inf: then this rank has the parameters from before them.
        """
        if not _NOTHING <= number(weight, "weight") <= 1 / _NOTHING:
            raise InvalidArgument(f"weight={weight} is not from {_NOTHING:g} to {1 / _NOTHING:g}")
        self._steps += 1
        self._weight += weight
        before = self._taken
        self._reached(self._exchange)
        return self._taken > before

    def fetch(self) -> None:
        """Takes the common values of now, and adds to them what this rank has not pushed yet.

        Waits for a server that is dialled.
        """
        self._patiently(self._fetch)

    def finish(self) -> None:
        """Pushes what is left, waits for the end of its round, and takes the common values.

        Others that still train move the values on; `fetch` takes the latest. When all have
        finished, it gives the same bits to all. Training may go on after it. Raises as `step`, and
        Timeout.
        """
        self._patiently(self._push_rest)
        self.fetch()

    def close(self) -> None:
        """Waits until what was pushed has arrived, and leaves; the others go on without it."""
        self._server.close()

    def _exchange(self) -> None:
        self._settle()
        if self._pull is not None:
            if not self._pull.done():
                return
            self._take()
        elif self._has_dialled or self._round_is_over():
            if self._steps and self._push is None and not self._has_pushed:
                self._begin_push()
            self._begin_pull()
            return
        if self._steps >= self.every and self._push is None:
            self._begin_push()

    def _round_is_over(self) -> bool:
        if self._next is None:
            self._next = self._server.wait(self.rounds + 1, async_op=True)
        assert self._next is not None
        if not self._next.done():
            return False
        pending, self._next = self._next, None
        try:
            pending.wait()
        except Timeout:  # it is asked again
            return False
        return True

    def _settle(self, *, wait: bool = False) -> None:
        """Notes what became of a push, when it is over, and raises its error."""
        if self._push is None or not (wait or self._push.done()):
            return
        pending, self._push = self._push, None
        try:
            self._awaited = [version + 1 for version in pending.wait()]
        except Timeout as error:
            _log.warning("an outer gradient was not taken in time, and does not count: %s", error)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _begin_push(self) -> None:
        for name, host in self._outgoing.items():
            host.copy_(self._start[name] - self._values[name])
        if not are_finite(list(self._outgoing.values())):
            self._refuse()
        self._push = self._server.push(
            self._outgoing,
            codec=self._codec,
            rules=self._rules,
            feedback=self._feedback if self._weight > _NOTHING else False,  # else it would be lost
            lr=self._weight,
            versions=self.versions,
            async_op=True,
        )
        for name, value in self._values.items():
            self._start[name].copy_(value)
        self._steps, self._weight, self._has_pushed = 0, 0.0, True

    def _refuse(self) -> None:
        """Gives up inner steps that ended in NaN or Inf."""
        problem = checks.not_finite(self._outgoing)
        for name, value in self._values.items():
            value.copy_(self._start[name])
        self._steps, self._weight = 0, 0.0
        raise InvalidArgument(f"{problem}: this rank has the parameters from before them again")

    def _begin_pull(self) -> None:
        self._pull = self._server.pull(self._fetched, codec=self._pull_codec, async_op=True)
        self._next, self._has_dialled = None, False

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _take(self) -> None:
        """Waits for a pull, and puts what this rank has not pushed on top of its values."""
        pending, self._pull = self._pull, None
        assert pending is not None
        self.versions = pending.wait()
        for name, value in self._values.items():
            start = self._start[name]
            value.sub_(start)
            start.copy_(self._fetched[name])
            value.add_(start)
        self._has_pushed = False
        self._taken += 1

    def _fetch(self) -> None:
        if self._pull is not None:
            self._take()
        self._begin_pull()
        self._take()

    def _push_rest(self) -> None:
        if self._pull is not None:
            self._take()
        self._settle(wait=True)
        if self._steps:
            self._fetch()  # so that the push is in time, and its round ends
            self._begin_push()
            self._settle(wait=True)
            while any(map(operator.gt, self._awaited, (each + 1 for each in self.versions))):
                self._fetch()  # a round has ended meanwhile: another push is in time
                self._weight = _NOTHING
                self._begin_push()
                self._settle(wait=True)
        self._await_pushed()

    def _await_pushed(self) -> None:
        """Waits for the end of the round that has the last push, on each shard."""
        if not self._awaited:
            return
        self._server.wait(min(self._awaited))
        deadline = Deadline(self._timeout)
        while any(map(operator.lt, self._versions_now(), self._awaited)):
            if deadline.passed:
                raise Timeout(f"the round of the last push did not end within {self._timeout:g} s")
            time.sleep(_LOOK_SECONDS)

    def _versions_now(self) -> list[int]:
        return [int(each["version"]) for each in self._server.stats()]

    def _reached(self, exchange: Callable[[], None]) -> bool:
        """Exchanges something with the servers; returns whether none of them is being dialled."""
        try:
            exchange()
        except serve.Dialling:
            self._pull = self._next = None
            self._has_dialled, self._awaited = True, []  # a server may have lost some rounds
            return False
        return True

    def _patiently(self, exchange: Callable[[], None]) -> None:
        """Exchanges something with the servers, and waits while one is dialled."""
        while not self._reached(exchange):
            time.sleep(_LOOK_SECONDS)


def _require_float32(values: Tensors) -> None:
    for name, each in values.items():
        if each.dtype is not torch.float32 or each.layout is not torch.strided:
            raise InvalidArgument(
                f"the parameter {name!r} is {each.dtype} ({each.layout}): parameter servers hold "
                "dense float32; keep the model in float32 and use autocast for computing"
            )


def _on_host(values: Tensors) -> Tensors:
    """Copies on the CPU, C-contiguous; in pinned memory for those on a GPU."""
    made = {}
    for name, each in values.items():
        if each.is_cuda:
            host = cuda_staging.host_memory(each.shape, torch.float32)
        else:
            host = torch.empty(each.shape, dtype=torch.float32, device="cpu")
        made[name] = host.copy_(each)
    return made


def _names_of(given: Compression) -> tuple[str, list[tuple[str, str]]]:
    """The codec and the rules of pushes; raises InvalidArgument for codecs that are no names."""

    def name(codec: object) -> str:
        if isinstance(codec, str | NativeCodec):
            return native(codec).name
        raise InvalidArgument(
            f"codec={codec!r}: a push takes names of codecs, such as 'int8', and no Stages"
        )

    return name(given.codec), [(pattern, name(each)) for pattern, each in given.rules]


def _for_small(given: Compression, values: Tensors) -> list[tuple[str, str]]:
    """Rules for the parameters that are too small for their codec."""
    table = given.table
    small = [name for name, each in values.items() if each.numel() < given.min_elements]
    of = {name: table.codec(name, values[name].numel(), 0) for name in small}
    return [(glob.escape(name), "none") for name, codec in of.items() if codec == "none"]

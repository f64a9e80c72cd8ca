"""Session: a training loop that goes on when ranks come and go."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire._base import arguments
from gradwire._communicator import Communicator
from gradwire._errors import Aborted, Error, InvalidArgument, Timeout, TransportError
from gradwire.torch._ranks.group import default_timeout
from gradwire.torch._ranks.ranks import Ranks, RanksLike, ranks_of
from gradwire.torch.elastic import random_state
from gradwire.torch.elastic.averaging import BUCKET_BYTES, Averager, Averaging
from gradwire.torch.elastic.members import Decision, MemberReport, decide
from gradwire.torch.elastic.model_buffers import ModelBuffers
from gradwire.torch.elastic.rates import Rates
from gradwire.torch.elastic.sampling import CONSTANT, SamplePart, Sampler, require_way
from gradwire.torch.elastic.session_state import SessionState
from gradwire.torch.elastic.transfer import share
from gradwire.torch.exchange.compression import CompressionLike, compression_of
from gradwire.torch.exchange.defaults import Model, settings

FAILURES = (TransportError, Timeout, Aborted)  # after which the others go on
_MOST_REPEATS = 4  # of a step that breaks off though no rank is lost

_log = logging.getLogger("gradwire")


class Session:
    """A training whose ranks may change. Made by `session`; a context manager, and an iterator.

    Iterating yields this rank's batches: samples of a dataset, or their indices. `backward` and
    `commit` belong to each. Changes of members happen within `commit` and between batches. The
    session clears gradients when a step begins, since those of a step that broke off must not
    count, and adds up those of its batches: do not call `zero_grad()`.
    """

    def __init__(
        self,
        replica: SessionState,
        sampler: Sampler,
        averager: Averager,
        connect: Callable[[], tuple[Communicator, bool]],
        *,
        rates: Rates | None,
        owns: bool,
        min_ranks: int | None,
        wait: float,
        patience: float,
        verify: bool,
        settings: dict[str, object],
    ) -> None:
        """Takes what `session` has made; `connect` gives a communicator, and whether it joined."""
        self._replica, self._sampler, self._averager = replica, sampler, averager
        self._connect, self._rates, self._owns = connect, rates, owns
        self._min_ranks, self._wait, self._verify = min_ranks, wait, verify
        self._patience = patience
        self._settings = settings
        self._comm: Communicator | None = None
        self._steps = self._changes = 0
        self._prepared = self._ending = False
        self._alike: bool | None = None  # whether all ranks' random generators began alike
        self._news: Decision | None = None  # of members that have not got the state yet
        self._part: SamplePart | None = None  # that was given to the loop, and not committed
        self._is_under_way = False  # a step
        self._failure: Exception | None = None  # since the last step that was committed
        self._repeats = 0

    @property
    def communicator(self) -> Communicator:
        """The communicator of the present members; another one after each change."""
        if self._comm is None:
            raise InvalidArgument("the session has not begun: use `with elastic.session(...) as s`")
        return self._comm

    @property
    def steps(self) -> int:
        """The number of steps that all ranks have committed."""
        return self._steps

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, from 0."""
        return self._sampler.epoch

    @property
    def changes(self) -> int:
        """The number of changes of members since this rank came."""
        return self._changes

    def __repr__(self) -> str:
        where = "not begun"
        if self._comm is not None:
            where = f"rank {self._comm.rank} of {self._comm.size}"
        return f"Session({where}, steps={self._steps}, changes={self._changes})"

    def __enter__(self) -> Session:
        """Connects to the other ranks, or joins them."""
        comm, self._joined = self._connect()  # joined: and has not got the state
        self._has_state = not self._joined and comm.rank == 0
        self._use(comm)
        try:
            if not self._owns:
                comm.accept_joins()
            if self._lacks_ranks(comm) or not self._report():
                self._reform()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        self._reference = self.communicator.size  # that the global batch is for; rank 0's counts
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends this rank's part; after an error of its own the others go on without it."""
        comm = self._comm
        if comm is not None and error is not None and not comm.closed:
            comm.abort(f"{type(error).__name__} in the training loop")
        try:
            self._averager.end(False)
        except Error as problem:
            if error is None:
                raise
            _log.debug("the step that %s broke off: %s", type(error).__name__, problem)
        finally:
            self._averager.close()
            if comm is not None:
                comm._core.set_patience(0)
            if comm is not None and self._owns:
                comm.close()

    def __iter__(self) -> Iterator[Any]:
        """Yields batches until all samples are taken; every rank must iterate."""
        while True:
            self._bring_together()
            self._samples = self._sampler.samples(self.communicator.size, self._target)
            if not self._samples:
                if self._end():
                    return
                continue
            yield from self._batches_of_step()

    def backward(self, loss: torch.Tensor) -> None:
        """Runs backward for the mean loss of the batch, and sends gradients after the last one.

        Never raises for ranks that failed: `commit` tells.
        """
        if self._part is None:
            raise InvalidArgument("backward() is for a batch of the session's loop, once")
        if self._has_backward:
            raise InvalidArgument("backward() was called twice for a batch: add the losses up")
        if self._adds and not self._averager.has_gradients:
            raise InvalidArgument(
                "the gradients of an earlier batch of this step are gone: a session adds up those "
                "of several batches, and clears them when a step begins; leave zero_grad() out"
            )
        self._has_backward: bool = True
        loss = loss * self._part.weight
        if not self._is_last:
            loss.backward()
            return
        with self._averager.sending():
            loss.backward()

    def commit(self) -> bool:
        """Whether the optimizer is to make a step now: the same answer on all ranks that go on.

        True when this batch completes a step and the gradients of all ranks were averaged into the
        same bits, which the parameters' ``grad`` then hold. False for a batch after which more of
        the same step follow, and for a step that was broken off because a rank failed: then nothing
        is to be applied, and its samples come again, for the ranks that are left. When a rank has
        failed, forms the next communicator of the others, for which it may wait.

        Raises RendezvousError when too few ranks are left, and Error when none of them has the
        state, or when the same step fails again and again though no rank is lost.
        """
        if self._part is None or not self._has_backward:
            raise InvalidArgument("call backward(loss) for the batch, and then commit(), once")
        self._part = None
        if not self._is_last:
            return False
        ok = self._succeeds(self._averager.finish)
        self._prepared = ok
        if ok and self._succeeds(self._averager.confirm):
            self._settle(committed=True)
            return True
        before = self._steps
        self._reform()
        return self._steps > before

    def should_stop(self) -> bool:
        """Whether a rank was asked to stop; the same on all ranks after the same step.

        See `Communicator.should_stop`.
        """
        return self.communicator.should_stop()

    @property
    def _target(self) -> int:
        """The number of ranks for which a step has samples."""
        return self._reference if self._rates is None else self.communicator.size

    def _batches_of_step(self) -> Iterator[Any]:
        """Yields the batches of one step, each with its `backward` and `commit`."""
        comm = self.communicator
        self._averager.begin(self._steps)
        self._averager.buffers.keep()
        self._is_under_way = True
        parts = self._sampler.parts(self._samples, comm.rank, comm.size)
        for i, part in enumerate(parts, start=1):
            self._part, self._is_last = part, i == len(parts)
            self._adds: bool = i > 1
            self._has_backward = False
            yield self._sampler.collated(part.indices)
            if self._part is not None:
                raise InvalidArgument(
                    "the batch ended without commit(): call s.backward(loss) and s.commit() for "
                    "each batch of the session"
                )

    def _lacks_ranks(self, comm: Communicator) -> bool:
        """Whether this training begins with too few ranks; the same on all of them."""
        if comm.joined or comm.size >= (self._min_ranks or 1):
            return False
        _log.warning(
            "rank %d: the session begins with %d of at least %d ranks (min_ranks), and waits up to "
            "%g s for others to join",
            *(comm.rank, comm.size, self._min_ranks, self._wait),
        )
        return True

    def _succeeds(self, call: Callable[[], Any]) -> bool:
        """Calls; returns False for a failure of ranks."""
        try:
            call()
        except FAILURES as error:
            _log.info("rank %d, step %d: %s", self.communicator.rank, self._steps, error)
            self._failure = error
            return False
        return True

    def _settle(self, committed: bool) -> None:
        """Ends the step under way on this rank."""
        self._averager.end(committed)
        self._prepared = False
        if committed:
            self._steps += 1
            self._failure, self._repeats = None, 0
            self._sampler.position += self._samples
            if self._rates is not None:
                self._rates.step()
        elif self._is_under_way:
            self._averager.buffers.restore()
        self._is_under_way = False

    def _reform(self) -> None:
        """Forms the next communicator, until its ranks agree on the last step.

        Raises RendezvousError when there are too few of them.
        """
        while True:
            self._resize()
            if self._report():
                return

    def _resize(self) -> None:
        comm = self.communicator
        least, wait = (1, 0.0) if self._ending else (self._min_ranks, self._wait)
        made = comm.resize(wait=wait, min_ranks=least)
        self._use(made)
        self._changes += 1
        self._require_progress(made.size == comm.size and not made.joined)

    def _use(self, comm: Communicator) -> None:
        """Goes on with these ranks, and waits for those that are slow."""
        comm._core.set_patience(self._patience)
        self._comm = comm

    def _require_progress(self, same: bool) -> None:
        """Raises Error where a step has failed too often with the same ranks, alike on all."""
        self._repeats = self._repeats + 1 if same and self._failure is not None else 0
        if not self._repeats:
            return
        what = f"rank {self.communicator.rank}: step {self._steps} failed, but no rank is lost"
        _log.warning("%s: %s", what, self._failure)
        if self._repeats == _MOST_REPEATS:
            raise Error(
                f"{what}, {_MOST_REPEATS} times: {self._failure} (on a slow network give the "
                "session a longer timeout, ranks=Ranks(timeout=...))"
            ) from self._failure

    def _report(self) -> bool:
        """Reports to the other ranks, and does what all decide; returns False if one failed.

        A step under way ends here.
        """
        comm = self.communicator
        own = MemberReport(self._has_state, self._steps, self._prepared)
        try:
            reports = [MemberReport(*each) for each in comm.all_gather_object(tuple(own))]
        except FAILURES as error:
            _log.info("rank %d lost another one while they met: %s", comm.rank, error)
            self._failure = error
            return False
        decision = decide(reports)
        self._settle(committed=comm.rank in decision.commits)
        self._averager.adopt(comm)
        self._has_state = comm.rank in decision.holders
        self._news = decision
        return True

    def _bring_together(self) -> None:
        """Lets joiners in before a step, and gives all ranks the state."""
        while not self._are_together():
            self._reform()

    def _are_together(self) -> bool:
        """Shares the state after a change; False if a rank failed, or another asks to join."""
        comm, news = self.communicator, self._news
        try:
            if news is None:
                return not comm.should_resize()
            self._share(comm, news)
        except FAILURES as error:
            _log.info("rank %d lost another one between steps: %s", comm.rank, error)
            self._failure = error
            return False
        self._news = None
        return True

    def _share(self, comm: Communicator, news: Decision) -> None:
        """Gives the state of those that have it to the others; then all have the same bits."""
        if self._rates is not None:
            self._rates.undo()
        random = random_state.digest(random_state.capture())
        own = self._digest() if self._verify and self._has_state else ""
        every = comm.all_gather_object((random, own))
        if self._alike is None and not self._joined:
            self._alike = len({each for each, _ in every}) == 1 < comm.size
        first = news.holders[0]
        wrong = [each for each in news.holders if every[each][1] != every[first][1]]
        if wrong:
            _log.warning("ranks %s differ from rank %d in bits, and take its state", wrong, first)
        holders = [each for each in news.holders if each not in wrong]
        receivers = sorted({*news.receivers, *wrong})
        if receivers:
            state = self._state() if comm.rank in holders else None
            state = share(comm, holders, receivers, state, self._require_alike)
            if comm.rank in receivers:
                self._load(state, f"{every[first][0]} {comm.rank}")
        self._has_state = True
        if self._alike:  # but for what a step that was broken off has drawn
            random_state.restore(
                comm.broadcast_object(
                    random_state.capture() if comm.rank == first else None, root=first
                )
            )
        if self._rates is not None:
            self._rates.follow(comm.size)

    def _digest(self) -> str:
        return f"{self._replica.digest()} {self._steps} {self._sampler.position}"

    def _state(self) -> dict[str, Any]:
        """All that a rank without the state must get."""
        return {
            "settings": self._settings,
            "steps": self._steps,
            "position": self._sampler.position,
            "reference": self._reference,
            "ranks_of_rates": 0 if self._rates is None else self._rates.size,
            "alike": self._alike,
            "replica": self._replica.state_dict(),
            "averager": self._averager.state_dict(),
        }

    def _require_alike(self, state: Mapping[str, Any]) -> None:
        """Raises InvalidArgument when another rank's session has other settings."""
        for name, its in state["settings"].items():
            own = self._settings[name]
            if own != its:
                raise InvalidArgument(
                    f"{name} differs: this rank's session has {_shown(own)}, the others' has "
                    f"{_shown(its)}; start the same program on all ranks"
                )

    def _load(self, state: Mapping[str, Any], seed: str) -> None:
        self._steps, self._sampler.position = state["steps"], state["position"]
        self._reference, self._alike = state["reference"], state["alike"]
        if self._rates is not None:
            self._rates.size = state["ranks_of_rates"]
        self._replica.load_state_dict(state["replica"])
        self._averager.load_state_dict(state["averager"])
        if self._joined and not self._alike:
            random_state.seed_from(seed)
        self._joined = False

    def _end(self) -> bool:
        """Waits until all ranks have ended; returns False when members have changed meanwhile."""
        self._ending = True
        if self._succeeds(self.communicator.barrier):
            return True
        self._reform()
        return False


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def session(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sampler: Sampler,
    *,
    carry: Sequence[Any] = (),
    global_batch: str = CONSTANT,
    min_ranks: int | None = None,
    wait: float = 60.0,
    compression: CompressionLike = "none",
    algorithm: str = "auto",
    bucket_bytes: int = BUCKET_BYTES,
    verify: bool = False,
    ranks: RanksLike = None,
    patience: float | None = None,
) -> Session:
    """Makes a training loop that goes on when ranks come and go; `with` connects it.

    The model is trained as it is, without DistributedDataParallel: the session averages gradients
    itself, with `compression` and `algorithm` as in `gradwire.torch.register`. `carry` are
    schedulers, scalers and other objects with `state_dict` and `load_state_dict`, which are the
    same on all ranks. Joiners get the state of model, optimizer and these from the other ranks, as
    all ranks get rank 0's at the start. Residuals follow the rates of the optimizer, and the scale
    of a carried GradScaler.

    `global_batch` says what stays when the number of ranks changes. "constant": a step has the
    sampler's `batch` times the number of ranks at the start, and fewer ranks accumulate gradients.
    "proportional": `batch` times the number of ranks now, and learning rates follow that number
    (Goyal et al. 2017, "Accurate, Large Minibatch SGD", sec. 2.1).

    After a loss the others go on if they are a majority of the ranks before, or half of them with
    rank 0; otherwise they raise RendezvousError. With `min_ranks` that number alone decides: fewer
    ranks, also at the start, wait up to `wait` seconds for joiners, and then raise RendezvousError.
    After the timeout of `ranks` one that does not answer, since it is stopped, counts as lost. One
    that answers is slow, as while it saves a checkpoint: the others wait `patience` seconds for its
    part of a step (the default process group's timeout if None, or torch's default, 1800, where
    there is no group). After the loss of another rank each has the timeout of `ranks` to come to
    its next call. `verify` compares the state of all ranks bit by bit after each change, and gives
    those that differ the state of the lowest rank.

    Without a communicator in `ranks`, `with` calls ``gradwire.init(elastic=True)``, and raises what
    that raises: JobOver in a process that was started to replace another one when the others are at
    the end. A communicator that is given is closed at the first change. Raises InvalidArgument.
    """
    if isinstance(model, DistributedDataParallel):
        raise InvalidArgument(
            "give the module inside DistributedDataParallel: the session averages gradients itself"
        )
    arguments.instance(model, "model", nn.Module, "a torch.nn.Module")
    arguments.instance(optimizer, "optimizer", torch.optim.Optimizer, "an optimizer of torch's")
    arguments.instance(sampler, "sampler", Sampler, "a gradwire.torch.elastic.Sampler")
    way = require_way(global_batch)
    given, ranks = compression_of(compression), _resizable(ranks)
    least = None if min_ranks is None else arguments.whole(min_ranks, "min_ranks", least=1)
    slow = default_timeout() if patience is None else arguments.seconds(patience, "patience")
    if not (arguments.number(wait, "wait") >= 0 and math.isfinite(wait)):
        raise InvalidArgument(f"wait={wait!r} is no number of seconds from 0")
    named = dict(model.named_parameters())
    how = settings(Model(model, named), given).compression.table
    kept = given.residuals(how)
    rates = Rates(optimizer, carry) if way != CONSTANT else None
    replica = SessionState(model, optimizer, carry)
    scaler = next((each for each in carry if isinstance(each, torch.amp.GradScaler)), None)
    averager = Averager(
        named,
        ModelBuffers(model),
        Averaging(algorithm, how, kept, *((None, None) if kept is None else (optimizer, scaler))),
        arguments.whole(bucket_bytes, "bucket_bytes", least=1),
    )
    alike = {
        **replica.settings,
        **sampler.settings,
        "global_batch": way,
        "codec": repr(given.codec),
        "rules": repr(given.rules),
        "algorithm": algorithm,
        "feedback": kept is not None,
        "bucket_bytes": bucket_bytes,
        **given.alike,
    }
    return Session(
        replica,
        sampler,
        averager,
        partial(_communicator_of, ranks),
        rates=rates,
        owns=ranks.over is None,
        min_ranks=least,
        wait=wait,
        patience=slow,
        verify=arguments.flag(verify, "verify"),
        settings=alike,
    )


def _resizable(given: RanksLike) -> Ranks:
    """The ranks that begin; raises InvalidArgument for a process group."""
    ranks = ranks_of(given)
    if isinstance(ranks.over, dist.ProcessGroup):
        raise InvalidArgument(
            "ranks= is a process group, whose ranks cannot change: give ranks=gradwire.init(), or "
            "Ranks(timeout=...)"
        )
    return ranks


def _communicator_of(ranks: Ranks) -> tuple[Communicator, bool]:
    """A communicator, and whether this rank has joined one that others had."""
    communicator = ranks.over
    if communicator is None:
        options: dict[str, Any] = {} if ranks.timeout is None else {"timeout": ranks.timeout}
        communicator = gradwire.init(elastic=True, **options)
    assert isinstance(communicator, Communicator)
    return communicator, communicator.rank >= communicator.size - communicator.joined

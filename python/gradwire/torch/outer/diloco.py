"""DiLoCo and local SGD: ranks train on their own, and average what came of it now and then."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from gradwire._base import stops
from gradwire._base.arguments import flag, instance
from gradwire._base.rules import require_matches
from gradwire._communicator import Communicator
from gradwire._errors import InvalidArgument
from gradwire.torch._ranks.broadcasts import broadcast_parameters
from gradwire.torch._ranks.ranks import RanksLike, ranks_of
from gradwire.torch._ranks.settings import require_algorithm, require_alike
from gradwire.torch.exchange import saved as saving
from gradwire.torch.exchange.compression import CompressionLike, compression_of
from gradwire.torch.exchange.engine import averaging_exchange
from gradwire.torch.exchange.gradient_scale import persistent_state_of
from gradwire.torch.outer import checks
from gradwire.torch.outer.buffers import SharedBuffers
from gradwire.torch.outer.outer import (
    OuterOptimizer,
    OuterParameters,
    fragments_of,
    require_supported,
    rows,
)
from gradwire.torch.outer.outer_steps import OuterSteps
from gradwire.torch.outer.rounds import Round, Stopwatch, clock_for


class DiLoCo:
    """Averages what inner steps have made of a model's parameters, every so many of them::

        outer = gradwire.torch.DiLoCo(model, optimizer, every=50)
        for inputs, labels in batches:
            optimizer.zero_grad()
            loss(model(inputs), labels).backward()
            optimizer.step()
            outer.step()
        outer.finish()

    Each rank trains with an optimizer of its own. A round ends with an outer step: the outer
    gradient, which is the parameters before the round less those after it, is averaged over the
    ranks, and SGD with Nesterov momentum moves the common parameters against it (Douillard et al.
    2023, "DiLoCo: Distributed Low-Communication Training of Language Models", Algorithm 1). With
    ``lr=1, momentum=0`` that is the mean of the ranks' parameters: local SGD (Stich 2019, "Local
    SGD Converges Fast and Communicates Little"), or federated averaging.

    After an outer step the parameters have the same bits on all ranks, also with lossy codecs. The
    ranks compare checksums of them in each round, and raise Error if they differ. Common values and
    velocities are float32, or float64 for parameters of that type; those of float16 and bfloat16
    parameters are rounded when they are set.
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
        compression: CompressionLike = "none",
        algorithm: str = "auto",
        pace: bool = True,
        fragments: int = 1,
        delay: int = 0,
        mix: float = 0.0,
        average_buffers: bool = True,
        ranks: RanksLike = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Gives all ranks rank 0's parameters and buffers; every rank calls it, before training.

        `every` is the number of inner steps in a round. `inner_optimizer` is one optimizer, or a
        list if several train parts of the model. `lr`, `momentum` and `nesterov` are those of the
        outer optimizer, as in torch.optim.SGD.

        `compression` is a codec or a `Compression` without `warm_up`, for outer gradients. A
        function of the step (`Stages`) gets the number of outer steps. Outer gradients of float64
        parameters travel as they are. `algorithm` is as in `Communicator.all_reduce`.

        With `pace` ranks tell each other their seconds per inner step in each round. The fastest
        makes `every` steps in the next one, and the others as many as they can meanwhile, at least
        one, so that none waits (Liu et al. 2024, "Asynchronous Local-SGD Training for Language
        Modeling", sec. 5). What is timed lies between two calls of `step`, by `clock`, in seconds;
        None is the wall clock. Numbers of steps then depend on the machines, and results with them.

        `fragments` cuts the model into parts of one size, parameters between two rows, of which one
        is exchanged every ``every / fragments`` inner steps. With `delay` training goes on while a
        part travels, for at most so many inner steps of the fastest rank; the steps made meanwhile
        are lost for that part, but for the share `mix` of its parameters, with which they differ
        between ranks until `finish` (Douillard et al. 2025, "Streaming DiLoCo with overlapping
        communication", sec. 2).

        With `average_buffers` ranks average their changes of buffers of real numbers, such as the
        statistics of BatchNorm, once in a round, and take over rank 0's other buffers; without it,
        each rank keeps its own. Frozen parameters, and those that no inner optimizer has, do not
        travel, and raise InvalidArgument in the next round if they are changed.

        `ranks` are torch's default group if None; see `Ranks`. A rank waits for the slowest one as
        long as their timeout is. Raises RendezvousError, and InvalidArgument, on all ranks for
        settings or models that differ between ranks.
        """
        given, ranks = compression_of(compression, warms_up=False), ranks_of(ranks)
        trained = checks.trained_parameters(model, inner_optimizer)
        require_supported(trained)
        count = sum(map(rows, trained.values()))
        every, fragments, delay = checks.rounds_of(every, fragments, delay, mix, count)
        checks.require_outer_optimizer(lr, momentum)
        self._rules = given.table
        require_matches(given.rules, trained)
        self._names = {each: name for name, each in trained.items()}
        parts = fragments_of(trained, fragments)
        pieces = {name: each for part in parts for name, each in part.items()}
        self._rules.add_parts({name: self._names[each.parameter] for name, each in pieces.items()})
        self.feedback = given.residuals(self._rules)
        persistent_state_of(self.feedback).require_free(self._names)
        settings = {
            "every": every,
            "lr": lr,
            "momentum": momentum,
            "nesterov": flag(nesterov, "nesterov"),
            "pace": flag(pace, "pace"),
            "fragments": fragments,
            "delay": delay,
            "mix": mix,
            "average_buffers": flag(average_buffers, "average_buffers"),
            "feedback": self.feedback is not None,
            **given.alike,
        }
        self.closed, self.error = False, None
        communicator, self._owns = ranks.connect()
        try:
            require_algorithm(algorithm, self._rules.lossy, communicator)
            require_alike(communicator, "DiLoCo()", settings)
            tensors = [*model.named_parameters(), *model.named_buffers()]
            broadcast_parameters(tensors, ranks=communicator)
        except BaseException:
            if self._owns:
                communicator.close()
            raise
        optimizer = OuterOptimizer(lr, momentum, nesterov and momentum > 0)
        device = next(iter(trained.values())).device
        self._steps = OuterSteps(
            communicator,
            [OuterParameters(each, optimizer) for each in parts],
            partial(
                averaging_exchange,
                names={each.tensor.to("meta"): name for name, each in pieces.items()},
                rules=self._rules,
                feedback=self.feedback,
                algorithm=algorithm,
            ),
            Round(every, fragments, delay),
            Stopwatch(clock or clock_for(device)),
            checks.Untrained(model, trained),
            SharedBuffers(model) if average_buffers else None,
            pace=pace,
            mix=mix,
        )
        if self.feedback is not None:
            persistent_state_of(self.feedback).state = weakref.ref(self)

    def __repr__(self) -> str:
        return (
            f"DiLoCo(rank {self.communicator.rank} of {self.communicator.size}, "
            f"rounds={self.rounds}, pace={list(self.pace)})"
        )

    @property
    def communicator(self) -> Communicator:
        """The ranks that train together."""
        return self._steps.communicator

    @property
    def rounds(self) -> int:
        """The number of rounds whose outer steps are done."""
        return self._steps.rounds

    @property
    def pace(self) -> tuple[int, ...]:
        """The number of inner steps in a round, by rank."""
        return self._steps.pace

    def step(self) -> bool:
        """Counts an inner step, and makes the outer step that is due after it, if one is.

        Call it after each ``inner_optimizer.step()``, also where a GradScaler skipped that. Returns
        whether an outer step set parameters; with one fragment and no delay all ranks have the same
        ones then. Raises gradwire's errors, which name the rank that failed; Timeout for one that
        does not get there. Raises InvalidArgument on all ranks when inner steps ended in NaN or Inf
        on one of them: then the outer step is not made, all ranks have the parameters of the outer
        step before, and training can go on.
        """
        return self._steps.step()

    def finish(self) -> None:
        """Averages what was done since the last outer step; returns when all ranks have called it.

        Call it when this rank has no more data, at the end of an epoch or of the training. Until
        the others call it too, this rank takes part in their outer steps, and counts in averages
        only for what it has done since the one before. Then the parameters are the same on all
        ranks, and training can go on with a new round. Raises as `step` does.
        """
        self._steps.finish()

    def should_stop(self) -> bool:
        """Whether a rank was asked to stop; the same on all ranks after the same outer step.

        See `Communicator.should_stop`. Ask after each `step`; the exchange of an outer step carries
        it, so a request counts at the end of a round, or of a fragment's part of it. Ranks then
        have made as many outer steps, and with `pace` different numbers of inner ones.
        """
        stops.watch(self.communicator)
        self._steps.asks_to_stop = True
        return self._steps.should_stop

    def check_agreement(self) -> None:
        """Raises Error on all ranks unless common values and velocities have the same bits.

        Every rank calls it, in the same round and after the same outer steps. It compares hashes by
        parameter, and names the first that differs; `step` compares checksums in each round. An
        average that is on its way counts from then on.
        """
        self._steps.check_agreement()

    def after_shrink(self, communicator: Communicator) -> None:
        """Goes on with the ranks that survived a failure; each of them calls it.

        `communicator` is the result of ``outer.communicator.shrink()``. Survivors keep what they
        have learnt since the last outer step. Where the failure struck after some of them had made
        an outer step, the others take over its result, and their residuals are those from before
        it. What the lost rank had not delivered is lost.
        """
        instance(communicator, "communicator", Communicator, "what communicator.shrink() returned")
        self._steps.go_on_with(communicator)
        self._owns = False

    def state_dict(self) -> dict[str, Any]:
        """Saves common values and velocities, and this rank's parameters, residuals and place.

        The dict holds tensors and plain values; each rank saves its own, and the states of its
        model and inner optimizer beside it, when `step` has returned True or after `finish`.
        `gather_state_dict` makes one dict of all ranks' states, also for another number of ranks.
        """
        saved = self._steps.state_dict()
        return {**saving.stamp(self.communicator, self._steps.exchanges), **saved}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continues from this rank's `state_dict`, or from all ranks' in one; every rank calls it.

        Load the model's own state before, for its buffers; this sets its parameters too. With the
        same model, ranks and settings, and with ``pace=False``, training has the same bits as if it
        had not been interrupted. Raises InvalidArgument on all ranks for the state of another
        model, rank or number of ranks, and when ranks load states of different outer steps.
        """
        failure: Exception | None = None
        comm = self.communicator
        try:
            self._steps.load_state_dict(saving.for_rank(saved, comm.rank, comm.size))
        except (InvalidArgument, KeyError, TypeError, ValueError) as error:
            failure = error
        found = {"state": self._steps.exchanges, "outer values": self._steps.checksum()}
        require_alike(comm, "load_state_dict()", found, failure)

    def close(self) -> None:
        """Closes the communicator, if it was made for this; all ranks call it."""
        self.closed = True
        if self._owns:
            self.communicator.close()

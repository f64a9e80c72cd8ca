"""ExchangingOptimizer: the base class of optimizers that exchange in their `step`."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gradwire._base.arguments import instance
from gradwire._base.rules import require_matches
from gradwire._communicator import Communicator
from gradwire._errors import Error, InvalidArgument
from gradwire._feedback import ErrorFeedback
from gradwire.torch._ranks.broadcasts import broadcast_optimizer_state, broadcast_parameters
from gradwire.torch._ranks.checksums import checksum, require_agreement
from gradwire.torch._ranks.ranks import RanksLike, ranks_of
from gradwire.torch._ranks.settings import require_alike
from gradwire.torch.exchange import saved as saving
from gradwire.torch.exchange.compression import Compression
from gradwire.torch.exchange.gradient_scale import Scaler, persistent_state_of
from gradwire.torch.exchange.rules import Rules
from gradwire.torch.optimizers import parameters as listed
from gradwire.torch.optimizers.loss_scale import LossScale
from gradwire.torch.optimizers.parameter_exchange import ParameterExchange

_log = logging.getLogger("gradwire")


class ExchangingOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """What optimizers that exchange in `step` have in common: groups, AMP, failures, states.

    Gradients are each rank's own. A subclass makes a step of them in `_step_with`, and lets
    `_average` average a tensor of each parameter over the ranks. Its state is the same on all ranks
    but for the tensors named `_local`.
    """

    feedback: ErrorFeedback | None
    _local = ""
    _step_supports_amp_scaling = True  # torch's GradScaler leaves it to step() to unscale and skip

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        settings: Mapping[str, object],
        compression: Compression,
        table: Rules,
        *,
        algorithm: str,
        scaler: Scaler | None,
        ranks: RanksLike,
    ) -> None:
        """Gives all ranks rank 0's parameters; raises on all when `settings` differ.

        `table` says in which codec each parameter's tensor travels; `compression` made it.
        """
        self.feedback = compression.residuals(table)
        self._rules, self._algorithm = table, algorithm
        self.closed, self.error, self._owns = False, None, False
        self._without_gradient: set[str] = set()  # of this rank, in the step under way
        self.steps = self.skipped_steps = 0
        self._loss_scale = LossScale(scaler)
        ranks = ranks_of(ranks)
        super().__init__(params, defaults)
        self._names = listed.names(self.param_groups)
        require_matches(compression.rules, self._names.values(), "the parameters")
        persistent_state_of(self.feedback).require_free(self._names)
        self.communicator, self._owns = ranks.connect()
        try:
            own = {
                **compression.alike,
                **settings,
                "feedback": self.feedback is not None,
                "param_groups": listed.options(self.param_groups),
                "scaler": scaler is not None,
            }
            require_alike(self.communicator, f"{self._kind}()", own)
            self._prepare_exchange()
            self._share_parameters(self.param_groups)
        except BaseException:
            self.close()
            raise
        persistent_state_of(self.feedback).state = weakref.ref(self)

    def __repr__(self) -> str:
        if "communicator" not in self.__dict__:  # a copy
            return str(super().__repr__())
        at = f"rank {self.communicator.rank} of {self.communicator.size}"
        return f"{self._kind}({at}, steps={self.steps}, groups={len(self.param_groups)})"

    @property
    def scaler(self) -> Scaler | None:
        """The GradScaler that scales the loss, whose scale then stays the same on all ranks."""
        return self._loss_scale.scaler

    @scaler.setter
    def scaler(self, scaler: Scaler | None) -> None:
        self._loss_scale = LossScale(scaler)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step with the other ranks, from the gradients that each has; all call it.

        Returns what `closure` returns, which is called first, with gradients enabled. With NaN or
        Inf in any rank's gradients no rank makes the step: parameters and state stay as they were,
        and `skipped_steps` counts it. A parameter whose ``grad`` is None on all ranks stays as it
        was, with its state, as in torch's optimizers; on some ranks, it counts as zeros there.
        Raises gradwire's errors, which name the rank that failed;
        then, too, this rank's parameters and state are as before.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_connected()
        with self._ending_on_failure():
            trained = self._trained()
            self._without_gradient = {name for name, each, _ in trained if each.grad is None}
            factor, poisoned = self._loss_scale.of(self)
            gradients = listed.gradients(self.param_groups, self._names, factor)
            if poisoned:
                listed.poison(gradients)
            made = self._step_with(gradients)
        self.steps += made
        if not made:
            self._count_skipped()
        return loss

    def should_stop(self) -> bool:
        """Whether a rank was asked to stop; the same on all ranks after the same step.

        See `Communicator.should_stop`: what `step` exchanges carries it.
        """
        self._require_connected()
        return self.communicator.should_stop()

    def _step_with(self, gradients: Mapping[str, torch.Tensor]) -> bool:
        """Makes a step with own gradients, by name; returns False if NaN or Inf prevent it.

        It must not write into them. Where it returns False or raises, it has changed nothing.
        """
        raise NotImplementedError

    def _average(
        self,
        inputs: Mapping[str, torch.Tensor],
        prepare: Callable[[dict[str, torch.Tensor]], None] | None = None,
        waiting: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor] | None:
        """Averages tensors over the ranks, in place; None if NaN or Inf is in any rank's.

        Those of `waiting` are not sent, and returned as they are. Residuals are kept only where
        all values are finite, and `prepare` has made the averages ready. Parameters that have no
        gradient on any rank are left out, and their residuals stay.
        """
        return self._exchange.average(
            inputs, waiting or {}, self.steps, self._without_gradient, prepare
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, with rank 0's values on all ranks; every rank calls it.

        Raises InvalidArgument for parameters that are not dense float32, and for options that
        cannot be, or differ between ranks; then the group is not added.
        """
        super().add_param_group(param_group)
        added = self.param_groups[-1:]
        try:
            names = self._checked_names(added)
        except InvalidArgument:
            self.param_groups.pop()
            raise
        if hasattr(self, "communicator"):
            self._names = names
            self._share_parameters(added)
            self._prepare_exchange()

    def _checked_names(self, added: Sequence[dict[str, Any]]) -> dict[torch.Tensor, str]:
        """The names of all parameters, once the added groups are known to be right on all ranks."""
        failure: InvalidArgument | None = None
        names: dict[torch.Tensor, str] = {}
        try:
            for group in added:
                self._check_group(group)
            names = listed.names(self.param_groups)
        except InvalidArgument as error:
            failure = error
        if hasattr(self, "communicator"):
            found = {"param_groups": listed.options(added)}
            require_alike(self.communicator, "add_param_group()", found, failure)
        elif failure is not None:
            raise failure
        return names

    def check_agreement(self) -> None:
        """Raises Error on all ranks unless parameters and common state have the same bits.

        Every rank calls it, after the same steps. It names the first tensor that differs.
        """
        self._require_connected()
        require_agreement(self.communicator, self._common(), "tensors")

    def after_shrink(self, communicator: Communicator) -> None:
        """Goes on with the ranks that survived a failure; each of them calls it.

        `communicator` is the result of ``optimizer.communicator.shrink()``. Where the failure
        struck after some of them had made a step, the others take over its result. What the lost
        rank had not delivered is lost.
        """
        self._require_connected()
        instance(communicator, "communicator", Communicator, "what communicator.shrink() returned")
        self.communicator, self._owns = communicator, False
        self._prepare_exchange()
        steps = communicator.all_gather(np.array([self.steps], np.int64)).tolist()
        if min(steps) < max(steps):
            self._take_over(steps.index(max(steps)))
            self.steps = max(steps)

    def state_dict(self) -> dict[str, Any]:
        """torch's state dict, with this rank's residuals; each rank saves its own.

        `gradwire.torch.gather_state_dict` makes one dict of all ranks' states, which loads on
        another number of ranks, too.
        """
        self._require_connected()
        saved = super().state_dict()
        state = {key: dict(each) for key, each in saved["state"].items()}
        local = {}
        for number, name in enumerate(self._names.values()):
            if self._local in state.get(number, ()):
                local[name] = state[number].pop(self._local)
        return {
            **saved,
            "state": state,
            **saving.stamp(self.communicator, self.steps),
            **self._exchange.state_dict(),
            "velocities": local,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from this rank's `state_dict`, or from all ranks' in one; every rank calls it.

        With the same model, ranks and settings, training has the same bits as if it had not been
        interrupted. Raises InvalidArgument on all ranks for the state of another model, rank or
        number of ranks, and when ranks load states of different steps; then nothing has changed on
        the ranks whose state does not fit.
        """
        self._require_connected()
        failure: Exception | None = None
        comm = self.communicator
        try:
            self._load(saving.for_rank(state_dict, comm.rank, comm.size))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            failure = error if isinstance(error, InvalidArgument) else listed.misfit(error)
        found = {
            "steps": self.steps,
            "state": checksum(self._common_state().values()),
            "param_groups": listed.options(self.param_groups),
        }
        require_alike(comm, "load_state_dict()", found, failure)

    def close(self) -> None:
        """Closes the communicator, if it was made for this; all ranks call it."""
        self._require_connected()
        self.closed = True
        if self._owns:
            self.communicator.close()

    @property
    def _kind(self) -> str:
        return type(self).__name__

    def _trained(self) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
        """Names, parameters and groups of those that are not frozen."""
        for group in self.param_groups:
            for each in group["params"]:
                if each.requires_grad:
                    yield self._names[each], each, group

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Raises InvalidArgument for a parameter group's options that cannot be."""
        listed.require_rates(group["lr"], group.get("betas", (0, 0)), group["weight_decay"])

    def _prepare_exchange(self) -> None:
        """Exchanges with these ranks, and these parameters, from now on; residuals stay."""
        self._exchange = ParameterExchange(
            self.communicator,
            self._names,
            self._rules,
            self.feedback,
            algorithm=self._algorithm,
            call=f"{self._kind}.step()",
        )

    def _common_state(self) -> dict[str, torch.Tensor]:
        """The tensors of the state that are the same on all ranks, by name."""
        return {
            f"{key} of {name}": each
            for parameter, name in self._names.items()
            for key, each in self.state.get(parameter, {}).items()
            if key != self._local and isinstance(each, torch.Tensor)
        }

    def _common(self) -> dict[str, torch.Tensor]:
        """All tensors that are the same on all ranks."""
        values = {name: each.detach().contiguous() for each, name in self._names.items()}
        return {**values, **self._common_state()}

    def _share_parameters(self, groups: Iterable[Mapping[str, Any]]) -> None:
        named = {self._names[each]: each for group in groups for each in group["params"]}
        broadcast_parameters(named, ranks=self.communicator)

    def _load(self, saved: Mapping[str, Any]) -> None:
        listed.require_fitting(saved, self.param_groups, self._names)
        state = {number: dict(each) for number, each in saved["state"].items()}
        numbers = {name: number for number, name in enumerate(self._names.values())}
        for name, each in saved["velocities"].items():
            state.setdefault(numbers[name], {})[self._local] = each
        self._exchange.load_state_dict(saved)
        super().load_state_dict({**saved, "state": state})
        self.steps = int(saved["steps"])

    def _take_over(self, root: int) -> None:
        """Gives all ranks the root's parameters and common state; each keeps its own local one."""
        local = {key: each.pop(self._local, None) for key, each in self.state.items()}
        self._share_from(root)
        for key, each in local.items():
            if each is not None:
                self.state[key][self._local] = each

    def _share_from(self, root: int) -> None:
        named = {name: each for each, name in self._names.items()}
        broadcast_parameters(named, root, ranks=self.communicator)
        broadcast_optimizer_state(self, root, ranks=self.communicator)

    def _count_skipped(self) -> None:
        self.skipped_steps += 1
        if self._loss_scale.note_skipped(self) or self.skipped_steps > 1:
            return
        _log.warning(
            "rank %d: a rank's gradients had NaN or Inf, and no rank made the step; "
            "skipped_steps counts more of them",
            self.communicator.rank,
        )

    def _require_connected(self) -> None:
        if "communicator" not in self.__dict__:
            raise InvalidArgument(
                f"this {self._kind} is a copy, without the original's connections: make a new one, "
                "and give it the original's state_dict()"
            )

    @contextlib.contextmanager
    def _ending_on_failure(self) -> Iterator[None]:
        """Tells the other ranks of an error that is this rank's alone."""
        try:
            yield
        except Error:
            raise
        except BaseException as error:
            self.communicator.abort(f"{type(error).__name__} in {self._kind}.step()")
            raise

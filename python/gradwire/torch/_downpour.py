"""Downpour SGD: replicas that train one model asynchronously against a parameter server."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch

from gradwire import serve
from gradwire._base import arguments
from gradwire._base.deadline import Deadline
from gradwire._errors import Error, InvalidArgument
from gradwire._feedback import ErrorFeedback
from gradwire.torch import _downpour_arrays as arrays
from gradwire.torch._downpour_codecs import PushCodecs
from gradwire.torch.exchange.compression import CompressionLike, compression_of

_WARM_START_SECONDS = 0.05  # between two looks at how far the first replica is
_DIALLING_SECONDS = 0.02  # between two looks whether servers are reached again

_log = logging.getLogger("gradwire")


class Downpour(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer whose rule runs on the servers: `step()` pushes gradients and fetches values.

    It is used as any optimizer of torch, one in each replica, whose batches differ; `close()` is
    called at the end. Dean et al. 2012, "Large Scale Distributed Deep Networks", sec. 4.1 and
    algorithm 1.1.

    No replica waits for another. Gradients are computed from values that others have updated since;
    Adagrad's rates, one for each parameter, and a warm start by one replica are what keeps that
    stable. Values change in `step()` and `fetch()` alone. Buffers, such as BatchNorm's means, stay
    each replica's own. A GPU's gradients and values pass through pinned memory.
    """

    def __init__(
        self,
        params: Iterable[Any],
        rule: serve.Rule,
        *,
        n_push: int = 1,
        n_fetch: int = 1,
        fetch: Literal["wait", "ahead"] = "wait",
        warm_start: int = 0,
        local_lr: float = 0.0,
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
        compression: CompressionLike = "none",
        pull_codec: str = "none",
        staleness: Literal["keep", "divide"] = "keep",
        max_staleness: int | None = None,
        store: str | None = None,
        name: str = "parameters",
        replica: str | None = None,
        secret: bytes | str | None = None,
        timeout: float = 300.0,
        reconnect: float | None = None,
    ) -> None:
        """Connects to the servers and fetches their values, or brings them the first ones.

        `params` are float32 tensors, or groups of them with `lr` and `weight_decay` of their own;
        groups' rates may differ with the rule SGD. `rule` is the servers' update
        rule; changing `lr` in `param_groups` changes it for this replica's pushes, as schedulers
        do. Every `n_push` steps the sum of the gradients since the last push goes out, and every
        `n_fetch` steps values come in. `fetch="ahead"` asks for them one fetch early, and so never
        waits; they are staler. `local_lr` also applies each gradient here, until the next fetch;
        with `reconnect` such local steps go on while an ended server is dialled, and what has
        accrued is pushed when it is back. Without `local_lr` a step waits for it.
        With `warm_start` the replica that came first trains alone until the servers have applied so
        many pushes; where it makes none for `timeout` seconds, the others go on without.
        `clip_norm` limits the norm of what is pushed, all parameters together.

        `compression` is that of pushes: a codec's name, or a `Compression` of names. Rules go by
        the names of `model.named_parameters()`, given as `params`. A step is a push that the
        servers have applied, of any replica; ``warm_up=None`` is 1,000 of them. Parameters of fewer
        than `min_elements`, or that are no matrix, stay in int8 beside a biased codec, where there
        are others and no rules. All codecs that may travel are in the table on which clients agree.

        A codec loses a part of each push, and `max_staleness` refuses some; the Compression's
        `feedback` adds both to the next one, and False gives them up. With `pull_codec` int8, int4
        or onebit, differences travel. The other arguments are those of `gradwire.serve.connect`,
        whose errors this raises.
        """
        defaults = {"lr": rule.lr, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._rule = rule
        self._n_push = arguments.whole(n_push, "n_push", least=1)
        self._n_fetch = arguments.whole(n_fetch, "n_fetch", least=1)
        if fetch not in ("wait", "ahead"):
            raise arguments.wrong(fetch, "fetch", "'wait' or 'ahead'")
        self._ahead = fetch == "ahead"
        self._local_lr = arguments.number(local_lr, "local_lr")
        if not self._local_lr >= 0:
            raise InvalidArgument(f"local_lr={local_lr} is negative, or no number")
        self._clip_norm = None if clip_norm is None else arguments.number(clip_norm, "clip_norm")
        if self._clip_norm is not None and not self._clip_norm > 0:
            raise InvalidArgument(f"clip_norm={clip_norm} is not positive")
        arguments.whole(warm_start, "warm_start", least=0)
        self._parameters = arrays.trained(self.param_groups)
        self._names = arrays.names(self.param_groups)
        self._pull_codec = pull_codec
        names = self._names or map(str, range(len(self._parameters)))  # as the servers know them
        known = dict(zip(names, self._parameters, strict=True))
        given = compression_of(compression)
        if given.decay != 1:
            raise InvalidArgument(f"decay={given.decay} is for trainers that average: leave it out")
        self._codecs = PushCodecs(given, known)
        drops = len(self._codecs.used) > 1 or max_staleness is not None
        own = given.feedback if isinstance(given.feedback, ErrorFeedback) else ErrorFeedback()
        self._feedback = own if drops and given.feedback is not False else None
        if given.rules and self._names is None:
            raise InvalidArgument(
                "rules= go by names: give Downpour model.named_parameters() instead of parameters()"
            )
        self._trained = frozenset(map(id, self._parameters))
        self._steps = 0
        self._accrued: list[torch.Tensor] | None = None
        self._outgoing: dict[serve.Pending, list[torch.Tensor] | None] = {}
        self._free: list[list[torch.Tensor]] = []  # memory for pushes
        self._incoming: serve.Pending | None = None
        self._fetched = arrays.on_host(self._parameters)
        for host, parameter in zip(self._fetched, self._parameters, strict=True):
            host.copy_(parameter.detach())
        self._server = serve.connect(
            self._named(self._fetched),
            rule,
            codecs=[*self._codecs.used, pull_codec],
            store=store,
            name=name,
            replica=replica,
            secret=secret,
            staleness=staleness,
            max_staleness=max_staleness,
            timeout=timeout,
            reconnect=reconnect,
            while_dialling="raise" if self._local_lr else "wait",
        )
        if not self._server.first:
            self._await_warm_start(warm_start, Deadline(timeout).seconds)
        self.fetch()

    @property
    def server(self) -> serve.ParameterServer:
        """The connection to the servers, for its statistics and checkpoints."""
        return self._server

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes the gradients of a backward: pushes them, fetches values, or both, when it is time.

        Returns what `closure` returns, which is called first, with gradients enabled. Raises
        TransportError, which names a shard that has ended, Timeout, and InvalidArgument for NaN and
        Inf. Raises the error of an earlier push, too, and takes no gradients then.
        """
        reached = self._reached(self._settle)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = self._gradients()
        if self._local_lr:
            torch._foreach_add_(list(self._parameters), gradients, alpha=-self._local_lr)
        pushes = reached and self._steps % self._n_push == 0
        self._accrue(gradients, pushes)
        if pushes:
            reached = self._reached(self._push)
        self._steps += 1
        if reached and self._steps % self._n_fetch == 0:
            self._reached(self._fetch_ahead if self._ahead else self._fetch)
        return loss

    def fetch(self) -> None:
        """Fetches the servers' values, with all pushes of this replica, as before an evaluation.

        Waits for a server that is dialled.
        """
        self._patiently(self._fetch)

    def close(self) -> None:
        """Pushes what has accrued, waits until the servers have applied it, and says goodbye.

        Waits for a server that is dialled.
        """
        try:
            self._patiently(self._push_rest)
        finally:
            self._server.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises InvalidArgument: the servers hold the parameters that were given at first."""
        if hasattr(self, "_server"):
            raise InvalidArgument(
                "the servers hold the parameters that Downpour was given at first: give all of "
                "them then, also those that are to be trained later"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """torch's state dict, with the steps, the residuals and what has accrued in this replica.

        Waits until pushes under way are over. The values and the rule's state are the servers': see
        `ParameterServer.checkpoint`.
        """
        for pending in self._outgoing:
            with contextlib.suppress(Error):  # which the next step() raises
                pending.wait()
        residuals = None if self._feedback is None else self._feedback.state_dict()
        accrued = None if self._accrued is None else [each.clone() for each in self._accrued]
        own = {"steps": self._steps, "residuals": residuals, "accrued": accrued}
        return {**super().state_dict(), "downpour": own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes a result of `state_dict`; values stay those of the servers.

        Raises InvalidArgument for the state of another optimizer.
        """
        rest = dict(state_dict)
        own = rest.pop("downpour", None)
        if own is None:
            raise InvalidArgument("this state_dict is of another optimizer than Downpour")
        self._patiently(lambda: self._settle(wait=True))
        super().load_state_dict(rest)
        self._steps = own["steps"]
        self._accrued = None
        if own["accrued"] is not None:
            pairs = zip(own["accrued"], self._parameters, strict=True)
            self._accrued = [each.to(like.device, copy=True) for each, like in pairs]
        if self._feedback is not None and own["residuals"] is not None:
            self._feedback.load_state_dict(own["residuals"])

    def _gradients(self) -> list[torch.Tensor]:
        """The contribution of each parameter to a push: zeros where it has no gradient."""
        found = []
        for group in self.param_groups:
            factor = self._factor(group)
            for parameter in group["params"]:
                if id(parameter) not in self._trained:
                    continue
                gradient = arrays.gradient_of(parameter, group["weight_decay"])
                found.append(gradient if factor == 1 else gradient * factor)
        return found

    def _rate(self) -> float:
        """The rate of pushes: that of the first group that has one above 0."""
        return next((group["lr"] for group in self.param_groups if group["lr"]), 0.0)

    def _factor(self, group: Mapping[str, Any]) -> float:
        """A group's rate as a share of the one that the servers use."""
        rate = self._rate()
        if group["lr"] == rate:
            return 1.0
        if not isinstance(self._rule, serve.SGD):
            raise InvalidArgument(
                f"parameter groups have the rates {rate} and {group['lr']}: with "
                f"{type(self._rule).__name__} all need the same one, since the servers' rule is "
                "one for all parameters; SGD can have several"
            )
        return float(group["lr"] / rate)

    def _reached(self, exchange: Callable[[], None]) -> bool:
        """Exchanges something with the servers; returns whether none of them is being dialled."""
        try:
            exchange()
        except serve.Dialling:
            return False
        return True

    def _patiently(self, exchange: Callable[[], None]) -> None:
        """Exchanges something with the servers, and waits while one is dialled."""
        while not self._reached(exchange):
            time.sleep(_DIALLING_SECONDS)

    def _accrue(self, gradients: list[torch.Tensor], pushes: bool) -> None:
        if self._accrued is not None:
            torch._foreach_add_(self._accrued, gradients)
        elif pushes:
            self._accrued = gradients  # which _push() copies before they change
        else:
            self._accrued = [each.clone() for each in gradients]

    def _push(self) -> None:
        accrued, self._accrued = self._accrued, None
        assert accrued is not None
        pushed = accrued if self._clip_norm is None else arrays.clipped(accrued, self._clip_norm)
        buffers = self._free.pop() if self._free else arrays.on_host(self._parameters)
        for host, gradient in zip(buffers, pushed, strict=True):
            host.copy_(gradient)
        feedback: Any = False if self._feedback is None else self._feedback
        codec, rules = self._codecs.at(min(self._versions))
        try:
            pending = self._server.push(
                self._named(buffers),
                codec=codec,
                rules=rules,
                feedback=feedback,
                lr=self._rate(),
                versions=self._versions,
                async_op=True,
            )
        except serve.Dialling:  # nothing of it was sent
            self._accrued = [each.clone() for each in accrued]
            self._free.append(buffers)
            raise
        assert pending is not None
        self._outgoing[pending] = None if pending.copied else buffers
        if pending.copied:
            self._free.append(buffers)

    def _settle(self, *, wait: bool = False) -> None:
        """Takes back the memory of pushes that are over, and raises their errors, each once."""
        for pending in list(self._outgoing):
            if not wait and not pending.done():
                continue
            try:
                pending.wait()
            finally:
                if pending.done() and (buffers := self._outgoing.pop(pending)):
                    self._free.append(buffers)

    def _push_rest(self) -> None:
        if self._accrued is not None:
            self._push()
        self._settle(wait=True)

    def _fetch(self) -> None:
        self._receive()
        self._settle(wait=True)
        self._request()
        self._receive()

    def _fetch_ahead(self) -> None:
        self._receive()
        self._request()

    def _request(self) -> None:
        self._incoming = self._server.pull(
            self._named(self._fetched), codec=self._pull_codec, async_op=True
        )

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _receive(self) -> None:
        """Waits for values that were asked for, and installs them."""
        incoming, self._incoming = self._incoming, None
        if incoming is None:
            return
        try:
            self._versions = incoming.wait()  # of the values that are installed
        except serve.Dialling:
            self._incoming = incoming  # which is made again
            raise
        for parameter, host in zip(self._parameters, self._fetched, strict=True):
            parameter.copy_(host)

    def _named(self, tensors: list[torch.Tensor]) -> list[torch.Tensor] | dict[str, torch.Tensor]:
        """Tensors as the servers know them: by the parameters' names, where these have some."""
        return tensors if self._names is None else dict(zip(self._names, tensors, strict=True))

    def _least_version(self) -> int:
        """The number of pushes that every shard has applied, or more."""
        while True:
            try:
                return min(int(each["version"]) for each in self._server.stats())
            except serve.Dialling:
                time.sleep(_DIALLING_SECONDS)

    def _await_warm_start(self, pushes: int, patience: float) -> None:
        """Waits while the first replica trains alone, as long as it makes progress."""
        reached, deadline = 0, Deadline(patience)
        while (now := self._least_version()) < pushes:
            if now > reached:
                reached, deadline = now, Deadline(patience)
            elif deadline.passed:
                _log.warning(
                    "warm start: no push in %g s, at %d of %d: has the first replica ended? This "
                    "one begins to train",
                    *(patience, reached, pushes),
                )
                return
            else:
                time.sleep(_WARM_START_SECONDS)

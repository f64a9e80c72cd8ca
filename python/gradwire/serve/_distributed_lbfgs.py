"""L-BFGS over a parameter server, by a coordinator and replicas."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gradwire._base import arguments
from gradwire._base.deadline import Deadline
from gradwire._errors import InvalidArgument
from gradwire._host.identity import process_name
from gradwire.serve import _directory, _replica
from gradwire.serve._client import Arrays, ParameterServer, connect
from gradwire.serve._coordinator import Coordinator
from gradwire.serve._lead import Batches, Lead, Progress
from gradwire.serve._rules import Coordinated
from gradwire.serve._sandblaster.more_thuente import more_thuente
from gradwire.serve._sandblaster.searches import Search, fixed, strong_wolfe

SEARCHES: dict[str | None, Search] = {
    "strong_wolfe": strong_wolfe,
    "more_thuente": more_thuente,
    None: fixed,
}
Function = Callable[[Any, int], tuple[float, Any]]


class DistributedLBFGS:
    """L-BFGS over a batch that replicas share: `serve()` on replicas, `step()` on a coordinator.

    Dean et al. 2012, "Large Scale Distributed Deep Networks", sec. 4.2. The parameters, the history
    and the directions are on the shards of a parameter server (`gradwire serve`, or `gradwire run
    --servers`); the coordinator, one process, gives them commands and gets numbers back.

    Each evaluation cuts its batch into portions, much smaller than a replica's share, and hands
    them out as replicas become free; at the end idle ones copy what slow ones have not reported.
    Each portion counts exactly once, whoever ends when; replicas may come and go at any time.
    """

    def __init__(
        self,
        like: Arrays,
        function: Function,
        *,
        portions: int,
        batch: int | Literal["all"] = "all",
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

        `like` are the parameters, a dict or a list of arrays, all float32 or all float64, on the
        CPU. Those of the first replica are the initial values; `serve()` writes into them, and the
        coordinator's are not read. `function(parameters, portion)` gets them, and a number below
        `portions`; it returns the sum of the losses in this portion, and gradients as `like` has
        the parameters.

        A batch are all portions, or so many of them, drawn anew after `iterations_per_batch`
        iterations with `seed`. `history` is the number of past steps that directions are made
        from. `search` finds the length of a step: by the strong Wolfe conditions as torch's LBFGS,
        as scipy's L-BFGS-B, or none, which takes `lr` (the first one: at most 1/‖g‖₁ times `lr`).
        `push_every` is the number of portions after which a replica pushes their sum, so what is
        computed again at most when it dies.

        Into the file `state` the coordinator writes scalars after each iteration; a new one with
        the same file goes on where it was. `store`, `name`, `secret` and `replica` are those of
        `gradwire.serve.connect`. `timeout` limits, in seconds, connecting, and how long all
        replicas may be silent.
        """
        self._like, self._function = like, function
        self._number = arguments.whole(portions, "portions", least=1)
        size = self._number if batch == "all" else arguments.whole(batch, "batch", least=1)
        if size > self._number:
            raise InvalidArgument(f"batch={batch} portions: there are {portions}")
        iterations = arguments.whole(iterations_per_batch, "iterations_per_batch", least=1)
        draw = arguments.whole(seed, "seed", bits=64)
        self._batches = Batches(self._number, size, iterations, draw)
        self._history = arguments.whole(history, "history", least=1)
        if search not in SEARCHES:
            raise arguments.wrong(search, "search", "'strong_wolfe', 'more_thuente' or None")
        self._search = search
        self._lr = arguments.number(lr, "lr")
        if not 0 < self._lr < float("inf"):
            raise InvalidArgument(f"lr={lr} is not positive and finite")
        self._backups = arguments.flag(backups, "backups")
        self._push_every = arguments.whole(push_every, "push_every", least=1)
        self._path = None if state is None else Path(state)
        self._timeout = arguments.seconds(timeout)
        self._service = (store, name, secret)
        self._replica = replica
        self._lead: Lead | None = None

    def serve(self) -> None:
        """Computes portions until the coordinator closes; then `like` has the last parameters.

        Raises TransportError that names the coordinator or a shard that has ended, also where the
        coordinator closes after an error; call it again to wait for a new coordinator. Raises
        RendezvousError where there is none within `timeout`, and what the function raises, which
        ends this replica, and of which the coordinator is told.
        """
        deadline = Deadline(self._timeout)
        name = self._replica
        if name is None:
            name = f"replica {os.environ['RANK']}" if "RANK" in os.environ else "replica"
        label = f"{name} ({process_name()})"
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(self._connect("replica"))
            directory = stack.enter_context(self._directory(deadline))
            sock, coordinator = _replica.connect(directory, directory.job(deadline), deadline)

            def fetch() -> None:
                server.pull(self._like)
                self._install()

            def push(gradients: list[Any], staged: tuple[int, int, int]) -> None:
                server.push(self._like_parameters(gradients), staged=staged)

            def successor() -> str | None:
                return _replica.successor(directory, coordinator)

            one = _replica.Replica(sock, coordinator, fetch, self._compute, push, successor)
            one.run(label, self._number)
            fetch()

    def step(self) -> Progress:
        """Does one iteration, on the coordinator.

        Raises InvalidArgument that names a replica whose function failed, Timeout where no replica
        says anything for `timeout` seconds, and TransportError that names a shard which has ended.
        After the first two it may be called again.
        """
        if self._lead is None:
            self._lead = self._begin()
        return self._lead.step()

    def close(self) -> None:
        """Ends the coordinator: replicas return from `serve()`. May be called again.

        Where the last `step()` has failed, or a `with` block ends by an exception, their `serve()`
        raises TransportError, which says why.
        """
        self._close(None)

    def __enter__(self) -> DistributedLBFGS:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        if self._lead is not None:
            self._lead.close(error)
            self._lead = None

    def _connect(self, role: Literal["replica", "coordinator"]) -> ParameterServer:
        store, name, secret = self._service
        named = self._replica if role == "replica" else "coordinator"
        return connect(
            self._like,
            Coordinated(),
            codecs=["none"],
            store=store,
            name=name,
            secret=secret,
            replica=named,
            role=role,
            timeout=self._timeout,
        )

    def _directory(self, deadline: Deadline) -> contextlib.AbstractContextManager[Any]:
        store, name, secret = self._service
        return _directory.opened(_directory.service(name, store, secret), deadline)

    def _begin(self) -> Lead:
        deadline = Deadline(self._timeout)
        with contextlib.ExitStack() as undo:
            server = undo.enter_context(self._connect("coordinator"))
            with self._directory(deadline) as directory:
                coordinator = Coordinator(
                    directory.job(deadline),
                    directory.service_id,
                    directory.interface(),
                    portions=self._number,
                    push_every=self._push_every,
                    backups=self._backups,
                )
                undo.callback(coordinator.close)
                lead = Lead(
                    server,
                    coordinator,
                    self._batches,
                    path=self._path,
                    patience=self._timeout,
                    history=self._history,
                    search=SEARCHES[self._search],
                    lr=self._lr,
                    by_norm=self._search == "more_thuente",
                )
                directory.publish_coordinator(coordinator.address)
            undo.pop_all()
        return lead

    def _install(self) -> None:
        """Called when `like` has new values."""

    def _like_parameters(self, arrays: list[Any]) -> Arrays:
        """Arrays in the parameters' order, in a dict where these are in one."""
        return (
            dict(zip(self._like, arrays, strict=True))
            if isinstance(self._like, Mapping)
            else arrays
        )

    def _compute(self, portion: int) -> tuple[float, list[np.ndarray[Any, Any]]]:
        loss, gradients = self._function(self._like, portion)
        return float(loss), _as_arrays(gradients, self._like)


def _as_arrays(gradients: Any, like: Arrays) -> list[np.ndarray[Any, Any]]:
    """Copies of gradients, in the parameters' order; raises InvalidArgument for other shapes."""
    if isinstance(like, Mapping) and isinstance(gradients, Mapping):
        if gradients.keys() != like.keys():
            odd = sorted(map(str, gradients.keys() ^ like.keys()))
            raise InvalidArgument(f"{odd[0]!r} is not in both, the gradients and the parameters")
        pairs = [(name, gradients[name], value) for name, value in like.items()]
    elif isinstance(like, Mapping) or len(gradients) != len(like):
        raise InvalidArgument(
            f"the function returned a {type(gradients).__name__} of {len(gradients)} gradients: "
            f"give {len(like)}, in a {type(like).__name__}"
        )
    else:
        pairs = [(str(i), *each) for i, each in enumerate(zip(gradients, like, strict=True))]
    found = []
    for name, gradient, parameter in pairs:
        wanted = np.asarray(parameter)
        array = np.array(gradient, dtype=wanted.dtype, order="C")
        if array.shape != wanted.shape:
            raise InvalidArgument(
                f"the gradient of {name!r} has the shape {array.shape}, the parameter "
                f"{wanted.shape}"
            )
        found.append(array)
    return found

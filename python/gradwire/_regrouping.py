"""How a communicator's ranks change: its methods `shrink`, `resize` and `accept_joins`.

`shrink` makes a communicator of the survivors after a failure, and needs no majority. `resize`
makes one of survivors and joiners, also where nothing has failed, and needs a majority or
`min_ranks`. `accept_joins` changes no ranks: it lets rank 0 listen for those who ask to join.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar

from gradwire import _core
from gradwire._bootstrap.core.build_core import Groups, build_core
from gradwire._bootstrap.join_listener import JoinListener
from gradwire._bootstrap.mesh import Mesh
from gradwire._bootstrap.resize import (
    Resize,
    ResizeOptions,
    has_room,
    open_listener,
    require_secret_to_join,
    resize_options,
)
from gradwire._bootstrap.shrink import Agreement
from gradwire._bootstrap.survivor_links import SurvivorLinks
from gradwire._calls.gpus import Gpu
from gradwire._errors import Error, InvalidArgument

Self = TypeVar("Self", bound="Regrouping")


class Regrouping:
    """Methods of the communicator that make the next one, of other ranks."""

    if TYPE_CHECKING:  # what the communicator has

        def __init__(
            self, core: _core.Communicator, mesh: Mesh, hosts: Groups, timeout: float
        ) -> None: ...

        _core: _core.Communicator
        _mesh: Mesh
        _timeout: float
        _gpu: Gpu | None
        _opening_listener: threading.Lock

        @property
        def rank(self) -> int: ...
        @property
        def size(self) -> int: ...
        @property
        def closed(self) -> bool: ...
        def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Any: ...
        def close(self, timeout: float | None = None) -> None: ...
        def _seconds(self, timeout: float | None) -> float: ...
        def _release(self) -> None: ...

    _listener: JoinListener | None = None  # on rank 0, once processes may ask to join
    _accepts_joins = False

    @property
    def epoch(self) -> int:
        """The number of changes of ranks so far: one more after each `resize` and `shrink`."""
        return self._mesh.membership.epoch

    @property
    def joined(self) -> int:
        """The number of ranks, the last ones, that joined at this epoch.

        A rank that joined earlier has the state only if the others could give it before they
        failed, which the program must remember.
        """
        return self._mesh.membership.joined

    def accept_joins(self) -> None:
        """Lets processes ask to join by `gradwire.join` from now on; every rank calls it.

        ``init(elastic=True)``, `join` and `resize` have done so. Rank 0 listens, and writes into
        the launcher's store where; a store that is not there any more it serves itself, at the same
        address. If that is not possible, a warning says why. Processes of a job can join one
        communicator at a time, the last one that accepts them: not several, or splits. Raises
        RendezvousError under torchrun without a GRADWIRE_SECRET.
        """
        require_secret_to_join(self._mesh)
        self._accepts_joins = True
        if self.rank == 0 and not self.closed:
            with self._opening_listener:
                if self._listener is None:
                    self._use_listener(open_listener(self._mesh))

    def should_resize(self) -> bool:
        """Whether a process wants to join; the same on all ranks that have made the same calls.

        All ranks then call `resize`, at the same place. The frames of all_reduce, reduce_scatter,
        all_gather and barrier carry it, as they do for `should_stop`: this is true on all ranks
        once somebody had asked before rank 0 began one of these calls. Nothing is sent. It waits
        for calls that are under way, and stays true. Raises the communicator's failure, and
        InvalidArgument before `accept_joins`.
        """
        if not self._accepts_joins:
            raise InvalidArgument(
                f"rank {self.rank}: no process can ask to join this communicator: call "
                "accept_joins() on all ranks first, or init(elastic=True)"
            )
        found = self._core.should_resize()
        if self._gpu is not None:
            found = self._gpu.should_resize() or found
        return found

    def shrink(self: Self, timeout: float | None = None) -> Self:
        """Makes a communicator of the ranks that survived the failure of this one.

        Every survivor calls it after this communicator raised TransportError, Timeout, Aborted or
        InvalidArgument there, or was aborted; with a working one it raises InvalidArgument. The
        ranks keep their order, and meet over the connections that they have: no store is needed,
        and rank 0 may be the one that died. Calls in flight have ended, their arrays are undefined,
        and this communicator is closed.

        A rank that has not called it within `timeout` seconds (the communicator's if None), for
        example because it is stopped, is left out, and raises TransportError when it does call. A
        rank that dies meanwhile is left out too, or makes the new communicator fail, which can be
        shrunk in turn. Raises RendezvousError when the survivors cannot connect to each other.

        However few survive, they go on: when the network between hosts is cut, each part does, by
        itself. Compare ``size`` with that before, or call `resize`, which wants a majority.
        """
        return self._regroup(self._seconds(timeout), None)

    def resize(
        self: Self,
        *,
        store: str | None = None,
        wait: float = 0.0,
        min_ranks: int | None = None,
        timeout: float | None = None,
    ) -> Self:
        """Makes the next communicator: the ranks that live, in their order, then those that join.

        Every rank calls it, where `should_resize` has told all of them to, or where they agree to
        for another reason; or every survivor, after this communicator failed. Its earlier calls are
        over, and it is closed. Processes that ask to join (`gradwire.join`) are let in; `joined` of
        the new communicator says how many they are.

        A majority of this communicator's ranks must live, or half of them with rank 0: after a
        partition of the network one part goes on. With `min_ranks` so many are enough, and each
        part that has them goes on; with fewer it waits up to `wait` seconds for more to join.
        ``gradwire run --min`` gives it, too (GRADWIRE_MIN_RANKS). `store` is the address of the
        store in which those who join look for the listener, from now on:
        ``tcp://HOST:PORT``, ``unix://NAME``, or ``torch://HOST:PORT`` for a TCPStore of torch's.
        Give one when the host of the old one is gone. All ranks pass the same. `timeout` and
        failures meanwhile are as in `shrink`: members that die, and processes that die while they
        join, are not in the new communicator, or make it fail, which can be resized in turn.

        Raises RendezvousError on each rank of a minority, and on all ranks when they are fewer than
        `min_ranks` after the wait.
        """
        limit = self._seconds(timeout)
        options = resize_options(self._mesh, store, wait, min_ranks)
        options.listener, self._listener = self._listener, None
        try:
            if store is not None and options.listener is not None:
                options.listener.announce(store)
            self._leave(limit)
            made = self._regroup(limit, options)
        except BaseException:
            if options.listener is not None:
                options.listener.close()
            raise
        made._accepts_joins = True
        if options.listener is not None:
            made._use_listener(options.listener)
        return made

    def _leave(self, timeout: float) -> None:
        """Ends this communicator, if it lives: once all ranks are over with their last calls."""
        try:
            if self._gpu is not None:
                self._gpu.close(timeout, failed=self.closed)
            if not self.closed:
                # A rank that is through it knows that the others are over with all calls before.
                self.barrier(timeout=timeout)
        except Error:
            pass  # a rank died now, or was through the barrier, and has ended this before
        self._core.abort(f"rank {self.rank} resizes")

    def _regroup(self: Self, timeout: float, options: ResizeOptions | None) -> Self:
        def make(mesh: Mesh, connect_timeout: float) -> Self:
            mesh.model = self._mesh.model
            core, hosts = build_core(mesh, None, {}, connect_timeout)
            return type(self)(core, mesh, hosts, self._timeout)

        links = SurvivorLinks(self._core.release_controls(), self.size)
        self._release()
        if options is not None:
            return Resize(self._mesh, links, make, options, timeout).run()
        return Agreement(self._mesh, links, make, self._mesh.transports, timeout).run()

    def _use_listener(self, listener: JoinListener) -> None:
        """Has the listener request a resize when a process asks to join and there is room."""
        if self.rank != 0:  # it was the lowest of a view that the others did not agree on
            listener.close()
            return
        self._listener = listener
        request = self._core.request_resize if has_room(self._mesh) else lambda: None
        listener.serve(self._mesh, request)

    def _close_listener(self, *, over: bool = False) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close(over=over)

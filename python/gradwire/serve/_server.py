"""Server: the shards of a parameter server that one process holds."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gradwire import _core
from gradwire._base import arguments, environment
from gradwire._base.deadline import Deadline
from gradwire._base.signals import handled
from gradwire._bootstrap.job_secret import secret_of_store
from gradwire._bootstrap.rendezvous import choose_transports
from gradwire._bootstrap.store import parse_address
from gradwire._bootstrap.store_server import StoreServer
from gradwire._errors import Error, InvalidArgument, describe
from gradwire.serve import _snapshot
from gradwire.serve._channels import ClientListener
from gradwire.serve._directory import MOST_SHARDS, Directory, service
from gradwire.serve._histories import History, begun

_ASK_SECONDS = 10.0  # for a shard's thread to answer this process
_COPY_SECONDS = 600.0  # for it to copy its state between its clients' frames
_TICK_SECONDS = 0.2

_log = logging.getLogger("gradwire")


class Server:
    """Serves shards of a model's parameters, until `stop()`; clients come and go as they like.

    A shard is one thread of the core, without Python's lock. It begins empty: the first client
    that connects brings names, shapes, update rule and initial values. Each client has a channel of
    its own to each shard; one that dies, stops or is slow holds up nobody else.

    Dean et al. 2012, "Large Scale Distributed Deep Networks", sec. 4.1 (the parameter server of
    Downpour SGD).
    """

    def __init__(
        self,
        shards: int = 1,
        *,
        only: Sequence[int] | None = None,
        store: str | None = None,
        name: str = "parameters",
        secret: bytes | str | None = None,
        transports: Sequence[str] | None = None,
        snapshot: str | os.PathLike[str] | None = None,
        interval: float = 60.0,
        timeout: float = 300.0,
    ) -> None:
        """Begins to listen for clients.

        `shards` is the number of shards in all; `only` names those that this process serves, all by
        default. `store` is the URL at which servers and clients meet, tcp://HOST:PORT on the host
        of shard 0, whose process listens there; port 0 takes a free one. Without it GRADWIRE_STORE
        counts; without both, one for processes of this host and user is made: see the attribute
        `store`. `name` tells several services of a job apart. `secret` keeps strangers out, as for
        `gradwire.init`. Into the folder `snapshot` each shard writes its state after each
        `interval`, and begins with what it finds there. `timeout` limits the rendezvous. Both are
        in seconds.

        Raises InvalidArgument, RendezvousError, and OSError for a snapshot that cannot be read.
        """
        self.shards = _number_of_shards(shards)
        self.only = _chosen(only, self.shards)
        self._folder = None if snapshot is None else Path(snapshot)
        self._interval = arguments.seconds(interval, "interval")
        self._stopping, self._ended = threading.Event(), False
        self.snapshot_error = ""
        deadline = Deadline(arguments.seconds(timeout))
        with contextlib.ExitStack() as undo:
            self.store = self._host_store(store, name, secret, undo)
            self._service = service(name, self.store, secret)
            self._directory = directory = Directory(self._service, deadline)
            undo.callback(lambda: self._directory.close())
            self._histories: dict[int, History] = {}
            self._cores = {shard: self._make(shard) for shard in self.only}
            for core in self._cores.values():
                undo.callback(core.stop)
            job = directory.publish_secret()
            offered = choose_transports(transports)
            where = directory.service_id, offered, directory.interface()
            self._listener = listener = ClientListener(job, *where, self._cores)
            undo.callback(listener.close)
            self._publish(directory)  # first, so that who has come in finds this start's history
            listener.open()
            self._writer = threading.Thread(target=self._write_snapshots, daemon=True)
            self._writer.start()
            self._undo = undo.pop_all()

    def run(self, *, until_idle: bool = False) -> None:
        """Serves until SIGINT or SIGTERM; `until_idle`: or until all clients have left."""
        self.run_while(lambda: not (until_idle and self._is_idle()))

    def run_while(self, goes_on: Callable[[], bool]) -> None:
        """Serves while `goes_on()`, which is asked a few times a second, or until a signal."""
        with handled((signal.SIGINT, signal.SIGTERM), lambda *_: self._stopping.set()):
            while not self._stopping.wait(_TICK_SECONDS) and goes_on():
                pass
        self.stop()

    def stop(self) -> None:
        """Ends all channels, writes last snapshots and stops listening. May be called again.

        A push that was acknowledged is in them. Where one cannot be written, the older one stays,
        and the attribute `snapshot_error` says why; it is empty otherwise.
        """
        if not self._ended:
            self._ended = True
            self._stopping.set()
            self._writer.join()
            for core in self._cores.values():
                core.stop()
            self.snapshot_error = self._write_all()
        self._undo.close()

    def stats(self) -> list[dict[str, Any]]:
        """Statistics of each shard of this process; see `ParameterServer.stats`."""
        return [json.loads(core.statistics(_ASK_SECONDS)) for core in self._cores.values()]

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        served = ",".join(map(str, self.only))
        return f"<gradwire.serve.Server of shards {served} of {self.shards} at {self.store}>"

    def _host_store(
        self, store: str | None, name: str, secret: bytes | str | None, undo: contextlib.ExitStack
    ) -> str:
        """The store's URL; the process of shard 0 listens there, unless a launcher does."""
        given = store if store is not None else environment.text("GRADWIRE_STORE")
        if given is None:
            given = f"unix://gradwire-{os.getuid()}-serve-{secrets.token_hex(8)}"
        elif not given.startswith("tcp:") or 0 not in self.only:
            return given
        found = service(name, given, secret)
        address = parse_address(given, any_port=True)
        server = StoreServer(address, found.job, secret_of_store(address, found.secret))
        undo.enter_context(server)
        return str(server.address)

    def _make(self, shard: int) -> _core.ServeServer:
        path = self._path(shard)
        if path is None or not path.exists():
            self._histories[shard] = begun((), 0)
            return _core.ServeServer(shard, self.shards)
        state = _snapshot.read(path)
        self._histories[shard] = begun(state.history, state.version)
        _log.warning("shard %d goes on at version %d, from %s", shard, state.version, path)
        slots = list(state.slots.items())
        try:
            return _core.ServeServer.restored(state.table, shard, state.version, state.steps, slots)
        except InvalidArgument as error:
            raise InvalidArgument(f"{path} cannot be gone on from: {error}") from None

    def _publish(self, directory: Directory) -> None:
        for shard in self.only:
            directory.publish(shard, self.shards, self._listener.address, self._histories[shard])

    def _follow_store(self) -> None:
        """Tells a new store where the shards are, where the old one's process has ended."""
        if not self._directory.store_is_gone():
            return
        with contextlib.suppress(Error, OSError):  # it is not there yet
            directory = Directory(self._service, Deadline(_TICK_SECONDS))
            self._listener.use_secret(directory.publish_secret().secret)
            self._publish(directory)
            self._directory.close()
            self._directory = directory
            _log.warning("the store at %s is a new one: told it where shards are", self.store)

    def _path(self, shard: int) -> Path | None:
        if self._folder is None:
            return None
        return _snapshot.path_of(self._folder, shard, self.shards)

    def _is_idle(self) -> bool:
        """Whether there were clients and all have left."""
        counts = [core.census(_ASK_SECONDS) for core in self._cores.values()]
        return all(admitted > 0 and joined == 0 for joined, admitted, _ in counts)

    def _write_snapshots(self) -> None:
        """Writes snapshots in their time, and those that clients ask for."""
        due = Deadline(self._interval)
        while not self._stopping.is_set():
            for shard, core in self._cores.items():
                ticket = core.snapshot_wanted(_TICK_SECONDS / len(self._cores))
                if ticket is not None:
                    core.snapshot_written(ticket, self._write(shard))
            self._follow_store()
            if due.passed:
                self._write_all()
                due = Deadline(self._interval)

    def _write_all(self) -> str:
        """Writes all shards' snapshots; returns why not, or an empty text."""
        if self._folder is None:
            return ""
        errors = []
        for shard, core in self._cores.items():
            try:
                *_, has_values = core.census(_ASK_SECONDS)
                error = self._write(shard) if has_values else ""
            except Error as failed:
                error = describe(failed)
            if error:
                errors.append(f"shard {shard}: no snapshot: {error}; the older one stays")
                _log.error("%s", errors[-1])
        return "; ".join(errors)

    def _write(self, shard: int) -> str:
        """Writes a shard's snapshot; returns why not, or an empty text."""
        path = self._path(shard)
        if path is None:
            return "the server has no folder for snapshots: start it with --snapshot DIR"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            copy = self._cores[shard].snapshot(_COPY_SECONDS)
            _snapshot.write(path, _snapshot.ShardState(**copy, history=self._histories[shard]))
        except (OSError, MemoryError, Error) as error:
            return describe(error)
        return ""


def _number_of_shards(given: int) -> int:
    shards = arguments.whole(given, "shards", least=1)
    if shards > MOST_SHARDS:
        raise InvalidArgument(f"shards={shards}: at most {MOST_SHARDS}")
    return shards


def _chosen(only: Sequence[int] | None, shards: int) -> tuple[int, ...]:
    if only is None:
        return tuple(range(shards))
    chosen = tuple(arguments.whole(each, "only", least=0) for each in only)
    if not chosen or len(set(chosen)) < len(chosen) or max(chosen) >= shards:
        raise InvalidArgument(f"only={list(only)} are no shards of {shards}")
    return chosen

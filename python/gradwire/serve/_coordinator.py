"""The coordinator's side of its connections to replicas: a thread that hands out portions."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from gradwire._base.deadline import Deadline
from gradwire._base.loops import survive
from gradwire._base.threads import AuthenticatingThread
from gradwire._bootstrap.authenticator import Admitted, Authenticator, refusals
from gradwire._bootstrap.endpoints import listen
from gradwire._bootstrap.handshake import HandshakeError, Hello, Purpose
from gradwire._bootstrap.mesh import Job
from gradwire._errors import Error, InvalidArgument, Timeout, describe
from gradwire._host.interfaces import Choice
from gradwire._host.transport_kinds import DEFAULTS
from gradwire.serve._sandblaster.messages import MAX_TEXT, OF_REPLICAS, Message, Reader, pack
from gradwire.serve._sandblaster.portions import Order, Portions

_TICK_SECONDS = 0.01  # between two looks at who is late, while a batch is computed
_IDLE_SECONDS = 0.5
_GOODBYE_SECONDS = 1.0
_MOST_UNSENT = 1 << 20  # bytes; a replica that reads so little has failed
_MOST_GONE = 8  # of which an error tells

_log = logging.getLogger("gradwire")


class Evaluated(NamedTuple):
    """The outcome of a batch: the loss, the pushes to fold, and who computed how much."""

    loss: float
    pushes: list[tuple[int, int]]
    portions: dict[str, int]
    copies: dict[str, int]


class _Peer:
    """A connection to one replica."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.reader = Reader(OF_REPLICAS)
        self.unsent = b""
        self.number: int | None = None  # after its hello
        self.name = "a replica"
        self.registered = selectors.EVENT_READ


class Coordinator:
    """Listens for replicas, which come and go, and has them compute batches.

    One thread owns everything but the request and its outcome.
    """

    def __init__(
        self,
        job: Job,
        service: int,
        interface: Choice,
        *,
        portions: int,
        push_every: int,
        backups: bool,
    ) -> None:
        """`portions` is the number of portions that replicas must be able to compute.

        `service` is the service's number (`Directory.service_id`).
        """
        self._service = service
        transports = DEFAULTS if interface.interface.loopback else ("tcp",)
        listeners, self.address = listen(transports, interface)
        self._authenticator = Authenticator(listeners, job.name, job.secret, self._check)
        self._number, self._push_every = portions, push_every
        self._portions = Portions(backups=backups)
        self._peers: dict[int, _Peer] = {}
        self._joined = 0
        self._gone: list[str] = []
        self._chosen: Sequence[int] = ()
        self._heard = 0.0
        self._lock = threading.Lock()
        self._request: tuple[int, Sequence[int], float] | None = None  # guarded by the lock
        self._batch = -1  # that is waited for, or -1; guarded by the lock
        self._outcome: Evaluated | Error | None = None  # of that batch; guarded by the lock
        self._over = threading.Event()
        self._patience: float | None = None  # of the request that is under way
        self._stopped = False
        self._error: str | None = None  # that ends it; written before _stopped
        self._failure: Error | None = None  # of the thread
        self._bell, self._button = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._authenticator, selectors.EVENT_READ, None)
        self._selector.register(self._bell, selectors.EVENT_READ, None)
        self._thread = AuthenticatingThread(
            target=self._run, name="gradwire-coordinator", daemon=True
        )
        self._thread.start()

    def evaluate(
        self, batch: int, portions: Sequence[int], patience: float, check: Callable[[], None]
    ) -> Evaluated:
        """Has replicas compute these portions, and waits until the shards have all pushes.

        Calls `check` now and then, which raises where it is of no use to wait any longer. Raises
        InvalidArgument that names a replica whose function failed, and Timeout where no replica has
        said anything for `patience` seconds.
        """
        with self._lock:
            self._over.clear()
            self._request, self._batch, self._outcome = (batch, portions, patience), batch, None
        try:
            self._ring()
            while not self._over.wait(_IDLE_SECONDS) and self._thread.is_alive():
                check()
        finally:
            with self._lock:  # also where the wait was interrupted: its outcome is nobody's
                outcome, self._batch = self._outcome, -1
        if isinstance(outcome, Evaluated):
            return outcome
        raise outcome or self._failure or Error("the coordinator was closed")

    def close(self, error: str | None = None) -> None:
        """Tells replicas that it is over, and stops listening. May be called again.

        `error` is why it ends without success: replicas then end with an error, too.
        """
        if self._stopped:
            return
        self._error = error
        self._stopped = True
        self._ring()
        self._thread.join()
        self._bell.close()
        self._button.close()

    def _ring(self) -> None:
        self._button.send(b"\0")

    def _check(self, hello: Hello, _: socket.socket) -> None:
        if hello.purpose != Purpose.COORDINATE or hello.communicator != self._service:
            raise HandshakeError("only portions for this service's replicas are given out here")

    def _run(self) -> None:
        try:
            while not self._stopped:
                survive(self._turn, self._note)
        except BaseException as error:
            _log.exception("the coordinator's thread has failed")
            self._failure = Error(f"the coordinator's thread has failed: {describe(error)}")
        finally:
            self._shut()

    def _note(self, why: str) -> None:
        """Notes that a turn went wrong; where that goes on, the batch ends for want of patience."""
        refusals.note("the coordinator", why)
        if self._patience is not None and time.monotonic() - self._heard > self._patience:
            self._finish(Timeout(f"no portion was computed for {self._patience:g} s: {why}"))

    def _turn(self) -> None:
        self._begin()
        for key, events in self._selector.select(self._nap()):
            peer: _Peer | None = key.data
            if peer is not None:
                self._serve(peer, events)
            elif key.fileobj is self._bell:
                self._bell.recv(4096)
        for admitted in self._authenticator.poll(0):
            survive(partial(self._admit, admitted), partial(refusals.note, "a replica"))
        self._begin()
        self._send(self._portions.tick(time.monotonic()))
        if self._patience is not None:
            self._look()

    def _nap(self) -> float:
        return _IDLE_SECONDS if self._patience is None else _TICK_SECONDS

    def _begin(self) -> None:
        """Begins with a batch that was asked for."""
        with self._lock:
            request, self._request = self._request, None
        if request is None:
            return
        batch, self._chosen, self._patience = request
        self._heard = time.monotonic()
        self._send(self._portions.begin(batch, len(self._chosen), self._heard))

    def _look(self) -> None:
        """Whether the batch is done, or nobody goes on with it."""
        assert self._patience is not None
        if self._portions.done:
            counts = self._portions.counts()
            named = {self._peers[number].name: each for number, each in counts.items()}
            self._finish(
                Evaluated(
                    self._portions.loss,
                    list(self._portions.pushes),
                    {name: kept for name, (kept, _) in named.items()},
                    {name: copies for name, (_, copies) in named.items()},
                )
            )
        elif time.monotonic() - self._heard > self._patience:
            names = ", ".join(each.name for each in self._peers.values())
            there = f"{names} did not answer" if names else "no replica is there"
            gone = f"; ended: {'; '.join(self._gone)}" if self._gone else ""
            self._finish(
                Timeout(f"no portion was computed for {self._patience:g} s: {there}{gone}")
            )

    def _finish(self, outcome: Evaluated | Error) -> None:
        batch = self._portions.batch
        self._send(self._portions.give_up())
        self._patience = None
        with self._lock:
            if batch == self._batch:
                self._outcome = outcome
                self._over.set()

    def _admit(self, admitted: Admitted) -> None:
        sock = admitted.sock
        try:
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, _Peer(sock))
        except BaseException:
            sock.close()
            raise

    def _serve(self, peer: _Peer, events: int) -> None:
        """Reads what a replica says, and sends it what is unsent."""
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(peer)
            if events & selectors.EVENT_READ:
                data = peer.sock.recv(1 << 16)
                if not data:
                    raise ConnectionResetError("its connection ended")
                for message in peer.reader.feed(data):
                    self._hear(peer, message)
        except BlockingIOError:
            return
        except Exception as error:  # whatever it is, only this replica ends
            self._end(peer, describe(error))

    def _hear(self, peer: _Peer, message: Message) -> None:
        now, what = time.monotonic(), message["what"]
        self._heard = now
        if peer.number is None or what == "hello":
            self._welcome(peer, message, now)
        elif what == "report":
            orders = self._portions.report(peer.number, message["ticket"], message["loss"], now)
            self._send(orders)
        elif what == "forgotten":
            self._send(self._portions.forgotten(peer.number, message["ticket"], now))
        elif what == "staged":
            name = (message["batch"], message["sequence"])
            self._send(self._portions.staged(peer.number, *name, message["tickets"], now))
        else:
            text = message["text"].encode("unicode_escape").decode()
            if self._patience is not None:
                self._finish(InvalidArgument(f"{peer.name}: {text}"))

    def _welcome(self, peer: _Peer, message: Message, now: float) -> None:
        if peer.number is not None or message["what"] != "hello":
            raise InvalidArgument("it did not introduce itself first, and once")
        if not message["name"].isprintable():
            raise InvalidArgument("its name is not printable")
        named = any(each.name == message["name"] for each in self._peers.values())
        peer.name = f"{message['name']} #{self._joined}" if named else message["name"]
        if message["portions"] != self._number:
            text = f"it has {message['portions']} portions, and the coordinator {self._number}"
            self._say(peer, pack("refused", text=text))
            raise InvalidArgument(text)
        peer.number = self._joined
        self._joined += 1
        self._peers[peer.number] = peer
        self._say(peer, pack("welcome", replica=peer.number, push_every=self._push_every))
        self._send(self._portions.join(peer.number, now))

    def _send(self, orders: Sequence[Order]) -> None:
        batch = self._portions.batch
        for order in orders:
            peer = self._peers.get(order.replica)
            if peer is None:
                continue
            if order.what == "push":
                self._say(peer, pack("push", batch=batch))
                continue
            fields = {"batch": batch, "ticket": order.ticket}
            if order.what == "work":
                fields["portion"] = self._chosen[order.portion]
            self._say(peer, pack(order.what, **fields))

    def _say(self, peer: _Peer, data: bytes) -> None:
        peer.unsent += data
        with contextlib.suppress(OSError):  # which its next read tells
            self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        with contextlib.suppress(BlockingIOError):
            while peer.unsent:
                peer.unsent = peer.unsent[peer.sock.send(peer.unsent) :]
        if len(peer.unsent) > _MOST_UNSENT:
            peer.sock.shutdown(socket.SHUT_RDWR)
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        if wanted != peer.registered:
            peer.registered = wanted
            self._selector.modify(peer.sock, wanted, peer)

    def _end(self, peer: _Peer, why: str) -> None:
        """A replica has ended; what it had is handed out again."""
        self._selector.unregister(peer.sock)
        peer.sock.close()
        if peer.number is None:
            _log.warning("a replica was not admitted: %s: %s", peer.name, why)
            return
        del self._peers[peer.number]
        _log.warning("%s has ended: %s", peer.name, why)
        self._gone = [*self._gone, f"{peer.name}: {why}"][-_MOST_GONE:]
        self._send(self._portions.leave(peer.number, time.monotonic()))

    def _shut(self) -> None:
        """Says goodbye, waits until replicas have read it, and closes everything."""
        peers = [key.data for key in self._selector.get_map().values() if key.data is not None]
        error = self._error if self._failure is None else describe(self._failure)
        goodbye = pack("end") if error is None else pack("broken", text=error[:MAX_TEXT])
        self._authenticator.close()
        self._selector.close()
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.sock.send(peer.unsent + goodbye)
                peer.sock.shutdown(socket.SHUT_WR)
        deadline = Deadline(_GOODBYE_SECONDS)
        for peer in peers:
            with peer.sock, contextlib.suppress(OSError):
                peer.sock.settimeout(deadline.left)
                while peer.sock.recv(1 << 16) and not deadline.passed:
                    pass

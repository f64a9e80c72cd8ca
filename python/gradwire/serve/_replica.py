"""A replica's side: it computes the portions that the coordinator hands out.

The caller's thread computes. Another one listens to the coordinator, adds up what is kept, and
pushes sums, so that no answer waits for a portion to be done.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gradwire._base.deadline import Deadline
from gradwire._base.threads import AuthenticatingThread
from gradwire._bootstrap.endpoints import open_socket
from gradwire._bootstrap.handshake import Hello, Purpose, SettingsError, client_handshake
from gradwire._bootstrap.mesh import Job
from gradwire._errors import (
    Error,
    InvalidArgument,
    RendezvousError,
    TransportError,
    describe,
)
from gradwire.serve._directory import Directory
from gradwire.serve._sandblaster.messages import (
    MAX_TEXT,
    OF_COORDINATORS,
    Message,
    Reader,
    pack,
)
from gradwire.serve._sandblaster.worker import Task, Worker

_RETRY_SECONDS = 0.05
_PUSH_SECONDS = 1.0  # after which a sum is pushed however little is in it
_LOOK_SECONDS = 2.0  # of silence, between two looks for another coordinator
_MOST_IN_PUSH = 1000  # portions, whose tickets are told in one message

Gradients = list[np.ndarray[Any, Any]]
Compute = Callable[[int], tuple[float, Gradients]]
Push = Callable[[Gradients, tuple[int, int, int]], None]


def connect(directory: Directory, job: Job, deadline: Deadline) -> tuple[socket.socket, str]:
    """A socket to the coordinator, and its name; raises RendezvousError.

    Tries again until the deadline, since one that is started anew has another address.
    """
    pause = threading.Event()
    while True:
        found = directory.find_coordinator(deadline)
        try:
            interface = directory.interface().interface
            sock = open_socket(found, "tcp", interface, deadline)
            number = found.listener
            hello = Hello(job.name, Purpose.COORDINATE, directory.service_id, listener=number)
            sock = client_handshake(sock, hello, job.secret, deadline)
            return sock, f"the coordinator ({found.name})"
        except SettingsError as error:
            raise RendezvousError(
                f"cannot connect to the coordinator ({found.name}): {error}"
            ) from error
        except (OSError, Error) as error:
            if deadline.passed:
                raise RendezvousError(
                    f"could not reach the coordinator ({found.name}) within "
                    f"{deadline.seconds:g} s ({describe(error)}): has it ended?"
                ) from error
        pause.wait(min(_RETRY_SECONDS, deadline.remaining))


def successor(directory: Directory, coordinator: str) -> str | None:
    """The name of a coordinator that has begun after this one, if there is any."""
    with contextlib.suppress(Error, OSError):
        found = f"the coordinator ({directory.find_coordinator(Deadline(_LOOK_SECONDS)).name})"
        return found if found != coordinator else None
    return None


class _Sum:
    """The sum of the gradients that were kept."""

    def __init__(self) -> None:
        self.total: Gradients | None = None

    def add(self, gradients: Gradients) -> None:
        """Takes these arrays over, or adds them."""
        if self.total is None:
            self.total = gradients
            return
        for mine, more in zip(self.total, gradients, strict=True):
            mine += more

    def clear(self) -> None:
        self.total = None


class Replica:
    """One replica, from its connection to a coordinator to its end."""

    def __init__(
        self,
        sock: socket.socket,
        coordinator: str,
        fetch: Callable[[], None],
        compute: Compute,
        push: Push,
        successor: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`fetch` brings the parameters; `compute` returns a portion's loss and fresh arrays.

        `push` pushes arrays staged under a batch, a replica and a sequence number. `successor`
        returns the name of another coordinator that has begun, if there is one.
        """
        self._sock, self._coordinator = sock, coordinator
        self._fetch, self._compute, self._push_staged = fetch, compute, push
        self._reader = Reader(OF_COORDINATORS)
        self._sum = _Sum()
        self._worker: Worker[Gradients] = Worker(self._sum.add, self._sum.clear)
        self._changed = threading.Condition()  # guards the worker, the sum and the end
        self._sending = threading.Lock()
        self._ended: Error | bool = False  # True: as the coordinator said
        self._number, self._push_every = -1, 1
        self._portions = 0
        self._successor = successor
        self._poll = select.poll()  # which, unlike select(), takes descriptors of any number
        self._poll.register(sock, select.POLLIN)
        self._fetched = -1  # the batch of the parameters that are here
        self._pushed_at = time.monotonic()

    def run(self, name: str, portions: int) -> None:
        """Computes portions until the coordinator says that it is over.

        Raises TransportError that names the coordinator where that has ended, or a shard;
        InvalidArgument; and what `compute` raises, of which the coordinator is told.
        """
        self._portions = portions
        with self._sock:
            self._say("hello", name=name, portions=portions)
            listener = AuthenticatingThread(
                target=self._listen, name="gradwire-replica", daemon=True
            )
            listener.start()
            try:
                while (task := self._next()) is not None:
                    self._do(task)
            finally:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
                listener.join()
        if isinstance(self._ended, Error):
            raise self._ended

    def _next(self) -> Task | None:
        """Waits for a portion; None at the end."""
        with self._changed:
            while not self._ended:
                if (task := self._worker.next()) is not None:
                    return task
                self._changed.wait()
        return None

    def _do(self, task: Task) -> None:
        if task.batch != self._fetched:
            self._fetch()
            self._fetched = task.batch
        try:
            loss, gradients = self._compute(task.portion)
            _require_finite(task.portion, loss, gradients)
        except Exception as error:
            text = f"its function failed: {type(error).__name__}: {describe(error)}"
            if isinstance(error, Error):
                text = describe(error)
            with contextlib.suppress(OSError):
                self._say("failed", text=text[:MAX_TEXT])
            raise
        with self._changed:
            answer = self._worker.computed(loss, gradients)
        with contextlib.suppress(OSError):  # which the listener tells
            if answer.what == "report":
                self._say("report", ticket=answer.ticket, loss=answer.loss)
            else:
                self._say("forgotten", ticket=answer.ticket)

    def _say(self, what: str, **fields: Any) -> None:
        data = pack(what, **fields)
        with self._sending:
            self._sock.sendall(data)

    def _listen(self) -> None:
        ended: Error | bool = True
        try:
            while self._turn():
                pass
        except Error as error:
            ended = error
        except OSError as error:
            ended = TransportError(f"{self._coordinator} is gone: {describe(error)}")
        except BaseException as error:  # or the caller would wait for portions for ever
            ended = Error(
                f"this replica's thread has failed: {type(error).__name__}: {describe(error)}"
            )
        with self._changed:
            self._ended = self._ended or ended
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _turn(self) -> bool:
        """Obeys what the coordinator says, and pushes when it is time; False: it is over."""
        asked = False
        rest = self._rest()
        heard = self._poll.poll(1e3 * _LOOK_SECONDS if rest is None else rest)
        if not heard and rest is None and (other := self._successor()) is not None:
            raise TransportError(f"{self._coordinator} says nothing, and {other} has begun")
        if heard:
            data = self._sock.recv(1 << 16)
            if not data:
                raise ConnectionResetError("it closed the connection")
            for message in self._reader.feed(data):
                if message["what"] == "end":
                    return False
                asked = self._obey(message) or asked
        self._push(asked)
        return True

    def _rest(self) -> float | None:
        """Milliseconds until what is kept is to be pushed; None where there is nothing."""
        with self._changed:
            if not self._worker.kept:
                return None
        return max(0.0, 1e3 * (self._pushed_at + _PUSH_SECONDS - time.monotonic()))

    def _obey(self, message: Message) -> bool:
        """Does what the coordinator says; returns whether it asks for the sum."""
        what, answer = message["what"], None
        if what == "welcome":
            self._welcome(message)
            return False
        if what in ("refused", "broken"):
            text = message["text"].encode("unicode_escape").decode()
            if what == "refused":
                raise InvalidArgument(f"{self._coordinator} refused this replica: {text}")
            raise TransportError(f"{self._coordinator} has ended with an error: {text}")
        with self._changed:
            if what == "work":
                if message["portion"] >= self._portions:
                    raise InvalidArgument(
                        f"{self._coordinator} asked for portion {message['portion']} of "
                        f"{self._portions}"
                    )
                self._worker.work(message["batch"], message["ticket"], message["portion"])
                self._changed.notify_all()
            elif what == "keep":
                if not self._worker.kept:
                    self._pushed_at = time.monotonic()
                self._worker.keep(message["batch"], message["ticket"])
            elif what == "drop":
                answer = self._worker.drop(message["batch"], message["ticket"])
        if answer is not None:
            self._say("forgotten", ticket=answer.ticket)
        return bool(what == "push")

    def _welcome(self, message: Message) -> None:
        if message["push_every"] == 0:
            raise InvalidArgument(f"{self._coordinator} wants a push after every 0 portions")
        self._number = message["replica"]
        self._push_every = min(message["push_every"], _MOST_IN_PUSH)

    def _push(self, asked: bool) -> None:
        """Pushes the sum if it was asked for, is large or old; then tells the coordinator."""
        with self._changed:
            due = time.monotonic() >= self._pushed_at + _PUSH_SECONDS
            least = 1 if asked or due else self._push_every
            if self._worker.kept < least:
                return
            total = self._sum.total
            push = self._worker.push()
        assert push is not None
        assert total is not None
        name = (push.batch, self._number, push.sequence)
        try:
            self._push_staged(total, name)
        except InvalidArgument as error:  # a shard has no room for it
            with contextlib.suppress(OSError):
                self._say("failed", text=describe(error)[:MAX_TEXT])
            raise
        self._say("staged", batch=push.batch, sequence=push.sequence, tickets=push.tickets)


def _require_finite(portion: int, loss: float, gradients: Gradients) -> None:
    if not math.isfinite(loss):
        raise InvalidArgument(f"the loss of portion {portion} is {loss}")
    if not all(np.isfinite(each).all() for each in gradients):
        raise InvalidArgument(f"a gradient of portion {portion} is NaN or infinite")

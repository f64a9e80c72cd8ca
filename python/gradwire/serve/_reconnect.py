"""A client of the core that is made anew when a server ends, and goes on where that one was."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gradwire import _core
from gradwire._base.deadline import Deadline
from gradwire._base.threads import AuthenticatingThread
from gradwire._errors import Error, InvalidArgument, RendezvousError, Timeout, TransportError
from gradwire.serve._histories import Versions

_NO_VERSION = _core.SERVE_NO_VERSION
_RETRY_SECONDS = 0.05
_ATTEMPT_SECONDS = 10.0  # after which close() is heard
_GOODBYE_SECONDS = 0.5  # to the shards that go on

_log = logging.getLogger("gradwire")


class Dialling(TransportError):
    """A server has ended and is being dialled; the call may be made again later."""


class Dialled(NamedTuple):
    """A client that has joined all shards, its number, and the version that each shard is at."""

    core: _core.ServeClient
    number: int
    versions: Versions


Dial = Callable[[Deadline, int], Dialled]  # takes the number of the client before


class LastingCall:
    """A call of a `LastingClient`, as the core's."""

    def __init__(
        self,
        client: Dialled,
        call: _core.ServeCall,
        again: Callable[[Dialled], _core.ServeCall] | None,
    ) -> None:
        """`again` makes the call of another client; None: it may be made once."""
        self.client, self.call, self.again = client, call, again
        self.lost: Versions | None = None  # what the shards went on from without it

    def done(self) -> bool:
        return self.call.done()

    def texts(self) -> list[str]:
        return self.call.texts()

    def versions(self) -> Versions:
        if self.lost is not None:
            return self.lost
        return Versions(self.call.versions(), self.client.versions.histories)

    def refusals(self) -> int:
        return 0 if self.lost is not None else self.call.refusals()

    def copied(self) -> bool:
        return self.call.copied()


class LastingClient:
    """Stands for a `_core.ServeClient`, of which it makes a new one when a server ends.

    Whoever calls first finds the end out, and dials; others wait meanwhile. Or, where it raises
    while it dials, a thread dials, and calls raise Dialling until it is over. Pulls and questions
    are made again. A push that was under way is not, as shards may have applied it: it is counted
    as lost, but for what was not sent, which is in the residuals where the push has error feedback.
    """

    def __init__(self, first: Dialled, dial: Dial, seconds: float) -> None:
        self._first = self._client = first
        self._dial, self._seconds = dial, seconds
        self.raises = False  # Dialling, in place of waiting
        self._dialler: threading.Thread | None = None  # where it raises, while it dials
        self._lock = threading.Lock()  # held while it dials
        self._brief = threading.Lock()  # guards what follows where it changes; never held for long
        self._known = [0] * len(first.versions)  # the last versions that the shards told
        self._pulled = [_NO_VERSION] * len(first.versions)  # those pulled last, before this client
        self._limit: Deadline | None = None  # while it dials
        self._failure: TransportError | None = None
        self._closed = False
        self._merged = self._stale = 0
        self._pushes: list[LastingCall] = []  # of which it is not known that they are applied
        self._lost = 0  # pushes

    def join(self, timeout: float) -> LastingCall:
        return self._begin(lambda client: client.core.join(timeout))

    def set(self, values: Any, timeout: float, memory: object) -> LastingCall:
        return self._begin(lambda client: client.core.set(values, timeout, memory))

    def push(
        self,
        gradients: Any,
        codec: Any,
        feedback: Any,
        rate: float,
        strict: bool,
        timeout: float,
        memory: object,
        versions: Sequence[int] = (),
        staged: tuple[int, int, int] | None = None,
    ) -> LastingCall:
        def begin(client: Dialled) -> _core.ServeCall:
            of = self._bounded(versions, client) if versions else self._versions_of(client)
            return client.core.push(
                gradients, codec, feedback, rate, strict, timeout, memory, of, staged
            )

        call = self._begin(begin, once=True)
        with self._brief:
            self._pushes.append(call)
        self._count_lost()
        return call

    def pull(self, values: Any, codec: str, timeout: float, memory: object) -> LastingCall:
        return self._begin(lambda client: client.core.pull(values, codec, timeout, memory))

    def command(self, *_: object) -> LastingCall:
        raise InvalidArgument(
            "commands to vectors are made once: connect without reconnect= to give them"
        )

    def ask(self, what: str, version: int, timeout: float) -> LastingCall:
        return self._begin(lambda client: client.core.ask(what, version, timeout))

    def wait(self, call: LastingCall, seconds: float) -> bool:
        limit = Deadline(seconds)
        while call.lost is None:
            client = call.client
            try:
                if not client.core.wait(call.call, limit.remaining):
                    return False
            except TransportError as error:
                if not self._renew(client, error, limit):
                    return False
                self._make_again(call)
            else:
                self._note(call.call.versions())
                return True
        return True

    def versions(self) -> list[int]:
        return self._client.core.versions()

    def merged(self) -> int:
        return self._merged + self._client.core.merged()

    def stale(self) -> int:
        return self._stale + self._client.core.stale()

    @property
    def lost(self) -> int:
        return self._lost

    def close(self, timeout: float) -> None:
        self._closed = True  # which ends a dialling
        with self._lock:
            self._client.core.close(timeout)

    def _begin(
        self, begin: Callable[[Dialled], _core.ServeCall], *, once: bool = False
    ) -> LastingCall:
        while True:
            client = self._client
            try:
                return LastingCall(client, begin(client), None if once else begin)
            except TransportError as error:
                self._renew(client, error, Deadline(self._seconds))

    def _make_again(self, call: LastingCall) -> None:
        if call.again is None:
            self._lose(call)
            return
        made = self._begin(call.again)
        call.client, call.call = made.client, made.call

    def _lose(self, call: LastingCall) -> None:
        with self._brief:
            self._lost += call.lost is None
            call.lost = self._client.versions

    def _count_lost(self) -> None:
        """Takes pushes that are over off the list, also those for which nobody waits."""
        with self._brief:
            pushes, self._pushes = self._pushes, []
        open_ones = []
        for each in pushes:
            if not each.done() or (_found_an_end(each) and each.client is self._client):
                open_ones.append(each)  # of the latter wait() may make a new client yet
            elif _found_an_end(each):
                self._lose(each)
        with self._brief:
            self._pushes += open_ones

    def _versions_of(self, client: Dialled) -> list[int]:
        """Versions of the values that were pulled last, be it before the end of a server.

        A shard that was started again has forgotten the later ones.
        """
        pairs = zip(client.core.versions(), self._pulled, strict=True)
        return [now if now != _NO_VERSION else was for now, was in pairs]

    def _bounded(self, versions: Sequence[int], client: Dialled) -> list[int]:
        """Versions that a caller names, for a client that may have joined later.

        Without their histories they are at most those that this client can have pulled: larger
        ones are of values that a shard had before it was started again.
        """
        if isinstance(versions, Versions) and len(versions) == len(self._known):
            return versions.within(client.versions.histories)
        if client is self._first or len(versions) != len(self._known):  # which the core refuses
            return list(versions)
        return list(map(min, versions, self._versions_of(client)))

    def _note(self, versions: list[int]) -> None:
        with self._brief:
            pairs = zip(self._known, versions, strict=True)
            self._known = [known if new == _NO_VERSION else max(known, new) for known, new in pairs]

    def _renew(self, client: Dialled, error: TransportError, within: Deadline) -> bool:
        """Makes a new client in the place of one; returns whether there is one in time.

        Raises TransportError when the shards could not be reached for too long, and Dialling
        where a thread dials them.
        """
        if self.raises:
            return self._renew_beside(client, error)
        if not self._lock.acquire(timeout=min(within.remaining, threading.TIMEOUT_MAX)):
            return False
        try:
            return self._renew_locked(client, error, within)
        finally:
            self._lock.release()

    def _renew_beside(self, client: Dialled, error: TransportError) -> bool:
        """Has a thread make a new client; True where there is one."""
        with self._brief:
            if self._client is not client:
                return True
            if self._failure is not None:
                raise self._failure
            if self._closed:
                raise error
            if self._dialler is None:
                dialler = AuthenticatingThread(
                    target=self._dial_alone, args=(client, error), name="gradwire-dial", daemon=True
                )
                self._dialler = dialler
                try:
                    dialler.start()
                except RuntimeError:  # the process has no thread left
                    self._dialler = None
                    raise
        raise Dialling(f"{error}; it is dialled, for {self._seconds:g} s at most")

    def _dial_alone(self, client: Dialled, error: TransportError) -> None:
        try:
            with self._lock:
                while not self._renew_locked(client, error, Deadline(self._seconds)):
                    pass
        except Error:
            pass  # which the next call raises
        except Exception as found:
            self._failure = TransportError(f"{error}; dialling it failed: {found!r}")
        finally:
            self._dialler = None

    def _renew_locked(self, client: Dialled, error: TransportError, within: Deadline) -> bool:
        if self._client is not client:
            return True
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise error
        if _core.SERVE_REPLACED in str(error):
            self._failure = TransportError(
                f"{error}: to dial would end that one; give each client its own replica="
            )
            raise self._failure
        if self._limit is None:
            _log.warning("%s; dialling for %g s at most", error, self._seconds)
            client.core.close(_GOODBYE_SECONDS)  # so that what it did not send is in the residuals
            self._limit = Deadline(self._seconds)
        try:
            dialled = self._dial_until(within)
        except (Error, OSError) as last:
            if not self._limit.passed and not self._closed and _may_pass(last):
                return False
            self._failure = TransportError(
                f"{error}; it was dialled for {self._seconds:g} s: {last}"
            )
            raise self._failure from last
        self._take(dialled)
        return True

    def _dial_until(self, within: Deadline) -> Dialled:
        assert self._limit is not None
        deadline = self._limit.within(within.remaining)
        pause = threading.Event()
        while True:
            try:
                return self._dial(deadline.within(_ATTEMPT_SECONDS), self._client.number)
            except (Error, OSError) as error:
                if deadline.passed or self._closed or not _may_pass(error):
                    raise
            pause.wait(_RETRY_SECONDS)

    def _take(self, dialled: Dialled) -> None:
        for shard, (was, now) in enumerate(zip(self._known, dialled.versions, strict=True)):
            if now < was:
                _log.warning("shard %d is at version %d, was at %d", shard, now, was)
        _log.warning("reached all shards again")
        before = self._client
        self._merged += before.core.merged()
        self._stale += before.core.stale()
        with self._brief:
            self._pulled = self._pulled_before(dialled)
            self._known = list(dialled.versions)
        self._client = dialled  # last: others read it at any time
        self._limit = None
        self._count_lost()

    def _pulled_before(self, later: Dialled) -> list[int]:
        """Versions that were pulled last, as a later client's shards know them."""
        pulled = Versions(self._versions_of(self._client), self._client.versions.histories)
        return pulled.within(later.versions.histories)


def _found_an_end(call: LastingCall) -> bool:
    """Whether a call that is over has failed since a server ended."""
    try:
        call.client.core.wait(call.call, 0)
    except TransportError:
        return True
    except Error:
        return False
    return False


def _may_pass(error: Error | OSError) -> bool:
    """Whether it is of a server that is not there, and may come."""
    if _core.SERVE_REPLACED in str(error):
        return False
    return isinstance(error, (TransportError, RendezvousError, Timeout, OSError))

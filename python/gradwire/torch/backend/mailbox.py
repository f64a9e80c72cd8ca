"""Mailbox: messages between two ranks, matched by tag.

gradwire's messages match in the order in which they were sent, and a receive knows the size.
torch's carry a tag and may be received in another order. So each message is preceded by a header
with its tag and size; one that nobody waits for yet is received into memory of the mailbox.

A header is only awaited while a receive is posted that it may be for: a rank that expects nothing
neither takes messages in nor times out. A header from any rank is never awaited beside one from a
certain rank, since it could take the message that follows that rank's header.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from gradwire._calls.on_cpu import Work
from gradwire._communicator import Communicator
from gradwire._errors import InvalidArgument, Timeout, TransportError, naming

_ANY = -1
_MOST_BYTES = 1 << 40  # of a message
_LONGEST = 2e6  # seconds, for headers that no receive needs
_GRACE = 5.0  # seconds for the communicator to notice a timeout first, which ends all its calls


class Receive:
    """One posted receive, which waits for a message of its tag."""

    def __init__(
        self,
        memory: torch.Tensor,
        source: int | None,
        tag: int,
        timeout: float,
        job_source: int | None = None,
    ) -> None:
        """Takes contiguous memory as bytes; a `source` of None is any rank.

        `job_source` is the source's number in the job, where that is another one.
        """
        self.memory, self.source, self.tag = memory, source, tag
        self._job_source = job_source
        self.size = memory.numel()
        self.deadline = time.monotonic() + timeout
        self._timeout = timeout
        self._matched = threading.Event()
        self._blocked: Callable[[], AbstractContextManager[None]] = nullcontext
        self._calls: list[Callable[[], None]] = []
        self._message: _Message | None = None
        self._error: Exception | None = None
        self._copied = False
        self._lock = threading.Lock()

    def takes(self, source: int, tag: int) -> bool:
        """Whether a message is for this receive."""
        return self.tag == tag and self.source in (None, source)

    def post(self, blocked: Callable[[], AbstractContextManager[None]]) -> None:
        """Says in which context a thread is that is blocked until the receive has its message."""
        self._blocked = blocked

    def match(self, message: _Message) -> None:
        """Gives the receive its message, which may still be on its way."""
        self._message = message
        self._end_wait()

    def fail(self, error: Exception) -> None:
        """Ends the receive with an error."""
        self._error = error
        self._end_wait()

    def when_matched(self, call: Callable[[], None]) -> None:
        """Calls back once a message has begun to come, or the receive has failed."""
        with self._lock:
            if not self._matched.is_set():
                self._calls.append(call)
                return
        call()

    def done(self) -> bool:
        """Whether the message is there, or the receive has failed."""
        return self._matched.is_set() and (self._message is None or self._message.work.done())

    def wait(self, timeout: float | None = None) -> int:
        """Blocks until the message is there; returns its sender. Raises the receive's error."""
        began = time.monotonic()
        own = max(self.deadline - began, 0) + _GRACE
        if not self._wait_for_match(own if timeout is None else min(timeout, own)):
            raise self._late(self._timeout if timeout is None else timeout)
        if self._error is not None:
            raise self._error
        message = self._message
        assert message is not None
        left = None if timeout is None else max(timeout - (time.monotonic() - began), 1e-3)
        message.work.wait(left)
        self._take(message)
        return message.source

    def _wait_for_match(self, seconds: float) -> bool:
        """Blocks until it has its message, and lets other ranks know for whom it waits."""
        if self._matched.is_set():
            return True
        with self._blocked():
            return self._matched.wait(seconds)

    def blame_source(self, error: Timeout) -> Timeout:
        """The error, with the rank that has not sent, if it is a certain one."""
        return error if self.source is None else naming(error, self.source, self._job_source)

    def _end_wait(self) -> None:
        with self._lock:
            self._matched.set()
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def _late(self, seconds: float) -> Timeout:
        return self.blame_source(
            Timeout(
                f"recv from {_name(self.source)} with tag {self.tag} timed out: it is not over "
                f"after its timeout={seconds:g} s"
            )
        )

    def _take(self, message: _Message) -> None:
        """Copies a message that came before the receive; checks its size."""
        with self._lock:
            if message.size != self.size:
                raise InvalidArgument(
                    f"rank {message.source} sent {message.size} bytes with tag {self.tag}, and "
                    f"recv() expects {self.size}: send and recv must agree on the size"
                )
            if message.memory is not self.memory and not self._copied:
                self.memory.copy_(torch.from_numpy(message.memory))
                self._copied = True


class _Message:
    """One message whose header has arrived."""

    def __init__(self, source: int, tag: int, size: int, memory: Any, work: Work) -> None:
        self.source, self.tag, self.size, self.memory, self.work = source, tag, size, memory, work


class Mailbox:
    """Sends and receives of one communicator; any thread may call it."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._sending = threading.Lock()  # a message follows its header
        self._lock = threading.Lock()  # for everything below
        self._posted: list[Receive] = []
        self._early: list[_Message] = []  # that no receive was posted for
        self._awaited: set[int] = set()  # ranks whose header is awaited, or _ANY
        self._listeners: dict[int, _Listener] = {}

    @property
    def waits(self) -> bool:
        """Whether a header is awaited, perhaps one that no receive needs any more."""
        return bool(self._awaited)

    @property
    def posted(self) -> bool:
        """Whether a receive has no message yet."""
        return bool(self._posted)

    def send(self, memory: torch.Tensor, to: int, tag: int, timeout: float | None) -> Work:
        """Begins to send contiguous memory, as bytes, to a rank."""
        header = np.array([tag, memory.numel()], np.int64)
        with self._sending:
            self._communicator.send(header, to, async_op=True, timeout=timeout)
            work: Work = self._communicator.send(memory, to, async_op=True, timeout=timeout)
        return work

    def receive(self, receive: Receive) -> None:
        """Posts a receive; raises the communicator's failure, also in a forked process."""
        self._communicator._core.check_failure(0)
        with self._lock:
            for message in self._early:
                if receive.takes(message.source, message.tag):
                    self._early.remove(message)
                    return receive.match(message)
            receive.post(partial(self._blocked_for, receive.source))
            self._posted.append(receive)
            self._listen()
        return None

    @contextmanager
    def _blocked_for(self, source: int | None) -> Iterator[None]:
        """Has the communicator count this thread, and not the listener's, as one that waits."""
        core, sender = self._communicator._core, _ANY if source is None else source
        core.begin_wait(sender)
        try:
            yield
        finally:
            core.end_wait(sender)

    def close(self, timeout: float) -> None:
        """Ends the threads; the communicator is closed or aborted before, if any is at work."""
        with self._lock:
            listeners = list(self._listeners.values())
            self._listeners.clear()
        for each in listeners:
            each.close(timeout)

    def _listen(self) -> None:
        """Awaits the headers that posted receives need; the lock is held."""
        if _ANY in self._awaited or not self._posted:
            return
        sources = {each.source for each in self._posted}
        if None not in sources:
            needed = {source for source in sources if source is not None}
        elif self._awaited:
            needed = set(range(self._communicator.size))
        else:
            needed = {_ANY}
        for source in needed - self._awaited:
            self._awaited.add(source)
            first = next((each for each in self._posted if source in (_ANY, each.source)), None)
            left = _LONGEST if first is None else max(first.deadline - time.monotonic(), 1e-3)
            self._listener(source).listen(left)

    def _listener(self, source: int) -> _Listener:
        if source not in self._listeners:
            self._listeners[source] = _Listener(source, self._receive_next)
        return self._listeners[source]

    def _receive_next(self, source: int, timeout: float) -> None:
        """Receives a header and begins to receive its message; on a listener's thread."""
        header = np.empty(2, np.int64)
        try:
            from_rank = None if source == _ANY else source
            sender = self._await(
                self._communicator.recv(header, from_rank, async_op=True, timeout=timeout)
            )
            tag, size = header.tolist()
            self._require_possible(sender, size)
            with self._lock:
                self._match(sender, tag, size)
                self._awaited.discard(source)
                self._listen()
        except Exception as error:  # also one of memory: nobody waits for this thread
            self._fail(source, error)

    def _await(self, work: Work) -> int:
        """Waits for a message, for which the program need not wait; returns its sender."""
        self._communicator._core.wait(work._core, math.inf, background=True)
        return work._core.source()

    def _require_possible(self, sender: int, size: int) -> None:
        """Raises TransportError for a size that no message has: a mailbox sent no such header."""
        if not 0 <= size <= _MOST_BYTES:
            text = f"rank {sender} announced a message of {size} bytes"
            job_rank = self._communicator._mesh.job_rank(sender)
            raise naming(TransportError(text), sender, job_rank)

    def _match(self, sender: int, tag: int, size: int) -> None:
        receive = next((each for each in self._posted if each.takes(sender, tag)), None)
        fits = receive is not None and receive.size == size
        memory = receive.memory if receive is not None and fits else np.empty(size, np.uint8)
        work = self._communicator.recv(memory, sender, async_op=True)
        message = _Message(sender, tag, size, memory, work)
        if receive is None:
            self._early.append(message)
        else:
            self._posted.remove(receive)
            receive.match(message)

    def _fail(self, source: int, error: Exception) -> None:
        """Fails all receives: the communicator has failed."""
        with self._lock:
            posted, self._posted = self._posted, []
            self._awaited.discard(source)
        for each in posted:
            each.fail(_named(error, each))


class _Listener:
    """A thread that awaits one header after the other, each time it is asked to."""

    def __init__(self, source: int, receive: Callable[[int, float], None]) -> None:
        self._source, self._receive = source, receive
        self._asked: SimpleQueue[float | None] = SimpleQueue()
        name = f"gradwire-messages-{'any' if source == _ANY else source}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def listen(self, timeout: float) -> None:
        """Awaits one header for at most `timeout` seconds."""
        self._asked.put(timeout)

    def close(self, timeout: float) -> None:
        """Ends the thread, and waits for that up to `timeout` seconds."""
        self._asked.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        while (timeout := self._asked.get()) is not None:
            self._receive(self._source, timeout)


def _name(source: int | None) -> str:
    return "any rank" if source is None else f"rank {source}"


def _named(error: Exception, receive: Receive) -> Exception:
    """The error, or for a receive that nobody answered in time one that names its rank."""
    if isinstance(error, Timeout) and error.peer < 0 and receive.source is not None:
        return receive.blame_source(Timeout(str(error)))
    return error

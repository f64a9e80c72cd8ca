"""A client of torch's TCPStore, through which rank 0 advertises its own store.

torchrun's MASTER_PORT belongs to torch's store, so gradwire cannot listen there.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from gradwire._base.deadline import Deadline
from gradwire._errors import InvalidArgument, RendezvousError, first_line

_TICK = timedelta(milliseconds=10)  # torch takes 0 for "no timeout"
_LEAST_PAUSE, _MOST_PAUSE = 0.005, 0.1  # seconds between two looks for a key


class TorchStore:
    """A client of the store at host:port; rank 0 hosts it where torchrun's agent does not.

    The store is shared with torch itself (`multi_tenant`), so `init_process_group` works beside it.
    """

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        size: int,
        deadline: Deadline,
        answer: float | None = None,
    ) -> None:
        """Connects by the deadline, or raises RendezvousError.

        Calls raise it when the store says nothing for `answer` seconds. Without `answer` they wait
        for a store that is stopped: torch sets no limit to them.
        """
        try:
            from torch.distributed import TCPStore
        except ImportError as error:
            raise RendezvousError(
                "RANK and WORLD_SIZE are set as by torchrun, whose store needs torch, which is not "
                "installed: install it, or set GRADWIRE_STORE=tcp://HOST:PORT with rank 0's host"
            ) from error
        agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._where, self._answer = f"{host}:{port}", answer
        is_master = rank == 0 and not agent_hosts
        options = {"wait_for_workers": False, "multi_tenant": True}
        timeout = max(timedelta(seconds=deadline.remaining), _TICK)

        def connect() -> Any:
            return TCPStore(host, port, size, is_master=is_master, timeout=timeout, **options)

        try:
            if not is_master:
                _await_listener(host, port, deadline)
            self._store = _connect((host, port, is_master), connect, deadline)
        except queue.Empty:
            raise self._unreachable(
                deadline, "it has not answered; is its process stopped?"
            ) from None
        except (OSError, RuntimeError) as error:
            reason = f"{first_line(error)}: is rank 0 or its torchrun running at this address?"
            raise self._unreachable(deadline, reason) from None

    def _unreachable(self, deadline: Deadline, reason: str) -> RendezvousError:
        return RendezvousError(
            f"could not reach torch's store at {self._where} "
            f"within {deadline.seconds:g} s: {reason}"
        )

    def set(self, key: str, value: bytes) -> None:
        """Stores the value; a later one replaces it."""
        self._call(self._store.set, key, value)

    def get(self, key: str, timeout: float) -> bytes:
        """Waits for a key's value and returns it; raises TimeoutError after `timeout` seconds."""
        if not self._present(key, timeout):
            raise TimeoutError(f"nobody set {key} within {timeout:g} s")
        return bytes(self._call(self._store.get, key))

    def find(self, key: str) -> bytes | None:
        """The value of a key; None if there is none yet."""
        if not self._call(self._store.check, [key]):
            return None
        return bytes(self._call(self._store.get, key))

    def _present(self, key: str, timeout: float) -> bool:
        """Whether the key is there in time. Looks again and again: torch's own wait prints text."""
        deadline, pause = Deadline(timeout), _LEAST_PAUSE
        while not self._call(self._store.check, [key]):
            if deadline.passed:
                return False
            threading.Event().wait(min(pause, deadline.remaining))
            pause = min(2 * pause, _MOST_PAUSE)
        return True

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            if self._answer is None:
                return function(*args)
            return _Answer(lambda: function(*args)).wait(self._answer)
        except RuntimeError as error:
            raise RendezvousError(
                f"lost torch's store at {self._where}: {first_line(error)}: its process, rank 0 or "
                "torchrun, has probably ended"
            ) from None
        except queue.Empty:
            raise RendezvousError(
                f"torch's store at {self._where} has not answered for {self._answer:g} s"
            ) from None


def connect_by_url(store: str, deadline: Deadline, answer: float) -> TorchStore:
    """A client of torch's store at torch://HOST:PORT, which another process serves."""
    return TorchStore(*parse_torch_address(store), 1, 2, deadline, answer)


def parse_torch_address(store: str) -> tuple[str, int]:
    """The host and port in torch://HOST:PORT; raises InvalidArgument for anything else."""
    try:
        parts = urlsplit(store)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise InvalidArgument(f"store={store!r} is not torch://HOST:PORT")
    return host, port


class _Answer:
    """The outcome of a function, on a thread that is left behind if that takes longer."""

    def __init__(self, function: Callable[[], Any]) -> None:
        """Calls the function."""
        self._outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._function = function
        threading.Thread(target=self._ask, name="gradwire-torch-store", daemon=True).start()

    def _ask(self) -> None:
        try:
            self._outcome.put((self._function(), None))
        except BaseException as error:
            self._outcome.put((None, error))

    def wait(self, seconds: float) -> Any:
        """Returns or raises what the function did, once; raises queue.Empty if it takes longer."""
        answer, error = self._outcome.get(timeout=seconds)
        if error is not None:
            raise error
        return answer


# Attempts to connect that nobody waits for any more. The next one takes up where they are, so that
# their threads do not pile up: torch's constructor waits without a limit for a store's first word.
_left: dict[tuple[str, int, bool], list[_Answer]] = {}


def _await_listener(host: str, port: int, deadline: Deadline) -> None:
    """Waits until somebody listens there; raises OSError if nobody does by the deadline.

    torch's own attempts to connect print frames of C++.
    """
    while True:
        try:
            socket.create_connection((host, port), deadline.left).close()
            return
        except OSError:
            if deadline.passed:
                raise
        threading.Event().wait(min(_MOST_PAUSE, deadline.remaining))


def _connect(key: tuple[str, int, bool], connect: Callable[[], Any], deadline: Deadline) -> Any:
    """Returns what connect() does; raises queue.Empty when that takes until the deadline."""
    left = _left.setdefault(key, [])
    with contextlib.suppress(IndexError, RuntimeError):
        return _await(left.pop(), left, deadline)
    return _await(_Answer(connect), left, deadline)


def _await(attempt: _Answer, left: list[_Answer], deadline: Deadline) -> Any:
    try:
        return attempt.wait(deadline.left)
    except BaseException as error:
        if not isinstance(error, RuntimeError):  # it goes on; so it does after Ctrl-C
            left.append(attempt)
        raise


os.register_at_fork(after_in_child=_left.clear)  # which has none of these threads

"""Calls on GPUs: how the ranks' GPUs come to exchange messages, and how a call gets to its stream.

Everything is set up in the first call with an array on a GPU, which every rank makes; its GPU is
the rank's from then on. Ranks on GPUs of their own exchange messages over NCCL, threads of one
process over copies on the device, and all others by way of the CPU transports (`GRADWIRE_GPU_LINKS`
says otherwise).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from gradwire import _core
from gradwire._arrays import cuda_arrays
from gradwire._arrays.operands import Operand
from gradwire._base import environment
from gradwire._base.group import Group
from gradwire._bootstrap.mesh import host_identity
from gradwire._errors import Error, InvalidArgument
from gradwire._feedback import ErrorFeedback
from gradwire._host import cuda

LINKS = ("auto", "nccl", "host", "nccl+host", "loopback")
_CARD_BYTES = 1024
_ID_BYTES = 128  # of NCCL

_loopbacks: weakref.WeakValueDictionary[str, _core.CudaLoopback] = weakref.WeakValueDictionary()
_lock = threading.Lock()  # of those


class _Communicator(Group, Protocol):
    """A `Communicator`, of which this uses what no user does."""

    _core: _core.Communicator
    _timeout: float

    @property
    def traffic(self) -> Any: ...

    def split(self, color: int | None) -> _Communicator | None: ...

    def close(self, timeout: float | None) -> None: ...


class _Card(NamedTuple):
    """What a rank tells the others of itself."""

    process: str
    device: str  # what identifies it on its host
    name: str
    nccl: str  # its version; empty: none
    wish: str
    token: str  # rank 0's: what this set-up is called within a process


class Gpu:
    """One rank's GPU in one communicator."""

    def __init__(self, communicator: _Communicator, device: int) -> None:
        """Every rank makes one at once. Raises InvalidArgument on all where it cannot be."""
        self.device = device
        timeout = communicator._timeout
        card = _card(device)
        cards = _exchange(communicator, card)
        links = _choose(cards)
        side = communicator.split(0)
        assert side is not None
        self._side, self._carriers = side, list[Any]()
        messages = self._messages(links, communicator, cards, timeout)
        self._core = _core.Gpu(communicator._core, side._core, device, messages)
        self._stream: _core.CudaStream | None = None  # of calls that are not waited for
        self._lock = threading.Lock()  # a call at a time
        # Arrays whose library nobody can tell, until that stream has used them.
        self._kept: deque[tuple[_core.CudaEvent, list[Any]]] = deque()
        self._keeping = threading.Lock()  # of those
        self._done = False

    @property
    def links(self) -> str:
        """How its messages travel: "nccl", "host", "host+nccl" or "loopback"."""
        return self._core.messages

    @property
    def bytes_sent(self) -> int:
        """By way of the host those that crossed it, else as they were handed over."""
        if self._carriers:
            return sum(each.traffic.bytes_sent for each in self._carriers)
        return self._core.sent

    @property
    def stream(self) -> int | None:
        """The handle of the stream of calls that are not waited for, once there was one."""
        return None if self._stream is None else self._stream.handle

    def run(
        self,
        request: _core.Request,
        feedback: ErrorFeedback | None,
        arrays: Sequence[Operand],
        timeout: float,
    ) -> None:
        """Enqueues it on the caller's stream, behind what is on all streams of the arrays.

        Not on one that means another stream on another thread: NCCL launches from its own.
        """
        stream, *others = self._callers(arrays)
        if stream == cuda_arrays.PER_THREAD_STREAM:
            event = self.begin(request, feedback, arrays, timeout)
            others.append(stream)
        elif not others:
            self._enqueue(request, feedback, stream, timeout)
        else:
            event = _core.CudaEvent(self.device)
            _follow(stream, others, event)
            self._enqueue(request, feedback, stream, timeout)
            event.record(stream)
        for each in others:
            event.wait(each)

    def begin(
        self,
        request: _core.Request,
        feedback: ErrorFeedback | None,
        arrays: Sequence[Operand],
        timeout: float,
    ) -> _core.CudaEvent:
        """Enqueues it on a stream of gradwire's, behind what is on the caller's; the end of it."""
        callers, own = self._callers(arrays), self._own_stream()
        event = _core.CudaEvent(self.device)
        _follow(own, callers, event)
        unkept = [each.array for each in arrays if not cuda_arrays.keep_for(each.array, own)]
        try:
            self._enqueue(request, feedback, own, timeout)
        finally:
            event.record(own)
            self._keep(unkept, event, own)
        return event

    def _callers(self, arrays: Sequence[Operand]) -> list[int]:
        return cuda_arrays.streams_of((each.array for each in arrays), self.device)

    def _own_stream(self) -> int:
        self.require_alive()  # in a fork the lock may never be free
        with self._lock:
            if self._stream is None:
                self._stream = _core.CudaStream(self.device)
            return self._stream.handle

    def _enqueue(
        self,
        request: _core.Request,
        feedback: ErrorFeedback | None,
        stream: int,
        timeout: float,
    ) -> None:
        self.require_alive()
        if self._kept and not _core.cuda_is_captured(self.device, stream):
            self._let_go()
        with self._lock:
            kept = None if feedback is None else feedback._on_gpu(self.device, stream)
            self._core.run(request, kept, stream, timeout)

    def _keep(self, arrays: list[Any], event: _core.CudaEvent, stream: int) -> None:
        """Those of a graph are the caller's to keep, for as long as it is replayed."""
        if arrays and not _core.cuda_is_captured(self.device, stream):
            with self._keeping:
                self._kept.append((event, arrays))

    def _let_go(self) -> None:
        """Of what is over."""
        over = []  # which ends without the lock: it may run any code
        with self._keeping:
            while self._kept and self._kept[0][0].done():
                over.append(self._kept.popleft())

    def require_alive(self) -> None:
        """Raises what has failed."""
        self._core.require_alive()

    def abort(self, reason: str) -> None:
        """Ends what is enqueued."""
        self._core.abort(reason)

    def close(self, timeout: float, *, failed: bool) -> None:
        """Waits for what is enqueued, and lets go; raises what ends it, but not an old failure.

        `failed`: a call on CPUs has raised one, which may be on its way here.
        """
        if self._done:
            return
        self._done = True
        try:
            if not self._has_failed():
                with contextlib.suppress(Error) if failed else contextlib.nullcontext():
                    self._core.finish(timeout)
        finally:
            self._core.close()
            with contextlib.suppress(Error):
                self._let_go()
            for each in (*self._carriers, self._side):
                each.close(timeout)

    def _has_failed(self) -> bool:
        try:
            self.require_alive()
        except Error:
            return True
        return False

    def _messages(
        self, links: str, communicator: _Communicator, cards: Sequence[_Card], timeout: float
    ) -> _core.CudaMessages:
        rank, size = communicator.rank, communicator.size
        if links == "loopback":
            self._shared = _loopback(cards[0].token, size)  # for those yet to come
            return _core.CudaMessages.loopback(self._shared, rank, self.device, timeout)
        if links == "host":
            return self._by_host(communicator, timeout)
        if links == "nccl":
            return self._by_nccl(communicator, range(size), timeout)
        own = next(host for host in communicator.hosts if rank in host)
        ways = [self._by_host(communicator, timeout), self._by_nccl(communicator, own, timeout)]
        routes = [(1, own.index(each)) if each in own else (0, each) for each in range(size)]
        return _core.CudaMessages.routed(ways, routes)

    def _by_host(self, communicator: _Communicator, timeout: float) -> _core.CudaMessages:
        carrier = communicator.split(0)
        assert carrier is not None
        self._carriers.append(carrier)
        return _core.CudaMessages.host(carrier._core, self.device, timeout)

    def _by_nccl(
        self, communicator: _Communicator, ranks: Sequence[int], timeout: float
    ) -> _core.CudaMessages:
        """Of those ranks, the first of which makes the id; every rank of the communicator calls."""
        search = cuda.nccl_wheels()
        own = np.zeros(_ID_BYTES, np.uint8)
        if communicator.rank == ranks[0]:
            own[:] = np.frombuffer(_core.CudaMessages.nccl_id(search), np.uint8)
        ids = communicator.all_gather(own).reshape(communicator.size, _ID_BYTES)
        return _core.CudaMessages.nccl(
            ids[ranks[0]].tobytes(),
            list(ranks).index(communicator.rank),
            len(ranks),
            self.device,
            timeout,
            search,
        )


def _follow(stream: int, others: Sequence[int], event: _core.CudaEvent) -> None:
    """Lets the stream wait for what is on the others."""
    for each in others:
        event.record(each)
        event.wait(stream)


def _card(device: int) -> _Card:
    identity, name = _core.cuda_device_identity(device)
    wish = environment.text("GRADWIRE_GPU_LINKS") or "auto"
    if wish not in LINKS:
        raise InvalidArgument(f"GRADWIRE_GPU_LINKS={wish} is none of {', '.join(LINKS)}")
    process = f"{host_identity()} {os.readlink('/proc/self/ns/pid')} {os.getpid()}"
    return _Card(process, identity, name, cuda.nccl_version(), wish, secrets.token_hex(8))


def _exchange(communicator: _Communicator, card: _Card) -> list[_Card]:
    """All ranks' cards, by rank."""
    text = json.dumps(card).encode()
    own = np.zeros(_CARD_BYTES, np.uint8)
    own[: len(text)] = np.frombuffer(text, np.uint8)
    cards = communicator.all_gather(own).reshape(communicator.size, _CARD_BYTES)
    return [_Card(*json.loads(each.tobytes().rstrip(b"\0"))) for each in cards]


def _choose(cards: Sequence[_Card]) -> str:
    """The links, of which all ranks find the same; raises InvalidArgument on all of them."""
    wishes = {each.wish for each in cards}
    if len(wishes) > 1:
        raise InvalidArgument(
            f"ranks disagree on GPUs: GRADWIRE_GPU_LINKS is {' and '.join(sorted(wishes))}"
        )
    (wish,) = wishes
    alone = len({each.process for each in cards}) == 1
    if wish == "loopback" and not alone:
        raise InvalidArgument("GRADWIRE_GPU_LINKS=loopback is for ranks that are one process")
    if wish in ("host", "nccl+host"):
        _require_processes(cards, f"GRADWIRE_GPU_LINKS={wish}")
    without = [rank for rank, each in enumerate(cards) if not each.nccl]
    if wish.startswith("nccl") and without:
        raise InvalidArgument(
            f"GRADWIRE_GPU_LINKS={wish}, and rank {without[0]} has no NCCL: install a wheel of it "
            "(nvidia-nccl-cu13 or -cu12), or name its file in GRADWIRE_NCCL_SO"
        )
    if wish != "auto":
        return wish
    own = len({each.device for each in cards}) == len(cards)
    if own and not without:
        return "nccl"
    if alone:
        return "loopback"
    why = "they share GPUs" if not own else f"rank {without[0]} has no NCCL"
    _require_processes(cards, f"ranks need the host between their GPUs, as {why}")
    return "host"


def _require_processes(cards: Sequence[_Card], what: str) -> None:
    """By way of the host a rank's stream waits in a function of the host.

    CUDA may run those of one process one after the other, so that its ranks wait for each other.
    """
    first: dict[str, int] = {}
    for rank, card in enumerate(cards):
        other = first.setdefault(card.process, rank)
        if other != rank:
            raise InvalidArgument(
                f"{what}: ranks {other} and {rank} are threads of one process, and their GPUs "
                "could wait for each other for ever: give each rank a process of its own, or each "
                "a GPU of its own and NCCL (GRADWIRE_GPU_LINKS=nccl)"
            )


def _loopback(token: str, size: int) -> _core.CudaLoopback:
    with _lock:
        shared = _loopbacks.get(token)
        if shared is None:
            shared = _loopbacks[token] = _core.CudaLoopback(size)
        return shared

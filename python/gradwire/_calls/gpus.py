"""Calls on GPUs: messages between the ranks' GPUs, and the order of calls on streams.

Everything is set up in the first call with an array on a GPU, which every rank makes; that GPU is
the rank's from then on. Ranks with GPUs of their own exchange messages over NCCL, threads of one
process by copies on the device, and all others over the CPU transports, unless
`GRADWIRE_GPU_LINKS` says otherwise.
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

from gradwire import _core, _model
from gradwire._arrays import cuda_arrays
from gradwire._arrays.operands import Operand
from gradwire._base import environment
from gradwire._base.deadline import Deadline
from gradwire._base.group import Group
from gradwire._bootstrap.agreed_model import host_set
from gradwire._bootstrap.groups.split import gather_bytes
from gradwire._bootstrap.mesh import Mesh
from gradwire._errors import Error, InvalidArgument
from gradwire._feedback import ErrorFeedback
from gradwire._host import cuda, encryption
from gradwire._host.identity import host_identity

LINKS = ("auto", "nccl", "host", "nccl+host", "loopback")

_loopbacks: weakref.WeakValueDictionary[str, _core.CudaLoopback] = weakref.WeakValueDictionary()
_lock = threading.Lock()  # guards _loopbacks


class _Communicator(Group, Protocol):
    """The private part of a `Communicator` that GPUs need."""

    _core: _core.Communicator
    _timeout: float
    _mesh: Mesh

    @property
    def traffic(self) -> Any: ...

    def split(self, color: int | None) -> _Communicator | None: ...

    def close(self, timeout: float | None) -> None: ...


class _GpuInfo(NamedTuple):
    """Process and GPU of a rank, which the ranks exchange."""

    process: str
    device: str  # identifies the GPU on its host
    name: str
    nccl: str  # its version; empty without NCCL
    requested: str
    token: str  # rank 0's names this set-up within a process


class Gpu:
    """One rank's GPU in one communicator."""

    def __init__(self, communicator: _Communicator, device: int) -> None:
        """Sets up messages between GPUs; every rank calls it. Raises InvalidArgument on all."""
        self.device = device
        timeout = communicator._timeout
        info = _gpu_info(device)
        infos = _exchange_infos(communicator, info)
        links = _choose_links(infos)
        if links == "nccl" and len({each.process.split()[0] for each in infos}) > 1:
            encryption.tell_unsealed("NCCL", communicator.rank)
        shadow = communicator.split(0)
        assert shadow is not None
        self._shadow, self._carriers = shadow, list[Any]()
        messages = self._messages(links, communicator, infos, timeout)
        self._core = _core.Gpu(communicator._core, shadow._core, device, messages)
        model = _agreed_model(communicator, self._core.messages)
        if model is not None:
            self._core.set_model(model)
        self._stream: _core.CudaStream | None = None  # of asynchronous calls
        self._lock = threading.Lock()  # one call at a time
        # Arrays of libraries that cannot be told of our stream, held until it has used them.
        self._in_use: deque[tuple[_core.CudaEvent, list[Any]]] = deque()
        self._in_use_lock = threading.Lock()
        self._closed = False

    @property
    def links(self) -> str:
        """The way of messages: "nccl", "host", "host+nccl" or "loopback"."""
        return self._core.messages

    @property
    def bytes_sent(self) -> int:
        """Bytes sent: over the host those of its transports, otherwise those of the messages."""
        if self._carriers:
            return sum(each.traffic.bytes_sent for each in self._carriers)
        return self._core.sent

    @property
    def stream(self) -> int | None:
        """The handle of the stream of asynchronous calls; None before the first such call."""
        return None if self._stream is None else self._stream.handle

    def run(
        self,
        request: _core.Request,
        feedback: ErrorFeedback | None,
        arrays: Sequence[Operand],
        timeout: float,
    ) -> None:
        """Enqueues a call on the caller's stream, behind all work on the streams of its arrays.

        For the default stream of each thread gradwire's own stream is used: NCCL launches from a
        thread of its own, on which that handle means another stream.
        """
        stream, *others = self._caller_streams(arrays)
        if stream == cuda_arrays.PER_THREAD_STREAM:
            event = self.begin(request, feedback, arrays, timeout)
            others.append(stream)
        elif not others:
            self._enqueue(request, feedback, stream, timeout)
        else:
            event = _core.CudaEvent(self.device)
            _wait_for_streams(stream, others, event)
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
        """Enqueues a call on gradwire's stream, after the caller's; returns an event at its end."""
        callers, own = self._caller_streams(arrays), self._own_stream()
        event = _core.CudaEvent(self.device)
        _wait_for_streams(own, callers, event)
        unknown_use = [each.array for each in arrays if not cuda_arrays.keep_for(each.array, own)]
        try:
            self._enqueue(request, feedback, own, timeout)
        finally:
            event.record(own)
            self._hold_until(unknown_use, event, own)
        return event

    def _caller_streams(self, arrays: Sequence[Operand]) -> list[int]:
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
        if self._in_use and not _core.cuda_is_captured(self.device, stream):
            self._release_finished()
        with self._lock:
            kept = None if feedback is None else feedback._on_gpu(self.device, stream)
            self._core.run(request, kept, stream, timeout)

    def _hold_until(self, arrays: list[Any], event: _core.CudaEvent, stream: int) -> None:
        """Holds arrays until the event; those of a captured graph are the caller's to keep."""
        if arrays and not _core.cuda_is_captured(self.device, stream):
            with self._in_use_lock:
                self._in_use.append((event, arrays))

    def _release_finished(self) -> None:
        """Releases the arrays of calls that are over."""
        over = []  # destroyed without the lock: that may run any code
        with self._in_use_lock:
            while self._in_use and self._in_use[0][0].done():
                over.append(self._in_use.popleft())

    def require_alive(self) -> None:
        """Raises the failure of an earlier call, if there was one."""
        self._core.require_alive()

    def require_success(self) -> None:
        """Raises the failure of the calls so far, whose streams the caller has waited for.

        Streams go on after a failure, with bytes that never came. `require_alive` may not know yet.
        """
        self._core.require_success()

    def should_stop(self) -> bool:
        """`Communicator.should_stop` for the calls on GPUs."""
        return self._core.should_stop()

    def should_resize(self) -> bool:
        """`Communicator.should_resize` for the calls on GPUs."""
        return self._core.should_resize()

    def abort(self, reason: str) -> None:
        """Ends all enqueued calls."""
        self._core.abort(reason)

    def close(self, timeout: float, *, failed: bool) -> None:
        """Waits for enqueued calls and releases everything; raises a new failure, not an old one.

        `failed` says that a call on CPUs has failed, which may still be on its way here.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if not self._has_failed():
                with contextlib.suppress(Error) if failed else contextlib.nullcontext():
                    self._core.finish(timeout)
        finally:
            self._core.close()
            with contextlib.suppress(Error):
                self._release_finished()
            for each in (*self._carriers, self._shadow):
                each.close(timeout)

    def _has_failed(self) -> bool:
        try:
            self.require_alive()
        except Error:
            return True
        return False

    def _messages(
        self, links: str, communicator: _Communicator, infos: Sequence[_GpuInfo], timeout: float
    ) -> _core.CudaMessages:
        rank, size = communicator.rank, communicator.size
        if links == "loopback":
            self._shared = _loopback(
                infos[0].token, size
            )  # keeps it alive for ranks that come later
            return _core.CudaMessages.loopback(self._shared, rank, self.device, timeout)
        if links == "host":
            return self._by_host(communicator, timeout)
        if links == "nccl":
            return self._by_nccl(communicator, range(size), timeout)
        own = next(host for host in communicator.hosts if rank in host)
        messages = [
            self._by_host(communicator, timeout),
            self._by_nccl(communicator, own, timeout),
        ]
        routes = [(1, own.index(each)) if each in own else (0, each) for each in range(size)]
        return _core.CudaMessages.routed(messages, routes)

    def _by_host(self, communicator: _Communicator, timeout: float) -> _core.CudaMessages:
        carrier = communicator.split(0)
        assert carrier is not None
        self._carriers.append(carrier)
        return _core.CudaMessages.host(carrier._core, self.device, timeout)

    def _by_nccl(
        self, communicator: _Communicator, ranks: Sequence[int], timeout: float
    ) -> _core.CudaMessages:
        """Messages among `ranks`, the first of which makes the id; every rank calls it."""
        search = cuda.nccl_wheels()
        own = _core.CudaMessages.nccl_id(search) if communicator.rank == ranks[0] else b""
        return _core.CudaMessages.nccl(
            gather_bytes(communicator, own, Deadline(timeout))[ranks[0]],
            list(ranks).index(communicator.rank),
            len(ranks),
            self.device,
            timeout,
            search,
            environment.flag("GRADWIRE_NCCL_BLOCKING"),
        )


def _wait_for_streams(stream: int, others: Sequence[int], event: _core.CudaEvent) -> None:
    """Makes the stream wait for all work on the others."""
    for each in others:
        event.record(each)
        event.wait(stream)


def _gpu_info(device: int) -> _GpuInfo:
    identity, name = _core.cuda_device_identity(device)
    requested = environment.text("GRADWIRE_GPU_LINKS") or "auto"
    if requested not in LINKS:
        raise InvalidArgument(f"GRADWIRE_GPU_LINKS={requested} is none of {', '.join(LINKS)}")
    if requested.startswith("nccl"):
        encryption.require_allowed("NCCL", "set GRADWIRE_GPU_LINKS=host")
    usable = encryption.setting() is not encryption.Setting.ON
    nccl = cuda.nccl_version() if usable else ""
    process = f"{host_identity()} {os.readlink('/proc/self/ns/pid')} {os.getpid()}"
    return _GpuInfo(process, identity, name, nccl, requested, secrets.token_hex(8))


def _exchange_infos(communicator: _Communicator, info: _GpuInfo) -> list[_GpuInfo]:
    """All ranks' information, by rank."""
    infos = gather_bytes(communicator, json.dumps(info).encode(), Deadline(communicator._timeout))
    return [_GpuInfo(*json.loads(each)) for each in infos]


def _agreed_model(communicator: _Communicator, links: str) -> _core.CostModel | None:
    """Rank 0's model of the GPUs; None for the built-in one. Raises what rank 0 found wrong."""
    own = json.dumps(_own_model(communicator, links)).encode() if communicator.rank == 0 else b""
    found = gather_bytes(communicator, own, Deadline(communicator._timeout))
    wrong, parameters = json.loads(found[0])
    if wrong:
        raise InvalidArgument(wrong)
    return None if parameters is None else _model.for_gpus(parameters)


def _own_model(communicator: _Communicator, links: str) -> tuple[str, dict[str, float] | None]:
    """The error of a file that is wrong, or empty; and the parameters in it."""
    try:
        found = _model.find_for_gpus(host_set(communicator._mesh), links)
    except InvalidArgument as error:
        return str(error), None
    return "", None if found is None else found.parameters


def _choose_links(infos: Sequence[_GpuInfo]) -> str:
    """Chooses how messages travel, alike on all ranks; raises InvalidArgument on all of them."""
    all_requested = {each.requested for each in infos}
    if len(all_requested) > 1:
        raise InvalidArgument(
            f"ranks disagree on GPUs: GRADWIRE_GPU_LINKS is {' and '.join(sorted(all_requested))}"
        )
    (requested,) = all_requested
    alone = len({each.process for each in infos}) == 1
    if requested == "loopback" and not alone:
        raise InvalidArgument("GRADWIRE_GPU_LINKS=loopback is for ranks that are one process")
    if requested in ("host", "nccl+host"):
        _require_processes(infos, f"GRADWIRE_GPU_LINKS={requested}")
    without = [rank for rank, each in enumerate(infos) if not each.nccl]
    if requested.startswith("nccl") and without:
        raise InvalidArgument(
            f"GRADWIRE_GPU_LINKS={requested}, and rank {without[0]} has no NCCL: install a wheel "
            "of it (nvidia-nccl-cu13 or -cu12), or name its file in GRADWIRE_NCCL_SO"
        )
    if requested != "auto":
        return requested
    own = len({each.device for each in infos}) == len(infos)
    if own and not without:
        return "nccl"
    if alone:
        return "loopback"
    why = "they share GPUs" if not own else f"rank {without[0]} has no NCCL"
    _require_processes(infos, f"ranks need the host between their GPUs, as {why}")
    return "host"


def _require_processes(infos: Sequence[_GpuInfo], what: str) -> None:
    """Raises InvalidArgument when two ranks are threads of one process.

    Over the host, a rank's stream waits in a host function, and CUDA may run those of one process
    one after the other, so that its ranks would wait for each other for ever.
    """
    first: dict[str, int] = {}
    for rank, info in enumerate(infos):
        other = first.setdefault(info.process, rank)
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

"""Communicator: what one rank of a group of ranks holds of it, and every collective."""

from __future__ import annotations

import operator
import threading
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, NamedTuple

import numpy as np

from gradwire import (
    _adopt,
    _barrier,
    _buffers,
    _core,
    _exit,
    _gpus,
    _model,
    _reductions,
    _shrink,
    _split,
    _work,
)
from gradwire._arrays import Operand, device_of, operand, writable, written
from gradwire._buffers import Buffers, Place
from gradwire._deadline import Deadline
from gradwire._errors import InvalidArgument
from gradwire._feedback import ErrorFeedback
from gradwire._lines import Lines
from gradwire._mesh import DEFAULT_TRANSPORTS, EMULATED, Mesh
from gradwire._model import CostModel
from gradwire._reductions import Call, CodecLike
from gradwire._schedules import Schedule
from gradwire._work import GpuWork, Work, seconds

# Of options: the same object means the same.
_IMMUTABLE = {str, int, float, bool, type(None)}


class Traffic(NamedTuple):
    """What this rank's operations have cost it.

    Bytes and frames it has sent, frame headers included, where a frame for k peers counts k; and
    seconds that lossy codecs of the core have taken to encode and to decode.
    """

    bytes_sent: int
    frames_sent: int
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0


class _Options(NamedTuple):
    """What the collectives' keywords mean; see `Communicator`."""

    algorithm: str = "auto"
    schedule: Schedule | None = None
    async_op: bool = False
    timeout: float | None = None
    op: str = "sum"
    root: int = 0
    codec: CodecLike = "none"
    key: str | None = None
    keys: Sequence[Any] | None = None
    feedback: ErrorFeedback | Literal[False] | None = None


class Communicator:
    """One rank's end of a group of ranks. Made by `gradwire.init`, `gradwire.spawn` or `split`.

    Every rank makes the same calls in the same order, from any thread, with the same options and
    sizes; a call that differs raises InvalidArgument on all ranks. Results have the same bits on
    every rank and in every run, where ``auto`` has the same `cost_model`.

    Arrays are NumPy arrays (ml_dtypes.bfloat16 too), torch tensors on the CPU or on CUDA, CuPy
    arrays or other objects with DLPack; C-contiguous, and writable where they are written. Nothing
    is copied on the way in or out. Collectives that reduce take float32/64, float16, bfloat16,
    int8/32/64 and uint8; those that only move data take every type. On a GPU a call is enqueued on
    the caller's current stream and returns, and the wait() of a `Work` makes that stream wait; a
    rank works on one GPU, that of its first such call.

    All collectives share these keywords:

    - ``algorithm``: a name from `gradwire.algorithms`, ``hierarchical(inner,outer)``, or ``auto``,
      the fastest by `cost_model`. all_reduce takes ``gather`` too, as reduce and
      reduce_scatter do with a lossy codec, but for lowrank: every rank's input, encoded once, goes
      to all, by an all_gather that ``gather(ring)`` names, and each adds them up;
    - ``schedule``: a `gradwire.Schedule` of one's own instead, equal on all ranks;
    - ``async_op``: return a `Work` at once; its wait() returns the result;
    - ``timeout``: seconds, from when the operation's turn comes; the communicator's if None;
    - ``op`` of those that reduce: sum, avg, min, max, prod. Integers wrap and have no avg; min and
      max are IEEE 754-2019 minimum and maximum (NaN wins, -0 < +0);
    - ``codec`` of those that reduce: how float32 travels for sum and avg, by a name from
      `gradwire.codecs` (``"topk:density=0.01"`` gives a parameter) or as an object of
      `gradwire.codec`; sums are formed in float32 all the same;
    - ``feedback`` of those that reduce: the `ErrorFeedback` that keeps what the codec loses, under
      ``key``, or under ``keys=[(name, count), ...]`` that lie end to end over the arrays. A codec
      that is biased needs it, or ``feedback=False``. With NaN or Inf on any rank no residual moves,
      and every result shows it.

    A failure is final: every later call raises the same error, and `shrink` makes a communicator
    of the ranks that survived. TransportError, Timeout and Aborted name the rank in `peer`.
    InvalidArgument that is raised before anything was sent leaves it alive. It is also a context
    manager, which closes it, or aborts it when the block raises.
    """

    def __init__(
        self,
        core: _core.Communicator,
        mesh: Mesh,
        hosts: Sequence[Sequence[int]],
        timeout: float,
    ) -> None:
        """Use `gradwire.init`."""
        self._core, self._mesh, self._timeout = core, mesh, timeout
        self._place = Place(mesh.rank, mesh.size)
        self._hosts = tuple(map(tuple, hosts))
        self._splits = 0
        self._dropped: deque[Work] = deque()
        self._is_one_round: bool | None = None  # a barrier
        self._forget_calls()
        self._nothing = np.empty(0, np.uint8)
        self._gpu: _gpus.Gpu | None = None
        self._making_gpu = threading.Lock()
        _exit.track(self)

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""
        return self._place.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._place.size

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host."""
        return self._hosts

    @property
    def transports(self) -> dict[int, str]:
        """By peer: "inproc", "shm" or "tcp"."""
        return {peer: each.links["collective"].transport for peer, each in self._mesh.peers.items()}

    @property
    def traffic(self) -> Traffic:
        """What this rank's finished operations have sent, those of its GPU among them.

        There the codecs' seconds are not known, nor what replays of CUDA graphs send, nor, with
        ``nccl+host``, what NCCL does.
        """
        traffic = Traffic(*self._core.traffic)
        if self._gpu is None:
            return traffic
        return traffic._replace(bytes_sent=traffic.bytes_sent + self._gpu.bytes_sent)

    @property
    def closed(self) -> bool:
        """Whether it is closed or failed: calls raise, and another must be made."""
        return not self._core.owned_here or self._core.closed

    @_core.repeatable
    def all_reduce(
        self,
        x: Any,
        *,
        op: str = "sum",
        algorithm: str = "auto",
        schedule: Schedule | None = None,
        codec: CodecLike = "none",
        key: str | None = None,
        keys: Sequence[Any] | None = None,
        feedback: ErrorFeedback | Literal[False] | None = None,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """The reduction of all ranks' `x`, on all ranks; in place, or in `out`, which it returns.

        A list of arrays of one dtype is one operation, which is faster than one for each.
        """
        options = _Options(
            algorithm, schedule, async_op, timeout, op, 0, codec, key, keys, feedback
        )
        return self._call("all_reduce", _buffers.all_reduce(x, out), options)

    allreduce = all_reduce

    def reduce_scatter(
        self,
        x: Any,
        *,
        op: str = "sum",
        algorithm: str = "auto",
        schedule: Schedule | None = None,
        codec: CodecLike = "none",
        key: str | None = None,
        keys: Sequence[Any] | None = None,
        feedback: ErrorFeedback | Literal[False] | None = None,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Block r of the reduction of all ranks' `x`, on rank r; in a new array, or in `out`.

        `x` is one array, cut evenly along its first dimension, or a list of one array per rank.
        Keys of error feedback may end anywhere in it.
        """
        options = _Options(
            algorithm, schedule, async_op, timeout, op, 0, codec, key, keys, feedback
        )
        return self._call("reduce_scatter", _buffers.reduce_scatter(x, out, self._place), options)

    def all_gather(
        self,
        x: Any,
        *,
        algorithm: str = "auto",
        schedule: Schedule | None = None,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """All ranks' `x` one after the other along the first dimension, on all ranks.

        The result is a new array for `x` of the same shape on every rank, or `out`: one array, or
        a list of one per rank for any sizes.
        """
        options = _Options(algorithm, schedule, async_op, timeout)
        return self._call("all_gather", _buffers.all_gather(x, out, self._place), options)

    def broadcast(
        self,
        x: Any,
        *,
        root: int = 0,
        algorithm: str = "auto",
        schedule: Schedule | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """The root's `x`, or list of arrays, on all ranks; in place. Returns `x`."""
        options = _Options(algorithm, schedule, async_op, timeout, root=root)
        return self._call("broadcast", _buffers.broadcast(x, root, self._place), options)

    def reduce(
        self,
        x: Any,
        *,
        root: int = 0,
        op: str = "sum",
        algorithm: str = "auto",
        schedule: Schedule | None = None,
        codec: CodecLike = "none",
        key: str | None = None,
        keys: Sequence[Any] | None = None,
        feedback: ErrorFeedback | Literal[False] | None = None,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """The reduction of all ranks' `x` on the root: in place or in `out`, which it returns.

        The other ranks' `x` stays as it is, and they get None.
        """
        options = _Options(
            algorithm, schedule, async_op, timeout, op, root, codec, key, keys, feedback
        )
        return self._call("reduce", _buffers.reduce(x, out, root, self._place), options)

    def gather(
        self,
        x: Any,
        *,
        root: int = 0,
        algorithm: str = "auto",
        schedule: Schedule | None = None,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """What `all_gather` returns, on the root; None on the others."""
        options = _Options(algorithm, schedule, async_op, timeout, root=root)
        return self._call("gather", _buffers.gather(x, out, root, self._place), options)

    def scatter(
        self,
        x: Any = None,
        *,
        root: int = 0,
        algorithm: str = "auto",
        schedule: Schedule | None = None,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Block r of the root's `x` on rank r.

        At the root `x` is as in `reduce_scatter`, and the result a new array or `out`. The others
        pass no `x`, and give the array for the result as `out`.
        """
        options = _Options(algorithm, schedule, async_op, timeout, root=root)
        return self._call("scatter", _buffers.scatter(x, out, root, self._place), options)

    def all_to_all(
        self,
        x: Any,
        *,
        algorithm: str = "auto",
        schedule: Schedule | None = None,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Block d of rank s's `x` becomes block s of rank d's result.

        `x` is one array, cut evenly along its first dimension, and the result a new array of the
        same shape or `out`; or `x` and `out` are lists of one array per rank, of any sizes.
        """
        options = _Options(algorithm, schedule, async_op, timeout)
        return self._call("all_to_all", _buffers.all_to_all(x, out, self._place), options)

    @_core.repeatable
    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Returns when every rank has called it.

        It is a collective of nothing: an all_gather or an all_reduce, as errors call it.
        """
        nothing = self._nothing
        if self._is_one_round is None:
            self._is_one_round = _barrier.is_one_round(self.cost_model._core, self._hosts)
        if self._is_one_round:
            name, algorithm = "all_gather", "direct"
            buffers = _buffers.all_gather(nothing, [nothing] * self.size, self._place)
        else:
            name, algorithm = "all_reduce", "recursive_doubling"
            buffers = _buffers.all_reduce(nothing, None)
        options = _Options(algorithm, None, async_op, timeout)
        return self._call(name, buffers._replace(result=None), options)

    def send(
        self, x: Any, dst: int, *, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Sends one array, of any type, to a rank that receives as many bytes.

        Messages between two ranks arrive in the order they were sent, independently of collectives.
        The call may return before the message is received.
        """
        message = self._on_host(operand(x, "x"), "send")
        work = self._core.send(
            message.address, message.nbytes, self._peer(dst), self._seconds(timeout), x
        )
        return self._finish(Work(self._core, work, "send", lambda: None), async_op)

    def recv(
        self,
        x: Any,
        src: int | None = None,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Receives into an array from a rank, or from whichever sends first; returns the rank."""
        (message,) = writable([self._on_host(operand(x, "x"), "recv")])
        written([message])
        source = -1 if src is None else self._peer(src)
        work = self._core.receive(
            message.address, message.nbytes, source, self._seconds(timeout), x
        )
        return self._finish(Work(self._core, work, "recv", work.source), async_op)

    def split(self, color: int | None, key: int | None = None) -> Communicator | None:
        """Makes one communicator for each color; every rank calls it.

        Ranks are ordered by `key`, and by their old rank where keys are equal. A rank without a
        color gets None. Raises RendezvousError when the ranks cannot connect to each other, and
        this communicator's failure when that is the reason.
        """
        deadline = Deadline(self._timeout)
        group = _split.members(self, color, self.rank if key is None else key)
        self._splits += 1
        mesh = _split.connect(
            self,
            self._mesh,
            group,
            None if color is None else f"{self._mesh.communicator}/{self._splits}/{color}",
            transports=self._transports_in_use(),
            hear=self._core.hear,
            deadline=deadline,
        )
        return None if mesh is None else from_mesh(mesh, timeout=self._timeout)

    @property
    def cost_model(self) -> CostModel:
        """By which ``algorithm="auto"`` decides: rank 0's, which all ranks have."""
        return _model.wrap(self._mesh.model or _core.CostModel("shm", "tcp", self.size))

    def tune(self, *, seconds: float = 10.0) -> CostModel:
        """Measures what ``algorithm="auto"`` decides by, and decides by it from now on.

        Every rank calls it, with no other call under way. It takes about `seconds`, and some more
        on rank 0; the machine should do nothing else. `gradwire tune` does this and keeps the
        result for later jobs on these hosts. Which algorithm is chosen can change the order in
        which a sum is formed, and so its last bits.
        """
        from gradwire import _tune  # which measures with communicators

        if self.size == 1:
            return self.cost_model
        hosts = _model.host_set(self._mesh)
        self._mesh.model, _ = _tune.tune(self, hosts, seconds=seconds, progress=None)
        self._core.set_model(self._mesh.model)
        self._forget_calls()
        return self.cost_model

    def abort(self, reason: str = "abort() was called") -> None:
        """Ends every call, here and on all ranks, with Aborted. May be called from any thread.

        It returns at once; within 0.2 s no call is blocked any more. `shrink` can go on from there.
        """
        self._core.abort(f"rank {self.rank}: {reason}")
        if self._gpu is not None:
            self._gpu.abort(f"rank {self.rank}: {reason}")

    def shrink(self, timeout: float | None = None) -> Communicator:
        """Makes a communicator of the ranks that survived the failure of this one.

        Every survivor calls it, when this communicator has raised TransportError, Timeout, Aborted
        or InvalidArgument there, or was aborted; from a living one it raises InvalidArgument. The
        ranks keep their order, and meet over the connections that they have: no store is needed,
        and rank 0 may be the one that died. What was in flight has ended, its arrays are in an
        undefined state, and this communicator is closed.

        A rank that has not called it within `timeout` seconds (the communicator's if None), for
        example because it is stopped, is left out, and raises TransportError when it does call. Who
        dies meanwhile is left out too, or makes the new communicator fail, which can be shrunk in
        turn. Raises RendezvousError when the survivors cannot connect to each other.
        """
        limit = self._seconds(timeout)

        def make(mesh: Mesh, patience: float) -> Communicator:
            mesh.model = self._mesh.model
            return from_mesh(mesh, timeout=self._timeout, patience=patience)

        lines = Lines(self._core.release_controls(), self.size)
        _work.finish(self._dropped)
        return _shrink.shrink(
            self._mesh,
            lines,
            make,
            transports=self._transports_in_use(),
            timeout=limit,
        )

    def close(self, timeout: float | None = None) -> None:
        """Finishes what is in flight, says goodbye, lets go of everything; later calls raise.

        Work that is not over after `timeout` seconds is aborted. Once closed, does nothing; nor in
        a process that was forked from the communicator's.
        """
        if not self._core.owned_here:
            return
        try:
            if self._gpu is not None:
                self._gpu.close(self._seconds(timeout), failed=self._core.closed)
        finally:
            try:
                self._core.close(self._seconds(timeout))
            finally:
                _work.finish(self._dropped)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and not self.closed:
            self.abort(f"left its with block with {kind.__name__}: {error}")
        self.close()

    def __repr__(self) -> str:
        links = "+".join(sorted(set(self.transports.values())))
        words = [
            f"<Communicator rank {self.rank}/{self.size}",
            links,
            "closed" if self.closed else "",
        ]
        return " ".join(filter(None, words)) + ">"

    def _call(self, name: str, buffers: Buffers, options: _Options) -> Any:
        _work.finish(self._dropped)
        device = device_of((*buffers.inputs, *buffers.outputs))
        if device is not None:
            return self._call_on_gpu(name, buffers, options, device)
        call = _reductions.prepare(name, buffers, options, self._place)
        try:
            work = self._begin(call, buffers, options)
        except BaseException:
            if call.reduction is not None:
                call.reduction.withdraw(failed=self.closed)
            raise
        return work if options.async_op else call.finish()

    def _begin(self, call: Call, buffers: Buffers, options: _Options) -> Work | None:
        """Runs the call, or submits it."""
        request = self._request(call, options)
        timeout = self._seconds(options.timeout)
        written(buffers.outputs)
        if not options.async_op:
            self._core.run(request, timeout)
            self._learn(call, buffers, options, request)
            _work.finish(self._dropped)
            return None
        core = self._core.submit(request, timeout, (buffers, request))
        dropped = None if call.reduction is None else self._dropped
        return Work(self._core, core, call.name, call.finish, dropped)

    def _call_on_gpu(self, name: str, buffers: Buffers, options: _Options, device: int) -> Any:
        call = _reductions.prepare(name, buffers, options, self._place, on_gpu=True)
        gpu, request = self._gpu_on(device), self._request(call, options)
        if device != gpu.device:
            raise InvalidArgument(
                f"the arrays are on cuda:{device}, and this rank works on cuda:{gpu.device} since "
                "its first call there: give each rank one GPU"
            )
        timeout = self._seconds(options.timeout)
        written(buffers.outputs)
        arrays = (*buffers.inputs, *buffers.outputs)
        if options.async_op:
            event = gpu.begin(request, call.feedback, arrays, timeout)
            return GpuWork(gpu, event, name, call.finish, arrays)
        gpu.run(request, call.feedback, arrays, timeout)
        return call.finish()

    def _gpu_on(self, device: int) -> _gpus.Gpu:
        """This rank's, which the first call sets up."""
        if self._gpu is None:
            self._core.hear(0)  # raises in a fork, where the lock may never be free
            with self._making_gpu:
                if self._gpu is None:
                    self._gpu = _gpus.Gpu(self, device)
        return self._gpu

    @property
    def _gpu_stream(self) -> int | None:
        """On which calls run that are not waited for; None before the first such call."""
        return None if self._gpu is None else self._gpu.stream

    def _require_alive_on_gpu(self) -> None:
        if self._gpu is not None:
            self._gpu.require_alive()

    def _forget_calls(self) -> None:
        """And what the cost model said of them."""
        self._learnt = _core.Shortcut(self._core, self._dropped)
        self._shortcut = self._learnt.capsule  # for repeatable methods
        self._is_one_round = None

    def _learn(
        self, call: Call, buffers: Buffers, options: _Options, request: _core.Request
    ) -> None:
        """Makes the next call like this one take the shortcut, where nothing can differ in it."""
        inputs = buffers.inputs
        if len(inputs) != 1 or call.reduction is not None or call.feedback is not None:
            return
        array: np.ndarray[Any, Any] | None = inputs[0].array
        method = _ALL_REDUCE
        in_place = call.name == "all_reduce" and buffers.outputs is inputs and not call.shapes
        if array is self._nothing:
            array, method = None, _BARRIER
        elif not in_place or type(array) is not np.ndarray:
            return
        given = tuple(getattr(options, name, None) for name in method.names)  # out: none
        if set(map(type, given)) <= _IMMUTABLE:
            self._learnt.learn(method, array, given, request, self._seconds(options.timeout))

    def _request(self, call: Call, options: _Options) -> _core.Request:
        request = _core.Request(
            call.name,
            call.dtype,
            options.op,
            self._rank(options.root, "root"),
            _addresses(call.inputs),
            _addresses(call.outputs),
            options.algorithm,
            None if options.schedule is None else options.schedule._core,
            call.codec,
        )
        if call.feedback is not None:
            on_gpu = call.inputs[0].device is not None
            host = call.feedback._core if on_gpu else call.feedback._on_cpu()
            request.feed_back(host, call.keys)
        if call.shapes:
            request.shape(call.shapes)
        if call.reduction is not None:
            request.exchange(call.reduction.letters, str(call.reduction.codec))
        return request

    def _on_host(self, message: Operand, name: str) -> Operand:
        if message.device is not None:
            raise InvalidArgument(
                f"{name}: x is on cuda:{message.device}; messages are of CPU memory: use x.cpu()"
            )
        return message

    def _finish(self, work: Work, async_op: bool) -> Any:
        return work if async_op else work.wait()

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else seconds(timeout)

    def _rank(self, rank: int, what: str) -> int:
        if not 0 <= operator.index(rank) < self.size:
            raise InvalidArgument(f"{what}={rank} is not a rank of {self!r}")
        return operator.index(rank)

    def _peer(self, rank: int) -> int:
        if self._rank(rank, "rank") == self.rank:
            raise InvalidArgument(f"rank {rank} cannot send to itself, nor receive")
        return rank

    def _transports_in_use(self) -> tuple[str, ...]:
        used = set(self.transports.values())
        return tuple(name for name in ("inproc", *DEFAULT_TRANSPORTS, EMULATED) if name in used)


# As they are here, whatever somebody puts in their place.
_ALL_REDUCE: _core.repeatable[Any, Any, Any] = Communicator.all_reduce
_BARRIER: _core.repeatable[Any, Any, Any] = Communicator.barrier


def from_mesh(
    mesh: Mesh,
    *,
    timeout: float,
    patience: float | None = None,
    hosts: Sequence[Sequence[int]] | None = None,
    **tuning: int,
) -> Communicator:
    """Takes over the sockets of the mesh; every rank calls it.

    `patience` is how long it waits for the others, `timeout` if None. `hosts` overrides which ranks
    count as one host; `tuning` the sizes of frames and segments, as `_core.Communicator` takes
    them.
    """
    limit = timeout if patience is None else patience
    core, groups = _adopt.adopt(mesh, hosts, tuning, limit)
    return Communicator(core, mesh, groups, seconds(timeout))


def _addresses(given: Sequence[Operand]) -> list[tuple[int, int]]:
    """In elements of a reducible dtype, else in bytes."""
    return [(each.address, each.elements if each.reducible else each.nbytes) for each in given]

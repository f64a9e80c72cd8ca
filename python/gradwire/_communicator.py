"""Communicator: one rank's end of a group of ranks, and every collective."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gradwire import _core, _model
from gradwire._arrays.buffers import Buffers, Place
from gradwire._arrays.operands import device_of
from gradwire._base import arguments, stops
from gradwire._base.arguments import seconds, whole
from gradwire._base.deadline import Deadline
from gradwire._base.texts import encodable
from gradwire._bootstrap.agreed_model import host_set
from gradwire._bootstrap.core.build_core import build_core
from gradwire._bootstrap.groups import split as _split
from gradwire._bootstrap.mesh import Mesh
from gradwire._calls import gpus
from gradwire._calls.choices import Choices
from gradwire._calls.collectives import ArrayCollectives
from gradwire._calls.messages import Messages
from gradwire._calls.mpi_names import MpiNames
from gradwire._calls.objects import ObjectCollectives
from gradwire._calls.on_cpu import CpuCalls
from gradwire._calls.on_gpu import call_on_gpu
from gradwire._calls.requests import Options
from gradwire._calls.variable import VariableCollectives
from gradwire._errors import InvalidArgument
from gradwire._launch import at_exit
from gradwire._metrics import exporter
from gradwire._model import CostModel
from gradwire._regrouping import Regrouping
from gradwire._schedules.schedule import BUTTERFLY, OF_LARGE
from gradwire._trace import session
from gradwire._trace.track import TracedRank

if TYPE_CHECKING:
    from gradwire.lab.tuning.fit import Timing

at_exit.call_last(session.write_part)
at_exit.call_last(exporter.end)


class Traffic(NamedTuple):
    """Counters of this rank's finished operations.

    `bytes_sent` and `frames_sent` include frame headers, and count a frame once for each peer that
    it goes to. The seconds are those that lossy codecs of the core took.
    """

    bytes_sent: int
    frames_sent: int
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0


class Communicator(
    ArrayCollectives, ObjectCollectives, VariableCollectives, Messages, Regrouping, MpiNames
):
    """One rank's end of a group of ranks. Made by `gradwire.init`, `gradwire.spawn` or `split`.

    Every rank makes the same calls in the same order, from any thread, with the same options,
    dtypes, sizes and shapes. A call that differs raises InvalidArgument on all ranks: in that call
    if a rank waits for data of the others, otherwise in the next one that does, in `close`, or at
    the end of the program, which then exits with a status other than 0. Results have the same bits
    on every rank and in every run, if ``auto`` has the same `cost_model`.

    Arrays are NumPy arrays (ml_dtypes.bfloat16 too), torch tensors on the CPU or on CUDA, CuPy
    arrays or other objects with DLPack; they are C-contiguous, and writable if the call writes
    them. Nothing is copied on the way in or out. Collectives that reduce take float32/64, float16,
    bfloat16, complex64/128, int8 to int64, uint8 to uint64 and bool; those that only move data take
    every type. On a GPU a call is enqueued on the caller's current stream and returns, and the
    wait() of a `Work` makes that stream wait. A rank works on one GPU, that of its first such call.

    All collectives share these keywords:

    - ``algorithm``: a name from `gradwire.algorithms`, ``hierarchical(inner,outer)``, or ``auto``,
      the fastest one by `cost_model`; ``butterfly`` is recursive_doubling where that is faster for
      an all_reduce without codec, and halving_doubling otherwise. all_reduce also takes
      ``gather``, and so do reduce and reduce_scatter with a lossy codec other than lowrank: every
      rank's input, encoded once, goes to all ranks, by an all_gather that ``gather(ring)`` names,
      and each rank adds them up. On GPUs over NCCL, ``nccl`` is the library's own collective, taken
      by ``auto`` for plain calls, and whose sums may differ from those on CPUs in their last bits;
    - ``schedule``: a `gradwire.Schedule` of one's own instead, equal on all ranks;
    - ``async_op``: return a `Work` at once; its wait() returns the result;
    - ``timeout``: seconds, from when the operation's turn comes; the communicator's if None;
    - ``op`` of those that reduce: sum, avg, min, max, prod; for integers and bool also band, bor,
      bxor (bitwise) and land, lor, lxor (logical: 0 or 1), and no avg, which most of them cannot
      hold: divide the sum, or average floats. Sums and products of integers wrap. min and max of
      floats are IEEE 754-2019 minimum and maximum (NaN wins, -0 < +0). For bools sum, max, bor and
      lor are "or", and prod, min, band and land are "and".
      Complex numbers have sum and avg, without codecs: pass their real and imaginary parts to
      those. float16 and bfloat16 are added, averaged and multiplied in float32: ``direct``,
      ``star`` and ``gather`` round the result once, other algorithms once on each rank that a
      partial sum passes. With one rank there is nothing to reduce, and arrays stay as they are;
    - ``codec`` of those that reduce: how float32 travels for sum and avg, by a name from
      `gradwire.codecs` (``"topk:density=0.01"`` sets a parameter) or as an object of
      `gradwire.codec`; sums are formed in float32 in any case. All collectives take "lossless",
      for arrays of any dtype, whose results have the bits that they have without codec;
    - ``prescale``, ``postscale`` of those that reduce, for sum and avg of floats and complex on the
      CPU: factors for this rank's input, of which a copy is made, and for the result; each product
      is rounded once, in the array's dtype. `prescale` may differ between ranks, for a weighted
      sum; `postscale` may not. Residuals have the scale of the prescaled input;
    - ``feedback`` of those that reduce: the `ErrorFeedback` that keeps what the codec loses, under
      ``key``, or under ``keys=[(name, count), ...]`` that lie end to end over the arrays. A biased
      codec needs it, or ``feedback=False``. reduce, reduce_scatter and ``lowrank`` need it on all
      ranks or on none. With NaN or Inf on any rank no residual changes, and every result shows it.

    all_reduce, reduce, reduce_scatter, broadcast and all_gather also take ``check``, for arrays on
    the CPU. With None, ranks compare shapes in the first call that has them (all_gather does not);
    with ``"shape"`` in each call; with ``"size"`` they compare only numbers of elements.
    Dimensions of size 1 do not count.

    A failure is final: every later call raises the same error, and `shrink` makes a communicator
    of the ranks that survived. TransportError, Timeout and Aborted name the rank in `peer`,
    and its number in the whole job in `job_peer`; both are -1 where it is not known.
    An InvalidArgument raised before anything was sent leaves the communicator usable. As a context
    manager it is closed at the end of the block, or aborted if the block raises.
    """

    def __init__(
        self,
        core: _core.Communicator,
        mesh: Mesh,
        hosts: Sequence[Sequence[int]],
        timeout: float,
    ) -> None:
        """Reserved for gradwire: call `gradwire.init` instead."""
        self._core, self._mesh, self._timeout = core, mesh, timeout
        self._place = Place(mesh.rank, mesh.size)
        self._hosts = tuple(map(tuple, hosts))
        self._splits = 0
        self._counted = exporter.count(core, mesh, self)
        totals = None if self._counted is None else self._counted.totals
        self._track = session.track(core, _traced_rank(mesh), self, totals)
        self._calls = CpuCalls(core, self._place, _FAST_PATHS)
        self._clear_call_cache()
        self._gpu: gpus.Gpu | None = None
        self._making_gpu, self._opening_listener = threading.Lock(), threading.Lock()
        at_exit.track(self)

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""
        return self._place.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._place.size

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host."""
        return self._hosts

    @property
    def sites(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each site: hosts that GRADWIRE_SITE, or the round trip, sets apart."""
        return self._mesh.sites or (tuple(range(self.size)),)

    @property
    def transports(self) -> dict[int, str]:
        """The transport to each peer: "inproc", "shm", "rdma", "tcp" or "emulated"."""
        return {peer: each.links["collective"].transport for peer, each in self._mesh.peers.items()}

    @property
    def traffic(self) -> Traffic:
        """Counters of this rank's finished operations, including those on its GPU.

        On GPUs, codecs' seconds and the bytes of replayed CUDA graphs are not counted, and with
        ``nccl+host`` not those within hosts.
        """
        traffic = Traffic(*self._core.traffic)
        if self._gpu is None:
            return traffic
        return traffic._replace(bytes_sent=traffic.bytes_sent + self._gpu.bytes_sent)

    @property
    def closed(self) -> bool:
        """Whether the communicator is closed or has failed, so that every call raises."""
        return not self._core.owned_here or self._core.closed

    @_core.fast_path_method
    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Returns when every rank has called it.

        Errors call it all_gather or all_reduce, of no elements, which implement it.
        """
        name, algorithm, given = self._choices.barrier(self._calls.nothing, self._place)
        return self._call(name, given, Options(algorithm, None, async_op, timeout))

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
            transports=self._mesh.transports,
            raise_if_peer_failed=self._core.check_failure,
            deadline=deadline,
        )
        return None if mesh is None else from_mesh(mesh, timeout=self._timeout)

    @property
    def cost_model(self) -> CostModel:
        """The cost model behind ``algorithm="auto"``: rank 0's, the same on all ranks."""
        return _model.wrap(self._mesh.model or _core.CostModel("shm", "tcp", self.size))

    def tune(self, *, seconds: float = 10.0) -> CostModel:
        """Measures the cost model behind ``algorithm="auto"``, uses it from now on, and returns it.

        Every rank calls it, with no other call under way. It takes about `seconds`, and some more
        on rank 0; the machine should do nothing else. `gradwire tune` does the same and saves the
        result for later jobs on these hosts. Another algorithm can form a sum in another order,
        and so change its last bits.
        """
        self._tune(arguments.seconds(seconds, "seconds"))
        return self.cost_model

    def _tune(self, seconds: float) -> list[Timing]:
        """Does what `tune` does; returns what it has measured, on rank 0."""
        if self.size == 1:
            return []
        from gradwire.lab.tuning.fit import tune

        hosts = host_set(self._mesh)
        self._mesh.model, timings = tune(self, hosts, seconds=seconds, progress=None)
        self._core.set_model(self._mesh.model)
        self._clear_call_cache()
        return timings

    def should_stop(self) -> bool:
        """Whether a rank was asked to stop; the same on all ranks that have made the same calls.

        A rank is asked by `request_stop`, by the end of its time slot (`gradwire run --slot`,
        ``GRADWIRE_SLOT_ENDS``, Slurm's time limit) less a margin, or, once it has called
        `gradwire.catch_stops` or ``init(stops=True)``, by SIGTERM or SIGUSR1. The frames
        of all_reduce, reduce_scatter, all_gather and barrier carry that: this is true on all ranks
        once one of them was asked before it began one of these calls that were made so far. Nothing
        is sent. It waits for calls that are under way, and stays true. Raises the communicator's
        failure, and InvalidArgument for a variable that is no time.
        """
        stops.watch(self)
        return self._stop_agreed()

    def request_stop(self) -> None:
        """Asks all ranks to stop, as a signal does: `should_stop` says so after a later call.

        One rank is enough. It may be called at any time, from any thread.
        """
        self._core.request_stop()

    def abort(self, reason: object = "abort() was called") -> None:
        """Ends every call, here and on all ranks, with Aborted. May be called from any thread.

        It returns at once; within 0.2 s no call is blocked any more. `shrink` can go on from there.
        For a `close` that has said goodbye, it only ends the wait, on this rank alone.
        """
        text = encodable(f"rank {self.rank}: {reason}")
        self._core.abort(text)
        if self._gpu is not None:
            self._gpu.abort(text)

    def close(self, timeout: float | None = None) -> None:
        """Finishes calls in flight, says goodbye and releases everything; later calls raise.

        Work that is not over after `timeout` seconds (the communicator's if None) is aborted. The
        same time is allowed for ranks that are behind, if only they can tell that all ranks made
        the same last calls: raises InvalidArgument when calls differ, Timeout when a rank does not
        get there. After all_reduce, all_gather, reduce_scatter or barrier this is known already,
        and with a `timeout` of 0 it is not checked. Does nothing once closed, nor in a process
        forked from the communicator's. On rank 0 it tells processes that want to join that the job
        is over.
        """
        limit = self._seconds(timeout)
        self._end(limit, limit, alone=True)

    def _end(self, timeout: float, settle: float | None = None, *, alone: bool = False) -> None:
        """Closes; `settle` is the time for ranks that are behind, the communicator's if None.

        `alone` says that the program goes on with other communicators.
        """
        if not self._core.owned_here:
            return
        stops.release(self)
        lives = not self._core.closed
        try:
            try:
                if self._gpu is not None:
                    self._gpu.close(timeout, failed=self._core.closed)
            finally:
                self._core.close(timeout, self._timeout if settle is None else settle, alone)
            self._close_listener(over=lives)
        finally:
            self._release()

    def _release(self) -> None:
        """Ends what goes beside the core: the watch for signals, the listener and the trace."""
        stops.release(self)
        self._close_listener()
        self._calls.finish_dropped()
        self._track.release()
        exporter.release(self._counted)

    def __del__(self) -> None:
        core = getattr(self, "_core", None)  # None if __init__ failed early
        if core is not None and not sys.is_finalizing():
            stops.release(self)
            at_exit.outlive(core, self._timeout)
            self._close_listener()
            self._track.release()
            exporter.release(self._counted)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, _: object) -> None:
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

    def _call(self, name: str, given: Buffers, options: Options) -> Any:
        self._calls.finish_dropped()
        options = options.checked()
        if options.algorithm == BUTTERFLY:
            options = options._replace(algorithm=self._butterfly(name, given, options))
        device = device_of((*given.inputs, *given.outputs))
        if device is None:
            return self._calls.run(name, given, options, self._timeout)
        return call_on_gpu(name, given, options, self._place, device, self._gpu_on, self._timeout)

    def _butterfly(self, name: str, given: Buffers, options: Options) -> str:
        if name != "all_reduce" or options.codec != "none":
            return OF_LARGE
        return self._choices.butterfly(sum(each.nbytes for each in given.inputs))

    def _stop_agreed(self) -> bool:
        found = self._core.should_stop()
        if self._gpu is not None:
            found = self._gpu.should_stop() or found
        return found

    def _gpu_on(self, device: int) -> gpus.Gpu:
        """The rank's GPU, which its first call sets up."""
        if self._gpu is None:
            self._core.check_failure(0)  # raises in a fork, where the lock may never be free
            with self._making_gpu:
                if self._gpu is None:
                    self._gpu = gpus.Gpu(self, device)
        return self._gpu

    @property
    def _gpu_stream(self) -> int | None:
        """The stream of asynchronous calls on the GPU; None before the first such call."""
        return None if self._gpu is None else self._gpu.stream

    @property
    def _gpu_links(self) -> str | None:
        """The way of messages between the ranks' GPUs; None before the first call there."""
        return None if self._gpu is None else self._gpu.links

    def _require_alive_on_gpu(self) -> None:
        if self._gpu is not None:
            self._gpu.require_alive()

    def _require_success_on_gpu(self) -> None:
        if self._gpu is not None:
            self._gpu.require_success()

    def _clear_call_cache(self) -> None:
        """Drops cached calls and choices, which depend on the cost model."""
        self._call_cache = self._calls.clear_cache()  # for fast_path_method
        self._choices = Choices(self._hosts, self.cost_model)

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else seconds(timeout)

    def _rank(self, rank: int, what: str) -> int:
        given = whole(rank, what)
        if not 0 <= given < self.size:
            raise InvalidArgument(f"{what}={given} is not a rank of {self!r}")
        return given


# The methods defined here, even if a program replaces them on the class.
_FAST_PATHS: dict[str, _core.fast_path_method[Any, Any, Any]] = {
    "all_reduce": Communicator.all_reduce,
    "barrier": Communicator.barrier,
}


def _traced_rank(mesh: Mesh) -> TracedRank:
    return TracedRank(
        mesh.job.name,
        mesh.job.tag,
        mesh.communicator,
        mesh.rank,
        mesh.size,
        tuple(map(mesh.job_rank, range(mesh.size))),
        tuple(sorted({each.links["collective"].transport for each in mesh.peers.values()})),
    )


def from_mesh(
    mesh: Mesh,
    *,
    timeout: float,
    connect_timeout: float | None = None,
    hosts: Sequence[Sequence[int]] | None = None,
    **tuning: int,
) -> Communicator:
    """Makes a communicator that takes over the sockets of the mesh; every rank calls it.

    `connect_timeout` is the time for making links, `timeout` if None. `hosts` overrides which ranks
    share a host; `tuning` sets sizes of frames and segments, as `_core.Communicator` takes them.
    """
    limit = timeout if connect_timeout is None else connect_timeout
    core, groups = build_core(mesh, hosts, tuning, limit)
    return Communicator(core, mesh, groups, seconds(timeout))

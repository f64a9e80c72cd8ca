"""A rank of one library that peers.py measures, or of a wall: it does what it is told.

    python peer_rank.py LIBRARY SOCKET

Between two commands it sleeps in the kernel, whatever its library's ranks do while they wait for
each other. It runs in the library's own environment, of which it needs NumPy alone. Commands and
answers are lines of JSON: {"do": "prepare", "op": "all_reduce", "bytes": 64} makes the buffer,
{"do": "turn", "calls": 9} checks the results of one call and then times 9 back to back.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

Array = Any  # np.ndarray of float32
Call = Callable[[], object]

_PERIOD = 1021  # elements: prime, so that a block in another's place is seen
_AT_ONCE = 1024 * _PERIOD  # elements
_WARM_UP = 4  # one call untimed to so many timed ones
_CHUNK = 1 << 18  # bytes of one send or receive


class Library(NamedTuple):
    """What is measured, as its user calls it."""

    rank: int
    version: str
    summed: Sequence[int]  # whose contributions the results are sums of
    all_reduce: Callable[[Array], tuple[Call, Array]]  # of an array; the call, and its result
    barrier: Call
    close: Call


def gradwire(transport: str) -> Library:
    """In the environment that runs peers.py."""
    import gradwire

    comm = gradwire.init(transports=[transport])
    bind = _in_place(lambda x: partial(comm.all_reduce, x))
    version = f"gradwire {gradwire.__version__}"
    return Library(comm.rank, version, range(comm.size), bind, comm.barrier, comm.close)


def gloo(transport: str) -> Library:
    """torch's: it has TCP alone, whatever the transport."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    bind = _in_place(lambda x: partial(dist.all_reduce, torch.from_numpy(x)))
    ranks = range(dist.get_world_size())
    version = f"torch {torch.__version__}"
    return Library(dist.get_rank(), version, ranks, bind, dist.barrier, dist.destroy_process_group)


def mpi(transport: str) -> Library:
    """MPICH or Open MPI, whose mpiexec has started this and chosen the transport."""
    import mpi4py
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    bind = _in_place(lambda x: partial(comm.Allreduce, MPI.IN_PLACE, [x, MPI.FLOAT]))
    name, version = MPI.get_vendor()
    version = f"{name} {'.'.join(map(str, version))}, mpi4py {mpi4py.__version__}"
    return Library(comm.rank, version, range(comm.size), bind, comm.Barrier, MPI.Finalize)


def copy(rank: str) -> Library:
    """The wall of shared memory: a copy of the buffer, which moves twice its bytes."""

    def bind(x: Array) -> tuple[Call, Array]:
        result = np.zeros_like(x)
        return partial(np.copyto, result, x), result

    return Library(int(rank), "", [int(rank)], bind, lambda: None, lambda: None)


def floor(place: str) -> Library:
    """What this machine allows in shared memory: shm_floor.cc."""
    from bench.libraries import placement

    descriptor, rank, ranks = map(int, place.split(","))
    library = placement.library()
    joined = library.floor_join(descriptor, rank, ranks)
    one = np.zeros(1, np.float32)

    def bind(x: Array) -> Call:
        return partial(library.floor_all_reduce, joined, x.ctypes.data, len(x))

    return Library(rank, "", range(ranks), _in_place(bind), bind(one), lambda: None)


def exchange(place: str) -> Library:
    """The wall of TCP: the buffer sent to a partner, while its own comes and is added."""
    rank, descriptor = map(int, place.split(","))
    sock = socket.socket(fileno=descriptor)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)

    def bind(x: Array) -> tuple[Call, Array]:
        result = np.zeros_like(x)
        return partial(_exchange, sock, x, result), result

    meet, _ = bind(np.zeros(1, np.float32))
    return Library(rank, "", [rank, rank ^ 1], bind, meet, sock.close)


LIBRARIES: dict[str, Callable[[str], Library]] = {
    each.__name__: each for each in (gradwire, gloo, mpi, floor, copy, exchange)
}


def _in_place(call: Callable[[Array], Call]) -> Callable[[Array], tuple[Call, Array]]:
    return lambda x: (call(x), x)


def _exchange(sock: socket.socket, x: Array, result: Array) -> None:
    """`result` = `x` + the partner's."""
    out, room = memoryview(x).cast("B"), memoryview(result).cast("B")
    poller = select.poll()
    sent = received = added = 0
    while sent < len(out) or received < len(room):
        before = sent + received
        with contextlib.suppress(BlockingIOError):
            sent += sock.send(out[sent : sent + _CHUNK])
        with contextlib.suppress(BlockingIOError):
            received += sock.recv_into(room[received : received + _CHUNK])
        new = slice(added, received // 4)  # whole elements, which are in the cache now
        np.add(result[new], x[new], out=result[new])
        added = new.stop
        if sent + received == before:
            poller.register(sock, select.POLLIN | (select.POLLOUT if sent < len(out) else 0))
            poller.poll()


class Case:
    """One operation, over buffers of its own."""

    def __init__(self, library: Library, op: str, nbytes: int) -> None:
        self._library = library
        self._x = self._result = np.zeros(nbytes // 4, np.float32)
        self._call = library.barrier
        if op == "all_reduce":
            self._call, self._result = library.all_reduce(self._x)

    def turn(self, calls: int) -> tuple[int, float]:
        """How many elements are wrong after one call; seconds of each of those that follow."""
        wrong = self._wrong()
        self._x.fill(0)  # sums of sums of anything else would overflow
        for _ in range(1 + calls // _WARM_UP):
            self._call()
        self._library.barrier()
        call = self._call
        start = perf_counter()
        for _ in range(calls):
            call()
        seconds = (perf_counter() - start) / calls
        # A library that sends only while it is called may still have what others wait for.
        self._library.barrier()
        return wrong, seconds

    def _wrong(self) -> int:
        count = len(self._x)
        mine = np.resize(_pattern(self._library.rank), min(count, _AT_ONCE))
        every = np.resize(sum(map(_pattern, self._library.summed)), min(count, _AT_ONCE))
        parts = [slice(at, min(at + _AT_ONCE, count)) for at in range(0, count, _AT_ONCE)]
        for part in parts:
            self._x[part] = mine[: part.stop - part.start]
        self._call()
        return sum(
            int(np.count_nonzero(self._result[part] != every[: part.stop - part.start]))
            for part in parts
        )


def _pattern(rank: int) -> Array:
    """What a rank contributes: integers, whose sums are exact, and none of them 0."""
    return ((np.arange(_PERIOD) * 7 + rank * 13) % _PERIOD + 1).astype(np.float32)


def main() -> int:
    """Serves until it is told to end, or whoever tells has gone."""
    name, _, transport = sys.argv[1].partition(":")
    library = LIBRARIES[name](transport)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(sys.argv[2])
        with sock.makefile("rw", buffering=1, encoding="utf-8") as lines:
            _write(lines, {"rank": library.rank, "version": library.version})
            _serve(library, lines)
    library.close()
    return 0


def _serve(library: Library, lines: Any) -> None:
    case = None
    while (line := lines.readline()) and (command := json.loads(line))["do"] != "end":
        if command["do"] == "prepare":
            case = None  # its memory first
            case = Case(library, command["op"], command["bytes"])
            _write(lines, {})
        elif case is not None:
            wrong, seconds = case.turn(command["calls"])
            _write(lines, {"wrong": wrong, "seconds": seconds})


def _write(lines: Any, answer: dict[str, Any]) -> None:
    lines.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    sys.exit(main())

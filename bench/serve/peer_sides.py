"""One process of a team: a client or a server of gradwire, raw sockets, gloo or torch's rpc.

In each team there are two clients and two servers, each of which holds half of the values. `pull`
asks for all values and receives them; `both` also sends as many and waits until they were taken.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import numpy as np
from gradwire import serve
from numpy.typing import NDArray

CLIENTS = 2
SERVERS = 2
GRADWIRE_SHM, GRADWIRE_TCP = "gradwire, shm", "gradwire, tcp"
SOCKETS, GLOO, RPC, WALL = "raw sockets", "gloo send/recv", "torch rpc", "copies alone"
_REQUEST = struct.Struct("<BQ")
_LIMIT = 600.0  # seconds

Floats = NDArray[np.float32]


def run(kind: str, rank: int, where: Any, sizes: Sequence[int], pipe: Connection) -> None:
    """Makes a side, says so, and does jobs until it is told None; ranks 0 and 1 are clients.

    A job is an operation, a number of float32 elements and how often; the answer is its seconds.
    """
    with contextlib.ExitStack() as stack:
        side = SIDES[kind](rank, where, sizes, stack)
        pipe.send(side.where)
        while (job := pipe.recv()) is not None:
            operation, elements, times = job
            act: Callable[[int], None] = getattr(side, operation)
            start = perf_counter()
            for _ in range(times):
                act(elements)
            pipe.send(perf_counter() - start)


def _filled(size: int) -> Floats:
    """An array whose memory is its own: of zeros that nobody wrote, all pages are the same one."""
    return np.full(size, 1e-3, np.float32)


class _Gradwire:
    """Rank 2 has both shards, of a service for each size; each shard is a thread."""

    transport = "shm"

    def __init__(self, rank: int, where: Any, sizes: Sequence[int], stack: Any) -> None:
        self.where = None
        if rank >= CLIENTS:
            servers = {size: stack.enter_context(serve.Server(SERVERS)) for size in sizes}
            self.where = {size: each.store for size, each in servers.items()}
            return
        self._values = {size: [_filled(size)] for size in sizes}
        self._gradients = {size: [_filled(size)] for size in sizes}
        self._servers = {
            size: stack.enter_context(
                serve.connect(
                    values,
                    serve.SGD(lr=0.1),
                    store=where[size],
                    transports=[self.transport],
                    replica=f"client {rank}",
                    timeout=_LIMIT,
                )
            )
            for size, values in self._values.items()
        }

    def pull(self, size: int) -> None:
        self._servers[size].pull(self._values[size])

    def both(self, size: int) -> None:
        self.pull(size)
        self._servers[size].push(self._gradients[size])


class _GradwireTcp(_Gradwire):
    transport = "tcp"


class _Sockets:
    """A thread of a server for each client; values are read and written in place."""

    def __init__(self, rank: int, where: Any, sizes: Sequence[int], stack: Any) -> None:
        self.where = None
        if rank >= CLIENTS:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            self.where = listener.getsockname()[1]
            self._halves = {size: _filled(size // SERVERS) for size in sizes}
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
            return
        self._halves = {size: _filled(size // SERVERS) for size in sizes}
        self._servers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port))) for port in where
        ]
        for each in self._servers:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(CLIENTS):
            peer, _ = listener.accept()
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        taken = {size: np.empty_like(half) for size, half in self._halves.items()}
        while request := peer.recv(_REQUEST.size, socket.MSG_WAITALL):
            pushes, size = _REQUEST.unpack(request)
            if pushes:
                receive(peer, taken[size])
                peer.sendall(b"\1")
            else:
                peer.sendall(self._halves[size])

    def pull(self, size: int) -> None:
        for each in self._servers:
            each.sendall(_REQUEST.pack(0, size))
        in_parallel(lambda i: receive(self._servers[i], self._halves[size]), size)

    def both(self, size: int) -> None:
        self.pull(size)

        def push(i: int) -> None:
            self._servers[i].sendall(_REQUEST.pack(1, size))
            self._servers[i].sendall(self._halves[size])
            self._servers[i].recv(1)

        in_parallel(push, size)


def receive(sock: socket.socket, into: Floats) -> None:
    """Fills an array from a socket."""
    view = memoryview(into).cast("B")  # type: ignore[arg-type]
    while view:
        view = view[sock.recv_into(view) :]


def in_parallel(act: Callable[[int], None], size: int) -> None:
    """Calls act(0) and act(1): on two threads where it takes long."""
    if size < 1 << 16:
        act(0)
        act(1)
        return
    other = threading.Thread(target=act, args=(1,))
    other.start()
    act(0)
    other.join()


class _Gloo:
    """All four are ranks of one group; servers are told of each operation, too."""

    def __init__(self, rank: int, where: Any, sizes: Sequence[int], stack: Any) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.where, self._dist, self._client = None, dist, rank < CLIENTS
        dist.init_process_group(
            "gloo",
            init_method=f"file://{where}",
            rank=rank,
            world_size=CLIENTS + SERVERS,
            timeout=datetime.timedelta(seconds=_LIMIT),
        )
        stack.callback(dist.destroy_process_group)
        self._peers = range(CLIENTS, CLIENTS + SERVERS) if self._client else range(CLIENTS)
        self._halves = {
            size: [torch.from_numpy(_filled(size // SERVERS)) for _ in self._peers]
            for size in sizes
        }
        self._words = [torch.zeros(1) for _ in self._peers]

    def _exchange(self, sends: bool, tensors: list[Any]) -> None:
        act = self._dist.isend if sends else self._dist.irecv
        for work in [act(each, peer) for each, peer in zip(tensors, self._peers, strict=True)]:
            work.wait()

    def pull(self, size: int) -> None:
        self._exchange(self._client, self._words)
        self._exchange(not self._client, self._halves[size])

    def both(self, size: int) -> None:
        self.pull(size)
        self._exchange(self._client, self._halves[size])
        self._exchange(not self._client, self._words)


_held: dict[int, Any] = {}  # a server's values under torch's rpc


def _rpc_pull(size: int) -> Any:
    return _held[size]


def _rpc_push(size: int, values: Any) -> int:
    return int(values.numel() == _held[size].numel())


class _Rpc:
    """torch.distributed.rpc over TensorPipe."""

    def __init__(self, rank: int, where: Any, sizes: Sequence[int], stack: Any) -> None:
        import torch
        from torch.distributed import rpc

        torch.set_num_threads(1)
        self.where, self._rpc = None, rpc
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{where}", rpc_timeout=_LIMIT)
        self._halves = {size: torch.from_numpy(_filled(size // SERVERS)) for size in sizes}
        if rank >= CLIENTS:
            _held.update(self._halves)
        rpc.init_rpc(
            f"rank{rank}",
            rank=rank,
            world_size=CLIENTS + SERVERS,
            rpc_backend_options=options,
        )
        stack.callback(rpc.shutdown, graceful=False)
        self._servers = [f"rank{CLIENTS + i}" for i in range(SERVERS)]

    def pull(self, size: int) -> None:
        for each in [self._rpc.rpc_async(to, _rpc_pull, (size,)) for to in self._servers]:
            each.wait()

    def both(self, size: int) -> None:
        self.pull(size)
        arguments = (size, self._halves[size])
        for each in [self._rpc.rpc_async(to, _rpc_push, arguments) for to in self._servers]:
            each.wait()


class _Wall:
    """The copies that two clients' pulls and pushes cannot do without: four for each client."""

    def __init__(self, rank: int, where: Any, sizes: Sequence[int], stack: Any) -> None:
        self.where = None
        self._arrays = {size: [_filled(size) for _ in range(2)] for size in sizes}

    def both(self, size: int) -> None:
        x, y = self._arrays[size]
        for _ in range(4):
            np.copyto(y, x)

    def pull(self, size: int) -> None:
        x, y = self._arrays[size]
        for _ in range(2):
            np.copyto(y, x)


SIDES: dict[str, Callable[..., Any]] = {
    GRADWIRE_SHM: _Gradwire,
    GRADWIRE_TCP: _GradwireTcp,
    SOCKETS: _Sockets,
    GLOO: _Gloo,
    RPC: _Rpc,
    WALL: _Wall,
}
SERVERS_OF = {GRADWIRE_SHM: 1, GRADWIRE_TCP: 1, SOCKETS: 2, GLOO: 2, RPC: 2, WALL: 0}
TOLD = {GLOO}  # whose servers are told of each operation
MEET_BY_FILE = {GLOO, RPC}

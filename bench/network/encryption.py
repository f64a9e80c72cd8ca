"""The price of encryption: all_reduce between two namespaces, encrypted and plain in turn.

    python -m bench.network.encryption [--rate 1gbit] [--mb 64] [--turns 10]      (root)

Two jobs of the same two ranks take turns call by call, so that whatever else the machine does hits
both alike. Over links that nothing holds, encryption may cost what the cipher itself takes for the
bytes that a rank sends and receives: a loop over the same libcrypto measures that beside them.
Bounds: 1.02 times as long on 1 Gbit/s; unheld the plain time and 1.15 times the cipher's; 1.15
times as long for 4 bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.common import machine
from bench.network import links

_PORT = 29500  # free: the namespaces are ours
_SETTINGS = ("off", "on")
_FRAME = 2046 * 64  # bytes that are sealed at a time


def main() -> int:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="1gbit", type=links.rate)
    parser.add_argument("--mb", default=64, type=float, help="MiB of the large all_reduce")
    parser.add_argument("--turns", default=10, type=int)
    asked = parser.parse_args()
    if why := links.missing():
        print(why, file=sys.stderr)
        return 1
    print(f"{machine.describe()}; medians of {asked.turns} turns\n")
    print("| link | bytes | off, ms | on, ms | on / off | bound, ms | cipher, ms |")
    print("|---|---|---|---|---|---|---|")
    for held, name in ((asked.rate, asked.rate.name), (None, "unheld")):
        for found in _measure(held, asked.mb, asked.turns):
            _print_row(name, **found)
    return 0


def _print_row(link: str, size: int, off: float, on: float, cipher: float) -> None:
    bound = {"unheld": off + 1.15 * cipher}.get(link, 1.02 * off) if size > 4 else 1.15 * off
    cells = f"{off:.3f} | {on:.3f} | {on / off:.3f} | {bound:.3f} | {cipher:.3f}"
    print(f"| {link} | {size:,} | {cells} |", flush=True)


def _measure(held: links.Rate | None, mb: float, turns: int) -> list[dict[str, Any]]:
    network = links.ShapedLinks(2, held) if held else links.namespaces.Switch(2)
    sizes = [(int(mb * (1 << 20)), turns), (4, 200 * turns)]
    try:
        pipes = []
        for rank in range(2):
            read, write = os.pipe()
            pid = network.hosts[rank].run(lambda rank=rank, to=write: _fork(rank, sizes, to))
            os.close(write)
            pipes.append((pid, read))
        with os.fdopen(pipes[0][1]) as lines:
            found = [json.loads(line) for line in lines]
        ended = [os.waitpid(pid, 0)[1] for pid, _ in pipes]
    finally:
        network.close()
    if any(ended) or len(found) != len(sizes):
        raise RuntimeError("a rank failed; see above")
    return found


def _fork(rank: int, sizes: list[tuple[int, int]], write: int) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = _run_rank(rank, sizes, write)
        finally:
            os._exit(status)
    return pid


def _run_rank(rank: int, sizes: list[tuple[int, int]], write: int) -> int:
    import gradwire
    import numpy as np

    os.environ.update(GRADWIRE_SECRET="0123456789abcdef", GRADWIRE_TRANSPORT="tcp")
    made = {}
    for number, setting in enumerate(_SETTINGS):
        os.environ["GRADWIRE_ENCRYPTION"] = setting
        store = f"tcp://{links.ShapedLinks.address(0)}:{_PORT + number}"
        made[setting] = gradwire.init(rank=rank, ranks=2, store=store, timeout=120.0)
    for size, turns in sizes:
        x = np.ones(size // 4, np.float32)
        calls = {name: functools.partial(comm.all_reduce, x, out=x) for name, comm in made.items()}
        times = _take_turns(calls, turns)
        if rank == 0:
            row = {"size": size, **times, "cipher": 1e3 * _cipher_seconds(size)}
            os.write(write, json.dumps(row).encode() + b"\n")
        made["off"].barrier()
    for comm in made.values():
        comm.close()
    return 0


def _take_turns(calls: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """The median of each call in milliseconds; each order is as frequent as the other."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-2, turns):
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            began = time.perf_counter()
            calls[name]()
            if turn >= 0:
                times[name].append(time.perf_counter() - began)
    return {name: 1e3 * statistics.median(found) for name, found in times.items()}


def _cipher_seconds(size: int) -> float:
    """What AES-128-GCM takes for what one of two ranks sends and receives of an all_reduce."""
    seal, open_ = _cipher(True), _cipher(False)
    frame = min(size, _FRAME)
    rounds = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(max(size // frame, 1)):
            seal(frame)
            open_(frame)
        rounds.append(time.perf_counter() - began)
    return min(rounds)


def _cipher(encrypts: bool) -> Callable[[int], None]:
    library = ctypes.CDLL("libcrypto.so.3")
    for name in ("EVP_CIPHER_CTX_new", "EVP_aes_128_gcm"):
        getattr(library, name).restype = ctypes.c_void_p
    context, written = ctypes.c_void_p(library.EVP_CIPHER_CTX_new()), ctypes.c_int()
    kind, key = ctypes.c_void_p(library.EVP_aes_128_gcm()), bytes(16)
    memory = ctypes.create_string_buffer(_FRAME + 16)
    library.EVP_CipherInit_ex(context, kind, None, key, None, int(encrypts))

    def run(count: int) -> None:
        library.EVP_CipherInit_ex(context, None, None, None, bytes(12), -1)
        library.EVP_CipherUpdate(context, memory, ctypes.byref(written), memory, count)
        library.EVP_CipherFinal_ex(context, memory, ctypes.byref(written))  # no tag: it fails

    return run


if __name__ == "__main__":
    sys.exit(main())

"""A crowd of strangers at a rank's listener, as a process of its own: silent, noisy, half way in.

Some have a recorded handshake, of which they play the hello or all at once; some send back whatever
they hear.

python storm.py HELLO_IN_HEX PROOF_IN_HEX
    stdin    "count address" a line: sends so many strangers there, all at once
    stdout   "count" for each line, when all of these have been turned away again
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading
import time
import traceback
from functools import partial

from gradwire._bootstrap.store import Address, parse_address

LIMIT = 240.0  # seconds, within which every stranger must have been turned away


class Storm:
    """The process, from the side of a test."""

    def __init__(self, hello: bytes, proof: bytes) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, hello.hex(), proof.hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lock = threading.Lock()
        self._sent = self._refused = 0
        self._limit = time.monotonic() + LIMIT
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def at(self, address: Address, count: int) -> None:
        """Sends `count` strangers; returns at once."""
        assert self._process.stdin is not None
        with self._lock:
            self._sent += count
            self._limit = time.monotonic() + LIMIT
            self._process.stdin.write(f"{count} {address}\n")
            self._process.stdin.flush()

    @property
    def over(self) -> bool:
        """Whether all strangers have come and have been turned away, or never will."""
        late = time.monotonic() > self._limit
        return late or self._refused == self._sent or self._process.poll() is not None

    def __enter__(self) -> Storm:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> int:
        """Waits until it is over; returns how many strangers were turned away."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._reader.join(LIMIT)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        return self._refused

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._refused += int(line)


async def main(hello: bytes, proof: bytes) -> None:
    """Reads stdin to its end, and lasts until the last stranger has been turned away."""
    loop = asyncio.get_running_loop()
    crowds = []
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        count, url = line.split()
        crowds.append(asyncio.create_task(crowd(int(count), parse_address(url), hello, proof)))
    await asyncio.gather(*crowds)


async def crowd(count: int, address: Address, hello: bytes, proof: bytes) -> None:
    """All of them come at once, and none leaves by itself. Where one fails, the process ends."""
    says = (b"", os.urandom(52), os.urandom(112), hello, hello + os.urandom(16), hello + proof)
    kinds = [partial(stranger, address, words) for words in says]
    kinds.append(partial(stranger, address, hello, echoes=True))
    strangers = (kinds[number % len(kinds)]() for number in range(count))
    try:
        await asyncio.wait_for(asyncio.gather(*strangers), LIMIT)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    print(count, flush=True)


async def stranger(address: Address, says: bytes, echoes: bool = False) -> None:
    """Comes, says something, perhaps also what it hears, and waits to be turned away."""
    with contextlib.suppress(ConnectionError):  # turned away at once, or in the middle of a word
        reader, writer = await connect(address)
        try:
            writer.write(says)
            while heard := await reader.read(4096):
                if echoes:
                    writer.write(heard)
        finally:
            writer.close()


async def connect(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection, as soon as there is room in the listener's queue."""
    if not address.local:
        return await asyncio.open_connection(address.host, address.port)
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    while True:
        try:
            sock.connect(address.resolve()[0][1])
            return await asyncio.open_unix_connection(sock=sock)
        except BlockingIOError:
            await asyncio.sleep(0.01)


if __name__ == "__main__":
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(main(*map(bytes.fromhex, sys.argv[1:])))

"""Runs a command on a busy machine: beside loops that never rest, and a process that fills memory
and frees it, in turns.

python tests/load.py --times 5 -- make test
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import subprocess
import sys
import time
from contextlib import ExitStack


def loop() -> None:
    """Keeps a processor busy."""
    while True:
        pass


def fill(size: int) -> None:
    """Touches every page of `size` bytes and gives them back, over and over."""
    while True:
        with mmap.mmap(-1, size) as memory:
            for page in range(0, size, mmap.PAGESIZE):
                memory[page] = 1


def load(stack: ExitStack, loops: int, gib: float) -> None:
    """Goes on until the stack is closed."""
    hog = (fill, (max(int(gib * 2**30), 1),))
    for target, args in [(loop, ())] * loops + [hog]:
        process = multiprocessing.Process(target=target, args=args, daemon=True)
        process.start()
        stack.callback(process.join)
        stack.callback(process.kill)


def run(command: list[str], number: int) -> bool:
    """Whether it passed; says how long it took, and the machine's load at its end."""
    begun = time.monotonic()
    passed = subprocess.run(command, check=False).returncode == 0
    minutes = (time.monotonic() - begun) / 60
    verdict = "passed" if passed else "FAILED"
    print(f"run {number} {verdict} in {minutes:.1f} min, load {os.getloadavg()[0]:.1f}", flush=True)
    return passed


def main() -> int:
    """0 where every run passed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--times", type=int, default=1, metavar="N", help="runs, in a row")
    parser.add_argument("--loops", type=int, default=4, metavar="N", help="busy loops")
    parser.add_argument("--gib", type=float, default=4, help="memory that is filled and freed")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    with ExitStack() as stack:
        load(stack, options.loops, options.gib)
        failed = sum(not run(options.command, i + 1) for i in range(options.times))
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())

"""Runs the programs that docs/backend.md gives for accelerate and Lightning, on two ranks each.

`make test-trainers` calls it with the Python of a virtual environment that has both and gradwire.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/backend.md"
LIMIT = 600.0  # seconds, after which a program is taken to hang
TRAINERS = ("accelerate", "lightning")  # in the page's order


def programs() -> list[str]:
    """The blocks of Python in the page's section on trainers."""
    section = PAGE.read_text().split("\n## accelerate and Lightning\n")[1].split("\n## ")[0]
    return [block.split("```")[0] for block in section.split("```python\n")[1:]]


def output_of(program: str) -> str:
    """What it prints on all ranks, and why it failed where it did."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    with tempfile.TemporaryDirectory() as folder:  # trainers leave logs where they run
        path = Path(folder) / "program.py"
        path.write_text(program)
        done = subprocess.run(
            [*torchrun, str(path)],
            cwd=folder,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
    assert done.returncode == 0, done.stdout
    return done.stdout


def main() -> None:
    """Fails where a program does, another backend was used, or weights differ between ranks."""
    for program, trainer in zip(programs(), TRAINERS, strict=True):
        printed = output_of(program)
        assert printed.count(f"{trainer} over gradwire: 0.0") == 2, printed
        print(f"{trainer}: passed")


if __name__ == "__main__":
    main()

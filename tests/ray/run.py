"""Runs the programs that docs/launching.md gives for Ray, on this machine.

`make test-with WHAT=ray` calls it, by the Python of an environment with Ray and gradwire: Ray's
workers do not see an editable install.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/launching.md"
LIMIT = 600.0  # seconds, after which a program is taken to hang
# What each prints, in the page's order.
EXPECTED = {
    "actors": "[0.5, 0.5]",
    "TorchTrainer": "'began': 0",
    "an elastic session": "elastic: the same bits",
    "a parameter server": "replicas learned: True",
}


# One worker dies, after Ray's controller, which asks every two seconds, knows of the checkpoint.
DEATH = """
        if step == 7 and first == 0 and rank == 1:
            import os, time

            time.sleep(10)
            os._exit(1)
"""


def dying(program: str) -> str:
    """The program of a TorchTrainer, one of whose workers dies once."""
    start = "    for step in range(first, 10):"
    assert start in program, "the page has another loop"
    return program.replace(start, start + DEATH)


def programs() -> list[str]:
    """The blocks of Python in the page's section on Ray."""
    section = PAGE.read_text().split("\n## Ray\n")[1].split("\n## ")[0]
    return [block.split("```")[0] for block in section.split("```python\n")[1:]]


def output_of(program: str) -> str:
    """What it prints, and why it failed where it did."""
    with tempfile.TemporaryDirectory() as folder:  # not the repository, whose sources have no core
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=folder,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
    assert done.returncode == 0, done.stdout
    return done.stdout


def main() -> None:
    """Fails where a program does, or prints something else."""
    for program, (name, expected) in zip(programs(), EXPECTED.items(), strict=True):
        printed = output_of(program)
        assert expected in printed, printed
        print(f"{name}: passed")
    printed = output_of(dying(programs()[1]))
    assert "'began': 5" in printed, printed
    print("TorchTrainer, a worker of which dies: passed")


if __name__ == "__main__":
    main()

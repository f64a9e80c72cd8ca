"""compute-sanitizer on the kernels' checks with few elements; skipped where it does not work.

A stage of bench/gpu.py.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from gpu_rows import Row

_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
_ENDED = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: (\d+) hazard"),
}


def main() -> int:
    """Prints the row."""
    tool, kernels, library, seconds = sys.argv[1:]
    with Row(f"compute-sanitizer {tool}", "small") as row:
        sanitizer = shutil.which("compute-sanitizer") or _elsewhere()
        if sanitizer is None:
            row.skip("there is no compute-sanitizer")
            return 0
        command = [sanitizer, "--tool", tool, kernels, library, "small"]
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=float(seconds),
            )
        except subprocess.TimeoutExpired:
            row.skip(f"{tool} took more than {seconds} s")
            return 0
        judge(row, tool, done.stdout)
    return 0


def judge(row: Row, tool: str, output: str) -> None:
    """By what the sanitizer and the program printed."""
    found = _ENDED[tool].search(output)
    told = [line for line in output.splitlines() if line.startswith("{")]
    if found is None or "not supported" in output:
        row.skip(f"{tool} does not work here: {_words(output)}")
        return
    row.expect(int(found[1]) == 0, f"{found[0]}: {_words(output)}")
    row.expect(told and all('"passed": true' in line for line in told), "the kernels' checks fail")
    row.note(f"{len(told)} groups of checks ran")


def _elsewhere() -> str | None:
    paths = (Path(place) / "compute-sanitizer" for place in _PLACES)
    return next((str(path) for path in paths if path.exists()), None)


def _words(output: str) -> str:
    """The first of the sanitizer's lines that say something."""
    lines = [line.lstrip("= ") for line in output.splitlines() if line.startswith("=====")]
    said = [line for line in lines if line and not line.startswith("COMPUTE-SANITIZER")]
    return " | ".join(said[:3]) or " | ".join(output.strip().splitlines()[-2:])


if __name__ == "__main__":
    sys.exit(main())

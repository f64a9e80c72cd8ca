"""Times `make demo` and `make test` as a new user runs them: in a clone of its own, caches off.

    python tests/fresh_clone.py [--only demo]

Fails where a command fails or takes longer than docs/install.md says. The limits are those of a
quiet machine of two cores whose package registry is near; on a busy one, --no-limits.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FIRST_TABLE = "ms/step"  # stands in the head of each of the demo's tables


class Times(NamedTuple):
    """Seconds, from the start of a command."""

    first_table: float | None
    whole: float


LIMITS = {"demo": Times(180, 240), "test": Times(None, 720)}


def main() -> int:
    """Returns the number of commands that took too long."""
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder, "gradwire")
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        taken = {each: run(each, clone) for each in options.only}
    return sum(report(*each, limited=options.limits) for each in taken.items())


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=LIMITS, default=list(LIMITS))
    parser.add_argument("--no-limits", dest="limits", action="store_false")
    return parser.parse_args()


def run(target: str, clone: Path) -> Times:
    """Passes on what `make TARGET` prints; raises CalledProcessError where it fails."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    environment = bare | {"CCACHE_DISABLE": "1", "PIP_NO_CACHE_DIR": "1"}
    begun, first_table = time.monotonic(), None
    with subprocess.Popen(
        ["make", target], cwd=clone, env=environment, stdout=subprocess.PIPE, text=True
    ) as make:
        for line in make.stdout or ():
            print(line, end="", flush=True)
            if first_table is None and FIRST_TABLE in line:
                first_table = time.monotonic() - begun
    if make.returncode:
        raise subprocess.CalledProcessError(make.returncode, make.args)
    return Times(first_table, time.monotonic() - begun)


def report(target: str, taken: Times, *, limited: bool) -> bool:
    """Prints the times; returns whether one is above its limit."""
    limits = LIMITS[target]
    late = False
    for name, seconds, limit in zip(taken._fields, taken, limits, strict=True):
        if limit is None:
            continue
        too_long = seconds is None or seconds > limit
        shown = "never came" if seconds is None else f"{seconds:.0f} s"
        print(f"make {target}, {name.replace('_', ' ')}: {shown} (limit {limit:.0f} s)")
        late |= too_long
    return late and limited


if __name__ == "__main__":
    sys.exit(main())

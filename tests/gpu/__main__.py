"""Checks the CUDA part over the simulated GPU of tests/simulated_cuda.

    python -m tests.gpu
    python -m tests.gpu --only loopback kernels

`make test-cpp build` makes what it runs. Exits with 1 where a check failed or a program is missing,
with 2 where none failed but a stage is incomplete. bench/gpu.py runs the same checks on a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tests.gpu.build import ROOT
from tests.gpu.stages import Deadline, Stage, chosen, python, run_all, status

_MINUTES = 11.0  # for all stages


def main() -> int:
    """Runs the stages, and prints a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="STAGE")
    parser.add_argument("--build", type=Path, default=ROOT / "build/release")
    options = parser.parse_args()
    every = stages(options.build.absolute())
    missing = [path for path in _programs(options.build) if not path.exists()]
    if missing:
        print(f"gpu: no {missing[0]}: `make test-cpp build` builds it", file=sys.stderr)
        return 1
    ended = run_all(chosen(every, options.only), Deadline(60 * _MINUTES), os.environ, _print)
    return status(ended)


def _programs(build: Path) -> tuple[Path, Path]:
    """The kernels' checks, and the simulated GPU."""
    return build / "gpu/gpu_kernels", build / "tests/simulated_cuda/libsimulated_cuda.so"


def stages(build: Path) -> list[Stage]:
    """Those that run over the simulated GPU; none times anything."""
    kernels, library = map(str, _programs(build))
    programs = {  # and their waves; ranks waits more than it works
        "ranks": ("tests.gpu.ranks", 0),
        "loopback": ("tests.gpu.loopback", 1),
        "graph": ("tests.gpu.graph", 1),
        "hook": ("tests.gpu.ddp", 1),
        "backend": ("tests.gpu.backend", 1),  # which is skipped there
        "trainers": ("tests.gpu.trainers", 1),
    }
    environment = {"GRADWIRE_CUDA_SO": library}
    return [
        Stage("kernels", [kernels, library, "small"], 200, 0),
        *(
            Stage(name, python(program, "--simulated"), 200, wave, environment)
            for name, (program, wave) in programs.items()
        ),
    ]


def _print(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())

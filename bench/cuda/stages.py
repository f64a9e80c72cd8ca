"""The stages of bench/gpu.py: checks of tests/gpu, and what times the CUDA part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.gpu.build import LIBRARY
from tests.gpu.stages import SECONDS, Stage, python

CORE, EXTENSION = "build", "build the extension"
BUILDS = (CORE, EXTENSION)


def stages(build: Path, architectures: str | None) -> list[Stage]:
    """All of them, on a GPU, of what is in a folder; first what tells most.

    Without `architectures` all is built already. Else kernels are built first, with nothing of
    Python, and checked while the extension is built. Processes share a GPU by turns, which makes
    many small calls slow: those have waves of their own, and so have times (`speed`, `threads`,
    `calls`, `steps`, `backend`); `graph` looks at how much memory is free.
    """
    made = _of(build, architectures or "")
    if architectures is not None:
        return made
    none = (*BUILDS, "C++ tests")  # whose programs are not carried
    return [replace(each, needs=()) for each in made if each.name not in none]


def _of(build: Path, architectures: str) -> list[Stage]:
    kernels, library = str(build / "gpu/gpu_kernels"), str(build / LIBRARY)
    jobs = str(build / "gpu/libgpu_jobs.so")
    # Threads that are ranks have a queue each.
    queues = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}

    def sanitize(tool: str) -> list[str]:
        return python("tests.gpu.sanitize", tool, kernels, library, SECONDS)

    core, extension = (CORE,), (EXTENSION,)
    return [
        Stage(CORE, python("tests.gpu.build", "core", architectures), 70, 0),
        Stage("kernels", [kernels, library, "all"], 55, 1, needs=core),
        Stage(EXTENSION, python("tests.gpu.build", "extension", architectures), 75, 1, needs=core),
        Stage("speed", python("bench.cuda.speed", library, jobs), 45, 2, needs=core),
        Stage("threads", python("bench.cuda.threads"), 20, 3, needs=extension),
        Stage("calls", python("bench.cuda.call_times"), 40, 4, needs=extension),
        Stage("counters", python("bench.cuda.counters", "count", library, jobs), 15, 5, needs=core),
        Stage("steps", python("bench.cuda.step_times"), 40, 6, needs=extension),
        Stage("loopback", python("tests.gpu.loopback"), 95, 7, queues, extension),
        Stage("graph", python("tests.gpu.graph"), 30, 8, queues, extension),
        Stage("ranks", python("tests.gpu.ranks"), 60, 9, needs=extension),
        Stage(
            "C++ tests", python("tests.gpu.cpp_tests", str(build), library), 45, 9, needs=extension
        ),
        Stage("hook", python("tests.gpu.ddp"), 60, 10, needs=extension),
        Stage("long arrays", [kernels, library, "long"], 30, 10, needs=core),
        Stage("backend", python("tests.gpu.backend"), 30, 11, needs=extension),
        Stage("trainers", python("tests.gpu.trainers"), 70, 12, needs=extension),
        Stage("memcheck", sanitize("memcheck"), 20, 13, needs=core),
        Stage("racecheck", sanitize("racecheck"), 20, 13, needs=core),
    ]

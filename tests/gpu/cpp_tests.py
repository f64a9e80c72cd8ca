"""The C++ tests of kernels, on the GPU instead of the simulated one; skipped without GoogleTest.

CMAKE_PREFIX_PATH may name a folder that has GoogleTest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.gpu.build import ROOT, CallFailed, call, tool
from tests.gpu.rows import Row


def main() -> int:
    """Prints the rows."""
    build, library = Path(sys.argv[1]), sys.argv[2]
    tests = names(ROOT / "tests/cpp/cuda")
    if not _built(build, tests):
        return 0
    for name in tests:
        with Row("C++ tests", name) as row:
            done = subprocess.run(
                [str(build / "tests/cpp" / name), "--gtest_brief=1"],
                env={**os.environ, "GRADWIRE_TESTED_CUDA_SO": library},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            failed = [line for line in done.stdout.splitlines() if "FAILED" in line]
            ended = f"ended with {done.returncode}"
            row.expect(done.returncode == 0, (failed or [ended])[0])
    return 0


def names(folder: Path) -> list[str]:
    """Of the tests that run on a device of one's choice (cuda_arrays.h)."""
    headers = ("cuda_arrays.h", "cuda_kernels.h", "cuda_sparse.h")
    return sorted(
        path.stem
        for path in folder.glob("cuda_*_test.cc")
        if any(f'"{header}"' in path.read_text(encoding="utf-8") for header in headers)
    )


def lacks_googletest(output: str) -> bool:
    """Whether that is why cmake failed."""
    return "Could NOT find GTest" in output


def _built(build: Path, tests: list[str]) -> bool:
    with Row("C++ tests", "build") as row:
        try:
            _configure(build, "ON")
        except CallFailed as error:
            _configure(build, "OFF")
            if not lacks_googletest(error.output):
                raise
            row.skip("there is no GoogleTest")
            return False
        call(tool("ninja"), "-C", str(build), *tests)
        row.expect(tests, "no test is for a device of one's choice")
        return True
    return False


def _configure(build: Path, tests: str) -> None:
    """Once more, from any directory."""
    call(tool("cmake"), f"-DGRADWIRE_TESTS={tests}", str(build))


if __name__ == "__main__":
    sys.exit(main())

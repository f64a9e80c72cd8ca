"""Builds and runs the tests of one mutant, in a copy of the sources.

libstdc++ checks its containers' indices: what reads beyond them is noticed, as sanitizers would.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.mutants.cpp.operators import Mutant

ROOT = Path(__file__).parents[3]
SOURCE, BUILD = ROOT / "build/mutants/cpp/source", ROOT / "build/mutants/cpp/build"
_COPIED = ("CMakeLists.txt", "cmake", "csrc", "tests/cpp", "bench/network", "bench/serve")
_OFF = ("PYTHON", "CUDA", "TEST_CUDA", "WARNINGS_ARE_ERRORS")
_OPTIONS = [
    *(f"-DGRADWIRE_{each}=OFF" for each in _OFF),
    "-DGRADWIRE_TESTS=ON",
    "-DCMAKE_UNITY_BUILD=OFF",
    "-DCMAKE_BUILD_TYPE=None",
    "-DCMAKE_CXX_FLAGS=-O0 -w -D_GLIBCXX_ASSERTIONS",
]


class Trials:
    """Test programs, compiled without optimisation, and how long each may take."""

    def __init__(self, programs: list[str]) -> None:
        """Raises RuntimeError where one of them fails without any mutant."""
        _copy_sources()
        launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
        cmake = ["cmake", "-G", "Ninja", "-S", SOURCE, "-B", BUILD, *_OPTIONS, *launcher]
        subprocess.run(cmake, check=True, stdout=subprocess.DEVNULL)
        if not _builds(*programs):
            raise RuntimeError("the sources do not compile")
        self._limit = {each: 60 + 8 * _seconds_of(each) for each in programs}

    def verdict(self, mutant: Mutant, programs: list[str]) -> str:
        """Returns "no build", "survived", or the name of the program that failed, and how."""
        file = SOURCE / mutant.file
        text = file.read_text()
        try:
            file.write_text(mutant.apply(text))
            if not _builds(f"{file}^"):
                return "no build"
            for each in programs:
                failure = _failure(each, self._limit[each]) if _builds(each) else "no build"
                if failure:
                    return f"{each} ({failure})"
            return "survived"
        finally:
            file.write_text(text)


def _copy_sources() -> None:
    """Copies what has changed, so that only that is compiled anew."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *_COPIED]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for each in map(Path, listed.splitlines()):
        ours, copy = ROOT / each, SOURCE / each
        if ours.exists() and not (copy.exists() and copy.read_bytes() == ours.read_bytes()):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ours, copy)


def _builds(*targets: str) -> bool:
    command = ["ninja", "-C", str(BUILD), *targets]
    return subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0


def _seconds_of(program: str) -> float:
    began = time.monotonic()
    if failure := _failure(program, 600):
        raise RuntimeError(f"{program} fails without a mutant: {failure}")
    return time.monotonic() - began


def _failure(program: str, limit: float) -> str:
    """Runs a test program for at most `limit` seconds; returns what went wrong, if anything."""
    command = [BUILD / "tests/cpp" / program, "--gtest_brief=1", "--gtest_fail_fast"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as running:
        try:
            status = running.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            return f"no end in {limit:.0f} s"
    return f"status {status}" if status else ""

"""Builds what bench/gpu.py measures, in build/gpu, for this machine's GPU; needs no network.

A stage of bench/gpu.py: cmake directly, and a package of links to python/gradwire beside the core
and the CUDA part, so that nothing is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from time import monotonic

from bench.common.result_files import ROOT
from bench.cuda.gpu_rows import Row

BUILD = ROOT / "build/gpu"
PACKAGES = BUILD / "python"  # for PYTHONPATH
PLUGIN = BUILD / "libgradwire_cuda.so"
ARCHITECTURES = "90"


class CallFailed(RuntimeError):
    """A program's last words, and all that it printed."""

    def __init__(self, words: str, output: str) -> None:
        super().__init__(words)
        self.output = output


def main() -> int:
    """Prints the rows; the first argument is the GPUs' architectures, 90 by default."""
    architectures = sys.argv[1] if len(sys.argv) > 1 else ARCHITECTURES
    with Row("build", f"CUDA {architectures}") as row:
        start = monotonic()
        _configure(architectures)
        call(tool("ninja"), "-C", str(BUILD), "extension", "gpu_kernels", "gpu_jobs")
        row.expect(PLUGIN.exists(), f"there is no {PLUGIN}")
        row.note(f"{monotonic() - start:.0f} s")
    with Row("build", "package") as row:
        _link()
        row.expect(_imported() == str(PLUGIN.resolve()), f"the CUDA part is {_imported()}")
    return 0


def _configure(architectures: str) -> None:
    pybind11 = call(sys.executable, "-m", "pybind11", "--cmakedir").strip()
    call(
        tool("cmake"),
        *("-G", "Ninja", "-S", str(ROOT), "-B", str(BUILD), "-DCMAKE_BUILD_TYPE=Release"),
        *("-DGRADWIRE_PYTHON=ON", "-DGRADWIRE_CUDA=ON", "-DGRADWIRE_BENCH=ON"),
        "-DGRADWIRE_WARNINGS_ARE_ERRORS=OFF",
        f"-DCMAKE_CUDA_ARCHITECTURES={architectures}",
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11}",
    )


def tool(name: str) -> str:
    """From this Python's programs, or PATH."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which(name, path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    if found is None:
        raise FileNotFoundError(f"{name} is neither in {beside} nor on PATH")
    return found


def call(*command: str) -> str:
    """What it prints; raises CallFailed."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        lines = done.stdout.strip().splitlines()
        named = [line for line in lines if "error" in line.lower() or "FAILED" in line]
        words = f"{' '.join(command[:2])}: " + " | ".join((named or lines)[-5:])
        raise CallFailed(words, done.stdout)
    return done.stdout


def _link() -> None:
    """A package gradwire that is the repository's, with what was built."""
    package = PACKAGES / "gradwire"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    sources = (ROOT / "python/gradwire").iterdir()
    built = [*BUILD.glob("_core*.so"), PLUGIN]
    for each in [*(path for path in sources if path.suffix != ".so"), *built]:
        if each.name != "__pycache__":
            (package / each.name).symlink_to(each)


def _imported() -> str:
    """The CUDA part that the package loads."""
    program = "from gradwire import _core; print(_core.cuda_info()['library'])"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return str(Path(done.stdout.strip()).resolve())


if __name__ == "__main__":
    sys.exit(main())

"""Builds what bench/gpu.py checks and times, in build/gpu, for this machine's GPU, off line.

Two stages of bench/gpu.py. `core`: the CUDA part, the programs that check its kernels and the jobs
that time them, by a compiler and nvcc alone. `extension`: what Python loads, and a package of links
to python/gradwire beside it, so that nothing is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from time import monotonic

from tests.gpu.rows import Row

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build/gpu"
PACKAGES = "python"  # in a build's folder, for PYTHONPATH
LIBRARY = "libgradwire_cuda.so"
PROGRAMS = ("gpu/gpu_kernels", "gpu/libgpu_jobs.so")
PLUGIN = BUILD / LIBRARY
ARCHITECTURES = "90"


class CallFailed(RuntimeError):
    """A program's last words, and all that it printed."""

    def __init__(self, words: str, output: str) -> None:
        super().__init__(words)
        self.output = output


def main() -> int:
    """Prints the rows; arguments: core or extension, and the GPUs' architectures, 90 by default.

    Or `pack FOLDER`: copies what both have built to a folder, for a machine that compiles nothing.
    """
    what, *given = sys.argv[1:]
    if what == "pack":
        pack(Path(given[0]))
        return 0
    architectures = given[0] if given else ARCHITECTURES
    return _core(architectures) if what == "core" else _extension(architectures)


def _core(architectures: str) -> int:
    with Row("build", f"kernels, CUDA {architectures}") as row:
        start = monotonic()
        _configure(architectures, "-DGRADWIRE_PYTHON=OFF")
        call(tool("ninja"), "-C", str(BUILD), "gradwire_cuda_plugin", "gpu_kernels", "gpu_jobs")
        row.expect(PLUGIN.exists(), f"there is no {PLUGIN}")
        row.note(f"{monotonic() - start:.0f} s")
    return 0


def _extension(architectures: str) -> int:
    with Row("build", "extension") as row:
        start = monotonic()
        pybind11 = call(sys.executable, "-m", "pybind11", "--cmakedir").strip()
        _configure(architectures, "-DGRADWIRE_PYTHON=ON", f"-Dpybind11_DIR={pybind11}")
        call(tool("ninja"), "-C", str(BUILD), "extension")
        row.note(f"{monotonic() - start:.0f} s")
    with Row("build", "package") as row:
        _link()
        row.expect(_imported() == str(PLUGIN.resolve()), f"the CUDA part is {_imported()}")
    return 0


def _configure(architectures: str, *options: str) -> None:
    call(
        tool("cmake"),
        *("-G", "Ninja", "-S", str(ROOT), "-B", str(BUILD), "-DCMAKE_BUILD_TYPE=Release"),
        *("-DGRADWIRE_CUDA=ON", "-DGRADWIRE_BENCH=ON", *options),
        "-DGRADWIRE_WARNINGS_ARE_ERRORS=OFF",
        f"-DCMAKE_CUDA_ARCHITECTURES={architectures}",
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        f"-DPython_EXECUTABLE={sys.executable}",
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
    package = BUILD / PACKAGES / "gradwire"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    sources = (ROOT / "python/gradwire").iterdir()
    built = [*BUILD.glob("_core*.so"), PLUGIN]
    for each in [*(path for path in sources if path.suffix != ".so"), *built]:
        if each.name != "__pycache__":
            (package / each.name).symlink_to(each)


def pack(folder: Path) -> None:
    """Copies what was built, without symbols, in the layout of BUILD."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(BUILD / PACKAGES, folder / PACKAGES)
    (folder / "gpu").mkdir()
    for program in (*PROGRAMS, LIBRARY):
        shutil.copy2(BUILD / program, folder / program)
    for each in [*folder.rglob("*.so"), folder / PROGRAMS[0]]:
        call(tool("strip"), str(each))


def _imported() -> str:
    """The CUDA part that the package loads."""
    program = "from gradwire import _core; print(_core.cuda_info()['library'])"
    environment = {**os.environ, "PYTHONPATH": str(BUILD / PACKAGES)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return str(Path(done.stdout.strip()).resolve())


if __name__ == "__main__":
    sys.exit(main())

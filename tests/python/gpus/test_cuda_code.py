"""The machine code that nvcc makes of the kernels, as cuobjdump shows it: no GPU is needed.

`make cuda` installs cuobjdump and nvdisasm.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PLUGIN = ROOT / "csrc/gradwire/cuda/plugin"
OPTIONS = re.search(
    r"target_compile_options\(gradwire_cuda_plugin PRIVATE\s+(.*?)\)",
    (ROOT / "cmake/cuda.cmake").read_text(),
    re.DOTALL,
)


def disassembler() -> Path | None:
    packages = Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/cuobjdump")
    found = shutil.which("cuobjdump")
    return Path(found) if found else next(packages, None)


def instructions(source: str, folder: Path) -> Counter[str]:
    """How often each is in the code of a file for sm_90."""
    nvcc, cuobjdump = shutil.which("nvcc"), disassembler()
    if nvcc is None or cuobjdump is None:
        pytest.skip("there is no nvcc, or no cuobjdump, which `make cuda` installs")
    assert OPTIONS is not None
    code = folder / "code.cubin"
    command = [nvcc, "-std=c++20", "-O3", "-arch=sm_90", "-cubin", "-o", str(code)]
    subprocess.run(
        [*command, *OPTIONS[1].split(), f"-I{ROOT / 'csrc'}", str(PLUGIN / source)], check=True
    )
    environment = {**os.environ, "PATH": f"{cuobjdump.parent}:{os.environ['PATH']}"}
    told = subprocess.run(
        [str(cuobjdump), "-sass", str(code)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return Counter(re.findall(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9_.]+)", told))


def count(of: Counter[str], pattern: str) -> int:
    return sum(number for name, number in of.items() if re.match(pattern, name))


def test_threads_move_four_elements_at_once(tmp_path: Path) -> None:
    """16 bytes of floats, 8 of halves; nvcc splits the assignment of a struct."""
    fold, cast = (instructions(each, tmp_path) for each in ("fold.cu", "cast/cast.cu"))
    assert count(fold, r"STG\.E\.128") >= 30, fold
    assert count(fold, r"LDG\.E\.128") >= 60, fold
    assert count(cast, r"STG\.E\.128") >= 16, cast
    assert count(cast, r"STG\.E\.64") >= 8, cast


@pytest.mark.nightly
def test_bytes_of_halves_are_no_numbers(tmp_path: Path) -> None:
    """ptxas 13.0 made conversions of casts to bytes; values of topk as fp16 were wrong on GPUs."""
    found = instructions("sparse/topk.cu", tmp_path)
    assert count(found, r"STG\.E\.U8") > 0
    assert count(found, r"F2I\.[US]8\.") == 0, found

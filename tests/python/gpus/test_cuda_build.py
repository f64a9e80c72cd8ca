"""The build of the CUDA part and its exported symbols; cuda_plugin_test.cc calls it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gradwire import _core

ROOT = Path(__file__).parents[3]
BUILT = Path(_core.__file__).with_name("libgradwire_cuda.so")
PLUGIN = Path(os.environ.get("GRADWIRE_CUDA_SO") or BUILT)
# libm and those that are part of libc since glibc 2.34; and where __tls_get_addr is.
SYSTEM = r"lib(stdc\+\+|gcc_s|c|m|dl|rt|pthread)\.so\.\d|ld-linux.*\.so\.\d"


def said(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def plugin() -> str:
    if not PLUGIN.exists():
        pytest.skip(f"this gradwire was built without nvcc: there is no {PLUGIN}")
    return str(PLUGIN)


def test_it_exports_its_table_and_nothing_else(plugin):
    names = [line.split()[-1] for line in said("nm", "-D", "--defined-only", plugin).splitlines()]
    assert names == ["gradwire_cuda_api"]


def test_it_needs_no_library_of_cuda(plugin):
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", said("readelf", "-d", "-W", plugin))
    assert needed
    assert [each for each in needed if not re.fullmatch(SYSTEM, each)] == []


def test_it_loads_and_says_which_driver_it_needs(plugin):
    code = "from gradwire import _core; print(_core.cuda_info())"
    environment = os.environ | {"GRADWIRE_CUDA_SO": plugin}
    told = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert re.search(r"'runtime': '1[2-9]\.\d+'", told.stdout), told.stdout


def configure(folder: Path, option: str) -> subprocess.CompletedProcess[str]:
    """Configures a build where no nvcc works."""
    cmake = Path(sys.executable).with_name("cmake")
    if not cmake.exists():
        pytest.skip(f"there is no {cmake}, which `make test` installs")
    command = [str(cmake), "-S", str(ROOT), "-B", str(folder)]
    command += ["-DGRADWIRE_PYTHON=OFF", f"-DGRADWIRE_CUDA={option}"]
    environment = os.environ | {"CUDACXX": str(folder / "no-nvcc")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_without_nvcc_auto_leaves_it_out(tmp_path):
    done = configure(tmp_path, "AUTO")
    assert done.returncode == 0, done.stderr
    said = re.findall(r"CUDA part: not built, no (nvcc|NVIDIA GPU or driver) is found", done.stdout)
    assert len(said) == 1, done.stdout


def test_without_nvcc_on_says_what_to_do(tmp_path):
    done = configure(tmp_path, "ON")
    assert done.returncode != 0
    told = " ".join(done.stderr.split())
    assert "no nvcc is found" in told
    assert "Name an nvcc in CUDACXX or put it on PATH" in told
    assert "GRADWIRE_CUDA=OFF" in told


def test_another_value_is_refused(tmp_path):
    done = configure(tmp_path, "MAYBE")
    assert done.returncode != 0
    assert "GRADWIRE_CUDA is 'MAYBE'; use AUTO, ON or OFF" in " ".join(done.stderr.split())

"""Reports of `gradwire doctor` on GPUs and NCCL; the libnccl that is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gradwire import _core
from gradwire._host import cuda
from ranks import LIMIT

# What a libnccl must have. Nobody calls any of it but the first.
FAKE = """
extern "C" int ncclGetVersion(int* version) { *version = VERSION; return 0; }
#define NONE(name) extern "C" int name() { return 3; }
NONE(ncclGetUniqueId) NONE(ncclCommInitRankConfig) NONE(ncclCommGetAsyncError)
NONE(ncclCommFinalize) NONE(ncclCommDestroy) NONE(ncclCommAbort) NONE(ncclGroupStart)
NONE(ncclGroupEnd) NONE(ncclSend) NONE(ncclRecv) NONE(ncclGetErrorString) NONE(ncclGetLastError)
NONE(ncclAllReduce) NONE(ncclReduceScatter) NONE(ncclAllGather) NONE(ncclBroadcast) NONE(ncclReduce)
"""


def compiled(folder: Path, version: int) -> Path:
    """A library of that version, which names itself as NCCL does."""
    folder.mkdir(parents=True)
    library = folder / "libnccl.so.2"
    command = ["g++", "-shared", "-fPIC", f"-DVERSION={version}", "-Wl,-soname,libnccl.so.2"]
    command += ["-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=FAKE, text=True, check=True, timeout=LIMIT)
    return library


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with a wheel of NCCL."""
    folder = tmp_path_factory.mktemp("site")
    compiled(folder / "nvidia" / "nccl" / "lib", 22809)
    return folder


@pytest.fixture(scope="module")
def fake(site: Path) -> Path:
    return site / "nvidia" / "nccl" / "lib" / "libnccl.so.2"


def doctor(name: str, before: str = "", **environment: str) -> tuple[bool, str]:
    """A row of its table, in a process of its own, since what is loaded stays."""
    code = f"{before}\nfrom gradwire._tools import cli\ncli.main(['doctor', '--json'])"
    kept = {k: v for k, v in os.environ.items() if k not in ("GRADWIRE_NCCL_SO", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": search_path(), **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.stdout, done.stderr
    (row,) = (each for each in json.loads(done.stdout)["checks"] if each["name"] == name)
    return row["ok"], row["detail"]


def search_path(*more: Path) -> str:
    """PYTHONPATH, with gradwire as it is imported here."""
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([*map(str, more), *filter(None, before)])


# --- NCCL ---


def test_the_variable_names_nccl(fake: Path):
    found = doctor("NCCL", GRADWIRE_NCCL_SO=str(fake))
    assert found == (True, f"2.28.9, {fake} (GRADWIRE_NCCL_SO)")


def test_pips_wheel_is_found_without_torch(site: Path, fake: Path):
    found = doctor("NCCL", PYTHONPATH=search_path(site))
    assert found == (True, f"2.28.9, {fake} (pip's wheel)")


def test_what_torch_has_loaded_comes_first(site: Path, tmp_path: Path):
    torchs = compiled(tmp_path / "torch" / "lib", 22005)
    load = f"import ctypes; torchs = ctypes.CDLL({str(torchs)!r})"
    found = doctor("NCCL", load, PYTHONPATH=search_path(site))
    assert found == (True, f"2.20.5, {torchs} (loaded already)")


def test_the_system_has_the_last_word(fake: Path):
    if cuda.nccl_wheels():
        pytest.skip("a wheel of NCCL is installed")
    found = doctor("NCCL", LD_LIBRARY_PATH=str(fake.parent))
    assert found == (True, f"2.28.9, {fake} (the system's)")


def test_an_old_nccl_is_refused(tmp_path: Path):
    old = compiled(tmp_path / "old", 21605)
    ok, detail = doctor("NCCL", GRADWIRE_NCCL_SO=str(old))
    assert not ok
    assert detail.startswith(f"because NCCL 2.16.5 ({old}) is too old: 2.19.0 or newer")
    assert "pip install" in detail


def test_a_file_that_is_no_library_is_refused():
    ok, detail = doctor("NCCL", GRADWIRE_NCCL_SO=__file__)
    assert not ok
    assert f"GRADWIRE_NCCL_SO={__file__} does not load" in detail


@pytest.mark.parametrize("absent", ["/nowhere/libnccl.so.2"])
def test_an_absent_file_is_refused_whatever_else_there_is(absent: str, site: Path):
    ok, detail = doctor("NCCL", GRADWIRE_NCCL_SO=absent, PYTHONPATH=search_path(site))
    assert not ok
    assert f"GRADWIRE_NCCL_SO={absent} does not load" in detail
    assert "No such file" in detail


def test_without_nccl_one_hears_what_to_install():
    ok, detail = doctor("NCCL")
    if ok:
        pytest.skip(f"there is one: {detail}")
    assert detail.startswith("because NCCL does not load (")
    assert "pip install nvidia-nccl-cu1" in detail


def test_wheels_are_looked_for_where_python_looks(
    monkeypatch: pytest.MonkeyPatch, site: Path, fake: Path, tmp_path: Path
):
    monkeypatch.chdir(site)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "", str(site), str(site)])
    assert cuda.nccl_wheels() == [str(fake)]


# --- GPUs ---


def test_an_absent_cuda_part_is_explained():
    ok, detail = doctor("CUDA", GRADWIRE_CUDA_SO="/nowhere/libgradwire_cuda.so")
    assert not ok
    assert "because gradwire's CUDA part does not load (/nowhere/libgradwire_cuda.so" in detail
    assert "GRADWIRE_CUDA=ON pip install" in detail


def test_another_library_is_not_the_cuda_part():
    ok, detail = doctor("CUDA", GRADWIRE_CUDA_SO="libm.so.6")
    assert not ok
    assert "libm.so.6 is not gradwire's CUDA part" in detail


def test_the_cuda_part_tells_its_devices_or_why_there_are_none():
    part = Path(_core.__file__).with_name("libgradwire_cuda.so")
    if not part.exists():
        pytest.skip(f"this gradwire was built without nvcc: there is no {part}")
    found = _core.cuda_info()
    assert found["library"] == str(part)
    assert float(found["runtime"]) >= 12
    assert bool(found["devices"]) != bool(found["why_not"])


def test_devices_are_counted(monkeypatch: pytest.MonkeyPatch):
    large = {"name": "NVIDIA H200", "capability": (9, 0), "memory": 150_110_000_000}
    small = {"name": "NVIDIA A2", "capability": (8, 6), "memory": 16 << 30}
    facts = {"library": "/x.so", "runtime": "13.0", "driver": "13.1", "why_not": ""}
    found = {**facts, "devices": [large, small, large]}
    monkeypatch.setattr(_core, "cuda_info", lambda: found)
    ok, detail = cuda.devices()
    assert ok
    assert detail == (
        "2 x NVIDIA H200 (9.0, 139.8 GiB), NVIDIA A2 (8.6, 16.0 GiB); "
        "CUDA 13.0, driver for 13.1; /x.so"
    )


def test_why_there_are_no_devices_is_told(monkeypatch: pytest.MonkeyPatch):
    facts = {"library": "/x.so", "runtime": "13.0", "driver": "0.0", "devices": []}
    monkeypatch.setattr(
        _core, "cuda_info", lambda: {**facts, "why_not": "there is no NVIDIA driver"}
    )
    assert cuda.devices() == (False, "because there is no NVIDIA driver")

"""How wheels are built: `.ci/wheel`, `.ci/check-wheel`, and cibuildwheel's table."""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def refusal(*command: str) -> str:
    """What a script says that can't do what it is asked."""
    done = subprocess.run([str(ROOT / ".ci" / command[0]), *command[1:]], capture_output=True)
    assert done.returncode == 2
    assert not done.stdout
    return done.stderr.decode()


@pytest.mark.parametrize("script", ["wheel", "check-wheel"])
def test_scripts_say_what_they_need(script: str) -> None:
    assert refusal(script).startswith(f"{script} PYTHON ")
    assert refusal(script, sys.executable).startswith(f"{script} PYTHON ")


@pytest.mark.parametrize("glibc", ["2", "3.17", "2.5", "2.17.1", "manylinux_2_17", ""])
def test_only_versions_of_glibc_are_taken(glibc: str, tmp_path: Path) -> None:
    assert f"'{glibc}' is no version of glibc" in refusal(
        "wheel", sys.executable, str(tmp_path), glibc
    )


def test_a_wheel_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "gradwire.whl")
    assert missing in refusal("check-wheel", sys.executable, missing)


def project() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text()))


def test_what_builds_wheels_is_pinned() -> None:
    """Another zig has another compiler."""
    extras = project()["project"]["optional-dependencies"]
    assert any(each.startswith("ziglang==") for each in extras["wheel"])


@pytest.mark.parametrize(
    ("identifier", "built"),
    [
        ("cp310-manylinux_x86_64", True),
        ("cp314-manylinux_aarch64", True),
        ("cp314t-manylinux_x86_64", False),
        ("cp39-manylinux_x86_64", False),
        ("cp312-musllinux_x86_64", False),
        ("pp311-manylinux_x86_64", False),
    ],
)
def test_cibuildwheel_builds_every_python_that_is_supported(identifier: str, built: bool) -> None:
    table = project()["tool"]["cibuildwheel"]
    chosen = fnmatch(identifier, table["build"]) and not fnmatch(identifier, table["skip"])
    assert chosen == built


def test_cibuildwheel_defines_what_cmake_knows() -> None:
    known = (ROOT / "CMakeLists.txt").read_text() + (ROOT / "cmake" / "cuda.cmake").read_text()
    settings = project()["tool"]["cibuildwheel"]["config-settings"]
    defined = [each for each in settings if each.startswith("cmake.define.")]
    assert defined
    for each in defined:
        assert f"({each.removeprefix('cmake.define.')} " in known

"""A cache of cost models that cannot be read costs a warning, and no job."""

from __future__ import annotations

import logging
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest
from gradwire import InvalidArgument, _model
from gradwire._model import HostSet
from gradwire._tools import doctor
from gradwire.lab.tuning import saving
from ranks import LIMIT, nightly

HOSTS = HostSet((("one", 2),), "shm", "tcp")
PROGRAM = """
import gradwire, numpy
for _ in range(2):
    with gradwire.init() as comm, comm.split(0) as part:
        part.all_reduce(numpy.ones(1000, numpy.float32))
"""


def a_file(path: Path) -> None:
    path.write_text("")


def a_loop(path: Path) -> None:
    path.symlink_to(path)


def anothers_home(path: Path) -> None:
    path.mkdir()
    path.chmod(0)
    if os.access(path, os.X_OK):
        pytest.skip("this user may read every folder")


@pytest.fixture(
    params=[
        (a_file, "HOME"),
        (a_loop, "XDG_CACHE_HOME"),
        (anothers_home, "HOME"),
        *nightly((a_file, "XDG_CACHE_HOME"), (a_loop, "HOME"), (anothers_home, "XDG_CACHE_HOME")),
    ],
    ids=lambda each: f"{each[0].__name__}-{each[1]}",
)
def broken_home(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """A folder whose cache cannot be read."""
    for each in ("HOME", "XDG_CACHE_HOME"):  # which name the folder of the cache
        monkeypatch.delenv(each, raising=False)
    make, variable = request.param
    make(tmp_path / "home")
    monkeypatch.setenv(variable, str(tmp_path / "home"))
    monkeypatch.delenv(_model.VARIABLE, raising=False)
    return str(tmp_path / "home")


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home, as containers have one."""

    def unknown(_: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", _model.VARIABLE):
        monkeypatch.delenv(name, raising=False)


def gradwire(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradwire", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)


def test_a_job_of_several_ranks_is_warned_once(broken_home: str, tmp_path: Path):
    (tmp_path / "job.py").write_text(PROGRAM)
    ended = gradwire("run", "-n", "2", str(tmp_path / "job.py"))
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("using built-in values") == 1, ended.stderr
    assert broken_home in ended.stderr


def test_doctor_says_what_is_wrong(broken_home: str):
    ended = gradwire("doctor")
    assert ended.returncode == 0, ended.stderr
    (line,) = [each for each in ended.stdout.splitlines() if "built-in values are used" in each]
    assert broken_home in line


def test_tune_says_so_before_it_measures(broken_home: str):
    ended = gradwire("tune", "--seconds", "600")
    assert ended.returncode != 0
    assert f"cannot save a cost model in {broken_home}" in ended.stderr
    assert "--output FILE" in ended.stderr


@pytest.mark.usefixtures("broken_home")
def test_tune_saves_in_a_given_file(tmp_path: Path):
    ended = gradwire("tune", "--seconds", "0.1", "-o", str(tmp_path / "model.json"))
    assert ended.returncode == 0, ended.stderr
    assert saving.describe(tmp_path / "model.json")[1]


@pytest.mark.usefixtures("no_home")
def test_a_user_without_a_home(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "gradwire"):
        assert _model.find(HOSTS)[1] == "built-in values"
        assert _model.find(HOSTS)[1] == "built-in values"
        assert _model.find_for_gpus(HOSTS, "nccl") is None
    assert [each.getMessage().count("HOME is not set") for each in caplog.records] == [1]
    (told,) = doctor._cost_models()
    assert told.ok is False
    assert "HOME is not set" in told.detail
    with pytest.raises(InvalidArgument, match=r"the cache \(HOME is not set.*--output FILE"):
        saving.make_place(HOSTS)

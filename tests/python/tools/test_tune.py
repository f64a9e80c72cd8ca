"""The cost model: where it is kept, that all ranks have rank 0's, and that measuring finds it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradwire
import numpy as np
import pytest
import simulated_gpu
from gradwire import (
    Communicator,
    CostModel,
    InvalidArgument,
    Schedule,
    ScheduleError,
    _core,
    _model,
)
from gradwire._model import HostSet
from gradwire.lab.tuning import saving
from gradwire.lab.tuning.fit import Fit, Timing, _cases
from gradwire.lab.tuning.measure import Case
from ranks import LIMIT, run

HOSTS = HostSet((("one", 2), ("two", 2)), "shm", "tcp")
OTHER = {"within.alpha": 1e-3, "gamma": 2e-9, "far.4M": 3.0, "fp16.encode": 1e-8}
NO_MODELS: dict[str, Any] = {
    "empty": "",
    "no JSON": "{",
    "no object": "[1]",
    "another format": {"gradwire_cost_model": 1, "parameters": {}},
    "no parameters": {"gradwire_cost_model": 1},
    "unknown": {"gradwire_cost_model": 1, "parameters": {"speed": 1}},
    "negative": {"gradwire_cost_model": 1, "parameters": {"gamma": -1}},
    "not finite": '{"gradwire_cost_model": 1, "parameters": {"gamma": NaN}}',
    "no number": {"gradwire_cost_model": 1, "parameters": {"gamma": True}},
    "huge": {"gradwire_cost_model": 1, "parameters": {"cores": 10**400}},
    "nested": "[" * 30_000,
    "too long": " " * 100_000,
}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(_model.VARIABLE, raising=False)


def write(path: Path, contents: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(contents if isinstance(contents, str) else json.dumps(contents))
    return path


def test_a_saved_model_is_found_for_its_hosts_alone():
    model = CostModel(OTHER)
    path = saving.save(model, HOSTS)
    assert path == HOSTS.path
    found, source = _model.find(HOSTS)
    assert (_model.wrap(found), source) == (model, str(path))
    others = HOSTS._replace(between="emulated")
    assert _model.find(others)[1] == "built-in values"
    write(others.path, path.read_text())  # moved there by hand
    assert _model.find(others)[1] == "built-in values"


def test_the_variable_names_a_file_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saving.save(CostModel(), HOSTS)
    elsewhere = saving.save(CostModel(OTHER), HOSTS, tmp_path / "mine.json")
    monkeypatch.setenv(_model.VARIABLE, str(elsewhere))
    assert _model.wrap(_model.find(HOSTS)[0]) == CostModel(OTHER)
    monkeypatch.setenv(_model.VARIABLE, "default")
    assert _model.find(HOSTS)[1] == "built-in values"


@pytest.mark.parametrize("contents", NO_MODELS.values(), ids=NO_MODELS)
def test_what_is_no_model_is_refused_or_warned_of(
    contents: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    write(HOSTS.path, contents)
    with caplog.at_level(logging.WARNING, "gradwire"):
        assert _model.find(HOSTS)[1] == "built-in values"
    assert str(HOSTS.path) in caplog.text
    mine = write(tmp_path / "mine.json", contents)
    monkeypatch.setenv(_model.VARIABLE, str(mine))
    with pytest.raises(InvalidArgument, match=r"mine\.json holds no cost model"):
        _model.find(HOSTS)


def test_files_that_are_none_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("absent", "."):
        monkeypatch.setenv(_model.VARIABLE, str(tmp_path / name))
        with pytest.raises(InvalidArgument, match="holds no cost model"):
            _model.find(HOSTS)


def parameters(comm: Communicator) -> list[dict[str, float]]:
    comm.all_reduce(np.ones(1000, np.float32))
    with comm.split(0) as part:
        part.all_reduce(np.ones(1000, np.float32))
        return [comm.cost_model.parameters, part.cost_model.parameters]


def test_all_ranks_have_rank_0s_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = saving.save(CostModel(OTHER), HOSTS, tmp_path / "mine.json")
    monkeypatch.setenv(_model.VARIABLE, str(path))
    told = gradwire.spawn(parameters, 3, timeout=60)
    assert told == [[told[0][0]] * 2] * 3
    assert OTHER.items() <= told[0][0].items()
    monkeypatch.setenv(_model.VARIABLE, str(write(tmp_path / "bad.json", "{")))
    with pytest.raises(InvalidArgument, match=r"bad\.json"):
        gradwire.spawn(parameters, 2, timeout=60)


def test_ranks_that_run_are_tuned(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gradwire.lab.tuning.fit._MOST_FIT_SECONDS", 0.3)

    def body(comm: Communicator) -> CostModel:
        model = comm.tune(seconds=0.3)
        assert model == comm.cost_model
        x = np.full(1000, 1.0, np.float32)
        comm.all_reduce(x)
        assert np.all(x == comm.size)
        return model

    one, *others = run(3, body, timeout=60)
    assert others == [one, one]


def test_the_fit_predicts_what_a_model_does():
    hidden = CostModel(
        {"within.alpha": 1e-6, "within.latency": 3e-6, "move": 2e-10, "gamma": 5e-10, "cores": 8}
    )
    size = 4
    cases = _cases(size)
    timings = [
        Timing(case, hidden.predict(case.algorithm, case.nbytes, size, collective=name))
        for case in cases
        if (name := case.collective)
    ]
    comm: Any = SimpleNamespace(hosts=((0, 1, 2, 3),), size=size)
    start = CostModel({"cores": 8})
    fit = Fit(comm, start._core, timings)
    fitted = fit.run()
    assert all(each.close for each in fitted)
    coded = Case("all_reduce", 1 << 20, algorithm="direct", codec="int8")
    measured = 3 * fit.model.predict(
        Schedule.generate("direct", size)._core, coded.nbytes, [[0, 1, 2, 3]], None
    )
    fit.fit_codecs([Timing(coded, measured)])
    found = _model.wrap(fit.model).predict("direct", coded.nbytes, size, codec="int8")
    assert found == pytest.approx(measured, rel=0.01)


def test_a_model_can_be_asked():
    model = CostModel({"within.alpha": 0, "within.latency": 0, "call": 0, "move": 0, "cores": 8})
    n = 512 << 10
    assert model.predict("ring", n, 4) == pytest.approx(
        3 / 4 * n * model.parameters["gamma"] * model_growth(model), rel=1e-6
    )
    name, seconds = model.choose(64 << 20, 4)
    assert seconds <= model.predict(name, 64 << 20, 4)
    name, seconds = CostModel({"cores": 8}).choose(4, 4)
    assert name == "gather(direct)"
    assert seconds == pytest.approx(CostModel({"cores": 8}).predict(name, 4, 4))
    assert model.predict("gather", 4, 4) == pytest.approx(model.predict("gather(direct)", 4, 4))
    with pytest.raises(ScheduleError, match="pigeon"):
        model.predict("gather(pigeon)", 4, 4)
    assert model.choose(4, 4, codec="int8")[0] != "recursive_doubling"
    for name, value in (("speed", 1.0), ("gamma", -1.0)):
        with pytest.raises(InvalidArgument, match=name):
            CostModel({name: value})


def model_growth(model: CostModel) -> float:
    return model.parameters["far.512K"]


def gradwire_says(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradwire", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)


def test_the_command_saves_where_init_and_doctor_look():
    ended = gradwire_says("tune", "-n", "2", "--seconds", "0.3", "--json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert all(each["predicted"] > 0 for each in found["timings"])
    (path,) = _model.directory().iterdir()
    assert str(path) in ended.stderr
    assert json.loads(path.read_text())["parameters"] == found["parameters"]
    (told, _) = gradwire.spawn(parameters, 2, timeout=60)[1]
    assert told == found["parameters"]
    assert path.name in gradwire_says("doctor").stdout


@simulated_gpu.needed
def test_gpus_are_tuned_and_use_what_was_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GRADWIRE_CUDA_SO", str(simulated_gpu.path()))
    ended = gradwire_says("tune", "--gpus", "-n", "2", "--seconds", "0.3", "--json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert all(each["predicted"] > 0 for each in found["timings"])
    (path,) = _model.directory().iterdir()
    saved = json.loads(path.read_text())
    assert saved["gpus"] == {"host": found["parameters"]}
    guess = _model.wrap(_core.gpu_model()).parameters
    changed = [name for name, value in guess.items() if found["parameters"][name] != value]
    assert {"call", "round", "within.alpha", "within.beta", "gamma"} <= set(changed)
    add = """
        def body(comm):
            x = Array(values(comm.rank))
            comm.all_reduce(x)
            return float(abs(x.get() - sum(map(values, range(comm.size)))).max())
        """
    assert max(simulated_gpu.run(add)) < 1e-5
    again = gradwire_says("tune", "-n", "2", "--seconds", "0.3")  # of CPUs: it keeps both
    assert again.returncode == 0, again.stderr
    assert json.loads(path.read_text())["gpus"] == saved["gpus"]
    saved["gpus"]["host"]["round"] = -1
    mine = write(path.with_name("mine.json"), saved)
    for error in simulated_gpu.run(
        """
        def body(comm):
            try:
                comm.all_reduce(Array(values(comm.rank)))
            except gradwire.InvalidArgument as error:
                return str(error)
        """,
        GRADWIRE_MODEL=str(mine),
    ):
        assert "mine.json" in error
        assert "round" in error


@pytest.mark.parametrize("options", [("-n", "1"), ("--seconds", "0"), ("--seconds", "nan")])
def test_wrong_usage_of_the_command(options: tuple[str, ...]):
    ended = gradwire_says("tune", *options)
    assert ended.returncode == 2
    assert options[0].lstrip("-") in ended.stderr or "rank" in ended.stderr

"""tests/gpu over the simulated GPU, what stages that go wrong come out as, and bench/gpu.py."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gradwire
import pytest
import ranks
import simulated_gpu

from bench import gpu, tables
from bench.common import report
from bench.cuda import floors, torch_jobs
from bench.cuda import report as gpu_report
from bench.cuda import stages as gpu_stages
from tests.gpu import build as gpu_build
from tests.gpu import cpp_tests, loopback, sanitize, stages
from tests.gpu import ranks as gpu_ranks
from tests.gpu.calls import Found, difference
from tests.gpu.rows import Row
from tests.gpu.stages import Deadline, Ended, Stage

BUILD = simulated_gpu.path().parents[2]
JOBS = BUILD / "gpu/libgpu_jobs.so"
built = pytest.mark.skipif(
    not (simulated_gpu.path().exists() and JOBS.exists()),
    reason="the simulated GPU and the programs of tests/gpu were not built (make test-cpp)",
)


@pytest.mark.long
@built
@pytest.mark.timeout(500)
def test_all_checks_pass_over_the_simulated_gpu() -> None:
    command = [sys.executable, "-m", "tests.gpu", "--build", str(BUILD)]
    done = subprocess.run(command, cwd=gpu_build.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split(": ") for line in done.stdout.splitlines()]
    passed = {line[0] for line in lines if "checks passed" in line[-1]}
    assert passed == {"kernels", "loopback", "graph", "ranks", "hook"}
    assert "backend: skipped: torch has no CUDA" in done.stdout.splitlines()


def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, "bench/gpu.py", "--output", str(tmp_path / "gpu")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=gpu_build.ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "nothing was measured" in done.stderr
    assert not list(tmp_path.iterdir())


def test_results_go_into_a_folder_or_beside_a_name(tmp_path: Path) -> None:
    assert gpu._stem("").parent == report.RESULTS
    assert gpu._stem(str(tmp_path)) == tmp_path / "gpu"
    assert gpu._stem(f"{tmp_path}/new/") == tmp_path / "new/gpu"
    assert gpu._stem(str(tmp_path / "h200.1")) == tmp_path / "h200.1"
    report.save(tmp_path / "h200.1", {"a": 1}, "text")
    assert {each.name for each in tmp_path.iterdir()} == {"h200.1.json", "h200.1.md"}


# ---- Stages ------------------------------------------------------------------------------------


def run(program: str, seconds: float = 60) -> Ended:
    """A stage that is this program, after some imports."""
    text = "import json, os, sys, time\n" + program
    stage = Stage("made up", [sys.executable, "-c", text], seconds)
    return stages.run(stage, seconds, os.environ)


_ROW = "from tests.gpu.rows import Row, tell\nwith Row('g', 'c') as row: row.expect(True, '')\n"


def test_rows_and_times_are_read_among_chatter() -> None:
    ended = run("print('hello'); print('{no json')\n" + _ROW + "tell(job='fold', n=1)")
    assert ended.passed
    assert [(row["group"], row["case"], row["checks"]) for row in ended.rows] == [("g", "c", 1)]
    assert ended.times == [{"job": "fold", "n": 1}]


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (_ROW + "os.kill(os.getpid(), 11)", "ended with status -11"),
        (_ROW + "print('the reason', file=sys.stderr); sys.exit(3)", "the reason"),
        ("", "it told nothing"),
        (
            "from tests.gpu.rows import Row\nwith Row('g') as row: row.expect(1 == 2, 'sums')",
            "sums",
        ),
        (
            "from tests.gpu.rows import Row\nwith Row('g') as row: raise ValueError('x')",
            "ValueError: x",
        ),
    ],
)
def test_what_goes_wrong_in_a_stage_is_a_failed_row(program: str, words: str) -> None:
    ended = run(program)
    assert not ended.passed
    assert words in ended.rows[-1]["detail"]


def test_a_stage_that_hangs_is_ended_with_its_children() -> None:
    hanging = """
child = os.fork()
if child == 0:
    time.sleep(1000)
print(json.dumps({"group": "children", "case": str(child), "passed": True}), flush=True)
time.sleep(1000)
"""
    ended = run(_ROW + hanging, seconds=3)
    assert ended.seconds < 60
    assert "ran out of its 3 s, last of children" in ended.rows[-1]["detail"]
    (child,) = [int(row["case"]) for row in ended.rows if row["group"] == "children"]
    ranks.eventually(lambda: not Path(f"/proc/{child}").exists() or ranks.state_of(child) == "Z")


def test_what_the_deadline_leaves_no_time_for_is_incomplete_and_said() -> None:
    told: list[str] = []
    (ended,) = stages.run_all([Stage("late", ["false"], 10)], Deadline(0), {}, told.append)
    assert ended.passed
    assert not ended.complete
    assert "INCOMPLETE after 0 checks: no time was left" in told[0]
    assert stages.status([ended]) == 2


def test_a_stage_that_runs_out_of_time_has_not_failed() -> None:
    ended = run(_ROW + "time.sleep(1000)", seconds=3)
    assert ended.passed
    assert not ended.complete
    assert stages.status([ended, Ended("b", 0, [FAILED])]) == 1
    assert stages.status([Ended("b", 0, [PASSED])]) == 0


def test_what_a_failed_stage_was_needed_for_is_not_run() -> None:
    row = '{"passed": true, "group": "g", "case": "", "checks": 1}'
    failing, other = Stage("build", ["false"], 10), Stage("other", ["echo", row], 10, 1)
    user = Stage("user", ["echo", row], 10, 1, needs=("build",))
    saved: list[list[str]] = []
    ended = stages.run_all(
        [failing, other, user],
        Deadline(100),
        os.environ,
        lambda line: None,
        lambda ended: saved.append([each.name for each in ended]),
    )
    assert [(each.passed, each.complete) for each in ended] == [
        (False, True),
        (True, True),
        (True, False),
    ]
    assert ended[2].rows[0]["detail"] == "it needs 'build', which did not pass"
    assert saved == [["build"], ["build", "other", "user"]], "results are saved after each wave"


def test_stages_need_those_that_are_run_before_them() -> None:
    wave: dict[str, int] = {}
    for stage in gpu_stages.stages(Path("build"), "90"):
        assert all(wave[each] < stage.wave for each in stage.needs), stage.name
        wave[stage.name] = stage.wave
    assert set(gpu_stages.BUILDS) < set(wave)


def test_stages_have_their_time_and_what_those_before_them_left() -> None:
    row = '{"passed": true, "group": "g", "case": "", "checks": 1}'
    first, second, third = (
        Stage(name, ["sh", "-c", f"echo '{row}'"], 30, wave)
        for wave, name in enumerate(("first", "second", "third"))
    )
    told: list[str] = []
    stages.run_all([first, second, third], Deadline(100), os.environ, told.append)
    # Of 100 s the first one leaves 60 to the others; a busy machine takes some of the rest.
    limits = [int(re.search(r"up to (\d+) s", told[i])[1]) for i in (0, 2)]  # type: ignore[index]
    assert 30 < limits[0] < 40
    assert 60 < limits[1] < 70


def test_a_command_is_told_its_seconds() -> None:
    row = 'import sys; print(\'{"passed": true, "case": "\' + sys.argv[1] + \'"}\')'
    stage = Stage("s", [sys.executable, "-c", row, stages.SECONDS], 99)
    assert stages.run(stage, 30, os.environ).rows == [{"passed": True, "case": "30"}]


def test_all_stages_have_their_time() -> None:
    """In 10 minutes where nothing is compiled, and in 12 with that."""
    built, all_of_them = (gpu_stages.stages(Path("build"), each) for each in (None, "90"))
    assert stages.needed(built) <= 10 * 60 - 20  # and what GPU there is
    assert stages.needed(all_of_them) <= 12 * 60 - 20


def test_stages_of_what_is_built_compile_nothing() -> None:
    built = gpu_stages.stages(Path("elsewhere"), None)
    assert not {*gpu_stages.BUILDS, "C++ tests"} & {each.name for each in built}
    assert all(each.needs == () for each in built)
    (kernels,) = [each for each in built if each.name == "kernels"]
    assert kernels.command[0] == "elsewhere/gpu/gpu_kernels"


# ---- What is compared --------------------------------------------------------------------------


def test_differences_of_results_and_residuals_are_found() -> None:
    kept = {"residual": [1.0], "tau": 0.5, "filter": 1.0, "calls": 3, "memory": []}
    one = Found([b"a", b"b"], {"k": kept})
    assert difference(one, one) == ""
    assert difference(one, Found([b"a", b"c"], {"k": kept})) == "the results of call 1 differ"
    assert difference(one, Found([b"a", b"b"], {"k": {**kept, "filter": 2.0}})) == ""
    other = Found([b"a", b"b"], {"k": {**kept, "residual": [2.0]}})
    assert difference(one, other) == "residual of k differs"
    assert "refused" in difference(one, Found([], {}, "no"))


def test_every_collective_codec_and_number_of_ranks_is_checked() -> None:
    assert sorted(loopback.SIZES) == [1, 2, 3, 4, 5, 8]
    groups = dict(loopback.groups(loopback.FULL, 4, ("float32",)))
    assert set(loopback.COLLECTIVES) < set(groups)
    assert {f"codec {each}" for each in (*loopback.CODECS, "lowrank")} < set(groups)
    assert {0, 1, 3} < {case.n for case in groups["all_reduce"]}
    assert {0, 1} == {case.shift for case in groups["all_reduce"]}
    assert all(case.calls == 3 for case in groups["codec onebit"] if case.feedback)


def test_nccl_gets_several_ranks_of_a_gpu() -> None:
    old, new = (gpu_ranks.nccl_environment(2, version) for version in ("2.28.9", "2.30.7"))
    assert (old["NCCL_HOSTID"], old["NCCL_NET"]) == ("rank2", "Socket")
    assert new["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert "NCCL_HOSTID" not in new
    assert gpu_ranks.nccl_environment(0, "") == {}


class _Late:
    """A communicator and a place in one: an error that comes while its first call is awaited."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds, self.failed = 100.0, seconds, False

    def all_reduce(self, x: object, timeout: float) -> None:
        if self.failed:
            error = gradwire.Timeout("late")
            error.peer = 1
            raise error

    def wait(self) -> None:
        self.now += self.seconds
        self.failed = True


@pytest.mark.parametrize("seconds", [4.0, 30.0])
def test_an_error_that_came_during_a_wait_is_known(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = _Late(seconds)
    monkeypatch.setattr(gpu_ranks, "own_time", lambda: late.now)
    assert gpu_ranks._until_it_fails(late, None, late) == ("Timeout", 1, seconds)  # type: ignore[arg-type]


_WELL = '{"passed": true}\n========= ERROR SUMMARY: 0 errors'
_NOT_SUPPORTED = """========= Program hit cudaErrorNotSupported (error 801) due to "operation not
========= supported" on CUDA API call to cudaLaunchKernel: not supported."""


@pytest.mark.parametrize(
    ("output", "status", "judged"),
    [
        (_WELL, 0, "passed"),
        (_WELL, 1, "failed"),
        (_WELL.replace("0 errors", "2 errors"), 0, "failed"),
        (_WELL.replace("true", "false"), 0, "failed"),
        ("========= ERROR SUMMARY: 0 errors", 0, "failed"),
        ("========= Internal Sanitizer Error: it will be shut down\n" + _WELL, 0, "failed"),
        ('{"passed": true}', -11, "failed"),
        (f"{_NOT_SUPPORTED}\n{_WELL.replace('0 errors', '1 error')}", 0, "failed"),
        ("========= Error: Device not supported. Please refer to", 255, "skipped"),
        ("========= Error: Device not supported.\n" + _WELL, 0, "skipped"),
        ("cannot run", 1, "failed"),
        ('{"passed": true}', None, "incomplete"),
        ('{"passed": true}\n========= Invalid __global__ write of size 4', None, "failed"),
        ('{"passed": false}', None, "failed"),
    ],
)
def test_compute_sanitizer_is_judged(
    output: str, status: int | None, judged: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Row("g") as row:
        sanitize.judge(row, "memcheck", output, status)
    told = json.loads(capsys.readouterr().out)
    instead = [each for each in ("skipped", "incomplete") if told.get(each)]
    assert judged == (*instead, "passed" if told["passed"] else "failed")[0]


def test_a_sanitizer_that_takes_too_long_is_ended() -> None:
    program = "import sys, time; print('said', flush=True); time.sleep(1000)"
    assert sanitize._run([sys.executable, "-c", program], 3) == ("said\n", None)


_TESTED = """cmake_minimum_required(VERSION 3.26)
project(tested LANGUAGES NONE)
if(GRADWIRE_TESTS)  # where there may be one
  set(CMAKE_FIND_USE_CMAKE_ENVIRONMENT_PATH OFF)
  set(CMAKE_FIND_USE_SYSTEM_ENVIRONMENT_PATH OFF)
  set(CMAKE_FIND_USE_CMAKE_SYSTEM_PATH OFF)
  find_package(GTest REQUIRED)
endif()
"""


@pytest.mark.skipif(shutil.which("cmake") is None, reason="there is no cmake")
def test_without_googletest_its_tests_are_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "CMakeLists.txt").write_text(_TESTED)
    build = tmp_path / "build"
    gpu_build.call("cmake", "-S", str(tmp_path), "-B", str(build))
    assert not cpp_tests._built(build, ["cuda_cast_test"])
    row = json.loads(capsys.readouterr().out)
    assert (row["passed"], row["skipped"], row["detail"]) == (True, True, "there is no GoogleTest")
    assert "GRADWIRE_TESTS:UNINITIALIZED=OFF" in (build / "CMakeCache.txt").read_text()


@pytest.mark.skipif(shutil.which("cmake") is None, reason="there is no cmake")
def test_what_else_cmake_says_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = 'message(STATUS "Found GTest: x")\n  message(FATAL_ERROR "no nvcc")'
    (tmp_path / "CMakeLists.txt").write_text(_TESTED.replace("find_package(GTest REQUIRED)", other))
    build = tmp_path / "build"
    gpu_build.call("cmake", "-S", str(tmp_path), "-B", str(build))
    assert not cpp_tests._built(build, ["cuda_cast_test"])
    assert not json.loads(capsys.readouterr().out)["passed"]


def test_the_kernels_tests_in_cpp_are_known() -> None:
    names = cpp_tests.names(gpu_build.ROOT / "tests/cpp/cuda")
    assert {"cuda_cast_test", "cuda_onebit_test", "cuda_topk_test"} < set(names)
    assert "cuda_nccl_test" not in names


# ---- Jobs --------------------------------------------------------------------------------------


@built
def test_every_job_that_is_timed_runs() -> None:
    library = ctypes.CDLL(str(JOBS))
    library.gpu_job_make.restype = ctypes.c_void_p
    library.gpu_job_make.argtypes = [
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_uint64,
        ctypes.c_int,
    ]
    library.gpu_job_run.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    library.gpu_job_free.argtypes = [ctypes.c_void_p]
    library.gpu_job_error.restype = ctypes.c_char_p
    plugin = str(simulated_gpu.path()).encode()
    for floor in floors.FLOORS:
        job = library.gpu_job_make(plugin, floor.job.encode(), 4096, 2)
        assert job, library.gpu_job_error()
        for index in range(2):
            assert library.gpu_job_run(job, index, None) == 0, library.gpu_job_error()
        library.gpu_job_free(job)
    assert not library.gpu_job_make(plugin, b"no such job", 4096, 1)
    assert b"no job 'no such job'" in library.gpu_job_error()


def test_torch_does_every_job_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_jobs, "DEVICE", "cpu")
    for floor in floors.FLOORS:
        job = torch_jobs.make(floor.job, 1 << 14, 2)
        job.run(0)
        job.run(1)


def test_floors_are_those_of_the_kernels() -> None:
    of_jobs = {each.job: each.bytes for each in floors.FLOORS}
    assert of_jobs["onebit encode, feedback"] == 12 + 1 / 8 + 8 / 1024
    assert of_jobs["onebit sum of 8"] == 4 + 8 * (1 / 8 + 8 / 1024)
    assert of_jobs["fp16 ring round"] == 8
    assert of_jobs["topk encode, feedback"] == pytest.approx(12.05)
    assert of_jobs["onebit owner's stage of 8"] == pytest.approx(17.06, abs=0.01)
    assert {"threshold decode", "topk decode", "onebit decode-add"} < of_jobs.keys()
    (fold,) = [each for each in floors.FLOORS if each.job == "fold"]
    copy_bytes = 8 * 1000 / 2e-3  # of a copy of 1,000 elements in 2 ms
    assert floors.share(fold, 1000, 3e-3, copy_bytes) == pytest.approx(1)
    assert floors.share(fold, 1000, 6e-3, copy_bytes) == pytest.approx(0.5)


# ---- Tables ------------------------------------------------------------------------------------


def time_of(job: str, n: int, share: float) -> dict[str, Any]:
    floor = next(each for each in floors.FLOORS if each.job == job)
    copy = 8 * n / 4e12
    own = floor.bytes * n / (share * 4e12)
    return {
        "job": job,
        "n": n,
        "floor": floor.bytes,
        "seconds": own,
        "copy_seconds": copy,
        "torch_seconds": 3 * own,
        "beside": floor.beside,
        "share": share,
        "reached": share >= floors.GOAL,
        "spread": 0.01,
    }


def found_of(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "date": "2020-01-02 03:04 UTC",
        "machine": "a machine",
        "command": "bench/gpu.py",
        "gpu": {"name": "A GPU", "driver": "1.2", "CUDA": "13.0", "torch": "2", "NCCL": "2.28.9"},
        "seconds": 400.0,
        "passed": all(row["passed"] for row in rows),
        "stages": [{"name": "kernels", "seconds": 1.0, "rows": list(rows)}],
        "times": [time_of("fold", 1 << 20, 0.8), time_of("fold", 1 << 28, 0.95)],
    }


PASSED = {"group": "codec int8", "case": "n=1", "passed": True, "checks": 1200, "detail": ""}
FAILED = {"group": "codec int8", "case": "n=2", "passed": False, "checks": 3, "detail": "a | b"}


def test_a_document_says_what_failed_and_which_goals_are_missed() -> None:
    text = gpu_report.document(found_of(PASSED, FAILED))
    assert "1,203 checks in 2 groups, of which 1 failed." in text
    assert "| kernels | codec int8 | 2 | 1,203 | **FAILED** n=2: a / b |" in text
    assert "| fold | 12.00 | 0.80 (3,200 GB/s) | 0.95 (3,800 GB/s) | missed at 1 M |" in text
    assert "add_: 3.0× as long at 256 M" in text


def test_a_document_says_what_is_incomplete() -> None:
    row = {"group": "the stage", "case": "", "passed": True, "checks": 0, "incomplete": True}
    found = found_of(PASSED, {**row, "detail": "no time was left"})
    found["times"] = [time_of("fp16 ring round", 1 << 28, 0.48)]
    text = gpu_report.document(found)
    assert "1,200 checks in 2 groups, all passed; 1 were incomplete." in text
    assert "| kernels | the stage | 1 | 0 | incomplete: no time was left |" in text
    assert "| missed at 256 M |" in text


def test_a_document_has_times_of_calls_and_steps() -> None:
    found = found_of(PASSED)
    call = {"call": "ring", "links": "nccl", "p": 2, "host_seconds": 5e-6}
    found["times"] = [
        {**call, "bytes": 4, "seconds": 2e-5, "launches": 6},
        {**call, "bytes": 1 << 20, "seconds": 1e-3, "launches": None},
        {"step": "plain DDP over NCCL", "p": 2, "seconds": 0.02},
        {"step": "gradwire's hook, none", "p": 2, "seconds": 0.021},
    ]
    text = gpu_report.document(found)
    assert "| 2 over nccl | ring | 20 (5, 6) | 1,000 (5, ?) |" in text
    assert "| gradwire's hook, none | 21.00 | 1.05 |" in text


def test_readme_has_what_was_measured_or_that_nothing_was(tmp_path: Path) -> None:
    assert tables.gpu(tmp_path) == ["Nothing was measured on a GPU yet."]
    (tmp_path / "gpu-2020-01-02.json").write_text(json.dumps(found_of(PASSED)))
    text = "\n".join(tables.gpu(tmp_path))
    assert "A GPU" in text
    assert "| fold | 12.00 |" in text
    (tmp_path / "gpu-2020-01-03.json").write_text(json.dumps(found_of(PASSED, FAILED)))
    assert "1 failed" in "\n".join(tables.gpu(tmp_path))

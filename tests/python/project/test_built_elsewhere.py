"""What is built elsewhere: the container, the sdist, and wheels on a forge's machines.

No docker daemon is needed: the Dockerfile is read, and its steps run in a folder.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from ranks import LIMIT

yaml = pytest.importorskip("yaml")
pytest.importorskip("scikit_build_core.build")

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "examples" / "container" / "Dockerfile"
WORKFLOW = ROOT / ".github" / "workflows" / "wheels.yml"
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]


@dataclass(frozen=True)
class Stage:
    """The instructions of a stage of the Dockerfile, from FROM on."""

    steps: list[tuple[str, str]]

    def all(self, instruction: str) -> list[str]:
        return [rest for name, rest in self.steps if name == instruction]

    def one(self, pattern: str) -> str:
        """The only RUN that has it."""
        (found,) = [each for each in self.all("RUN") if re.search(pattern, each)]
        return found


def stages() -> list[Stage]:
    text = re.sub(r"(?m)^#.*\n", "", DOCKERFILE.read_text()).replace("\\\n", " ")
    found = [Stage([])]  # what comes before the first FROM
    for line in filter(None, text.splitlines()):
        name, rest = line.split(maxsplit=1)
        if name == "FROM":
            found.append(Stage([]))
        found[-1].steps.append((name, rest))
    return found


HEAD, BUILD, LAST = stages()


def python(code: str, folder: Path) -> str:
    """What this environment's Python prints in the folder."""
    command = [sys.executable, "-c", code]
    return subprocess.check_output(command, cwd=folder, text=True, timeout=LIMIT)


def copy_sources(into: Path) -> None:
    """Copies what the first stage copies."""
    for each in BUILD.all("COPY"):
        *sources, target = each.split()
        for source in sources:
            place = into / target / ("" if (ROOT / source).is_dir() else source)
            copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
            copy(ROOT / source, place)


def assert_complete(sources: Path, build: Path) -> None:
    """Asserts that a build finds all files; compiles nothing."""
    pybind11 = python("import pybind11; print(pybind11.get_cmake_dir())", sources).strip()
    options = [f"-Dpybind11_DIR={pybind11}", f"-DPython_EXECUTABLE={sys.executable}"]
    options += ["-DGRADWIRE_CUDA=OFF", "-G", "Ninja"]
    tools = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    for command in (
        ["cmake", "-S", str(sources), "-B", str(build), *options],
        ["ninja", "-C", str(build), "-n", "extension"],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr + done.stdout


needs_tools = pytest.mark.skipif(
    not Path(sys.executable).with_name("ninja").exists(), reason="cmake and ninja are not here"
)


def test_the_last_stage_has_no_compiler_and_takes_the_first_ones_environment() -> None:
    (packages,) = re.findall(r"--no-install-recommends (.*?) *&&", LAST.one("apt-get"))
    assert packages == "python3"
    assert LAST.all("RUN") == [LAST.one("apt-get")]
    (environment,) = re.findall(r"python3 -m venv (\S+)", BUILD.one("-m venv"))
    assert LAST.all("COPY") == [f"--from=build {environment} {environment}"]
    assert LAST.all("ENV") == BUILD.all("ENV") == [f"PATH={environment}/bin:$PATH"]
    assert BUILD.all("FROM") == ["${BUILD_IMAGE} AS build"]
    assert HEAD.all("ARG") == [f"BUILD_IMAGE={LAST.all('FROM')[0]}"]  # of which Python is


def test_the_user_is_not_root() -> None:
    (user,) = LAST.all("USER")
    (made,) = re.findall(r"useradd .*--uid (\d+)", LAST.one("useradd"))
    assert user == made
    assert int(user) > 0
    names = [name for name, _ in LAST.steps]
    assert names.index("USER") > max(names.index(each) for each in ("RUN", "COPY"))


def test_the_arguments_that_its_head_names_are_taken() -> None:
    named = set(re.findall(r"--build-arg (\w+)=", DOCKERFILE.read_text()))
    taken = {each.split("=")[0] for stage in (HEAD, BUILD) for each in stage.all("ARG")}
    assert named == taken
    order = [rest if name == "ARG" else name for name, rest in BUILD.steps]
    assert order[order.index("GRADWIRE_CUDA=OFF") + 1 :][0] == "RUN"  # in whose environment it is
    assert "set(GRADWIRE_CUDA $ENV{GRADWIRE_CUDA}" in (ROOT / "cmake" / "cuda.cmake").read_text()


@needs_tools
def test_what_is_copied_is_enough_and_makes_the_wheel_that_is_installed(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    copy_sources(sources)
    assert_complete(sources, tmp_path / "build")
    code = "from scikit_build_core.build import prepare_metadata_for_build_wheel as prepare"
    name = python(f"{code}; print(prepare('metadata'))", sources).split()[-1]
    wheel = name.removesuffix(".dist-info") + "-cp312-cp312-linux_x86_64.whl"
    (folder,) = re.findall(r"--wheel-dir (\S+)", BUILD.one("pip wheel"))
    (pattern,) = re.findall(rf"{folder}/(\S+)", BUILD.one("pip install .*whl"))
    assert fnmatch(wheel, pattern)


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # of compiling
def test_the_steps_make_an_environment_that_runs(tmp_path: Path) -> None:
    """Without those of apt and torch, which load gigabytes."""
    places = {"/opt/gradwire": str(tmp_path / "venv"), "/wheels": str(tmp_path / "wheels")}
    sources = tmp_path / "sources"
    sources.mkdir()
    copy_sources(sources)
    environment = {**os.environ, "PATH": f"{tmp_path}/venv/bin:{os.environ['PATH']}"}
    for pattern in ("-m venv", "pip wheel", "pip install .*whl"):
        step = BUILD.one(pattern).replace("python3 -m venv", f"{sys.executable} -m venv")
        for place, here in places.items():
            step = step.replace(place, here)
        subprocess.run(["sh", "-ec", step], cwd=sources, env=environment, check=True)
    bare = {"PATH": f"{tmp_path}/venv/bin", "HOME": str(tmp_path)}
    run = ["gradwire", "run", "-n", "2", str(ROOT / "examples" / "all_reduce.py")]
    program = shutil.which(run[0], path=bare["PATH"])
    assert program is not None
    done = subprocess.run(
        [program, *run[1:]], env=bare, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.stdout.count("the average is 0.5") == 2, done.stderr


@needs_tools
def test_the_sdist_has_all_that_a_build_needs(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("without git an sdist would hold what .gitignore names")
    code = f"from scikit_build_core.build import build_sdist; print(build_sdist({str(tmp_path)!r}))"
    made = tmp_path / python(code, ROOT).split()[-1]
    with tarfile.open(made) as archive:
        names = archive.getnames()
        archive.extractall(tmp_path)
    assert [each for each in names if "/.venv/" in each or "/build/" in each] == []
    assert_complete(tmp_path / made.name.removesuffix(".tar.gz"), tmp_path / "build")


def workflow() -> dict[str, Any]:
    return dict(yaml.safe_load(WORKFLOW.read_text())["jobs"])


def test_the_workflow_covers_every_python_and_machine() -> None:
    jobs = workflow()
    (setup,) = [each["with"] for each in jobs["build"]["steps"] if "setup-python" in str(each)]
    assert setup["python-version"].split() == PYTHONS
    named = " ".join(f"python{each}" for each in PYTHONS)
    assert f'make wheel PYTHONS="{named}"' in [each.get("run") for each in jobs["build"]["steps"]]
    machines = jobs["build"]["strategy"]["matrix"]["machine"]
    assert {each.endswith("-arm") for each in machines} == {True, False}
    assert jobs["try"]["strategy"]["matrix"] == {"machine": machines, "python": PYTHONS}
    assert re.search(rf'^requires-python = ">={PYTHONS[0]}"$', project_text(), re.MULTILINE)


def project_text() -> str:
    return (ROOT / "pyproject.toml").read_text()


def test_the_workflow_runs_the_projects_own_commands() -> None:
    makefile = (ROOT / "Makefile").read_text()
    runs = [step["run"] for job in workflow().values() for step in job["steps"] if "run" in step]
    targets = [run.split()[1] for run in runs if run.startswith("make ")]
    assert targets == ["wheel", "sdist"]
    assert all(re.search(rf"(?m)^{each}:", makefile) for each in targets)
    assert [run for run in runs if not re.match(r"make |\.ci/check-wheel |if ", run)] == []

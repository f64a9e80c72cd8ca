"""What `make` runs when it is given no variables, as README has it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from ranks import LIMIT

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted((ROOT / ".ci/with").iterdir())
PAGES = sorted((ROOT / "docs").glob("*.md"))


def commands(*words: str) -> str:
    """What `make -n` prints, by the user's own environment: nothing of an outer make."""
    if shutil.which("make") is None or not (ROOT / "Makefile").exists():
        pytest.skip("there is no make, or no Makefile")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    done = subprocess.run(
        ["make", "-n", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
    )
    return done.stdout


def filters(text: str) -> list[str]:
    """The regular expressions with which ctest chooses tests of a release build."""
    return re.findall(r"^ctest .* build/release -R '([^']*)'", text, re.MULTILINE)


def test_make_test_runs_every_cpp_program() -> None:
    (chosen,) = filters(commands("test"))
    programs = [path.stem for path in (ROOT / "tests/cpp").glob("*/*_test.cc")]
    assert programs
    assert [each for each in programs if not re.search(chosen, each)] == []


def test_make_test_leaves_nothing_out_but_nightly_tests() -> None:
    lines = [line for line in commands("test").splitlines() if " -m pytest " in line]
    pytest_lines = [line for line in lines if "--collect-only" not in line]
    assert [re.findall(r"-m '(.*?)'|-k", line) for line in pytest_lines] == [["not nightly"]]
    nightly = [line for line in commands("test", "NIGHTLY=1").splitlines() if "-m pytest" in line]
    assert all("nightly" not in line for line in nightly)


def test_every_run_of_ctest_fails_where_a_filter_matches_no_test() -> None:
    text = commands("test-cpp", "CPP_TESTS=cc -E") + commands("sanitize")
    text += "".join(script.read_text() for script in SCRIPTS)
    runs = [line for line in text.splitlines() if line.lstrip().startswith("ctest ")]
    assert len(runs) == 4
    assert all("--no-tests=error" in line for line in runs)


def test_what_tests_may_run_with_is_named_and_run_nightly() -> None:
    names = {script.name for script in SCRIPTS}
    head, _, rest = (ROOT / "Makefile").read_text().partition("PYTHON ?=")
    listed = re.search(r"script of \.ci/with: (.*?)\n#   make", head, re.DOTALL)
    assert listed is not None
    assert set(re.findall(r"[a-z][a-z0-9-]+", listed[1])) - {"or"} == names
    nightly = rest[rest.index("\nnightly:") : rest.index("\ntest-with:")]
    assert {each for each in names if re.search(rf"\b{each}\b", nightly)} == names
    assert all(os.access(script, os.X_OK) for script in SCRIPTS)


def test_what_scripts_install_is_pinned_to_what_the_documentation_says_was_tried() -> None:
    lines = re.findall(r"-c constraints\.txt \. (.*)", "".join(map(Path.read_text, SCRIPTS)))
    installed = set(re.findall(r"[a-z]+(?![a-z]*\])", " ".join(lines)))
    assert installed == {"accelerate", "lightning", "ray", "torch", "transformers"}
    pins = re.findall(r"(?m)^([a-z]+)==(\d+\.\d+)", (ROOT / "constraints.txt").read_text())
    assert installed <= dict(pins).keys()
    tried = re.findall(r"(?i)tried\*? with (.*)", "".join(map(Path.read_text, PAGES)))
    named = re.findall(r"(\w+) (\d+\.\d+)", " ".join(tried).lower())
    assert {each for each in pins if each[0] in installed} <= set(named)
    others = installed - {"torch"}  # of which several are tried
    assert {each for each in named if each[0] in others} <= set(pins)


def test_no_variable_of_ours_is_one_that_make_has_built_in() -> None:
    names = re.findall(r"^([A-Z_]+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE)
    built_in = subprocess.run(
        ["make", "-p", "-f", "/dev/null"], capture_output=True, text=True, timeout=LIMIT
    ).stdout
    defined = set(re.findall(r"^# default\n([A-Za-z_]+) =", built_in, re.MULTILINE))
    assert "CPP" in defined
    assert [each for each in names if each in defined] == []


def test_the_gate_runs_what_readme_has() -> None:
    gate = (ROOT / ".ci/run").read_text()
    assert re.search(r"^make test$", gate, re.MULTILINE)

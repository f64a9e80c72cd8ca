"""The first pages' programs run as they stand there, and their commands are such as exist."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from pages import blocks_of
from ranks import LIMIT

ROOT = Path(__file__).parents[3]
PAGES = ("README.md", "docs/index.md", "docs/quickstart.md")
# Of the programs that train, which take seconds, those of README.
PROGRAMS = [
    pytest.param(
        source,
        id=f"{page}:{line}",
        marks=[pytest.mark.nightly] * (page != "README.md" and "import torch" in source),
    )
    for page in PAGES
    for line, source in blocks_of((ROOT / page).read_text(encoding="utf-8"))
]


def command_of(program: str) -> list[str]:
    """Of the first line, which every program has."""
    found = re.match(r"# Run: (.+ (\w+\.py))\n", program)
    assert found is not None, "a block of Python begins with `# Run: COMMAND NAME.py`"
    return shlex.split(found[1])


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """As a reader would, with this environment's commands."""
    name, *words = command_of(program)
    (folder / words[-1]).write_text(program, encoding="utf-8")
    command = [str(Path(sys.executable).with_name(name)), *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_runs_as_it_stands(program: str, tmp_path: Path):
    if "import torch" in program:
        pytest.importorskip("torch.distributed")
    ended = run(program, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout


def test_a_program_that_takes_something_for_granted_fails(tmp_path: Path):
    with pytest.raises(AssertionError, match=r"begins with `# Run: COMMAND NAME\.py`"):
        run("x = 1\n", tmp_path)
    ended = run("# Run: python bare.py\ncomm.barrier()\n", tmp_path)
    assert ended.returncode == 1
    assert "name 'comm' is not defined" in ended.stderr


def commands_in(page: str) -> list[list[str]]:
    """The lines of the blocks of commands, without comments."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", "")  # continued lines
    blocks = re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = [line for language, block in blocks if not language for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def commands_of_examples() -> list[list[str]]:
    """Which test_examples.py runs."""
    texts = [each.read_text(encoding="utf-8") for each in (ROOT / "examples").glob("*.py")]
    docstrings = [ast.get_docstring(ast.parse(text)) or "" for text in texts]
    return [shlex.split(re.findall(r"^Run: (.+)$", each, re.MULTILINE)[0]) for each in docstrings]


def exists(words: list[str]) -> bool:
    """Whether it is a target of make, an extra of the package, or runs an example or torchrun."""
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        return re.search(rf"^{words[1]}:", makefile, re.MULTILINE) is not None
    if words[:2] == ["pip", "install"]:
        extras = metadata.metadata("gradwire").get_all("Provides-Extra") or []
        return words[2] in (".", *(f".[{each}]" for each in extras))
    if words[0] == "torchrun":
        launcher = pytest.importorskip("torch.distributed.run")
        launcher.get_args_parser().parse_args(words[1:])  # exits where an option is unknown
        return True
    return words in commands_of_examples()


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_commands_exist(page: str):
    found = commands_in(page)
    assert found
    assert [words for words in found if not exists(words)] == []


def test_a_command_that_does_not_exist_is_found():
    assert exists(["make", "demo"])
    assert not exists(["make", "no-such-target"])
    assert not exists(["pip", "install", "gradwire[torch]"])
    assert not exists(["gradwire", "run", "examples/no_such_example.py"])


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_number_is_that_of_the_table(page: str):
    table = (ROOT / "README.md").read_text(encoding="utf-8")
    row = re.findall(r"^\| 100 Mbit/s \|(.*)\|$", table, re.MULTILINE)[0].split("|")
    gloo, lowrank = float(row[0]), float(row[4])
    assert f"**{gloo:.0f} → {lowrank:.0f} ms a step**" in (ROOT / page).read_text(encoding="utf-8")

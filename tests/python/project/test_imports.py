"""Modules import only what stands below them, in the order that ARCHITECTURE.md gives.

Training needs nothing of `lab`, and a program loads few modules before it uses something.
"""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import gradwire
import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "python" / "gradwire"


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {module_of(path): path for path in PACKAGE.rglob("*.py")}
MODULES = {*PATHS, "gradwire._core"}

# Methods that are implemented in `lab`, which they import when they are called.
METHODS = {
    ("gradwire._schedules.schedule", "gradwire.lab.drawing"),  # Schedule.draw
    ("gradwire._communicator", "gradwire.lab.tuning.fit"),  # Communicator.tune
}
MOST_MODULES = 45  # of a program that has only imported gradwire


def imports_of(path: Path) -> Iterator[str]:
    """Every module of the package that a file imports, in functions, for types and by text too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            for each in node.names:
                full = f"{node.module}.{each.name}"
                if full in MODULES:
                    yield full
                elif node.module in MODULES:
                    yield node.module
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            texts = {each.value for each in node.args if isinstance(each, ast.Constant)}
            yield from texts & MODULES


@functools.cache
def imports() -> dict[str, set[str]]:
    return {module: set(imports_of(path)) for module, path in PATHS.items()}


def part_of(module: str) -> str:
    """The folder that a module is in, or the module itself where it is directly in `gradwire`."""
    _, *parts = module.split(".")
    folder = PATHS.get(module, PACKAGE / "_core.pyi").parent
    return "/".join(folder.relative_to(PACKAGE).parts) or (parts[0] if parts else "__init__")


def order() -> list[str]:
    """The parts from top to bottom, as the table in ARCHITECTURE.md lists them."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\| part of `python/gradwire` .*\n\|[-|]+\n((?:\|.*\n)+)", text)
    cells = [row.split("|")[1] for row in table.splitlines()]
    return [name.rstrip("/") for cell in cells for name in re.findall(r"`([\w/]+)`", cell)]


def test_the_table_lists_every_part() -> None:
    assert sorted(order()) == sorted({part_of(module) for module in MODULES})


def test_imports_go_down() -> None:
    height = {part: -index for index, part in enumerate(order())}
    wrong = [
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in others
        if (module, other) not in METHODS and height[part_of(other)] > height[part_of(module)]
    ]
    assert not wrong


def imports_at_once(path: Path) -> Iterator[str]:
    """The modules that a file imports when it is loaded, by the statements of its first level."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{each.name}" for each in node.names)


def test_only_commands_and_the_package_import_lab() -> None:
    """Nothing else does, but for two methods that users call."""
    above = ("gradwire", "gradwire.__main__", "gradwire._tools", "gradwire.lab")
    found = {
        (module, other)
        for module, others in imports().items()
        for other in others
        if other.startswith("gradwire.lab")
        and not (module in above or module.startswith(("gradwire._tools.", "gradwire.lab.")))
    }
    assert found == METHODS
    for module, other in METHODS:
        assert other not in set(imports_at_once(PATHS[module]))


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


LOADED = "sorted(name for name in sys.modules if name.split('.')[0] in ('gradwire', 'numpy'))"


def test_importing_gradwire_loads_few_modules() -> None:
    loaded = python(f"import sys, gradwire; print(*{LOADED})").split()
    assert "gradwire._core" in loaded
    assert "numpy" not in loaded
    assert len(loaded) <= MOST_MODULES, loaded


def test_ranks_exchange_without_lab() -> None:
    """With a codec, too, and ranks that are processes: as if `lab` had not been installed."""
    code = """
import sys
sys.modules["gradwire.lab"] = None
import gradwire, numpy as np
def body(comm):
    sums = comm.all_reduce(np.ones(8, np.float32)), comm.all_reduce(
        np.ones(8, np.float32), codec=gradwire.codec.FP16(), feedback=False, algorithm="ring"
    )
    return [each.tolist() for each in sums]
assert gradwire.spawn(body, 2) == [[[2.0] * 8] * 2] * 2
"""
    assert python(code) == ""


def test_names_that_are_loaded_late_are_those_of_the_imports_for_types() -> None:
    tree = ast.parse(PATHS["gradwire"].read_text(encoding="utf-8"))
    (block,) = (
        each
        for each in tree.body
        if isinstance(each, ast.If) and not each.orelse and isinstance(each.test, ast.Name)
    )
    found = {
        each.name: f"{node.module}.{each.name}" if node.module == "gradwire" else node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for each in node.names
    }
    assert found == gradwire._HOMES
    assert set(found) <= set(gradwire.__all__)


@pytest.mark.parametrize("home", sorted(set(gradwire._HOMES.values())))
def test_public_names_are_found_whichever_module_is_loaded_first(home: str) -> None:
    names = [name for name, each in gradwire._HOMES.items() if each == home]
    python(f"import gradwire; from gradwire import {', '.join(names)}; gradwire.{names[0]}")


def test_dir_has_names_that_are_not_loaded() -> None:
    listed = python("import gradwire; print(*dir(gradwire))").split()
    assert set(gradwire.__all__) <= set(listed)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'gradwire' has no attribute 'allreduce'"):
        _ = gradwire.allreduce
    with pytest.raises(ImportError):
        exec("from gradwire import allreduce")


def test_no_modules_import_each_other_in_a_circle() -> None:
    TopologicalSorter(imports()).prepare()  # raises CycleError, which names them


def test_every_folder_says_what_belongs_there() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path


def test_no_folder_has_more_than_25_files() -> None:
    for folder in {path.parent for path in PATHS.values()}:
        assert len(list(folder.glob("*.py"))) <= 25, folder

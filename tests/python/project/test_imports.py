"""Modules import only what stands below them, in the order that ARCHITECTURE.md gives."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "python" / "gradwire"


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {module_of(path): path for path in PACKAGE.rglob("*.py")}
MODULES = {*PATHS, "gradwire._core"}


def imports_of(path: Path) -> Iterator[str]:
    """Every module of the package that a file imports, in functions and for types too."""
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


IMPORTS = {module: set(imports_of(path)) for module, path in PATHS.items()}


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
        for module, others in IMPORTS.items()
        for other in others
        if height[part_of(other)] > height[part_of(module)]
    ]
    assert not wrong


def test_no_modules_import_each_other_in_a_circle() -> None:
    TopologicalSorter(IMPORTS).prepare()  # raises CycleError, which names them


def test_every_folder_says_what_belongs_there() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path


def test_no_folder_has_more_than_25_files() -> None:
    for folder in {path.parent for path in PATHS.values()}:
        assert len(list(folder.glob("*.py"))) <= 25, folder

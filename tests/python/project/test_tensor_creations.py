"""Tensors are made on a named device and of a named type: programs may set other defaults.

`torch.set_default_device` and `torch.set_default_dtype` change what torch makes without them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

_CODE = Path(__file__).parents[3] / "python/gradwire"
_OF_ANY_TYPE = {"empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros"}
_OF_INTEGERS = {"arange", "randint", "randperm"}
_OF_GIVEN_DATA = {"as_tensor", "asarray", "sparse_coo_tensor"}


def careless(code: str) -> Iterator[tuple[int, str]]:
    """Lines of calls that make a tensor, with what they lack."""
    for call in ast.walk(ast.parse(code)):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            continue
        if not (isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"):
            continue
        name, given = call.func.attr, {each.arg for each in call.keywords}
        lacks = set()
        if name in _OF_ANY_TYPE | _OF_INTEGERS | _OF_GIVEN_DATA:
            lacks.add("device")
        if name in _OF_ANY_TYPE:
            lacks.add("dtype")
        if missing := lacks - given:
            yield call.lineno, f"torch.{name} without {' and '.join(sorted(missing))}"


def test_tensors_are_made_on_a_named_device_and_of_a_named_type() -> None:
    found = [
        f"{path.relative_to(_CODE)}:{line}: {what}"
        for path in sorted(_CODE.rglob("*.py"))
        for line, what in careless(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("code", "lacks"),
    [
        ("torch.zeros(3)", ["torch.zeros without device and dtype"]),
        ("torch.arange(3)", ["torch.arange without device"]),
        ("torch.tensor([1.0], device='cpu')", ["torch.tensor without dtype"]),
        ("torch.tensor([1.0], device='cpu', dtype=torch.float32)", []),
        ("torch.empty_like(x)", []),
        ("x.new_zeros(3)", []),
    ],
)
def test_careless_calls_are_found(code: str, lacks: list[str]) -> None:
    assert [what for _, what in careless(code)] == lacks

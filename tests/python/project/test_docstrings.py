"""Docstrings of what is public name the errors that are raised, and the unit of times."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import gradwire
import gradwire.codec
import gradwire.serve
import gradwire.torch
import pytest

IN_SECONDS = {"timeout", "wait", "patience"}
ELSEWHERE = ("as in `", "See `", "as `", "as for `")  # the docstring that says it


def public() -> Iterator[Any]:
    """The public functions and methods; each with what its class and it say."""
    for module in (gradwire, gradwire.codec, gradwire.serve, gradwire.torch):
        for name in module.__all__:
            thing = getattr(module, name)
            where = f"{module.__name__}.{name}"
            if inspect.isfunction(thing):
                yield pytest.param(thing, inspect.getdoc(thing) or "", id=where)
            elif inspect.isclass(thing):
                for its, method in inspect.getmembers(thing, inspect.isfunction):
                    written = "gradwire" in method.__code__.co_filename
                    if written and (its == "__init__" or not its.startswith("_")):
                        said = f"{inspect.getdoc(thing)}\n{inspect.getdoc(method)}"
                        yield pytest.param(method, said, id=f"{where}.{its}")


def unsaid(function: Callable[..., Any], said: str) -> set[str]:
    """The errors that a function's own body raises, and the units, that a docstring leaves out."""
    if any(each in said for each in ELSEWHERE):
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    raised = (each.exc for each in ast.walk(tree) if isinstance(each, ast.Raise))
    makers = (each.func for each in raised if isinstance(each, ast.Call))
    errors = {each.id for each in makers if isinstance(each, ast.Name) and each.id[0].isupper()}
    missing = {each for each in errors if each not in said}
    if IN_SECONDS & inspect.signature(function).parameters.keys() and "second" not in said:
        missing.add("seconds")
    return missing


@pytest.mark.parametrize(("function", "said"), list(public()))
def test_a_docstring_says_errors_and_units(function: Callable[..., Any], said: str) -> None:
    assert not unsaid(function, said)


def test_what_a_docstring_leaves_out_is_found() -> None:
    def wait(timeout: float) -> None:
        raise gradwire.Timeout if timeout else ValueError("no time")

    def fail(timeout: float) -> None:
        raise ValueError(timeout)

    assert unsaid(wait, "Waits.") == {"seconds"}
    assert unsaid(fail, "Waits some seconds.") == {"ValueError"}
    assert not unsaid(fail, "Raises ValueError after so many seconds.")
    assert not unsaid(fail, "Waits as in `wait`.")

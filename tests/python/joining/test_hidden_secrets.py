"""No repr shows a secret: they end up in logs, in tracebacks and in what a debugger prints."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import gradwire
import pytest
from gradwire import _bootstrap, _launch, serve

SECRET = b"a secret that nobody may read"


def records() -> Iterator[type]:
    """The dataclasses and named tuples, of what makes and uses secrets, that have one."""
    for package in (_bootstrap, _launch, serve):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(found.name)
            for _, each in inspect.getmembers(module, inspect.isclass):
                if each.__module__ == module.__name__ and secrets_of(each):
                    yield each


def fields_of(record: type) -> list[str]:
    if dataclasses.is_dataclass(record):
        return [each.name for each in dataclasses.fields(record)]
    return list(getattr(record, "_fields", ()))


def secrets_of(record: type) -> list[str]:
    return [each for each in fields_of(record) if "secret" in each]


def made(record: type) -> Any:
    """One with a secret wherever it may have one, and nothing else."""
    values = [SECRET if each in secrets_of(record) else None for each in fields_of(record)]
    if issubclass(record, tuple):
        return record(*values)
    one = object.__new__(record)
    for name, value in zip(fields_of(record), values, strict=True):
        object.__setattr__(one, name, value)
    return one


@pytest.mark.parametrize("record", list(records()), ids=lambda each: each.__name__)
def test_no_repr_shows_a_secret(record: type) -> None:
    one = made(record)
    assert all(getattr(one, name) == SECRET for name in secrets_of(record))
    assert record.__name__ in repr(one)
    assert SECRET.decode() not in repr(one)


def test_the_records_with_a_secret_are_known() -> None:
    assert {each.__name__ for each in records()} == {
        *("Endpoint", "Job", "Rendezvous", "Membership", "Service", "JoinOptions", "ListenerEntry")
    }


def test_a_communicator_shows_none() -> None:
    with gradwire.init(rank=0, ranks=1, secret=SECRET) as comm:
        assert SECRET.decode() not in repr(comm) + repr(comm._mesh)

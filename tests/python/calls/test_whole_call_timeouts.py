"""A timeout is for the whole call: its later parts have what the earlier ones have left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire import InvalidArgument
from gradwire._base import deadline
from gradwire._calls.objects import ObjectCollectives
from gradwire._calls.variable import VariableCollectives

LIMIT, TAKES = 10.0, 4.0  # seconds of a call, and of each of its parts


class Parts(ObjectCollectives, VariableCollectives):
    """A rank alone, on whose clock each part takes some time; notes what each may take at most."""

    def __init__(self, comm: gradwire.Communicator) -> None:
        self._comm, self.now = comm, 100.0
        self.given: list[float | None] = []

    def part(self, name: str, *args: Any, timeout: float | None = None, **options: Any) -> Any:
        self.given.append(timeout)
        self.now += TAKES
        return getattr(self._comm, name)(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name in ("all_gather", "all_to_all", "broadcast", "gather", "scatter"):
            return lambda *args, **options: self.part(name, *args, **options)
        return getattr(self._comm, name)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    made = Parts(gradwire.init(rank=0, ranks=1, store="unix://none"))
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


CALLS: dict[str, Callable[[Parts], Any]] = {
    "all_gather_v": lambda comm: comm.all_gather_v(np.ones(3), timeout=LIMIT),
    "all_to_all_v": lambda comm: comm.all_to_all_v([np.ones(3)], timeout=LIMIT),
    "broadcast_object": lambda comm: comm.broadcast_object(3, timeout=LIMIT),
    "all_gather_object": lambda comm: comm.all_gather_object(3, timeout=LIMIT),
    "gather_object": lambda comm: comm.gather_object(3, timeout=LIMIT),
    "scatter_object": lambda comm: comm.scatter_object([3], timeout=LIMIT),
}
REFUSED: dict[str, Callable[[Parts], Any]] = {
    "all_gather_object": lambda comm: comm.all_gather_object(threading.Lock(), timeout=LIMIT),
    "gather_object": lambda comm: comm.gather_object(threading.Lock(), timeout=LIMIT),
    "broadcast_object": lambda comm: comm.broadcast_object(threading.Lock(), timeout=LIMIT),
    "scatter_object": lambda comm: comm.scatter_object([threading.Lock()], timeout=LIMIT),
}


@pytest.mark.parametrize("name", CALLS)
def test_later_parts_have_what_is_left(parts: Parts, name: str) -> None:
    CALLS[name](parts)
    assert parts.given == pytest.approx([LIMIT, LIMIT - TAKES])


@pytest.mark.parametrize("name", REFUSED)
def test_so_have_those_that_tell_of_an_error(parts: Parts, name: str) -> None:
    with pytest.raises(InvalidArgument, match="cannot pickle"):
        REFUSED[name](parts)
    assert parts.given == pytest.approx([LIMIT, LIMIT - TAKES])

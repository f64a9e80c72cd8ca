"""CommunicatorLike: what the classes need from which `Communicator` takes its methods."""

from __future__ import annotations

from typing import Any, Protocol

from gradwire import _core
from gradwire._arrays.buffers import Buffers, Place
from gradwire._calls.requests import Options


class CommunicatorLike(Protocol):
    """The part of the communicator that its methods in other files call."""

    _core: _core.Communicator
    _place: Place

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_gather(
        self, x: Any, *, algorithm: str = "auto", out: Any = None, timeout: float | None = None
    ) -> Any: ...
    def all_to_all(
        self, x: Any, *, algorithm: str = "auto", out: Any = None, timeout: float | None = None
    ) -> Any: ...
    def broadcast(self, x: Any, *, root: int = 0, timeout: float | None = None) -> Any: ...
    def gather(
        self, x: Any, *, root: int = 0, out: Any = None, timeout: float | None = None
    ) -> Any: ...
    def scatter(
        self, x: Any = None, *, root: int = 0, out: Any = None, timeout: float | None = None
    ) -> Any: ...
    def _call(self, name: str, given: Buffers, options: Options) -> Any: ...
    def _rank(self, rank: int, what: str) -> int: ...
    def _seconds(self, timeout: float | None) -> float: ...

"""Group: the part of `Communicator` that lower layers use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Group(Protocol):
    """The ranks of a communicator and the collectives that move data between them."""

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host."""

    @property
    def all_reduce(self) -> Callable[..., Any]:
        """See `Communicator.all_reduce`, and likewise for the others."""

    @property
    def barrier(self) -> Callable[..., Any]:
        """Returns when every rank has called it."""

    def all_gather(self, x: Any, *, out: Any = None, timeout: float | None = None) -> Any:
        """All ranks' `x`, on all ranks; see `Communicator.all_gather`."""

    def broadcast(self, x: Any, *, root: int = 0, algorithm: str = "auto") -> Any:
        """The root's `x`, on all ranks; see `Communicator.broadcast`."""

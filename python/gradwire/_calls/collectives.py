"""Collectives of arrays, as methods of the communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from gradwire import _core
from gradwire._arrays import buffers
from gradwire._arrays.buffers import Check
from gradwire._calls.communicator_like import CommunicatorLike
from gradwire._calls.requests import CodecLike, Options
from gradwire._feedback import ErrorFeedback
from gradwire._schedules.schedule import Schedule


class ArrayCollectives:
    """The communicator's methods that reduce or move arrays; `Communicator` explains keywords."""

    @_core.fast_path_method
    def all_reduce(
        self: CommunicatorLike,
        x: Any,
        *,
        op: str = "sum",
        algorithm: str = "auto",
        schedule: Schedule | None = None,
        codec: CodecLike = "none",
        key: str | None = None,
        keys: Sequence[Any] | None = None,
        feedback: ErrorFeedback | Literal[False] | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        out: Any = None,
        check: Check = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Reduces all ranks' `x`, on all ranks; in place or into `out`, which is then returned.

        `x` is an array of any shape, or a list of arrays of one dtype, which is one operation and
        faster than one for each.
        """
        options = Options(
            *(algorithm, schedule, async_op, timeout, op, 0),
            *(codec, key, keys, feedback, prescale, postscale),
            check=check,
        )
        return self._call("all_reduce", buffers.all_reduce(x, out), options)

    allreduce = all_reduce

    def reduce_scatter(
        self: CommunicatorLike,
        x: Any,
        *,
        op: str = "sum",
        algorithm: str = "auto",
        schedule: Schedule | None = None,
        codec: CodecLike = "none",
        key: str | None = None,
        keys: Sequence[Any] | None = None,
        feedback: ErrorFeedback | Literal[False] | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        out: Any = None,
        check: Check = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Reduces all ranks' `x`; rank r gets block r, in a new array or in `out`.

        `x` is one array, cut evenly along its first dimension, or a list of one array per rank.
        Keys of error feedback may end anywhere in it. With a list as `out`, `x` is a list of as
        many arrays, each cut evenly, and all are one operation; without codecs.
        """
        options = Options(
            *(algorithm, schedule, async_op, timeout, op, 0),
            *(codec, key, keys, feedback, prescale, postscale),
            check=check,
        )
        return self._call("reduce_scatter", buffers.reduce_scatter(x, out, self._place), options)

    def all_gather(
        self: CommunicatorLike,
        x: Any,
        *,
        algorithm: str = "auto",
        schedule: Schedule | None = None,
        codec: CodecLike = "none",
        out: Any = None,
        check: Check = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Concatenates all ranks' `x` along the first dimension, on all ranks.

        The result is a new array, if `x` has the same shape on every rank, or `out`: one array, or
        a list of one per rank, of any sizes. With a list as `x`, which is one operation, the result
        and `out` are lists of as many arrays.
        """
        options = Options(algorithm, schedule, async_op, timeout, check=check, codec=codec)
        return self._call("all_gather", buffers.all_gather(x, out, self._place), options)

    def broadcast(
        self: CommunicatorLike,
        x: Any,
        *,
        root: int = 0,
        algorithm: str = "auto",
        schedule: Schedule | None = None,
        codec: CodecLike = "none",
        check: Check = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Copies the root's `x`, an array or a list, to all ranks, in place; returns `x`."""
        root = self._rank(root, "root")
        options = Options(
            algorithm, schedule, async_op, timeout, root=root, check=check, codec=codec
        )
        return self._call("broadcast", buffers.broadcast(x, root, self._place), options)

    def reduce(
        self: CommunicatorLike,
        x: Any,
        *,
        root: int = 0,
        op: str = "sum",
        algorithm: str = "auto",
        schedule: Schedule | None = None,
        codec: CodecLike = "none",
        key: str | None = None,
        keys: Sequence[Any] | None = None,
        feedback: ErrorFeedback | Literal[False] | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        out: Any = None,
        check: Check = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Reduces all ranks' `x` on the root, in place or into `out`; returns the result.

        The other ranks' `x` stays as it is, and they get None.
        """
        root = self._rank(root, "root")
        options = Options(
            *(algorithm, schedule, async_op, timeout, op, root),
            *(codec, key, keys, feedback, prescale, postscale),
            check=check,
        )
        return self._call("reduce", buffers.reduce(x, out, root, self._place), options)

    def gather(
        self: CommunicatorLike,
        x: Any,
        *,
        root: int = 0,
        algorithm: str = "auto",
        schedule: Schedule | None = None,
        codec: CodecLike = "none",
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Concatenates all ranks' `x` on the root as `all_gather` does; None on the others."""
        root = self._rank(root, "root")
        options = Options(algorithm, schedule, async_op, timeout, root=root, codec=codec)
        return self._call("gather", buffers.gather(x, out, root, self._place), options)

    def scatter(
        self: CommunicatorLike,
        x: Any = None,
        *,
        root: int = 0,
        algorithm: str = "auto",
        schedule: Schedule | None = None,
        codec: CodecLike = "none",
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Sends block r of the root's `x` to rank r.

        At the root `x` is as in `reduce_scatter`, and the result a new array or `out`. The others
        pass no `x`, and give the array for the result as `out`.
        """
        root = self._rank(root, "root")
        options = Options(algorithm, schedule, async_op, timeout, root=root, codec=codec)
        return self._call("scatter", buffers.scatter(x, out, root, self._place), options)

    def all_to_all(
        self: CommunicatorLike,
        x: Any,
        *,
        algorithm: str = "auto",
        schedule: Schedule | None = None,
        codec: CodecLike = "none",
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Exchanges blocks: block d of rank s's `x` becomes block s of rank d's result.

        `x` is one array, cut evenly along its first dimension, and the result a new array of the
        same shape or `out`; or `x` and `out` are lists of one array per rank, of any sizes.
        """
        options = Options(algorithm, schedule, async_op, timeout, codec=codec)
        return self._call("all_to_all", buffers.all_to_all(x, out, self._place), options)

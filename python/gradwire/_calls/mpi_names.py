"""MpiNames: answers the names that mpi4py gives a communicator's methods with gradwire's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_OURS = {
    "get_rank": "rank",
    "get_size": "size",
    "split": "split()",
    "free": "close()",
    "abort": "abort()",
    "barrier": "barrier()",
    "send": "send()",
    "recv": "recv()",
    "bcast": "broadcast(), or broadcast_object() for Python objects",
    "reduce": "reduce()",
    "allreduce": "all_reduce()",
    "reduce_scatter": "reduce_scatter()",
    "reduce_scatter_block": "reduce_scatter()",
    "gather": "gather()",
    "gatherv": "gather()",
    "scatter": "scatter()",
    "scatterv": "scatter()",
    "allgather": "all_gather(), or all_gather_object() for Python objects",
    "allgatherv": "all_gather_v()",
    "alltoall": "all_to_all()",
    "alltoallv": "all_to_all_v()",
}


class MpiNames:
    """The communicator's answer to names that it has not."""

    if not TYPE_CHECKING:  # type checkers would take any name for known

        def __getattr__(self, name: str) -> Any:
            """Raises AttributeError, which names gradwire's method in place of MPI's."""
            kind, asked = type(self).__name__, name.lower()
            ours = _OURS.get(asked) or _OURS.get(asked.removeprefix("i"))
            hint = "" if ours is None else f"; MPI's {name} is {ours} here"
            if ours is not None and asked not in _OURS:
                hint += ", with async_op=True"
            raise AttributeError(f"a {kind} has no {name!r}{hint}", name=name, obj=self)

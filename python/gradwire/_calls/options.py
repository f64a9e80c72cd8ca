"""Options: the collectives' keywords, and checks of their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from gradwire._arrays.shapes import Check
from gradwire._base import arguments
from gradwire._calls.reductions import CodecLike
from gradwire._errors import InvalidArgument
from gradwire._feedback import ErrorFeedback
from gradwire._schedules.schedule import Schedule

# Types of torch.distributed.ReduceOp, and of torch's bindings of its values.
_TORCH_KINDS = ("ReduceOp", "RedOpType")


class Options(NamedTuple):
    """The keywords of one call; see `Communicator`."""

    algorithm: str = "auto"
    schedule: Schedule | None = None
    async_op: bool = False
    timeout: float | None = None
    op: str = "sum"
    root: int = 0
    codec: CodecLike = "none"
    key: str | None = None
    keys: Sequence[Any] | None = None
    feedback: ErrorFeedback | Literal[False] | None = None
    prescale: float = 1.0
    postscale: float = 1.0
    check: Check = None

    def limit(self, default: float) -> float:
        """The timeout in seconds, or the default; raises InvalidArgument for no positive number."""
        return default if self.timeout is None else arguments.seconds(self.timeout)

    def checked(self) -> Options:
        """Checks types and translates `op`; returns the options. Raises InvalidArgument.

        Other modules check `root`, codecs and feedback.
        """
        arguments.text(self.algorithm, "algorithm")
        arguments.flag(self.async_op, "async_op")
        if self.schedule is not None:
            arguments.instance(self.schedule, "schedule", Schedule, "a gradwire.Schedule")
        if self.key is not None:
            arguments.text(self.key, "key")
        return self if type(self.op) is str else self._replace(op=operation(self.op))


def operation(op: Any) -> str:
    """The name of a reduction, given as a str or as a torch.distributed.ReduceOp."""
    if isinstance(op, str):
        return op
    value = getattr(op, "op", op)  # a ReduceOp holds one of its enumeration
    name = getattr(value, "name", None)
    if type(value).__name__ not in _TORCH_KINDS or not isinstance(name, str):
        raise arguments.wrong(
            op, "op", "'sum', 'avg', 'min', 'max' or another name of Communicator"
        )
    if name == "PREMUL_SUM":
        raise InvalidArgument("op=ReduceOp.PREMUL_SUM: give op='sum' and its factor as prescale=")
    return {"PRODUCT": "prod"}.get(name, name.lower())

"""Messages: send and receive between two ranks."""

from __future__ import annotations

from typing import Any

from gradwire._arrays.operands import Operand, on_cpu, writable, written
from gradwire._base.arguments import flag
from gradwire._calls.communicator_like import CommunicatorLike
from gradwire._calls.on_cpu import Work
from gradwire._calls.requests import CodecLike, moving
from gradwire.codec import NativeCodec


def _packed_as(message: Operand, codec: CodecLike) -> str:
    """The dtype of elements that travel packed; empty where they do not."""
    found = "none" if codec == "none" else moving(codec, "send").name
    return message.dtype if found == "lossless" and message.reducible else ""


class Messages:
    """Methods of the communicator for one array from one rank to another."""

    def send(
        self: CommunicatorLike,
        x: Any,
        dst: int,
        *,
        codec: str | NativeCodec = "none",
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Sends one array, of any type, to a rank that receives as many bytes.

        Messages between two ranks arrive in the order they were sent, independently of collectives.
        `codec` is "none" or "lossless"; the receiver needs none.
        The call may return before the message is received. A message to this rank itself is copied,
        and the call returns at once.
        """
        flag(async_op, "async_op")
        limit = self._seconds(timeout)
        message = on_cpu(x, "send")
        to, packed_as = self._rank(dst, "dst"), _packed_as(message, codec)
        core = self._core.send(message.address, message.nbytes, to, limit, x, packed_as)
        work = Work(self._core, core, "send", lambda: None)
        return work if async_op else work.wait()

    def recv(
        self: CommunicatorLike,
        x: Any,
        src: int | None = None,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Receives into an array from a rank, or from whichever sends first; returns the rank."""
        flag(async_op, "async_op")
        limit = self._seconds(timeout)
        (message,) = writable([on_cpu(x, "recv")])
        written([message])
        source = -1 if src is None else self._rank(src, "src")
        core = self._core.receive(message.address, message.nbytes, source, limit, x)
        work = Work(self._core, core, "recv", core.source)
        return work if async_op else work.wait()

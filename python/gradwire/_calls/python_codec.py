"""Reductions with a codec written in Python: encoded at submission, decoded by wait()."""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradwire import _core
from gradwire._arrays.operands import Operand
from gradwire._errors import InvalidArgument, TransportError
from gradwire._feedback import ErrorFeedback, Keys
from gradwire.codec import Codec

Floats: TypeAlias = NDArray[np.float32]

_LENGTH = struct.Struct("<Q")  # in front of each array's payload


class Reduction:
    """One call: encodes this rank's payload, and sums all ranks' payloads."""

    def __init__(
        self,
        codec: Codec,
        inputs: Sequence[Operand],
        average: bool,
        feedback: ErrorFeedback | None,
        keys: Keys,
    ) -> None:
        """Encodes the arrays; with feedback, `keys` name runs that cover them end to end.

        Raises InvalidArgument for arrays that are not float32, for keys in use, and for a codec
        whose payload is not as it promises.
        """
        for each in inputs:
            if each.dtype != "float32":
                raise InvalidArgument(f"codec '{codec}' needs float32, {each.what} is {each.dtype}")
        self.codec, self._average = codec, average
        self._counts = [each.elements for each in inputs]
        self._lock = threading.Lock()
        self._over = False
        self._error: BaseException | None = None
        self.payloads = _core.ExchangePayloads(
            None if feedback is None else feedback._core, list(keys)
        )
        self._residuals = None if feedback is None else _Residuals(self.payloads, keys)
        try:
            self._encode([floats(each) for each in inputs])
        except BaseException:
            self.payloads.cancel()
            raise

    def finish(self, rank: int, outputs: Mapping[int, Operand]) -> None:
        """Writes the sums of the arrays in `outputs`, once all payloads have arrived.

        Raises TransportError, which names the rank, for a payload that cannot be decoded; every
        later call raises it again.
        """
        with self._lock:
            if not self._over:
                try:
                    self._settle(rank, self._deliver(rank, outputs))
                except BaseException as error:
                    self._error = error
                    self.payloads.settle(False)
                self._over = True
            if self._error is not None:
                raise self._error

    def withdraw(self, *, failed: bool) -> None:
        """Frees the keys of a call that was refused or failed before it began."""
        if failed:
            self.payloads.settle(False)
        self.payloads.cancel()

    def _settle(self, rank: int, keep: bool) -> None:
        if keep and self._residuals is not None:
            self._residuals.write(rank)
        self.payloads.settle(keep)

    def _encode(self, inputs: Sequence[Floats]) -> None:
        """Encodes this rank's payload; an empty one means NaN or Inf, which codecs never see."""
        most = [self.codec.max_bytes(count) for count in self._counts]
        limit = sum(_LENGTH.size + each for each in most)
        payloads = []
        for index, x in enumerate(inputs):
            payload = self._payload(x, index)
            if payload is None:
                self.payloads.seal(b"", finite=False, limit=limit)
                return
            if len(payload) > most[index]:
                raise InvalidArgument(
                    f"codec '{self.codec}' has encoded {x.size} elements in {len(payload)} bytes, "
                    f"and its max_bytes({x.size}), by which all ranks go, is {most[index]}: "
                    "override max_bytes"
                )
            payloads += [_LENGTH.pack(len(payload)), payload]
        self.payloads.seal(b"".join(payloads), finite=True, limit=limit)

    def _payload(self, x: Floats, index: int) -> bytes | None:
        """The payload of one array; None if its value or its new residual is not finite."""
        value = x if self._residuals is None else self._residuals.add_to(x)
        if not np.isfinite(value).all():
            return None
        payload = self._bytes(self.codec.encode(value))
        if self._residuals is None:
            return payload
        with np.errstate(invalid="ignore", over="ignore"):
            lost = value - self._decode(memoryview(payload), index)
        self._residuals.keep(lost)
        return payload if np.isfinite(lost).all() else None

    def _bytes(self, encoded: Any) -> bytes:
        try:
            return memoryview(encoded).tobytes()
        except TypeError as error:
            raise InvalidArgument(
                f"codec '{self.codec}' has encoded into a {type(encoded).__name__}, which is no "
                f"buffer of bytes: {error}"
            ) from error

    def _deliver(self, rank: int, outputs: Mapping[int, Operand]) -> bool:
        """Writes the sums; returns whether all is finite, alike on all ranks.

        All ranks decide by the same payloads. With feedback each rank therefore forms the whole
        sum, even if it keeps only a part.
        """
        finite = self.payloads.all_finite
        if finite:
            parts = self._parts(rank)
            for index in outputs if self._residuals is None else range(len(self._counts)):
                total = self._sum(rank, [each[index] for each in parts], index)
                finite = finite and bool(np.isfinite(total).all())
                if index in outputs:
                    floats(outputs[index], writable=True)[:] = total
        if not finite:
            for output in outputs.values():
                floats(output, writable=True)[:] = np.nan
        return finite

    def _parts(self, rank: int) -> list[list[memoryview]]:
        """The payloads of the arrays, by rank."""
        everything = memoryview(self.payloads)
        bounds = itertools.pairwise([0, *self.payloads.ends])
        return [
            self._parts_of(everything[start:end], rank, peer)
            for peer, (start, end) in enumerate(bounds)
        ]

    def _parts_of(self, payload: memoryview, rank: int, peer: int) -> list[memoryview]:
        parts, at = [], 0
        for _ in self._counts:
            start = at + _LENGTH.size
            if start > len(payload):
                raise _refusal(rank, peer, "it ends too soon")
            at = start + int(_LENGTH.unpack_from(payload, at)[0])
            if at > len(payload):
                raise _refusal(rank, peer, "it ends too soon")
            parts.append(payload[start:at])
        if at < len(payload):
            raise _refusal(rank, peer, "it is longer than its parts")
        return parts

    def _sum(self, rank: int, payloads: Sequence[memoryview], index: int) -> Floats:
        total = np.zeros(self._counts[index], np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            for peer, payload in enumerate(payloads):
                try:
                    total += self._decode(payload, index)
                except Exception as error:
                    raise _refusal(rank, peer, str(error)) from error
            if self._average:
                total *= np.float32(1 / len(payloads))
        return total

    def _decode(self, payload: memoryview, index: int) -> Floats:
        count = self._counts[index]
        decoded = np.asarray(self.codec.decode(payload, count), np.float32)
        if decoded.shape == (count,):
            return decoded
        raise InvalidArgument(
            f"codec '{self.codec}' decoded an array of shape {decoded.shape}, not ({count},)"
        )


class _Residuals:
    """Residuals of one call's keys, read and written array by array, in order."""

    def __init__(self, payloads: _core.ExchangePayloads, keys: Keys) -> None:
        self._payloads = payloads
        sizes = [count for _, count in keys]
        olds = [payloads.residual(i) for i in range(len(keys))]
        self._old = np.concatenate(
            [
                old if old.size else np.zeros(size, np.float32)
                for old, size in zip(olds, sizes, strict=True)
            ]
        )
        self._ends = np.cumsum(sizes)
        self._next: list[Floats] = []
        self._at = 0

    def add_to(self, x: Floats) -> Floats:
        self._at += x.size
        with np.errstate(invalid="ignore", over="ignore"):
            value: Floats = x + self._old[self._at - x.size : self._at]
        value.flags.writeable = False
        return value

    def keep(self, error: Floats) -> None:
        self._next.append(error)

    def write(self, rank: int) -> None:
        for i, part in enumerate(np.split(np.concatenate(self._next), self._ends[:-1])):
            self._payloads.write_next(i, part, rank)


def _refusal(rank: int, peer: int, why: str) -> TransportError:
    error = TransportError(
        f"rank {rank}: rank {peer} sent a payload that can't be decoded: {why}; do all ranks use "
        "the same codec?"
    )
    error.peer = peer
    return error


def floats(each: Operand, *, writable: bool = False) -> Floats:
    """A flat float32 array over the operand's memory."""
    if each.elements == 0:
        return np.empty(0, np.float32)
    memory: Any = (ctypes.c_float * each.elements).from_address(each.address)
    array: Floats = np.frombuffer(
        memory if writable else memoryview(memory).toreadonly(), np.float32
    )
    return array

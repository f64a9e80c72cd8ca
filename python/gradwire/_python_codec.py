"""Reductions with a codec that is written in Python: encoded at submission, decoded by wait()."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradwire import _core
from gradwire._arrays import Operand
from gradwire._errors import InvalidArgument, TransportError
from gradwire._feedback import ErrorFeedback, Keys
from gradwire.codec import Codec

Floats: TypeAlias = NDArray[np.float32]

_LENGTH = struct.Struct("<Q")  # in front of each array's payload


class Reduction:
    """One call: this rank's payload, and what becomes of all ranks' payloads."""

    def __init__(
        self,
        codec: Codec,
        inputs: Sequence[Operand],
        average: bool,
        feedback: ErrorFeedback | None,
        keys: Keys,
    ) -> None:
        """Encodes the arrays; with feedback each of them belongs to one of the keys.

        Raises InvalidArgument for arrays that are not float32 and keys that are in use.
        """
        for each in inputs:
            if each.dtype != "float32":
                raise InvalidArgument(f"codec '{codec}' needs float32, {each.what} is {each.dtype}")
        self._codec, self._average = codec, average
        self._counts = [each.elements for each in inputs]
        self._lock = threading.Lock()
        self._finished = False
        self._residuals = None if feedback is None else _Residuals(feedback, keys)
        try:
            self.letters = self._encode([floats(each) for each in inputs])
        except BaseException:
            self._settle(False)
            raise

    def _encode(self, inputs: Sequence[Floats]) -> _core.Letters:
        payloads, finite = [], True
        for index, x in enumerate(inputs):
            value = x if self._residuals is None else self._residuals.add_to(x)
            encoded: Any = self._codec.encode(value)  # any buffer
            payload = bytes(memoryview(encoded).cast("B"))
            finite = finite and bool(np.isfinite(value).all())
            if self._residuals is not None:
                with np.errstate(invalid="ignore"):
                    self._residuals.keep(value - self._decode(payload, index))
            payloads.append(_LENGTH.pack(len(payload)) + payload)
        limit = sum(_LENGTH.size + self._codec.max_bytes(count) for count in self._counts)
        return _core.Letters(b"".join(payloads), finite, limit)

    def finish(self, rank: int, outputs: Mapping[int, Operand]) -> None:
        """Writes the sums of the arrays that `outputs` names; to be called when the letters are in.

        Raises TransportError, which names the rank, for a payload that is none.
        """
        with self._lock:
            if self._finished:
                return
            self._finished = True
            payloads = [self._parts(rank, peer) for peer in range(len(self.letters.all))]
            for index, output in outputs.items():
                floats(output)[:] = self._sum(rank, [each[index] for each in payloads], index)
            self._settle(self.letters.all_finite)

    def _parts(self, rank: int, peer: int) -> list[bytes]:
        letter, parts, at = self.letters.all[peer], [], 0
        for _ in self._counts:
            start = at + _LENGTH.size
            if start > len(letter):
                raise _refusal(rank, peer, "it ends too soon")
            at = start + int(_LENGTH.unpack_from(letter, at)[0])
            if at > len(letter):
                raise _refusal(rank, peer, "it ends too soon")
            parts.append(letter[start:at])
        return parts

    def _sum(self, rank: int, payloads: Sequence[bytes], index: int) -> Floats:
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

    def _decode(self, payload: bytes, index: int) -> Floats:
        count = self._counts[index]
        decoded = np.asarray(self._codec.decode(memoryview(payload), count), np.float32)
        if decoded.shape == (count,):
            return decoded
        raise InvalidArgument(
            f"codec '{self._codec}' decoded an array of shape {decoded.shape}, not ({count},)"
        )

    def _settle(self, keep: bool) -> None:
        if self._residuals is not None:
            self._residuals.settle(keep)


class _Residuals:
    """Those of one call's keys, read and written array by array, in order."""

    def __init__(self, feedback: ErrorFeedback, keys: Keys) -> None:
        self._open = _core.Transaction(feedback._core, list(keys))
        olds = [self._open.residual(i) for i in range(len(keys))]
        sizes = [count for _, count in keys]
        zeros = [np.zeros(size, np.float32) for size in sizes]
        self._old = np.concatenate(
            [old if old.size else z for old, z in zip(olds, zeros, strict=True)]
        )
        self._ends = np.cumsum(sizes)
        self._next: list[Floats] = []
        self._at = 0

    def add_to(self, x: Floats) -> Floats:
        self._at += x.size
        value: Floats = x + self._old[self._at - x.size : self._at]
        return value

    def keep(self, error: Floats) -> None:
        self._next.append(error)

    def settle(self, keep: bool) -> None:
        if keep:
            for i, part in enumerate(np.split(np.concatenate(self._next), self._ends[:-1])):
                self._open.write_next(i, part)
        self._open.settle(keep)


def _refusal(rank: int, peer: int, why: str) -> TransportError:
    error = TransportError(
        f"rank {rank}: rank {peer} sent a payload that can't be decoded: {why}; do all ranks use "
        "the same codec?"
    )
    error.peer = peer
    return error


def floats(each: Operand) -> Floats:
    """A flat array over the operand's memory."""
    if each.elements == 0:
        return np.empty(0, np.float32)
    memory: Any = (ctypes.c_float * each.elements).from_address(each.address)
    array: Floats = np.frombuffer(memory, np.float32)
    return array

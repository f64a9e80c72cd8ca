"""Codecs: how float32 travels in reductions. Objects for ``codec=``, and a base class for your own.

``codec="onebit"`` and ``codec=OneBit()`` are the same; `gradwire.codecs` lists the names. *Biased*
codecs lose something in every call that only `gradwire.ErrorFeedback` makes up for.

A codec also works by itself, on payloads that a program sends or stores as it likes:

    onebit = gradwire.codec.get("onebit")
    payload = onebit.encode(x, feedback=feedback, key="w")
    y = onebit.decode(payload, x.shape)
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gradwire import _core
from gradwire._arrays.operands import Operand, operand
from gradwire._base import arguments
from gradwire._errors import InvalidArgument
from gradwire._feedback import ErrorFeedback

__all__ = [
    "BF16",
    "FP16",
    "Codec",
    "Int4",
    "Int8",
    "Lossless",
    "LowRank",
    "NativeCodec",
    "OneBit",
    "Threshold",
    "TopK",
    "Uncompressed",
    "get",
]

Payload = bytes | bytearray | memoryview | NDArray[Any]


def _word(value: Any, what: str) -> str:
    """Checks a text without commas, which separate options."""
    given = arguments.text(value, what)
    if "," in given:
        raise InvalidArgument(f"{what}={given!r} is no choice of one option")
    return given


# Checks by the annotation of a field.
_CHECKS: dict[Any, Callable[[Any, str], object]] = {
    "int | None": functools.partial(arguments.whole, bits=65),
    "float | None": arguments.number,
    "str | None": _word,
}


class NativeCodec:
    """A codec of the C++ core, with its parameters. Immutable.

    Raises InvalidArgument for a parameter of the wrong type or out of range.
    """

    _name: ClassVar[str]

    def __post_init__(self) -> None:
        self.spec  # noqa: B018 - making it checks the parameters

    @functools.cached_property
    def spec(self) -> str:
        """The canonical name with parameters, as ``codec=`` takes it."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        given = {each: getattr(self, each.name) for each in fields}
        text = ",".join(
            f"{field.name}={_CHECKS[field.type](value, field.name)}"
            for field, value in given.items()
            if value is not None
        )
        return _core.Codec(f"{self._name}:{text}" if text else self._name).name

    def encode(
        self,
        x: Any,
        *,
        feedback: ErrorFeedback | None = None,
        key: str | None = None,
        call: int = 0,
    ) -> NDArray[np.uint8]:
        """Encodes an array; returns its payload: uint8, of shape (bytes,), `max_bytes` at most.

        `x` is a float32 array of any shape on the CPU: NumPy, torch, or with DLPack, C-contiguous.
        The payload has the bytes that an all_reduce or a push sends of `x`; lowrank's has both
        factors of the one matrix, or the elements as they are where factors are no smaller.

        With `feedback` the residual of `key` is added first, and what the payload does not hold
        becomes the residual. So all decoded payloads and the last residual add up to all inputs.
        If the sum holds NaN or Inf, the payload does too, and the residual stays. Without, what a
        lossy codec drops is lost; rounding="stochastic" then draws anew for each `call`, 0 or more.

        Raises InvalidArgument for other arrays, for a key without feedback or feedback without a
        key, for a key in an unfinished call, and for a residual of another length.
        """
        given = _floats(x)
        rows, columns = _matrix(given.shape)
        if (feedback is None) != (key is None):
            raise InvalidArgument("feedback= and key= go together: key= names the residual")
        kept = name = None
        if feedback is not None:
            kept = arguments.instance(
                feedback, "feedback", ErrorFeedback, "a gradwire.ErrorFeedback"
            )._on_cpu()
            name = arguments.text(key, "key")
        number = arguments.whole(call, "call", least=0, bits=64)
        return _native(self.spec).encode_array(
            given.address, rows, columns, kept, name or "", number
        )

    def decode(self, payload: Payload, shape: int | Sequence[int]) -> NDArray[np.float32]:
        """Decodes a payload to a new float32 array of `shape`, or of so many elements.

        Give the shape of what was encoded; the number of elements is enough for all codecs but
        lowrank. The payload may come from anywhere, as bytes or an array of uint8: lengths and
        indices in it are checked. Raises InvalidArgument for one that no such array has.
        """
        wanted = _shape(shape)
        rows, columns = _matrix(wanted)
        y = np.empty(wanted, np.float32)
        _native(self.spec).decode_array(_bytes(payload), rows, columns, y.ctypes.data)
        return y

    def max_bytes(self, shape: int | Sequence[int]) -> int:
        """The most bytes of a payload of an array of `shape`, or of so many elements."""
        return _native(self.spec).most_payload(*_matrix(_shape(shape)))

    def __str__(self) -> str:
        return self.spec


@functools.cache
def _native(spec: str) -> _core.Codec:
    return _core.Codec(spec)


def _floats(x: Any) -> Operand:
    given = operand(x, "x")
    if given.dtype != "float32" or given.device is not None:
        where = "the CPU" if given.device is None else f"cuda:{given.device}"
        raise InvalidArgument(f"x is {given.dtype} on {where}: codecs encode float32 on the CPU")
    return given


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns: the first dimension, and all others together."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def _shape(given: int | Sequence[int]) -> tuple[int, ...]:
    sizes = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    shape = tuple(arguments.whole(each, "shape", least=0, bits=64) for each in sizes)
    # NumPy multiplies all sides but those of 0.
    arguments.whole(math.prod(side for side in shape if side), "elements of the shape", bits=48)
    return shape


def _bytes(payload: Payload) -> NDArray[np.uint8]:
    """The bytes of a payload, not copied."""
    try:
        view = memoryview(payload)  # type: ignore[arg-type]
        flat = view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"payload is a {type(payload).__name__}: give bytes, or an array of uint8 without gaps "
            f"({error})"
        ) from error
    return np.frombuffer(flat, np.uint8)


@dataclasses.dataclass(frozen=True)
class Uncompressed(NativeCodec):
    """The elements as they are: ``codec="none"``."""

    _name = "none"


@dataclasses.dataclass(frozen=True)
class FP16(NativeCodec):
    """Half precision on the wire, sums in float32.

    `scale`, a power of two, multiplies before the cast and is divided out after it. Choose it above
    1 for gradients below 6e-5, where float16 has few digits, and below 1 for sums beyond 65504,
    which saturate.
    """

    _name = "fp16"
    scale: float | None = None


@dataclasses.dataclass(frozen=True)
class BF16(NativeCodec):
    """The upper half of a float32 on the wire, sums in float32."""

    _name = "bf16"


@dataclasses.dataclass(frozen=True)
class Int8(NativeCodec):
    """One byte per element, and one float32 scale per block of `block` elements.

    `rounding` is "nearest" (ties to even) or "stochastic", which depends only on `seed`, the call
    and the element.
    """

    _name = "int8"
    block: int | None = None
    rounding: str | None = None
    seed: int | None = None


@dataclasses.dataclass(frozen=True)
class Int4(NativeCodec):
    """Four bits per element, and one bfloat16 scale per block: 4.5 bits in blocks of 32.

    `block` is 32, 64 or 128 elements. `rounding` and `seed` are as for `Int8`: to "nearest"
    of 16 levels, or "stochastic" to one of 15, which loses three times as much but is unbiased.
    """

    _name = "int4"
    block: int | None = None
    rounding: str | None = None
    seed: int | None = None


@dataclasses.dataclass(frozen=True)
class OneBit(NativeCodec):
    """The sign of each element, and two means per block of `block` elements.

    Seide et al. 2014, "1-Bit Stochastic Gradient Descent", sec. 3. Biased.
    """

    _name = "onebit"
    block: int | None = None


@dataclasses.dataclass(frozen=True)
class Threshold(NativeCodec):
    """Sends ±tau for each element beyond it, and nothing for the others.

    Strom 2015, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing". Biased.
    Either give `tau`, or it adapts for each key so that a share `density` of the elements is sent.
    """

    _name = "threshold"
    tau: float | None = None
    density: float | None = None


@dataclasses.dataclass(frozen=True)
class TopK(NativeCodec):
    """The largest `density` fraction of every block of 32,768 elements, by magnitude.

    At least one element per block is sent, at the precision `values`: "fp32", "fp16", "bf16", or
    "2bit": the sign, and one of two magnitudes per 512 values. Lin et al. 2018, "Deep Gradient
    Compression", sec. 3; Sarfi et al. 2025, "Communication Efficient LLM Pre-training with
    SparseLoCo". Biased.
    """

    _name = "topk"
    density: float | None = None
    values: str | None = None


@dataclasses.dataclass(frozen=True)
class LowRank(NativeCodec):
    """Each matrix as a product of two matrices with `rank` columns.

    Vogels et al. 2019, "PowerSGD", Algorithm 1. Biased. Arrays are matrices of shape[0] rows.
    Arrays of one dimension travel uncompressed, and so do the pieces into which ``keys=`` cuts an
    array: give a list of matrices instead. For all_reduce only.
    """

    _name = "lowrank"
    rank: int | None = None


@dataclasses.dataclass(frozen=True)
class Lossless(NativeCodec):
    """The elements as they are, in fewer bytes: exponents in few bits, no bit lost.

    For all collectives and `send`, of float32, float16 and bfloat16; others travel as by "none".
    Results have the bits that they have by "none". It packs what goes over sockets; over shared
    memory and between GPUs arrays travel as they are.
    """

    _name = "lossless"


class Codec(abc.ABC):
    """Base class for your own codecs, for ``codec=``; use equal ones on all ranks.

    Each rank encodes its input once, all payloads travel to all ranks, and each rank adds them up
    in rank order; so ``algorithm=`` is "auto", "gather" or "gather(ring)". encode runs on the
    thread that makes the call and decode on the one that waits for it, on one array at a time. For
    a Work that is dropped without wait(), decode runs in the communicator's next call, or in
    close().

    A codec never sees NaN or Inf: if an array, a residual or a sum has any, all results are NaN,
    and no residual changes. The call raises an error of encode before anything is sent. Every
    wait() raises an error of decode, as a TransportError that names the rank of the payload; it
    leaves that rank's residual, and the communicator, as they were.
    """

    name: str = ""
    """The name in messages, equal on all ranks; the class's name if empty."""
    biased: bool = True
    """Whether the codec needs error feedback."""

    @abc.abstractmethod
    def encode(self, x: NDArray[np.float32]) -> bytes | bytearray | memoryview | NDArray[Any]:
        """Encodes a flat float32 array, read-only and not to be kept; returns the payload."""

    @abc.abstractmethod
    def decode(self, payload: memoryview, count: int) -> NDArray[np.float32]:
        """Decodes a payload to `count` float32 elements, with the same bits on every rank."""

    def max_bytes(self, count: int) -> int:
        """The most bytes of a payload of `count` elements.

        The rank that encodes a longer one raises InvalidArgument before anything is sent, and may
        call again, while the others wait for it. A longer payload from a peer is an error.
        """
        return 8 * count + 1024

    def __str__(self) -> str:
        return self.name or type(self).__name__

    def __repr__(self) -> str:  # no address, since ranks compare their settings
        return f"<codec {self}>"


_VALUES: dict[Any, Callable[[str], object]] = {
    "int | None": int,
    "float | None": float,
    "str | None": str,
}


def get(spec: str) -> NativeCodec:
    """The codec of a name with options, as ``codec=`` takes it: "onebit", "topk:density=0.01".

    Raises InvalidArgument, which lists the known names, for anything else.
    """
    name, _, rest = _core.Codec(arguments.text(spec, "codec")).name.partition(":")
    if rest.startswith("between="):
        raise InvalidArgument(f"codec={spec!r} says between what all_reduce encodes: leave it out")
    (kind,) = (each for each in NativeCodec.__subclasses__() if each._name == name)
    types = {field.name: field.type for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    options = (each.split("=", 1) for each in rest.split(",") if each)
    return kind(**{option: _VALUES[types[option]](value) for option, value in options})

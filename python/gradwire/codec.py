"""Codecs: how float32 travels in reductions. Objects for ``codec=``, and a base for one's own.

``codec="onebit"`` and ``codec=OneBit()`` are the same; `gradwire.codecs` lists the names. Those
that are ``biased`` lose something at every call that only `gradwire.ErrorFeedback` makes up for.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gradwire import _core
from gradwire._base import arguments
from gradwire._errors import InvalidArgument

__all__ = [
    "BF16",
    "FP16",
    "Codec",
    "Int8",
    "LowRank",
    "NativeCodec",
    "OneBit",
    "Threshold",
    "TopK",
]


def _word(value: Any, what: str) -> str:
    """A text that ends where its option does."""
    given = arguments.text(value, what)
    if "," in given:
        raise InvalidArgument(f"{what}={given!r} is no choice of one option")
    return given


# By the annotation of a field.
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
        self.spec  # noqa: B018 - which is checked when it is made

    @functools.cached_property
    def spec(self) -> str:
        """Its canonical name with parameters, as ``codec=`` takes it."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        given = {each: getattr(self, each.name) for each in fields}
        text = ",".join(
            f"{field.name}={_CHECKS[field.type](value, field.name)}"
            for field, value in given.items()
            if value is not None
        )
        return _core.Codec(f"{self._name}:{text}" if text else self._name).name

    def __str__(self) -> str:
        return self.spec


@dataclasses.dataclass(frozen=True)
class FP16(NativeCodec):
    """Half precision on the wire, sums in float32.

    `scale`, a power of two, multiplies before the cast and is divided out after it: above 1 for
    gradients below 6e-5, where float16 has few digits; below 1 for sums beyond 65504, which
    saturate.
    """

    _name = "fp16"
    scale: float | None = None


@dataclasses.dataclass(frozen=True)
class BF16(NativeCodec):
    """The upper half of a float32 on the wire, sums in float32."""

    _name = "bf16"


@dataclasses.dataclass(frozen=True)
class Int8(NativeCodec):
    """One byte an element and one float32 scale a block of `block` elements.

    `rounding` is "nearest" (even) or "stochastic", which depends on `seed`, the call and the
    element alone.
    """

    _name = "int8"
    block: int | None = None
    rounding: str | None = None
    seed: int | None = None


@dataclasses.dataclass(frozen=True)
class OneBit(NativeCodec):
    """The sign of each element, and two means a block of `block` elements.

    Seide et al. 2014, "1-Bit Stochastic Gradient Descent", sec. 3. Biased.
    """

    _name = "onebit"
    block: int | None = None


@dataclasses.dataclass(frozen=True)
class Threshold(NativeCodec):
    """±tau for each element beyond it, nothing for the others.

    Strom 2015, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing". Biased.
    Either `tau` is given, or it adapts, key by key, to send `density` of all elements.
    """

    _name = "threshold"
    tau: float | None = None
    density: float | None = None


@dataclasses.dataclass(frozen=True)
class TopK(NativeCodec):
    """The `density` of each 32,768 elements of an array that is largest in magnitude.

    At least one of them is sent, exactly as it is, or rounded to `values`: "fp32", "fp16" or
    "bf16". Lin et al. 2018, "Deep Gradient Compression", sec. 3. Biased.
    """

    _name = "topk"
    density: float | None = None
    values: str | None = None


@dataclasses.dataclass(frozen=True)
class LowRank(NativeCodec):
    """Each matrix as the product of two with `rank` columns.

    Vogels et al. 2019, "PowerSGD", Algorithm 1. Biased. Arrays are matrices of shape[0] rows; those
    of one dimension travel as they are, and so do the pieces into which ``keys=`` cuts an array:
    give a list of matrices instead. For all_reduce only.
    """

    _name = "lowrank"
    rank: int | None = None


class Codec(abc.ABC):
    """A codec of one's own, for ``codec=``; the same one on all ranks.

    Each rank encodes its input once, all payloads travel to all ranks, and each adds them up in
    rank order; so ``algorithm=`` is "auto", "gather" or "gather(ring)". Both methods run on the
    thread that makes the call (encode) or waits for it (decode), on one array at a time; for a Work
    that is dropped unwaited, decode runs in the communicator's next call, or in close().

    NaN or Inf, in an array, a residual or a sum, is none of its business: where there is any, all
    results are NaN, and no residual moves. What encode raises is raised by the call, before
    anything was sent; what decode raises, by every wait() as a TransportError that names the rank
    whose payload it was. It leaves that rank's residual, and the communicator, as they were.
    """

    name: str = ""
    """What messages call it; the class's name if empty. Equal on all ranks."""
    biased: bool = True
    """Whether it needs error feedback."""

    @abc.abstractmethod
    def encode(self, x: NDArray[np.float32]) -> bytes | bytearray | memoryview | NDArray[Any]:
        """The payload of a flat float32 array, which is read-only and must not be kept."""

    @abc.abstractmethod
    def decode(self, payload: memoryview, count: int) -> NDArray[np.float32]:
        """The `count` float32 elements that a payload stands for: the same bits on every rank."""

    def max_bytes(self, count: int) -> int:
        """The longest payload of so many elements.

        A longer one is refused with InvalidArgument where it was encoded, before anything is sent:
        that rank may call again, and the others wait for it. A peer's longer one is an error.
        """
        return 8 * count + 1024

    def __str__(self) -> str:
        return self.name or type(self).__name__

"""What a collective asks of the core: its arrays, and for reductions its codec and feedback."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from gradwire import _core
from gradwire._arrays import REDUCIBLE, Operand
from gradwire._buffers import Buffers, Place
from gradwire._errors import InvalidArgument
from gradwire._feedback import ErrorFeedback, Keys, cut, keys_of
from gradwire._python_codec import Reduction
from gradwire.codec import Codec, NativeCodec

CodecLike: TypeAlias = str | NativeCodec | Codec

_REDUCING = ("all_reduce", "reduce_scatter", "reduce")


class Wishes(Protocol):
    """Of a collective's keywords, those that this module reads."""

    @property
    def op(self) -> str: ...
    @property
    def root(self) -> int: ...
    @property
    def codec(self) -> CodecLike: ...
    @property
    def key(self) -> str | None: ...
    @property
    def keys(self) -> Sequence[Any] | None: ...
    @property
    def feedback(self) -> ErrorFeedback | bool | None: ...


class Call(NamedTuple):
    """One call, in the core's terms."""

    name: str
    dtype: str
    inputs: Sequence[Operand]
    outputs: Sequence[Operand]
    finish: Callable[[], Any]  # on the caller's thread when it is over; what the call returns
    codec: _core.Codec | None = None
    feedback: ErrorFeedback | None = None
    keys: Keys = ()
    shapes: Sequence[tuple[int, int]] = ()
    letters: tuple[_core.Letters, str] | None = None  # of a codec in Python, and its name


def prepare(name: str, buffers: Buffers, wishes: Wishes, place: Place) -> Call:
    """Raises InvalidArgument for arrays, codec and feedback that do not go together."""
    inputs, outputs, result = buffers
    known = (*inputs, *outputs)[0]
    call = Call(name, known.dtype if known.reducible else "uint8", inputs, outputs, lambda: result)
    if name not in _REDUCING:
        return call
    if not known.reducible:
        raise InvalidArgument(
            f"{name}: {known.what} is {known.dtype}, which cannot be reduced; "
            f"use one of {', '.join(REDUCIBLE)}"
        )
    if isinstance(wishes.codec, Codec):
        return _with_python_codec(call, wishes.codec, wishes, place)
    return _with_codec(call, native(wishes.codec), wishes)


def native(codec: str | NativeCodec) -> _core.Codec:
    """The core's codec; the same object for the same one, so that plans are found again."""
    return _native(codec if isinstance(codec, str) else codec.spec)


@functools.cache
def _native(spec: str) -> _core.Codec:
    return _core.Codec(spec)


def _with_codec(call: Call, codec: _core.Codec, wishes: Wishes) -> Call:
    call = _with_feedback(call, codec.name, codec.biased, wishes)._replace(codec=codec)
    if not codec.compound:
        return call
    return call._replace(shapes=[_matrix(each.shape) for each in call.inputs])


def _with_feedback(call: Call, codec: str, biased: bool, wishes: Wishes) -> Call:
    feedback = wishes.feedback
    if feedback is None and biased:
        raise InvalidArgument(
            f"codec '{codec}' loses what only error feedback makes up for: give "
            "feedback=gradwire.ErrorFeedback(), kept from call to call, and key=; or feedback=False"
        )
    if feedback is None or feedback is False:
        return call
    if not isinstance(feedback, ErrorFeedback):
        raise InvalidArgument(f"feedback={feedback!r} is no gradwire.ErrorFeedback, nor False")
    keys = keys_of(call.inputs, wishes.key, wishes.keys)
    in_place = call.outputs is call.inputs
    inputs = cut(call.inputs, keys)
    outputs = call.outputs
    if call.name != "reduce_scatter" and outputs:  # whose blocks are what they are
        outputs = inputs if in_place else cut(outputs, keys)
    return call._replace(inputs=inputs, outputs=outputs, feedback=feedback, keys=keys)


def _with_python_codec(call: Call, codec: Codec, wishes: Wishes, place: Place) -> Call:
    if wishes.op not in ("sum", "avg"):
        raise InvalidArgument(f"codec '{codec}' is for op 'sum' or 'avg', not '{wishes.op}'")
    call = _with_feedback(call, str(codec), codec.biased, wishes)
    reduction = Reduction(codec, call.inputs, wishes.op == "avg", call.feedback, call.keys)
    outputs = _results(call, wishes, place)
    finish = call.finish

    def decode() -> Any:
        reduction.finish(place.rank, outputs)
        return finish()

    return call._replace(
        finish=decode, feedback=None, keys=(), letters=(reduction.letters, str(codec))
    )


def _results(call: Call, wishes: Wishes, place: Place) -> dict[int, Operand]:
    """By input: the array that its sum goes into on this rank."""
    if call.name == "reduce_scatter":
        return {place.rank: call.outputs[0]}
    if call.name == "reduce" and place.rank != wishes.root:
        return {}
    return dict(enumerate(call.outputs))


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns: the first dimension, and all others."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])

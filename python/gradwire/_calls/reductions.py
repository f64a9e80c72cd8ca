"""What a collective asks of the core: its arrays, and for reductions its codec and feedback."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from gradwire import _core
from gradwire._arrays.buffers import Buffers, Place
from gradwire._arrays.operands import REDUCIBLE, Operand
from gradwire._base.arguments import text, whole
from gradwire._calls.python_codec import Reduction
from gradwire._errors import InvalidArgument
from gradwire._feedback import ErrorFeedback, Keys, cut, keys_of
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
    reduction: Reduction | None = None  # of a codec in Python
    is_late: bool = False  # whether `finish` has something to do
    moved: str = ""  # the dtype of what is moved as bytes


def prepare(
    name: str, buffers: Buffers, wishes: Wishes, place: Place, *, on_gpu: bool = False
) -> Call:
    """Raises InvalidArgument for arrays, codec and feedback that do not go together."""
    inputs, outputs, result = buffers
    known = (*inputs, *outputs)[0]
    call = Call(name, known.dtype if known.reducible else "uint8", inputs, outputs, lambda: result)
    if name not in _REDUCING:
        return call if known.reducible else call._replace(moved=known.dtype)
    if not known.reducible:
        raise InvalidArgument(
            f"{name}: {known.what} is {known.dtype}, which cannot be reduced; "
            f"use one of {', '.join(REDUCIBLE)}"
        )
    if name == "reduce_scatter" and len(outputs) > 1:
        _require_plain(wishes)
    if isinstance(wishes.codec, Codec) and on_gpu:
        raise InvalidArgument(
            f"codec '{wishes.codec}' is written in Python and works on arrays of the CPU: use "
            "x.cpu(), or one of gradwire.codecs()"
        )
    if isinstance(wishes.codec, Codec):
        return _with_python_codec(call, wishes.codec, wishes, place)
    return _with_codec(call, native(wishes.codec), wishes)


def _require_plain(wishes: Wishes) -> None:
    if wishes.codec == "none" and not wishes.feedback:
        return
    raise InvalidArgument(
        "reduce_scatter of several arrays takes no codec= and no feedback=: give one array, "
        "of which keys= name the parts"
    )


def native(codec: str | NativeCodec) -> _core.Codec:
    """The core's codec; the same object for the same one, so that plans are found again.

    Raises InvalidArgument for what is none.
    """
    if isinstance(codec, NativeCodec):
        return _native(codec.spec)
    if isinstance(codec, str):
        return _native(codec)
    if isinstance(codec, type) and issubclass(codec, NativeCodec | Codec):
        raise InvalidArgument(
            f"codec={codec.__name__} is a class: give an object of it, {codec.__name__}()"
        )
    raise InvalidArgument(
        f"codec={codec!r} is no codec: give 'none' or another name of gradwire.codecs(), or an "
        "object of gradwire.codec"
    )


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
    if feedback is None and not (wishes.key is None and wishes.keys is None):
        raise InvalidArgument(
            "key= and keys= say where error feedback keeps what the codec loses: give "
            "feedback=gradwire.ErrorFeedback() too, kept from call to call, or leave them out"
        )
    if feedback is None or feedback is False:
        return call
    if not isinstance(feedback, ErrorFeedback):
        raise InvalidArgument(f"feedback={feedback!r} is no gradwire.ErrorFeedback, nor False")
    keys = keys_of(call.inputs, wishes.key, _named(wishes.keys))
    call = call._replace(feedback=feedback, keys=keys)
    if call.name == "reduce_scatter":  # a block may be of several keys
        return call
    in_place = call.outputs is call.inputs
    inputs = cut(call.inputs, keys)
    return call._replace(inputs=inputs, outputs=inputs if in_place else cut(call.outputs, keys))


def _named(keys: Sequence[Any] | None) -> Keys | None:
    """Raises InvalidArgument for what are no names and counts."""
    if keys is None:
        return None
    try:
        named = [(text(name, "keys"), whole(count, "keys", bits=64)) for name, count in keys]
    except (TypeError, ValueError) as error:  # InvalidArgument is one
        raise InvalidArgument(
            f"keys={keys!r} is no list of (name, count), one for each run of elements with a "
            "residual of its own"
        ) from error
    for name, count in named:
        if count < 0:
            raise InvalidArgument(f"keys= give '{name}' {count} elements; a count is 0 or more")
    return named


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

    return call._replace(finish=decode, feedback=None, keys=(), reduction=reduction, is_late=True)


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

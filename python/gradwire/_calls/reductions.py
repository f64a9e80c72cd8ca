"""A collective's request in the core's terms: arrays, and for reductions codec and feedback."""

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


class ReductionOptions(Protocol):
    """The collectives' keywords that reductions read."""

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


class PreparedCall(NamedTuple):
    """One call in the core's terms."""

    name: str
    dtype: str
    inputs: Sequence[Operand]
    outputs: Sequence[Operand]
    finish: Callable[[], Any]  # runs on the caller's thread at the end, and makes the call's result
    codec: _core.Codec | None = None
    feedback: ErrorFeedback | None = None
    keys: Keys = ()
    shapes: Sequence[tuple[int, int]] = ()
    reduction: Reduction | None = None  # with a codec written in Python
    is_late: bool = False  # whether `finish` has work to do
    moved: str = ""  # the dtype of arrays that are moved as bytes


def prepare(
    name: str, buffers: Buffers, options: ReductionOptions, place: Place, *, on_gpu: bool = False
) -> PreparedCall:
    """Makes the call; raises InvalidArgument if arrays, codec and feedback do not match."""
    inputs, outputs, result = buffers
    known = (*inputs, *outputs)[0]
    call = PreparedCall(
        name, known.dtype if known.reducible else "uint8", inputs, outputs, lambda: result
    )
    if name not in _REDUCING:
        return call if known.reducible else call._replace(moved=known.dtype)
    if not known.reducible:
        raise InvalidArgument(
            f"{name}: {known.what} is {known.dtype}, which cannot be reduced; "
            f"use one of {', '.join(REDUCIBLE)}"
        )
    if name == "reduce_scatter" and len(outputs) > 1:
        _require_plain(options)
    if isinstance(options.codec, Codec) and on_gpu:
        raise InvalidArgument(
            f"codec '{options.codec}' is written in Python and works on arrays of the CPU: use "
            "x.cpu(), or one of gradwire.codecs()"
        )
    if isinstance(options.codec, Codec):
        return _with_python_codec(call, options.codec, options, place)
    return _with_codec(call, native(options.codec), options)


def _require_plain(options: ReductionOptions) -> None:
    if options.codec == "none" and not options.feedback:
        return
    raise InvalidArgument(
        "reduce_scatter of several arrays takes no codec= and no feedback=: give one array, "
        "of which keys= name the parts"
    )


def native(codec: str | NativeCodec) -> _core.Codec:
    """The core's codec; equal codecs give the same object, so that cached plans are found.

    Raises InvalidArgument for anything that is not a codec.
    """
    if isinstance(codec, NativeCodec):
        return _native(codec.spec)
    if isinstance(codec, str):
        if codec.partition(":")[0] == "auto":
            raise InvalidArgument(
                f"codec={codec!r}: only gradwire.torch.register() and register_fsdp() choose a "
                "codec, by codec='auto' without options; give a codec's name"
            )
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


def _with_codec(call: PreparedCall, codec: _core.Codec, options: ReductionOptions) -> PreparedCall:
    call = _with_feedback(call, codec.name, codec.biased, options)._replace(codec=codec)
    if not codec.compound:
        return call
    return call._replace(shapes=[_matrix(each.shape) for each in call.inputs])


def _with_feedback(
    call: PreparedCall, codec: str, biased: bool, options: ReductionOptions
) -> PreparedCall:
    feedback = options.feedback
    if feedback is None and biased:
        raise InvalidArgument(
            f"codec '{codec}' loses what only error feedback makes up for: give "
            "feedback=gradwire.ErrorFeedback(), kept from call to call, and key=; or feedback=False"
        )
    if feedback is None and not (options.key is None and options.keys is None):
        raise InvalidArgument(
            "key= and keys= say where error feedback keeps what the codec loses: give "
            "feedback=gradwire.ErrorFeedback() too, kept from call to call, or leave them out"
        )
    if feedback is None or feedback is False:
        return call
    if not isinstance(feedback, ErrorFeedback):
        raise InvalidArgument(f"feedback={feedback!r} is no gradwire.ErrorFeedback, nor False")
    keys = keys_of(call.inputs, options.key, _named(options.keys))
    call = call._replace(feedback=feedback, keys=keys)
    if call.name == "reduce_scatter":  # keys may end anywhere in a block
        return call
    in_place = call.outputs is call.inputs
    inputs = cut(call.inputs, keys)
    return call._replace(inputs=inputs, outputs=inputs if in_place else cut(call.outputs, keys))


def _named(keys: Sequence[Any] | None) -> Keys | None:
    """Checks the keys; raises InvalidArgument for anything but names and counts."""
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


def _with_python_codec(
    call: PreparedCall, codec: Codec, options: ReductionOptions, place: Place
) -> PreparedCall:
    if options.op not in ("sum", "avg"):
        raise InvalidArgument(f"codec '{codec}' is for op 'sum' or 'avg', not '{options.op}'")
    call = _with_feedback(call, str(codec), codec.biased, options)
    reduction = Reduction(codec, call.inputs, options.op == "avg", call.feedback, call.keys)
    outputs = _results(call, options, place)
    finish = call.finish

    def decode() -> Any:
        reduction.finish(place.rank, outputs)
        return finish()

    return call._replace(finish=decode, feedback=None, keys=(), reduction=reduction, is_late=True)


def _results(call: PreparedCall, options: ReductionOptions, place: Place) -> dict[int, Operand]:
    """The arrays for the sums on this rank, by the number of their input."""
    if call.name == "reduce_scatter":
        return {place.rank: call.outputs[0]}
    if call.name == "reduce" and place.rank != options.root:
        return {}
    return dict(enumerate(call.outputs))


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a matrix: the first dimension, and all others together."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])

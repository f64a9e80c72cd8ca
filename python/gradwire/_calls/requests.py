"""One call: its options, and its request to the core.

`prepare` checks that arrays and options match. For reductions it adds codec, error feedback, and
the factors before and after (`prescale=`, `postscale=`).
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from gradwire import _core
from gradwire._arrays.buffers import Buffers, Check, Place
from gradwire._arrays.operands import REDUCIBLE, Operand
from gradwire._base import arguments
from gradwire._base.arguments import text, whole
from gradwire._calls.python_codec import Reduction
from gradwire._errors import InvalidArgument
from gradwire._feedback import ErrorFeedback, Keys, cut, keys_of
from gradwire._schedules.schedule import Schedule
from gradwire.codec import Codec, NativeCodec

CodecLike: TypeAlias = str | NativeCodec | Codec

_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
_SCALABLE = ("float32", "float64", "float16", "bfloat16", "complex64", "complex128")
_DOUBLES = ("float64", "complex128")
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
    name: str, buffers: Buffers, options: Options, place: Place, *, on_gpu: bool = False
) -> PreparedCall:
    """Makes the call; raises InvalidArgument if arrays, codec and feedback do not match."""
    inputs, outputs, result = buffers
    known = (*inputs, *outputs)[0]
    call = PreparedCall(
        name, known.dtype if known.reducible else "uint8", inputs, outputs, lambda: result
    )
    if name not in _REDUCING:
        if not known.reducible:
            call = call._replace(moved=known.dtype)
        return call._replace(codec=None if options.codec == "none" else moving(options.codec, name))
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


def _require_plain(options: Options) -> None:
    if options.codec == "none" and not options.feedback:
        return
    raise InvalidArgument(
        "reduce_scatter of several arrays takes no codec= and no feedback=: give one array, "
        "of which keys= name the parts"
    )


def moving(codec: CodecLike, name: str) -> _core.Codec:
    """The core's codec for a call that moves arrays; raises InvalidArgument for one that loses."""
    if isinstance(codec, Codec):
        raise InvalidArgument(f"codec '{codec}' is for collectives that add, not for {name}")
    found = native(codec)
    if not found.exact:
        raise InvalidArgument(
            f"codec '{found.name}' is for collectives that add; {name} moves arrays as they are, "
            "by 'none' or 'lossless'"
        )
    return found


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


def _with_codec(call: PreparedCall, codec: _core.Codec, options: Options) -> PreparedCall:
    call = _with_feedback(call, codec.name, codec.biased, options)._replace(codec=codec)
    if not codec.compound:
        return call
    return call._replace(shapes=[_matrix(each.shape) for each in call.inputs])


def _with_feedback(call: PreparedCall, codec: str, biased: bool, options: Options) -> PreparedCall:
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
    call: PreparedCall, codec: Codec, options: Options, place: Place
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


def _results(call: PreparedCall, options: Options, place: Place) -> dict[int, Operand]:
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


def request_of(call: PreparedCall, options: Options) -> _core.Request:
    """The request for a call that `prepare` has checked."""
    request = _core.Request(
        call.name,
        call.dtype,
        options.op,
        options.root,
        _addresses(call.inputs),
        _addresses(call.outputs),
        options.algorithm,
        None if options.schedule is None else options.schedule._core,
        call.codec,
    )
    if call.feedback is not None:
        on_gpu = call.inputs[0].device is not None
        host = call.feedback._core if on_gpu else call.feedback._on_cpu()
        request.feed_back(host, call.keys)
    if call.shapes:
        request.shape(call.shapes)
    if call.reduction is not None:
        request.exchange(call.reduction.payloads)
    if label := _label(call, options):
        request.label(label)
    if call.moved:
        request.move(call.moved)
    return request


def _addresses(given: Sequence[Operand]) -> list[tuple[int, int]]:
    """Addresses and sizes: in elements of a reducible dtype, otherwise in bytes."""
    return [(each.address, each.elements if each.reducible else each.nbytes) for each in given]


def prescaled(name: str, buffers: Buffers, options: Options) -> Buffers:
    """Replaces the inputs by multiplied copies: the caller's arrays survive a refused call.

    Raises InvalidArgument for wrong factors, and for types and reductions without them.
    """
    given = {"prescale": options.prescale, "postscale": options.postscale}
    factors = {what: _factor(value, what) for what, value in given.items()}
    scaling = [what for what, factor in factors.items() if factor != 1]
    if not scaling:
        return buffers
    for each in (*buffers.inputs, *buffers.outputs):
        for what in scaling:
            _require_scalable(name, each, options.op, what, factors[what])
    if "prescale" not in scaling:
        return buffers
    return buffers._replace(inputs=[_copy(each, factors["prescale"]) for each in buffers.inputs])


def postscaled(call: PreparedCall, options: Options) -> PreparedCall:
    """Makes the call multiply its results once, when it is finished."""
    factor = float(options.postscale)
    if factor == 1:
        return call
    finish, results = call.finish, _Results(call.outputs, factor)

    def scale() -> Any:
        finished = finish()
        results.scale()
        return finished

    return call._replace(finish=scale, is_late=True)


def _label(call: PreparedCall, options: Options) -> str | None:
    """The text by which ranks compare codec and `postscale`; None if the codec's name suffices."""
    codec = None if call.reduction is None else str(call.reduction.codec)
    if options.postscale == 1:
        return codec
    name = codec or ("none" if call.codec is None else call.codec.name)
    return f"{name}, postscale {float(options.postscale)!r}"


def require_none_on_gpu(options: Options) -> None:
    """Raises InvalidArgument for a factor other than 1, which GPUs do not apply."""
    for what in ("prescale", "postscale"):
        if _factor(getattr(options, what), what) != 1:
            raise InvalidArgument(
                f"{what}= is for arrays of the CPU: multiply the array on the GPU, as x.mul_() does"
            )


class _Results:
    """The outputs of one call, scaled once though several threads may wait."""

    def __init__(self, outputs: Sequence[Operand], factor: float) -> None:
        self._outputs, self._factor = outputs, factor
        self._lock = threading.Lock()

    def scale(self) -> None:
        with self._lock:
            for each in self._outputs:
                address = each.address
                _core.scale(each.dtype, address, address, each.elements, self._factor)
            self._outputs = ()


def _factor(value: Any, what: str) -> float:
    factor = arguments.number(value, what)
    if not math.isfinite(factor):
        raise InvalidArgument(f"{what}={value!r} is not finite")
    return factor


def _require_scalable(name: str, each: Operand, op: str, what: str, factor: float) -> None:
    if op not in ("sum", "avg"):
        raise InvalidArgument(f"{name}: {what}= is for op 'sum' or 'avg', not '{op}'")
    if each.dtype not in _SCALABLE:
        raise InvalidArgument(
            f"{name}: {what}= is for {', '.join(_SCALABLE)}, and {each.what} is {each.dtype}"
        )
    if each.dtype not in _DOUBLES and abs(factor) > float(np.finfo(np.float32).max):
        raise InvalidArgument(f"{name}: {what}={factor!r} is beyond float32, {each.what} is not")


def _copy(given: Operand, factor: float) -> Operand:
    made = np.empty(given.nbytes, np.uint8)
    address = made.__array_interface__["data"][0]
    _core.scale(given.dtype, given.address, address, given.elements, factor)
    return given._replace(address=address, array=made)

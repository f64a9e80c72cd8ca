"""prescale= and postscale=: factors before and after a reduction."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradwire import _core
from gradwire._arrays.buffers import Buffers
from gradwire._arrays.operands import Operand
from gradwire._base import arguments
from gradwire._calls.options import Options
from gradwire._calls.reductions import PreparedCall
from gradwire._errors import InvalidArgument

_SCALABLE = ("float32", "float64", "float16", "bfloat16", "complex64", "complex128")
_DOUBLES = ("float64", "complex128")


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


def label(call: PreparedCall, options: Options) -> str | None:
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

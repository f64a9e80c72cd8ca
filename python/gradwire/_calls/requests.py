"""Requests: a call and its options, as the core takes them."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire import _core
from gradwire._arrays.operands import Operand
from gradwire._calls import scaling
from gradwire._calls.options import Options
from gradwire._calls.reductions import PreparedCall


def request_of(call: PreparedCall, options: Options) -> _core.Request:
    """The request for a call that `reductions.prepare` has checked."""
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
    if label := scaling.label(call, options):
        request.label(label)
    if call.moved:
        request.move(call.moved)
    return request


def _addresses(given: Sequence[Operand]) -> list[tuple[int, int]]:
    """Addresses and sizes: in elements of a reducible dtype, otherwise in bytes."""
    return [(each.address, each.elements if each.reducible else each.nbytes) for each in given]

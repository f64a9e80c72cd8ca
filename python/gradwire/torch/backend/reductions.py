"""Reductions: torch's ReduceOp as gradwire's keywords."""

from __future__ import annotations

from typing import Any

from torch.distributed import ReduceOp

_KINDS = ReduceOp.RedOpType
_NAMES = {
    _KINDS.SUM: "sum",
    _KINDS.AVG: "avg",
    _KINDS.PRODUCT: "prod",
    _KINDS.MIN: "min",
    _KINDS.MAX: "max",
    _KINDS.BAND: "band",
    _KINDS.BOR: "bor",
    _KINDS.BXOR: "bxor",
}


def keywords(op: Any) -> dict[str, Any]:
    """The keywords `op` and, for PREMUL_SUM, `prescale` of a call that reduces."""
    kind = getattr(op, "op", op)
    if kind == _KINDS.PREMUL_SUM:
        return {"op": "sum", "prescale": float(op.__getstate__()[1])}
    return {"op": _NAMES[kind]}

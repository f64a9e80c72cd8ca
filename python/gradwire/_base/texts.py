"""Texts that go to other ranks, and that come from them."""

from __future__ import annotations

import json
from typing import Any


def encodable(text: str) -> str:
    """The text in a form that UTF-8 can hold: in Python, names that are none have surrogates."""
    return text.encode(errors="backslashreplace").decode()


def read_fields(data: bytes, **kinds: type | tuple[type, ...]) -> dict[str, Any]:
    """Decodes a JSON object of exactly these fields and types; raises ValueError for others."""
    try:
        found: Any = json.loads(data)
    except RecursionError:
        found = None
    if not isinstance(found, dict) or found.keys() != kinds.keys():
        raise ValueError("it has other fields")
    for name, kind in kinds.items():
        if type(found[name]) not in (kind if isinstance(kind, tuple) else (kind,)):
            raise ValueError(f"its {name} is of another type")
    return found

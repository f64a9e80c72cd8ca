"""The text of Python's standard library, as bytes to learn."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

VOCABULARY = 128
_BYTES = 2_000_000


class Text(NamedTuple):
    """Bytes below VOCABULARY, as int64."""

    name: str
    seen: torch.Tensor  # what is trained with
    unseen: torch.Tensor  # the last tenth, to test with


@cache
def standard_library() -> Text:
    """The modules that are files, in the order of their names; differs between Pythons."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    joined = b"".join(each.read_bytes() for each in sources)[:_BYTES]
    data = torch.tensor(bytearray(joined)).long().clamp(max=VOCABULARY - 1)
    end = len(data) * 9 // 10
    name = f"standard library of Python {platform.python_version()}"
    return Text(name, data[:end], data[end:])


def windows(data: torch.Tensor, starts: torch.Tensor, context: int) -> torch.Tensor:
    """The bytes from each start, and one more: shape (starts, context + 1)."""
    return data[starts[:, None] + torch.arange(context + 1)]

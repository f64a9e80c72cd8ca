"""Settings of trainers that tests vary one by one, in the objects that trainers take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from gradwire.torch import Compression, Ranks

_COMPRESSION = {each.name for each in dataclasses.fields(Compression)}


def grouped(own: Sequence[str] = (), /, **settings: Any) -> dict[str, Any]:
    """A trainer's keywords: those of Compression and of Ranks in one each, but for its `own`."""
    codecs = {name: settings.pop(name) for name in settings.keys() & _COMPRESSION - {*own}}
    ranks = {name: settings.pop(name) for name in {"over", "timeout"} & settings.keys()}
    if codecs:
        settings["compression"] = Compression(**{"codec": "none", **codecs})
    if ranks:
        settings["ranks"] = Ranks(**ranks)
    return settings

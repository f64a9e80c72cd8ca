"""Settings of trainers that tests vary one by one, in the objects that trainers take."""

from __future__ import annotations

import dataclasses
from typing import Any

from gradwire.torch import Compression, Ranks

_COMPRESSION = {each.name for each in dataclasses.fields(Compression)}


def grouped(**settings: Any) -> dict[str, Any]:
    """A trainer's keywords: those of Compression and of Ranks are in one each."""
    codecs = {name: settings.pop(name) for name in _COMPRESSION & settings.keys()}
    ranks = {name: settings.pop(name) for name in {"over", "timeout"} & settings.keys()}
    if codecs:
        settings["compression"] = Compression(**codecs)
    if ranks:
        settings["ranks"] = Ranks(**ranks)
    return settings

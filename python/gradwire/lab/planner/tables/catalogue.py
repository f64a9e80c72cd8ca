"""The tables by name."""

from __future__ import annotations

from collections.abc import Callable

from gradwire._errors import InvalidArgument
from gradwire.lab.planner.tables import branched, plain, transformers
from gradwire.lab.planner.tables.network import Layer, Network

_IMAGE = "an image of 3 × 224 × 224"
TABLES: dict[str, tuple[str, Callable[[], list[Layer]]]] = {
    "alexnet": (_IMAGE, plain.alexnet),
    "bert_base": ("512 tokens", transformers.bert_base),
    "bert_large": ("512 tokens", transformers.bert_large),
    "googlenet": (_IMAGE, branched.googlenet),
    "gpt2": ("1024 tokens", transformers.gpt2),
    "gpt2_large": ("1024 tokens", transformers.gpt2_large),
    "gpt2_medium": ("1024 tokens", transformers.gpt2_medium),
    "gpt2_xl": ("1024 tokens", transformers.gpt2_xl),
    "nin": (_IMAGE, plain.nin),
    "resnet18": (_IMAGE, branched.resnet18),
    "resnet50": (_IMAGE, branched.resnet50),
    "resnet152": (_IMAGE, branched.resnet152),
    "vgg16": (_IMAGE, plain.vgg16),
    "vgg19": (_IMAGE, plain.vgg19),
}


def network(name: str) -> Network:
    """Makes a network of the catalogue; raises InvalidArgument with the list for other names."""
    found = TABLES.get(name.lower().replace("-", "_"))
    if found is None:
        raise InvalidArgument(
            f"there is no model {name!r:.80}: give one of {', '.join(TABLES)}, or module:callable"
        )
    sample, layers = found
    return Network(name.lower().replace("-", "_"), sample, tuple(layers()))

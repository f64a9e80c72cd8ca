"""Settings that biased codecs need to train, where a program names nothing but the codec.

For the first steps gradients travel in int8: these are large and change direction (Lin et al. 2018,
"Deep Gradient Compression", sec. 3.3). The first and the last layer, embeddings and what is no
matrix stay in int8, as in the settings that docs/compression.md measures.
"""

from __future__ import annotations

import glob
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from gradwire._calls.requests import native
from gradwire.codec import NativeCodec
from gradwire.torch.exchange.compression import START, Compression
from gradwire.torch.exchange.optimizer_watch import warn_of_own_momentum
from gradwire.torch.exchange.rules import Stages

_log = logging.getLogger("gradwire")
# With 562 and 374 steps of int8 onebit came within 0.3 points of dense training's accuracy in
# docs/compression.md. torch's PowerSGD hook waits for 1,000.
WARM_UP = 500


class Settings(NamedTuple):
    """The compression of a hook, and why this; no reason where the program says it all."""

    compression: Compression
    why: str = ""
    unused: bool = False  # the codec: every element stays in START
    guess: str = ""  # what the choice of a codec rests on without a measurement

    @property
    def last(self) -> object:
        """The codec after the warm-up."""
        codec = self.compression.codec
        return codec.codecs[-1] if isinstance(codec, Stages) else codec


def tell(chosen: Settings, optimizer: torch.optim.Optimizer | None) -> None:
    """Logs what was chosen, and what it does not suit; `optimizer` may have momentum of its own."""
    if chosen.unused:
        _log.warning(
            "all gradients of the model stay in int8 and codec=%r changes nothing, since the model "
            "has no layers between the first and the last: to send these in it, too, give rules=, "
            "or warm_up=0 with codec=gradwire.torch.Stages(...)",
            str(chosen.last),
        )
    if chosen.guess:
        _log.warning("%s", chosen.guess)
    if chosen.why:
        _log.info("%s", chosen.why)
    if chosen.why and isinstance(chosen.compression.codec, Stages) and optimizer is not None:
        warn_of_own_momentum(optimizer, chosen.last)


class Model(NamedTuple):
    """A model, and its parameters that travel, by name."""

    module: nn.Module
    parameters: Mapping[str, torch.Tensor]

    def owner(self, name: str) -> nn.Module:
        """The module that has a parameter itself; all of the model where names tell another."""
        try:
            return self.module.get_submodule(name.rpartition(".")[0])
        except AttributeError:  # the module names its parameters in its own way
            return self.module


def settings(model: Model, given: Compression) -> Settings:
    """Adds what a biased codec of gradwire's needs to what the program gave."""
    codec, steps = given.codec, WARM_UP if given.warm_up is None else given.warm_up
    if not steps or not isinstance(codec, str | NativeCodec) or not native(codec).biased:
        return Settings(given)
    staged = replace(given, codec=Stages((0, START), (steps, codec)), warm_up=0)
    why = f"{codec} after {steps} steps in {START} (warm_up={steps})"
    if given.rules:
        return Settings(staged, why)
    outside = set(sensitive(model, given.min_elements))
    counts = {n: p.numel() for n, p in model.parameters.items() if p.requires_grad}
    inside = sum(count for name, count in counts.items() if name not in outside)
    why += (
        f", for {inside / max(sum(counts.values()), 1):.0%} of the elements: the first layer, the "
        f"last, embeddings, and what is small or no matrix stay in {START}"
    )
    rules = [(glob.escape(n), START) for n in model.parameters if n in outside]
    return Settings(replace(staged, rules=rules), why, unused=not inside)


def sensitive(model: Model, min_elements: int) -> Iterator[str]:
    """Names of the parameters that biased codecs should leave alone."""
    matrices = [
        name
        for name, each in model.parameters.items()
        if each.requires_grad and sum(side > 1 for side in each.shape) > 1
    ]
    inner = set(matrices) - {*_to_first_layer(model, matrices)}
    inner -= {*_to_first_layer(model, reversed(matrices))}
    tables = _vocabulary(model.module)
    for name, each in model.parameters.items():
        is_small = each.numel() < min_elements
        if is_small or name not in inner or model.owner(name) in tables:
            yield name


def _to_first_layer(model: Model, names: Iterable[str]) -> Iterator[str]:
    """The names up to the first that belongs to a layer: a module without parts.

    What a module with parts has itself, such as a table of positions, is no layer.
    """
    for name in names:
        yield name
        if not any(model.owner(name).children()):
            return


def _vocabulary(model: nn.Module) -> set[nn.Module]:
    """The embeddings, and the linear layers of an embedding's size that have no like in the model.

    These are outputs over the embedding's vocabulary, wherever the model defines them.
    """
    embeddings = {each for each in model.modules() if isinstance(each, _EMBEDDINGS)}
    sizes = {(each.embedding_dim, each.num_embeddings) for each in embeddings}
    linear = [each for each in model.modules() if isinstance(each, nn.Linear)]
    count = Counter((each.in_features, each.out_features) for each in linear)
    return embeddings | {
        each
        for each in linear
        if (size := (each.in_features, each.out_features)) in sizes and count[size] == 1
    }


_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)

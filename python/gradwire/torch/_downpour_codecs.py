"""The codec of each parameter in a push, with what biased codecs need to train under Adagrad.

A one-bit payload gives all elements of a block one size, so the servers' sums of squares no longer
tell large gradients from small ones. They do where the first pushes, whose gradients are the
largest, go in int8, as the second moment of 1-bit Adam is that of dense steps (Tang et al. 2021,
sec. 3). Small parameters cost few bytes in int8, too. docs/parameter_server.md has the figures.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence

import torch

from gradwire._calls.requests import native
from gradwire._errors import InvalidArgument
from gradwire.torch.exchange.compression import START, Compression

WARM_UP = 1000  # pushes of all replicas

Rules = Sequence[tuple[str, str]]


class PushCodecs:
    """The codec and the rules of `ParameterServer.push`, by the servers' version."""

    def __init__(self, given: Compression, parameters: Mapping[str, torch.Tensor]) -> None:
        """Adds int8 for the first pushes and for small parameters, where the codec is biased.

        Given rules win over that for small parameters, and ``warm_up=0`` over both. Raises
        InvalidArgument for codecs that are no names, and for residuals that decay.
        """
        if given.decay != 1:
            raise InvalidArgument(f"decay={given.decay} is for trainers that average: leave it out")
        self._rules = [(pattern, _name(each)) for pattern, each in given.rules]
        self._codec, self._until = _name(given.codec), 0
        if native(self._codec).biased and given.warm_up != 0:
            self._until = WARM_UP if given.warm_up is None else given.warm_up
            self._rules = self._rules or _small(parameters, given.min_elements)

    @property
    def used(self) -> list[str]:
        """All codecs that a push may have, "none" first, each once."""
        start = [START] if self._until else []
        found = ["none", self._codec, *(each for _, each in self._rules), *start]
        return list(dict.fromkeys(found))

    def at(self, version: int) -> tuple[str, Rules]:
        """The codec and the rules of a push when the servers have applied so many."""
        return (START if version < self._until else self._codec), self._rules


def _name(codec: object) -> str:
    if not isinstance(codec, str):
        raise InvalidArgument(f"codec={codec!r}: a push takes names of codecs, such as 'onebit'")
    return codec


def _small(parameters: Mapping[str, torch.Tensor], least: int) -> list[tuple[str, str]]:
    """Rules for the parameters that are no matrix, or have few elements; none if that is all."""
    found = [
        (glob.escape(name), START)
        for name, each in parameters.items()
        if each.numel() < least or sum(side > 1 for side in each.shape) < 2
    ]
    return found if len(found) < len(parameters) else []

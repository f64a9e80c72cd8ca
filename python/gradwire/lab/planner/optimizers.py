"""What codecs an optimizer can take: the rules of docs/compression.md and docs/optimizers.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire import _core
from gradwire._base import arguments
from gradwire._errors import InvalidArgument
from gradwire.lab.planner.tables.network import CONV, Network

_SGD, _ONE_BIT_ADAM, _ADAMS = "sgd", "onebitadam", ("adam", "adamw")
_OF_ONE_BIT_ADAM = ("none", "int8", "onebit")
_FOR_SGD = "int4"  # with AdamW only short trainings were measured


@dataclass(frozen=True)
class Optimizer:
    """An optimizer by name, for a network; without a name it is taken to be SGD."""

    given: str | None
    convolves: bool

    @classmethod
    def of(cls, name: str | None, network: Network) -> Optimizer:
        """The optimizer of a training of this network; raises InvalidArgument for no text."""
        name = None if name is None else arguments.text(name, "optimizer")
        return cls(name, any(layer.kind == CONV for layer in network.layers))

    @property
    def name(self) -> str:
        """Its name in small letters, without what joins words."""
        return (self.given or _SGD).lower().replace("_", "").replace("-", "")

    @property
    def after_backward(self) -> bool:
        """Whether it averages in its step, so that nothing is hidden behind backward."""
        return self.name == _ONE_BIT_ADAM

    @property
    def offers_one_bit(self) -> bool:
        """Whether OneBitAdam can take its place."""
        return self.name in _ADAMS and not self.convolves

    def allows(self, codec: str) -> bool:
        """Whether training keeps its accuracy with the codec, as far as it was measured."""
        if self.after_backward and not self.convolves:
            return codec.partition(":")[0] in _OF_ONE_BIT_ADAM
        return self.name == _SGD or not _core.Codec(codec).biased

    def choose(self, given: Sequence[str] | None, usual: Sequence[str]) -> list[str]:
        """The given codecs, or those of the usual ones that it allows.

        Raises InvalidArgument for one that it does not.
        """
        if given is None:
            return [each for each in usual if self.allows(each) and self._is_known(each)]
        for each in given:
            if not self.allows(each):
                raise InvalidArgument(
                    f"codec {each!r} is not for {self.given}"
                    f"{' on a CNN' if self.after_backward and self.convolves else ''}, with which "
                    "training ends at a higher loss (docs/compression.md): give "
                    f"{', '.join(each for each in usual if self.allows(each))}, or no codecs"
                )
        return list(given)

    def _is_known(self, codec: str) -> bool:
        return self.name == _SGD or codec.partition(":")[0] != _FOR_SGD

    def assumptions(self) -> list[str]:
        """What the report says of it."""
        if self.given is None:
            return ["the optimizer is SGD; with another one fewer codecs suit: give --optimizer"]
        if self.after_backward:
            return [
                "OneBitAdam averages in its step, after backward; the first 20 to 30 % of its "
                "steps are AdamW's, with gradients in int8"
            ]
        if self.name == _SGD:
            return []
        return [
            f"{self.given} is not linear in the gradient, so codecs that need error feedback are "
            "left out"
        ]

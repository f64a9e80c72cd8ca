"""Compression: in which codecs the tensors of a training travel between its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TypeAlias

from gradwire._base.arguments import instance, number, whole
from gradwire._base.rules import require_pairs
from gradwire._calls.requests import native
from gradwire._errors import InvalidArgument
from gradwire._feedback import ErrorFeedback
from gradwire.codec import NativeCodec
from gradwire.torch.exchange.gradient_scale import persistent_state_of
from gradwire.torch.exchange.rules import CodecChoice, Rules, is_biased

AUTO = "auto"
START = "int8"  # in a warm-up


@dataclass(frozen=True)
class Compression:
    """A codec, the parameters that travel in it, and what it needs to train.

    Every trainer takes one, or a codec alone, which stands for ``Compression(codec)``::

        register(ddp, "int8")
        register(ddp, Compression("onebit", rules=[("*.bias", "none")], warm_up=2000))

    `codec` is as in `Communicator.all_reduce`, or a function of the step (`Stages`); `register`
    and `register_fsdp` take "auto" too. It applies to float32, and to complex64 as pairs of
    float32.

    `rules` are pairs of a pattern and a codec: a parameter whose name matches (as in fnmatch:
    ``"*.bias"``) travels with the codec of the first such rule. Parameters of fewer than
    `min_elements` elements travel uncompressed where the codec is biased.

    `feedback` keeps what a codec loses, by parameter, and sends it later. None keeps it if a codec
    needs it or changes with the step; True always; False never; ErrorFeedback("bfloat16") in half
    the memory.

    `decay` is the share of a residual that stays from one step to the next: 1 loses nothing. With
    less, what a codec never delivers fades by intent, and residuals act as a momentum: SparseLoCo
    (Sarfi et al. 2025, arXiv 2508.15706) is `DiLoCo` with topk, ``decay=0.95``, ``lr=1`` and
    ``momentum=0``. `Downpour` and the codec "auto" refuse it.

    `warm_up` is the number of first steps in which int8 takes the place of a biased codec of
    gradwire's (onebit, threshold, topk, lowrank) that does not change with the step. None is 500,
    about as many as the trainings in docs/compression.md had; a fifth of all steps is a good number
    where that is known. The first and the last layer, embeddings, and parameters that are small or
    no matrices then stay in int8, unless `rules` are given. ``warm_up=0`` leaves everything as it
    is given. `DiLoCo` and `OneBitAdam` refuse it; `OneBitAdam(warm_up=)` is another thing: its
    first steps, as AdamW's.

    Raises InvalidArgument for what cannot be.
    """

    codec: CodecChoice
    _: KW_ONLY
    rules: Sequence[tuple[str, CodecChoice]] = ()
    min_elements: int = 1024
    feedback: ErrorFeedback | bool | None = None
    warm_up: int | None = None
    decay: float = 1.0

    def __post_init__(self) -> None:
        require_pairs(self.rules)
        if self.feedback is not None and not isinstance(self.feedback, bool):
            wanted = "None, True, False or an ErrorFeedback"
            instance(self.feedback, "feedback", ErrorFeedback, wanted)
        if not 0 <= number(self.decay, "decay") <= 1:
            raise InvalidArgument(f"decay={self.decay!r} is no share, from 0 to 1")
        codec = "none" if self.codec == AUTO else self.codec
        table = Rules(codec, self.rules, self.min_elements)  # refuses what is no codec
        if self.decay != 1 and (self.codec == AUTO or not self._keeps_residuals(table)):
            raise InvalidArgument(
                f"decay={self.decay} is for residuals, and codec={self.codec!r} with feedback="
                f"{self.feedback} keeps none: leave decay= out, or give feedback=True, and another "
                'codec than "auto"'
            )
        if self.warm_up is not None and whole(self.warm_up, "warm_up", least=0):
            self._require_to_warm_up()

    @property
    def table(self) -> Rules:
        """The codec of each parameter, at each step."""
        return Rules(self.codec, self.rules, self.min_elements)

    @property
    def can_warm_up(self) -> bool:
        """Whether the codec is "auto", or a biased one of gradwire's at all steps."""
        codec = self.codec
        return isinstance(codec, str | NativeCodec) and (codec == AUTO or is_biased(codec))

    @property
    def alike(self) -> dict[str, object]:
        """The settings that all ranks must give alike; of codecs their calls tell."""
        return {"min_elements": self.min_elements, "warm_up": self.warm_up, "decay": self.decay}

    def residuals(self, table: Rules) -> ErrorFeedback | None:
        """The residuals that a table's codecs need, or that were asked for; None for none."""
        if not self._keeps_residuals(table):
            return None
        found = self.feedback if isinstance(self.feedback, ErrorFeedback) else ErrorFeedback()
        persistent_state_of(found).decay = self.decay
        return found

    def _keeps_residuals(self, table: Rules) -> bool:
        return table.needs_feedback if self.feedback is None else self.feedback is not False

    def _require_to_warm_up(self) -> None:
        """Raises InvalidArgument for a codec that a warm-up is not for."""
        if not self.can_warm_up:
            raise InvalidArgument(
                f"warm_up={self.warm_up} is for a biased codec of gradwire's, such as 'onebit', "
                f"and codec={self.codec!r} is none: leave warm_up= out, or give codec=Stages((0, "
                f"{START!r}), ({self.warm_up}, your codec))"
            )


CompressionLike: TypeAlias = CodecChoice | Compression


def compression_of(
    given: CompressionLike, *, auto: bool = False, warms_up: bool = True
) -> Compression:
    """Makes a Compression of what a trainer was given; raises InvalidArgument for no codec.

    With `auto` the trainer can choose one; without `warms_up` it takes the codec from step 0 on.
    """
    made = given if isinstance(given, Compression) else Compression(given)
    if made.codec == AUTO and not auto:
        native(AUTO)  # raises
    if made.warm_up and not warms_up:
        raise InvalidArgument(
            f"warm_up={made.warm_up} of a Compression is for register(), register_fsdp(), "
            "elastic.session() and Downpour: leave it out, or give codec=Stages(...)"
        )
    return made

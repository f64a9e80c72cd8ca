"""Which codec a parameter's gradient travels with, at which step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from gradwire._base.arguments import wrong
from gradwire._calls.reductions import CodecLike, native
from gradwire._errors import InvalidArgument
from gradwire.codec import Codec

Wanted: TypeAlias = CodecLike | Callable[[int], CodecLike]


class Stages:
    """A codec that changes: ``Stages((0, "none"), (1000, "onebit"))``, from step 0 on.

    Steps are backward passes whose gradients were averaged, so ranks change together.
    """

    def __init__(self, *stages: tuple[int, CodecLike]) -> None:
        """Raises InvalidArgument unless the steps ascend from 0."""
        starts = [start for start, _ in stages]
        if starts[:1] != [0] or starts != sorted(set(starts)):
            raise InvalidArgument(f"the stages begin at steps {starts}, which must ascend from 0")
        for _, codec in stages:
            is_biased(codec)  # refuses an unknown one
        self._stages = stages

    def __call__(self, step: int) -> CodecLike:
        return [codec for start, codec in self._stages if start <= step][-1]

    def __repr__(self) -> str:
        return f"Stages({', '.join(f'({start}, {str(codec)!r})' for start, codec in self._stages)})"


def warm_up(density: float = 0.001, *, every: int, start: int = 0, codec: str = "topk") -> Stages:
    """Lets gradients thin out: a quarter of them, then a quarter of that every `every` steps.

    Until step `start` they travel as they are; in the end with `density`. `codec` has a parameter
    of that name. (Lin et al. 2018, "Deep Gradient Compression", sec. 3.3)
    """
    if not 0 < density <= 1 or every < 1 or start < 0:
        raise InvalidArgument(f"density={density}, every={every}, start={start}: cannot warm up")
    above = max(0, math.ceil(math.log(density, 0.25)) - 1)
    densities = [*(0.25**k for k in range(1, above + 1)), density]
    ramp = [(start + k * every, f"{codec}:density={each}") for k, each in enumerate(densities)]
    return Stages(*([(0, "none")] if start else []), *ramp)


class Rules:
    """The first pattern that matches a parameter's name decides."""

    def __init__(
        self, codec: Wanted, rules: Sequence[tuple[str, Wanted]] = (), min_elements: int = 0
    ) -> None:
        """Raises InvalidArgument for a codec that does not exist."""
        self._rules = [*rules, ("*", codec)]
        self._min_elements = min_elements
        self._wanted: dict[str, Wanted] = {}
        self._step, self._now = -1, dict[int, CodecLike]()  # what functions gave for that step
        self._static = [each for _, each in self._rules if isinstance(each, CodecLike)]
        biased = [is_biased(at(each, 0)) for _, each in self._rules]
        self.needs_feedback = any(biased) or len(self._static) < len(self._rules)

    @property
    def compresses(self) -> bool:
        """Whether any codec loses something, or may at some step."""
        return self.needs_feedback or self.lossy is not None

    @property
    def lossy(self) -> str | None:
        """One of the codecs that never change and lose something."""
        return next((str(each) for each in self._static if str(each) != "none"), None)

    def default(self, step: int) -> CodecLike:
        """The codec where parameters have no names."""
        return self._at(self._rules[-1][1], step)

    def codec(self, name: str, elements: int, step: int) -> CodecLike:
        """A small tensor is not worth what a biased codec costs it."""
        if name not in self._wanted:
            self._wanted[name] = self._find(name, elements)
        wanted = self._wanted[name]
        if isinstance(wanted, str):  # the quick way of most
            return wanted
        return self._unless_small(self._at(wanted, step), elements)

    def _at(self, wanted: Wanted, step: int) -> CodecLike:
        """One and the same for all parameters of a step, which travel together then."""
        if step != self._step:
            self._step, self._now = step, {}
        if id(wanted) not in self._now:
            self._now[id(wanted)] = at(wanted, step)
        return self._now[id(wanted)]

    def _find(self, name: str, elements: int) -> Wanted:
        wanted = next(wanted for pattern, wanted in self._rules if fnmatchcase(name, pattern))
        return self._unless_small(wanted, elements) if isinstance(wanted, CodecLike) else wanted

    def _unless_small(self, codec: CodecLike, elements: int) -> CodecLike:
        return "none" if elements < self._min_elements and is_biased(codec) else codec


def at(wanted: Wanted, step: int) -> CodecLike:
    """The codec at a step; raises InvalidArgument for a schedule that gives none."""
    if isinstance(wanted, CodecLike):
        return wanted
    if not callable(wanted) or isinstance(wanted, type):
        raise wrong(wanted, "codec", "a codec's name, a codec, or a function of the step")
    codec = wanted(step)
    if not isinstance(codec, CodecLike):
        raise InvalidArgument(f"codec={wanted!r} gives {codec!r} for step {step}: no codec")
    return codec


def is_biased(codec: CodecLike) -> bool:
    """Whether it needs error feedback; raises InvalidArgument where there is no such codec."""
    return codec.biased if isinstance(codec, Codec) else native(codec).biased


def is_sparse(codec: CodecLike) -> bool:
    """Whether it sends some elements and not others."""
    return not isinstance(codec, Codec) and native(codec).name.startswith(("threshold", "topk"))


def is_at_least_16_bits(codec: CodecLike) -> bool:
    """Whether it sends no fewer bits of an element than bfloat16 and float16 have."""
    return not isinstance(codec, Codec) and native(codec).name.startswith(("none", "fp16", "bf16"))


def require_matches(rules: Sequence[tuple[str, Any]], names: Iterable[str]) -> None:
    """Raises InvalidArgument for a rule that is for no parameter."""
    known = list(names)
    for pattern, _ in rules:
        if not any(fnmatchcase(name, pattern) for name in known):
            some = ", ".join(known[:5]) + (", ..." if len(known) > 5 else "")
            raise InvalidArgument(
                f"rules= has the pattern {pattern!r}, which matches no parameter; their names are "
                f"those of ddp.module.named_parameters(): {some}"
            )

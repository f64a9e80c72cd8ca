"""Buckets of gradients, and Rules: in which codec each gradient travels, at which step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch

from gradwire._base import arguments
from gradwire._base.arguments import wrong
from gradwire._base.rules import choose
from gradwire._calls.requests import CodecLike, native
from gradwire._errors import Error, InvalidArgument
from gradwire.codec import Codec

CodecChoice: TypeAlias = CodecLike | Callable[[int], CodecLike]


class Bucket(NamedTuple):
    """Gradients that travel together: one of DDP's buckets, say, or a repacked one."""

    whole: Sequence[torch.Tensor]  # all elements, end to end: one flat tensor, or the gradients
    names: Sequence[str]  # of the parameters; empty when unknown
    gradients: Sequence[torch.Tensor]  # in the parameters' shapes


def real_view(buffer: torch.Tensor) -> torch.Tensor:
    """A view of the buffer as a flat tensor of real numbers."""
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer


def gradient_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape of a gradient in real numbers; complex ones add a last dimension of 2."""
    return (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)


def gradient_elements(parameter: torch.Tensor) -> int:
    """The number of real numbers in a parameter's gradient."""
    return prod(gradient_shape(parameter))


def compressible(gradient: torch.Tensor) -> bool:
    """Whether codecs apply: to float32, complex64 and, on the CPU, bfloat16 and float16."""
    dtype = gradient.dtype.to_real()
    on_cpu = gradient.device.type == "cpu"
    return dtype is torch.float32 or (dtype in (torch.bfloat16, torch.float16) and on_cpu)


def codec_for_16_bits(dtype: torch.dtype, ranks: int) -> str:
    """A codec that sends as many bytes as the type, and whose sums do not overflow."""
    if dtype is torch.bfloat16:
        return "bf16"
    return f"fp16:scale={2.0 ** -(ranks - 1).bit_length()}" if ranks > 1 else "fp16"


class BucketLayout(NamedTuple):
    """The places of some parameters' gradients, end to end in a flat buffer of real numbers."""

    names: tuple[str, ...]
    shapes: Sequence[tuple[int, ...]]
    sizes: Sequence[int]

    @classmethod
    def of(cls, parameters: Mapping[str, torch.Tensor]) -> BucketLayout:
        """The layout of the gradients of these parameters, by name."""
        shapes = [gradient_shape(each) for each in parameters.values()]
        return cls(tuple(parameters), shapes, [prod(shape) for shape in shapes])

    def bucket(self, buffer: torch.Tensor, what: str) -> Bucket:
        """Cuts a buffer into gradients; `what` names it.

        (DDP's own `GradBucket.gradients()` counts pairs as one, and so leaves half of a bucket of
        complex parameters out.) Raises Error where they would not cover it exactly once.
        """
        if sum(self.sizes) != buffer.numel() or buffer.dim() != 1 or not buffer.is_contiguous():
            raise Error(
                f"{what} is a buffer of shape {tuple(buffer.shape)}, and its parameters, whose "
                f"gradients have shapes {list(self.shapes)}, have {sum(self.sizes)} real numbers: "
                "gradients must lie end to end and fill their bucket; nothing of it was sent"
            )
        parts = map(torch.Tensor.view, buffer.split(self.sizes), self.shapes)
        return Bucket([buffer], self.names, list(parts))


class Stages:
    """A codec that changes: ``Stages((0, "none"), (1000, "onebit"))``, from step 0 on.

    Steps are backward passes whose gradients were averaged, so ranks change together.
    """

    def __init__(self, *stages: tuple[int, CodecLike]) -> None:
        """Takes (first step, codec) pairs; raises InvalidArgument unless steps ascend from 0."""
        starts = [arguments.whole(start, "step", bits=64) for start, _ in _pairs(stages)]
        if starts[:1] != [0] or starts != sorted(set(starts)):
            raise InvalidArgument(f"the stages begin at steps {starts}, which must ascend from 0")
        for _, codec in stages:
            is_biased(codec)  # raises for an unknown one
        self._stages = stages

    @classmethod
    def sparse(
        cls, density: float = 0.001, *, every: int, start: int = 0, codec: str = "topk"
    ) -> Stages:
        """Makes gradients sparse in stages: a quarter of them first, then a quarter of that ...

        A stage lasts `every` steps. Until step `start` gradients travel uncompressed, and in the
        last stage with `density`, a share from above 0 to 1. `codec` is the name of one with a
        parameter ``density``. Raises InvalidArgument. (Lin et al. 2018, "Deep Gradient
        Compression", sec. 3.3)
        """
        every = arguments.whole(every, "every", least=1)
        start = arguments.whole(start, "start", least=0)
        if not 0 < arguments.number(density, "density") <= 1:
            raise InvalidArgument(f"density={density} is not from above 0 to 1")
        above = max(0, math.ceil(math.log(density, 0.25)) - 1)
        densities = [*(0.25**k for k in range(1, above + 1)), density]
        ramp = [(start + k * every, f"{codec}:density={each}") for k, each in enumerate(densities)]
        return cls(*([(0, "none")] if start else []), *ramp)

    @property
    def codecs(self) -> list[CodecLike]:
        """The codecs of all stages."""
        return [codec for _, codec in self._stages]

    def __call__(self, step: int) -> CodecLike:
        """The codec of a step."""
        return [codec for start, codec in self._stages if start <= step][-1]

    def __repr__(self) -> str:
        return f"Stages({', '.join(f'({start}, {str(codec)!r})' for start, codec in self._stages)})"


def _pairs(stages: Any) -> Any:
    """Raises InvalidArgument for anything but pairs."""
    for each in stages:
        if not isinstance(each, tuple | list) or len(each) != 2:
            raise wrong(each, "a stage", "a pair of a first step and a codec: (0, 'int8')")
    return stages


class Rules:
    """Patterns with codecs: the first pattern that matches a parameter's name decides."""

    def __init__(
        self,
        codec: CodecChoice,
        rules: Sequence[tuple[str, CodecChoice]] = (),
        min_elements: int = 0,
    ) -> None:
        """Takes what `register` was given; raises InvalidArgument for an unknown codec."""
        self._rules = [*rules, ("*", codec)]
        self._min_elements = arguments.whole(min_elements, "min_elements", least=0, bits=64)
        self._parts: dict[str, str] = {}
        self._choices: dict[str, CodecChoice] = {}
        self._groups: dict[tuple[str, ...], list[tuple[CodecLike, list[int]]]] = {}
        self._step: int | None = None
        self._codecs_now: dict[int, CodecLike] = {}  # results of functions for that step
        self._static = [each for _, each in self._rules if isinstance(each, CodecLike)]
        self._varies = len(self._static) < len(self._rules)  # whether groups change with the step
        biased = [is_biased(codec_at(each, 0)) for _, each in self._rules]
        self.needs_feedback = any(biased) or self._varies

    def add_parts(self, parts: Mapping[str, str]) -> None:
        """Lets parts of parameters, by name, follow the rules of the parameters."""
        self._parts.update(parts)

    @property
    def compresses(self) -> bool:
        """Whether any codec loses something, or may at some step."""
        return self.needs_feedback or self.lossy is not None

    @property
    def lossy(self) -> str | None:
        """The name of a codec that never changes and loses something; None without one."""
        return next((str(each) for each in self._static if not is_exact(each)), None)

    def biased(self, step: int) -> CodecLike | None:
        """A codec of that step that is biased, or of any stage; None without one."""
        return next(filter(is_biased, self.codecs(step)), None)

    def codecs(self, step: int) -> list[CodecLike]:
        """The codecs of that step, and of all stages."""
        found: list[CodecLike] = []
        for _, choice in self._rules:
            found += choice.codecs if isinstance(choice, Stages) else [self._at(choice, step)]
        return found

    def default(self, step: int) -> CodecLike:
        """The codec of gradients whose parameters have no names."""
        return self._at(self._rules[-1][1], step)

    def codec(self, name: str, elements: int, step: int) -> CodecLike:
        """The codec of a parameter; "none" takes a biased one's place if the parameter is small."""
        if name not in self._choices:
            self._choices[name] = self._find(name, elements)
        choice = self._choices[name]
        if isinstance(choice, str):  # the common case
            return choice
        return self._unless_small(self._at(choice, step), elements)

    def groups(
        self, names: Sequence[str], gradients: Sequence[torch.Tensor], step: int
    ) -> list[tuple[CodecLike, list[int]]]:
        """Groups parameters by codec, as indices; in the same order on every rank.

        They are found once where no codec depends on the step.
        """
        key = tuple(names)
        known = self._groups.get(key)
        if known is not None:
            return known
        found: dict[object, tuple[CodecLike, list[int]]] = {}
        for i, (name, gradient) in enumerate(zip(names, gradients, strict=True)):
            codec = self.codec(name, gradient.numel(), step)
            # A user's codec need not be hashable.
            same = id(codec) if isinstance(codec, Codec) else codec
            found.setdefault(same, (codec, []))[1].append(i)
        groups = list(found.values())
        if not self._varies:
            self._groups[key] = groups
        return groups

    def _at(self, choice: CodecChoice, step: int) -> CodecLike:
        """The codec of a choice: asked once per step, so that its parameters travel together."""
        if step != self._step:
            self._step, self._codecs_now = step, {}
        if id(choice) not in self._codecs_now:
            self._codecs_now[id(choice)] = codec_at(choice, step)
        return self._codecs_now[id(choice)]

    def _find(self, name: str, elements: int) -> CodecChoice:
        choice = choose(self._parts.get(name, name), self._rules)
        return self._unless_small(choice, elements) if isinstance(choice, CodecLike) else choice

    def _unless_small(self, codec: CodecLike, elements: int) -> CodecLike:
        return "none" if elements < self._min_elements and is_biased(codec) else codec


def codec_at(choice: CodecChoice, step: int) -> CodecLike:
    """The codec of a choice at a step; raises InvalidArgument for a function that returns none."""
    if isinstance(choice, CodecLike):
        return choice
    if not callable(choice) or isinstance(choice, type):
        raise wrong(choice, "codec", "a codec's name, a codec, or a function of the step")
    codec = choice(step)
    if not isinstance(codec, CodecLike):
        raise InvalidArgument(f"codec={choice!r} gives {codec!r} for step {step}: no codec")
    return codec


def is_biased(codec: CodecLike) -> bool:
    """Whether a codec needs error feedback; raises InvalidArgument for an unknown codec."""
    return codec.biased if isinstance(codec, Codec) else native(codec).biased


def is_sparse(codec: CodecLike) -> bool:
    """Whether a codec sends some elements and not others."""
    return not isinstance(codec, Codec) and native(codec).name.startswith(("threshold", "topk"))


def is_exact(codec: CodecLike) -> bool:
    """Whether a codec loses nothing."""
    return not isinstance(codec, Codec) and native(codec).exact


def is_at_least_16_bits(codec: CodecLike) -> bool:
    """Whether a codec sends at least 16 bits of each element, or all of them in fewer."""
    return is_exact(codec) or (
        not isinstance(codec, Codec) and native(codec).name.startswith(("fp16", "bf16"))
    )

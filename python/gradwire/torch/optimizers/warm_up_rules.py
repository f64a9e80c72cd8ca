"""WarmUpRules: codecs by parameter, and another one while a parameter is in its warm-up."""

from __future__ import annotations

from gradwire._calls.requests import CodecLike
from gradwire.torch.exchange.compression import Compression
from gradwire.torch.exchange.rules import CodecChoice, Rules


class WarmUpRules(Rules):
    """Rules that hold after the warm-up of a parameter; before it has ended, one codec for all."""

    def __init__(self, given: Compression, warm_up_codec: CodecChoice) -> None:
        """Raises InvalidArgument for an unknown codec."""
        super().__init__(given.codec, given.rules, given.min_elements)
        self._before = Rules(warm_up_codec, (), given.min_elements)
        self.needs_feedback = self.needs_feedback or self._before.needs_feedback
        self._varies = True
        self.warming: frozenset[str] = frozenset()  # the parameters in their warm-up

    @property
    def compresses(self) -> bool:
        """Whether any codec loses something, or may at some step."""
        return super().compresses or self._before.compresses

    @property
    def lossy(self) -> str | None:
        """The name of a codec that never changes and loses something; None without one."""
        return super().lossy or self._before.lossy

    def codec(self, name: str, elements: int, step: int) -> CodecLike:
        """The codec of a parameter at this step."""
        if name in self.warming:
            return self._before.codec(name, elements, step)
        return super().codec(name, elements, step)

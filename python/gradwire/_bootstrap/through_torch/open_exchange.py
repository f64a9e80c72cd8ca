"""A secret from rank 0 to each rank, through a place where others read what both say.

It is the handshake Noise_NN (`NNpsk0` with a key of zeros, which everybody knows), its two messages
left where others may read them: a rank's question has its ephemeral public key, and rank 0's answer
has its own, and the secret, under a key that only these two can derive. Who changes messages
instead of only reading them takes the place of either.
"""

from __future__ import annotations

from gradwire import _core
from gradwire._errors import TransportError

QUESTION_BYTES = int(_core.NOISE_OVERHEAD)
ANSWER_OVERHEAD = int(_core.NOISE_OVERHEAD)

_PROLOGUE = b"gradwire/1 open exchange"
_NO_KEY = bytes(32)


class Question:
    """A rank's half of the exchange, for one answer."""

    def __init__(self) -> None:
        """Makes an ephemeral key; raises RendezvousError without libcrypto."""
        self._noise = _core.Noise(True, _PROLOGUE, _NO_KEY)
        self.message = bytes(self._noise.write(b""))

    def read(self, answer: bytes) -> bytes:
        """Opens rank 0's answer to this very question; raises ValueError for anything else."""
        try:
            return bytes(self._noise.read(answer))
        except TransportError as error:
            raise ValueError(str(error)) from None


def answer_to(question: bytes, secret: bytes) -> bytes:
    """Rank 0's half: the secret for who asked; raises ValueError for what is no question."""
    noise = _core.Noise(False, _PROLOGUE, _NO_KEY)
    try:
        noise.read(question)
        return bytes(noise.write(secret))
    except TransportError as error:
        raise ValueError(str(error)) from None

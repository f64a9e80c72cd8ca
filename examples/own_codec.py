"""Write a codec: the sign of each element, and the mean of their magnitudes.

Run: gradwire run -n 4 examples/own_codec.py

A codec that loses something needs error feedback, which adds what one call lost to the next one.
"""

import gradwire
import numpy as np


class Sign(gradwire.codec.Codec):
    """One bit for each element, and one float32 for the array."""

    def encode(self, x):
        """Return the payload of a flat float32 array."""
        return np.abs(x).mean().tobytes() + np.packbits(x >= 0).tobytes()

    def decode(self, payload, count):
        """Return the elements that a payload stands for: the same bits on every rank."""
        mean = np.frombuffer(payload[:4], np.float32)[0]
        positive = np.unpackbits(np.frombuffer(payload[4:], np.uint8), count=count)
        return np.where(positive, mean, -mean).astype(np.float32)


CALLS = 200


def error(comm, feedback):
    """How far the mean of many calls is from the exact average."""
    own = np.random.default_rng(comm.rank).standard_normal(10_000).astype(np.float32)
    exact = comm.all_reduce(own.copy(), op="avg")
    total = np.zeros_like(own)
    for _ in range(CALLS):
        total += comm.all_reduce(
            own.copy(), op="avg", codec=Sign(), feedback=feedback, key="own" if feedback else None
        )
    return np.abs(total / CALLS - exact).mean()


with gradwire.init() as comm:
    without, kept = error(comm, feedback=False), error(comm, gradwire.ErrorFeedback())
    if comm.rank == 0:
        print(f"error of {CALLS} calls: {without:.4f} without feedback, {kept:.4f} with it")

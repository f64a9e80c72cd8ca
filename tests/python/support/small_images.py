"""Random images of 8 x 8 as the files of an MNIST-like data set."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np


def write(folder: Path) -> None:
    """Writes 2,560 images to train with and 16 to test with."""
    random = np.random.default_rng(1)
    for stem, count in (("train", 2560), ("t10k", 16)):
        for kind, values in (
            ("images-idx3", random.integers(0, 256, (count, 8, 8))),
            ("labels-idx1", random.integers(0, 10, count)),
        ):
            header = b"\0\0\x08" + struct.pack(f">B{values.ndim}I", values.ndim, *values.shape)
            content = header + values.astype(np.uint8).tobytes()
            (folder / f"{stem}-{kind}-ubyte").write_bytes(content)

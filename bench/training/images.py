"""A small image classification task: data that a fresh machine can have, and networks for it."""

from __future__ import annotations

import gzip
import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

CLASSES = 10
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # package dataset-fashion-mnist
GENERATED = "generated"  # the name of images that are

_MOVED, _NOISE = 8, 2.0  # pixels at most, and standard deviations of a pattern: of generated images
_FILES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")


class Images(NamedTuple):
    """Grey images in [0, 1] of shape (count, 1, side, side), labels of shape (count,)."""

    name: str
    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor

    @property
    def side(self) -> int:
        """Pixels along an edge."""
        return int(self.train_images.shape[-1])


def load(data: Path | None) -> Images:
    """The IDX files in `data`, else Debian's Fashion-MNIST, else generated images."""
    if data is not None:
        return load_idx(data, data.name)
    return load_fashion_mnist() if DEBIAN_FASHION_MNIST.is_dir() else generated()


def load_fashion_mnist() -> Images:
    """Debian's Fashion-MNIST, installed where this user may; raises RuntimeError elsewhere."""
    if not DEBIAN_FASHION_MNIST.is_dir():
        _install("dataset-fashion-mnist")
    return load_idx(DEBIAN_FASHION_MNIST, "Fashion-MNIST")


def load_idx(directory: Path, name: str) -> Images:
    """The four files of MNIST and Fashion-MNIST, compressed or not; raises FileNotFoundError."""
    train, train_labels, test, test_labels = (read_idx(_find(directory, each)) for each in _FILES)
    return Images(
        name, _scale(train, 255), _long(train_labels), _scale(test, 255), _long(test_labels)
    )


def load_digits() -> Images:
    """1,797 digits of 8 × 8 pixels, every fifth one for the test."""
    from sklearn.datasets import load_digits as bundled

    digits = bundled()
    images, labels = _scale(digits.images, 16), _long(digits.target)
    test = torch.arange(len(labels)) % 5 == 0
    return Images("digits", images[~test], labels[~test], images[test], labels[test])


def generated(count: int = 20_000, test: int = 4_000, side: int = 28) -> Images:
    """Ten patterns, of which each image is one, moved and in noise: for machines without others."""
    random = torch.Generator().manual_seed(1)
    coarse = torch.randn(CLASSES, 1, 7, 7, generator=random)
    patterns = nn.functional.interpolate(coarse, side + _MOVED, mode="bilinear")
    labels = torch.arange(count + test) % CLASSES
    down, right = torch.randint(0, _MOVED + 1, (2, len(labels)), generator=random)
    pixels = torch.arange(side)
    rows, columns = (down[:, None] + pixels)[:, :, None], (right[:, None] + pixels)[:, None, :]
    shown = patterns[labels[:, None, None], 0, rows, columns].unsqueeze(1)
    noisy = (shown + _NOISE * torch.randn(shown.shape, generator=random)).sigmoid()
    return Images(GENERATED, noisy[:count], labels[:count], noisy[count:], labels[count:])


def random_images(count: int, side: int = 28) -> Images:
    """Noise, for what is timed alone."""
    noise = torch.rand(count, 1, side, side, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(count) % CLASSES
    return Images("noise", noise, labels, noise, labels)


def read_idx(path: Path) -> np.ndarray:
    """An array of bytes in Yann LeCun's IDX format; raises ValueError for anything else."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an IDX file of bytes")
    end = 4 + 4 * content[3]
    shape = struct.unpack_from(f">{content[3]}I", content, 4)
    return np.frombuffer(content, np.uint8, offset=end).reshape(shape)


def small_cnn(side: int, hidden: int = 128) -> nn.Module:
    """Two convolutions of stride 2 and two linear layers, for side × side images.

    With hidden = 640 and images of 28 × 28 it has 1,015,370 parameters.
    """
    flat = 32 * _halved(_halved(side)) ** 2
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(flat, hidden),
        nn.ReLU(),
        nn.Linear(hidden, CLASSES),
    )


def mlp(side: int, hidden: int = 1024) -> nn.Module:
    """Eleven linear layers: with images of 28 × 28, 10,260,490 parameters.

    Many, so that backward has some of the gradients soon, and averaging can begin.
    """
    layers = [nn.Flatten(), nn.Linear(side * side, hidden), nn.ReLU()]
    for _ in range(9):
        layers += [nn.Linear(hidden, hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, CLASSES))


def batches(count: int, batch: int, rank: int, ranks: int, seed: int, steps: int) -> torch.Tensor:
    """Indices of shape (steps, batch) for one rank: shuffled epochs, the same for one seed."""
    generator = torch.Generator().manual_seed(seed)
    each = batch * ranks
    per_epoch = count // each
    if per_epoch == 0:
        raise ValueError(f"{count} images are fewer than one batch of {batch} on {ranks} ranks")
    epochs = [
        torch.randperm(count, generator=generator)[: per_epoch * each]
        for _ in range(-(-steps // per_epoch))
    ]
    return torch.cat(epochs).view(-1, ranks, batch)[:steps, rank]


@torch.inference_mode()
def accuracy(model: nn.Module, data: Images) -> float:
    """The share of test images that the model tells right."""
    right = model(data.test_images).argmax(1) == data.test_labels
    return float(right.float().mean())


def _install(package: str) -> None:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise RuntimeError(f"Fashion-MNIST is missing: sudo apt-get install {package}")
    for command in (["update"], ["install", "--no-install-recommends", package]):
        ended = subprocess.run(["apt-get", "-qq", "-y", *command], stdout=subprocess.DEVNULL)
        if ended.returncode != 0:
            raise RuntimeError(f"apt-get {command[0]} failed; Fashion-MNIST is in {package}")


def _find(directory: Path, stem: str) -> Path:
    for name in (f"{stem}-ubyte.gz", f"{stem}-ubyte"):
        if (directory / name).is_file():
            return directory / name
    raise FileNotFoundError(f"{directory} has no {stem}-ubyte or {stem}-ubyte.gz")


def _scale(pixels: np.ndarray, brightest: float) -> torch.Tensor:
    return torch.from_numpy(pixels.astype(np.float32) / brightest).unsqueeze(1)


def _long(labels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(labels.astype(np.int64))


def _halved(side: int) -> int:
    return (side + 1) // 2

"""Checksums of tensors, by which ranks find that they no longer have the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch

from gradwire._communicator import Communicator
from gradwire._errors import Error


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """A sum over all bits, at the cost of reading them once: below 2^63."""
    total = 0
    for each in tensors:
        flat = each.view(-1)
        whole = flat.numel() * flat.element_size() // 8 * 8 // flat.element_size()
        parts = (flat[:whole].view(torch.int64), flat[whole:].view(torch.int32))
        if flat.dtype is torch.float64:
            parts = (flat.view(torch.int64), flat[:0].view(torch.int64))
        for part in parts:
            total = (31 * total + int(part.sum(dtype=torch.int64))) % 2**63
    return total


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """SHA-256 of each tensor's bits."""
    return {
        name: hashlib.sha256(each.cpu().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
        for name, each in tensors.items()
    }


def require_agreement(
    communicator: Communicator, tensors: Mapping[str, torch.Tensor], what: str
) -> None:
    """Raises Error on all ranks unless all have the same bits; every rank calls it.

    `what` is what the error calls the tensors.
    """
    every = communicator.all_gather_object(digests(tensors))
    for name in tensors:
        having = _ranks_by([each.get(name) for each in every])
        if len(having) > 1:
            groups = "; ".join(f"ranks {', '.join(map(str, each))}" for each in having)
            raise Error(
                f"the ranks' {what} of {name!r} differ, and these have the same: {groups}. "
                "Values must change on all ranks alike: do processors differ, or does the program "
                "change the model's parameters between steps? Load a checkpoint to go on"
            )


def _ranks_by(values: Sequence[object]) -> list[list[int]]:
    """The ranks that have each value."""
    found: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(rank)
    return list(found.values())

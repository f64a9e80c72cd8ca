"""What is asked of all replicas of a model at once, by every rank of the default group."""

from __future__ import annotations

import gc
import hashlib

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from bench.training import images

_AT_ONCE = 1000  # images


@torch.inference_mode()
def test_accuracy(model: torch.nn.Module, data: images.Images) -> float:
    """The share of test images that is labelled right; every rank tests a part."""
    right = torch.zeros((), dtype=torch.int64)
    for some, labels in _my_part(data.test_images, data.test_labels):
        right += (model(some).argmax(1) == labels).sum()
    dist.all_reduce(right)
    return int(right) / len(data.test_labels)


@torch.inference_mode()
def evaluated(
    model: torch.nn.Module, inputs: torch.Tensor, labels: torch.Tensor
) -> tuple[float, float]:
    """The mean cross-entropy, and the share of labels that is predicted; each rank does a part."""
    found = torch.zeros(2, dtype=torch.float64)
    for some, wanted in _my_part(inputs, labels):
        outputs, wanted = model(some), wanted.flatten()
        right = (outputs.argmax(1) == wanted).sum()
        found += torch.stack([cross_entropy(outputs, wanted, reduction="sum"), right])
    dist.all_reduce(found)
    loss, share = (found / labels.numel()).tolist()
    return loss, share


@torch.inference_mode()
def training_loss(model: torch.nn.Module, data: images.Images) -> float:
    """The mean cross-entropy of all training images."""
    total = torch.zeros((), dtype=torch.float64)
    for some, labels in _my_part(data.train_images, data.train_labels):
        total += cross_entropy(model(some), labels, reduction="sum")
    dist.all_reduce(total)
    return float(total) / len(data.train_labels)


def mean(value: float) -> float:
    """Over all ranks."""
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def identical(model: torch.nn.Module) -> bool:
    """Whether the parameters and buffers of all ranks have the same bytes."""
    mine = torch.tensor(list(_digest(model)), dtype=torch.uint8)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return all(torch.equal(each, gathered[0]) for each in gathered)


def leave(store: dist.Store, rank: int, ranks: int) -> None:
    """Ends the process group and its threads, once no rank needs it any more.

    A thread of torch's gloo that lets go of a tensor while the interpreter shuts down aborts the
    process, and a model in a reference cycle keeps the group and its threads alive.
    """
    store.set(f"leaving/{rank}", b"")
    store.wait([f"leaving/{each}" for each in range(ranks)])
    gc.collect()
    dist.destroy_process_group()


def _my_part(inputs: torch.Tensor, labels: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    return list(zip(inputs[mine].split(_AT_ONCE), labels[mine].split(_AT_ONCE), strict=True))


def _digest(model: torch.nn.Module) -> bytes:
    """SHA-256 of the parameters and buffers, with their names."""
    summed = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        summed.update(name.encode())
        summed.update(tensor.numpy().tobytes())
    return summed.digest()

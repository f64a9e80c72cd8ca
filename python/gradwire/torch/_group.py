"""A communicator over the ranks of a torch process group, which carries their first messages."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from gradwire._base.deadline import Deadline
from gradwire._bootstrap.group_rendezvous import meet_in_group
from gradwire._communicator import Communicator, from_mesh
from gradwire._errors import RendezvousError


def communicator_of(group: dist.ProcessGroup, timeout: float = 300) -> Communicator:
    """Connects the ranks of `group`; each of them calls it.

    The group carries the secret that rank 0 makes without a GRADWIRE_SECRET. Raises as
    `meet_in_group` does.
    """
    deadline = Deadline(timeout)
    return meet_in_group(
        group.rank(),
        group.size(),
        lambda data: _all_gather_bytes(group, data, deadline),
        lambda mesh: from_mesh(mesh, timeout=timeout),
        deadline,
    )


def communicator_over(group: dist.ProcessGroup, timeout: float = 300) -> tuple[Communicator, bool]:
    """The communicator of a group of the backend gradwire, or one made; and whether it was made."""
    endpoint = getattr(group, "_endpoint", None)
    if endpoint is None and torch.device("cpu") in getattr(group, "_device_types", ()):
        endpoint = getattr(group._get_backend(torch.device("cpu")), "_endpoint", None)
    if endpoint is not None:
        return endpoint.communicator, False
    return communicator_of(group, timeout), True


def _all_gather_bytes(group: dist.ProcessGroup, data: bytes, deadline: Deadline) -> list[bytes]:
    """All ranks' bytes, in rank order; nothing is unpickled."""
    try:
        at = _device(group)
        own = torch.tensor(list(data), dtype=torch.uint8, device=at)
        length = torch.tensor([own.numel()], device=at)
        sizes = [int(each) for each in _all_gather(group, length, deadline)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=at)
        padded[: own.numel()] = own
        gathered = _all_gather(group, padded, deadline)
    except RuntimeError as error:
        raise RendezvousError(
            f"another rank of the process group ended, or did not register in time: which one, "
            f"torch did not tell rank {group.rank()} ({error}); all its ranks must register, and "
            "it needs a backend for CPU tensors, such as gloo, or NCCL; or give communicator="
        ) from error
    return [bytes(each[:size].tolist()) for each, size in zip(gathered, sizes, strict=True)]


def _device(group: dist.ProcessGroup) -> torch.device:
    """The device of tensors that the group can exchange: this process's GPU if it has only NCCL."""
    kinds = {each.type for each in getattr(group, "_device_types", [])}
    if kinds == {"cuda"}:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _all_gather(
    group: dist.ProcessGroup, own: torch.Tensor, deadline: Deadline
) -> list[torch.Tensor]:
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    work = dist.all_gather(gathered, own, group=group, async_op=True)
    assert work is not None  # this rank is in the group
    work.wait(max(timedelta(seconds=deadline.remaining), timedelta(milliseconds=10)))
    return gathered

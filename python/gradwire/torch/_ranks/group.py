"""A communicator over the ranks of a torch process group, which carries their first messages."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from gradwire._base.arguments import seconds
from gradwire._base.deadline import Deadline
from gradwire._bootstrap.groups.group_rendezvous import rendezvous_in_group
from gradwire._bootstrap.mesh import Mesh
from gradwire._communicator import Communicator, from_mesh
from gradwire._errors import RendezvousError, first_line
from gradwire.torch.backend.endpoint import endpoint_of
from gradwire.torch.backend.rendezvous import join_world


def timeout_of(group: dist.ProcessGroup) -> float:
    """The timeout of a group's calls in seconds; torch's default where its backend tells none."""
    endpoint = endpoint_of(group)
    if endpoint is not None:
        return float(endpoint.timeout or endpoint.communicator._timeout)
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            return float(options._timeout.total_seconds())
    return float(default_pg_timeout.total_seconds())


def default_timeout() -> float:
    """The timeout of the default process group in seconds; torch's default without a group."""
    if dist.is_available() and dist.is_initialized():
        return timeout_of(dist.distributed_c10d._get_default_group())
    return float(default_pg_timeout.total_seconds())


def communicator_of(group: dist.ProcessGroup, timeout: float | None = None) -> Communicator:
    """Connects the ranks of `group`; each of them calls it. `timeout` is the group's if None.

    The group carries the secret that rank 0 makes without a GRADWIRE_SECRET. A failure ends the
    groups of the backend gradwire in this process too, and theirs ends this one. Raises as
    `rendezvous_in_group` does.
    """
    timeout = timeout_of(group) if timeout is None else seconds(timeout)
    deadline = Deadline(timeout)
    job_ranks = _job_ranks(group)

    def make(mesh: Mesh) -> Communicator:
        mesh.job_ranks = job_ranks
        return from_mesh(mesh, timeout=timeout)

    made = rendezvous_in_group(
        group.rank(),
        group.size(),
        lambda data: _all_gather_bytes(group, data, deadline),
        make,
        deadline,
    )
    if job_ranks:
        join_world(made)
    return made


def communicator_over(
    group: dist.ProcessGroup, timeout: float | None = None
) -> tuple[Communicator, bool]:
    """The communicator of a group of the backend gradwire, or one made; and whether it was made.

    One is made, too, where that of the group has another timeout than the one that is to be.
    """
    endpoint = endpoint_of(group)
    limit = timeout_of(group) if timeout is None else seconds(timeout)
    if endpoint is not None and endpoint.communicator._timeout == limit:
        return endpoint.communicator, False
    return communicator_of(group, limit), True


def _job_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """The number of each member in WORLD; empty for a group that torch does not know."""
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return ()


def _all_gather_bytes(group: dist.ProcessGroup, data: bytes, deadline: Deadline) -> list[bytes]:
    """All ranks' bytes, in rank order; nothing is unpickled."""
    try:
        at = _device(group)
        own = torch.tensor(list(data), dtype=torch.uint8, device=at)
        length = torch.tensor([own.numel()], dtype=torch.int64, device=at)
        sizes = [int(each) for each in _all_gather(group, length, deadline)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=at)
        padded[: own.numel()] = own
        gathered = _all_gather(group, padded, deadline)
    except RuntimeError as error:
        raise RendezvousError(
            f"another rank of the process group ended, or did not register in time: which one, "
            f"torch did not tell rank {group.rank()} ({first_line(error)}); all its ranks must "
            "register, and it needs a backend for CPU tensors, such as gloo, or NCCL; or give "
            "ranks="
        ) from None
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

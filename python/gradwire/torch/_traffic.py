"""traffic: what a process group of the backend has sent."""

from __future__ import annotations

import torch.distributed as dist

from gradwire._base.arguments import wrong
from gradwire._communicator import Traffic
from gradwire._errors import InvalidArgument
from gradwire.torch._ranks.group import endpoint_of


def traffic(group: dist.ProcessGroup | None = None) -> Traffic:
    """Counters of this rank in a process group of the backend gradwire; the default one if None.

    They count finished operations, with the headers of frames. Raises InvalidArgument for a group
    of another backend.
    """
    chosen = dist.group.WORLD if group is None else group
    if chosen is None:
        raise InvalidArgument("there is no process group: call init_process_group('gradwire')")
    if not isinstance(chosen, dist.ProcessGroup):  # torch has a number for groups of others
        raise wrong(chosen, "group", "a process group that this rank is in")
    endpoint = endpoint_of(chosen)
    if endpoint is None:
        raise InvalidArgument(
            f"the group's backend is {dist.get_backend(group)}, and only gradwire's counts: make "
            "it with backend='gradwire'; of a hook's traffic, gradwire.torch.stats(model) tells"
        )
    counted: Traffic = endpoint.communicator.traffic
    return counted

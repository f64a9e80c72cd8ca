"""traffic: what a process group of the backend has sent."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gradwire._communicator import Traffic
from gradwire._errors import InvalidArgument


def traffic(group: dist.ProcessGroup | None = None) -> Traffic:
    """Counters of this rank in a process group of the backend gradwire; the default one if None.

    They count finished operations, with the headers of frames. Raises InvalidArgument for a group
    of another backend.
    """
    chosen = dist.group.WORLD if group is None else group
    if chosen is None:
        raise InvalidArgument("there is no process group: call init_process_group('gradwire')")
    backend = chosen._get_backend(torch.device("cpu"))
    endpoint = getattr(backend, "_endpoint", None)
    if endpoint is None:
        raise InvalidArgument(
            f"the group's backend is {dist.get_backend(group)}, and only gradwire's counts"
        )
    counted: Traffic = endpoint.communicator.traffic
    return counted

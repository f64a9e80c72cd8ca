"""Calls on a process group of the backend that torch does not have, or leaves to gloo."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gradwire._base.arguments import wrong
from gradwire._communicator import Traffic
from gradwire._errors import InvalidArgument
from gradwire.torch.backend.endpoint import endpoint_of


def traffic(group: dist.ProcessGroup | None = None) -> Traffic:
    """Counters of this rank in a process group of the backend gradwire; the default one if None.

    They count finished operations, with the headers of frames. Raises InvalidArgument for a group
    of another backend.
    """
    hint = "of a hook's traffic, gradwire.torch.stats(model) tells"
    counted: Traffic = _endpoint(group, f"only gradwire's counts: {hint}").communicator.traffic
    return counted


def monitored_barrier(
    group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None
) -> None:
    """Returns when every rank of the group has called it; otherwise says which one has not.

    Torch's function of this name takes only gloo's groups up to torch 2.13; this one takes groups
    of the backend gradwire, the default one if None. `timeout` is in seconds or a timedelta, the
    group's if None. Raises Timeout, whose `job_peer` is a rank that has not called it;
    TransportError for one that was lost; and InvalidArgument for a group of another backend.
    """
    endpoint = _endpoint(group, "torch.distributed.monitored_barrier() is for gloo's")
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    endpoint.communicator.barrier(timeout=endpoint.timeout if timeout is None else timeout)


def _endpoint(group: dist.ProcessGroup | None, hint: str) -> Any:
    chosen = dist.group.WORLD if group is None else group
    if chosen is None:
        raise InvalidArgument("there is no process group: call init_process_group('gradwire')")
    if not isinstance(chosen, dist.ProcessGroup):  # torch has a number for groups of others
        raise wrong(chosen, "group", "a process group that this rank is in")
    endpoint = endpoint_of(chosen)
    if endpoint is None:
        raise InvalidArgument(
            f"the group's backend is {dist.get_backend(group)}, and this call is for "
            f"backend='gradwire'; {hint}"
        )
    return endpoint

"""async_save: torch's distributed checkpoints while training goes on, over a group of their own."""

from __future__ import annotations

import io
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, wait
from typing import Any

import torch
import torch.distributed as dist

from gradwire._communicator import Communicator
from gradwire._errors import InvalidArgument


class _Saver:
    """The group of the saves of one group of ranks, and the last of them."""

    def __init__(self, ranks: list[int]) -> None:
        self.group = dist.new_group(ranks, use_local_synchronization=True)
        self.last: Future[Any] | None = None


_savers: weakref.WeakKeyDictionary[dist.ProcessGroup, _Saver] = weakref.WeakKeyDictionary()


def async_save(
    state_dict: Mapping[str, Any], *, process_group: dist.ProcessGroup | None = None, **named: Any
) -> Any:
    """Saves a distributed checkpoint on a thread, as `torch.distributed.checkpoint.async_save`.

    Every rank of `process_group`, the default one if None, calls it. The thread communicates over a
    group of its own, which the first save makes, so training may go on over the others. Give the
    state of a hook, or a `DiLoCo`, as it is, ``{"model": ..., "gradwire": state}``: residuals
    differ by rank, so each rank's are saved as a file, here ``f"gradwire-{dist.get_rank()}"``,
    which `torch.load` reads. `named` are torch's other arguments.

    Waits for the save before this one. Returns torch's future. Raises InvalidArgument without a
    process group.
    """
    import torch.distributed.checkpoint as dcp

    chosen = dist.group.WORLD if process_group is None else process_group
    if chosen is None:
        raise InvalidArgument("there is no process group: call init_process_group() first")
    if chosen not in _savers:
        _savers[chosen] = _Saver(dist.get_process_group_ranks(chosen))
    saver = _savers[chosen]
    if saver.last is not None:
        wait([saver.last])
    found = dict(_by_rank(key, value) for key, value in state_dict.items())
    response = dcp.async_save(found, process_group=saver.group, **named)
    saver.last = getattr(response, "upload_completion", response)
    return response


def _by_rank(key: str, value: Any) -> tuple[str, Any]:
    """The entry to save: a file of this rank's for the state of a hook."""
    if not isinstance(getattr(value, "communicator", None), Communicator):
        return key, value
    torch.save(value.state_dict(), file := io.BytesIO())
    return f"{key}-{dist.get_rank()}", file

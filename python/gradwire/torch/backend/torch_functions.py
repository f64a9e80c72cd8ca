"""Functions of torch that serve gloo and NCCL alone, replaced by ones that serve this backend too.

Calls for other groups go on to torch's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch.backend.endpoint import endpoint_of


def replace() -> None:
    """Replaces them, in this process."""
    for owner, name, make in (
        (distributed_c10d, "_set_pg_timeout", _setting_timeout),
        (DistributedDataParallel, "_register_builtin_comm_hook", _registering_hook),
    ):
        torchs = getattr(owner, name, None)
        if torchs is not None:  # torch does not promise to keep them
            setattr(owner, name, functools.wraps(torchs)(make(torchs)))


def _setting_timeout(torchs: Callable[..., None]) -> Callable[..., None]:
    def set_timeout(timeout: timedelta, group: Any = None) -> None:
        endpoint = endpoint_of(dist.group.WORLD if group is None else group)
        if endpoint is None:
            torchs(timeout, group)
        else:
            endpoint.timeout = timeout.total_seconds()

    return set_timeout


def _registering_hook(torchs: Callable[..., None]) -> Callable[..., None]:
    """FP16_COMPRESS in C++ takes only futures made in C++; its form in Python has the same bits."""

    def register(ddp: DistributedDataParallel, kind: Any) -> None:
        in_cpp = kind != dist.BuiltinCommHookType.FP16_COMPRESS
        if in_cpp or endpoint_of(ddp.process_group) is None:
            torchs(ddp, kind)
        else:
            ddp.register_comm_hook(ddp.process_group, fp16_compress_hook)

    return register

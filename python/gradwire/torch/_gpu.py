"""What is different where a model is on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire._communicator import Communicator
from gradwire._errors import InvalidArgument


@contextlib.contextmanager
def on_gpu_stream(communicator: Communicator, buffer: torch.Tensor) -> Iterator[None]:
    """Makes current the stream on which the communicator averages what is not waited for."""
    handle = communicator._gpu_stream
    if handle is None:  # the first call failed
        yield
        return
    with torch.cuda.stream(torch.cuda.ExternalStream(handle, device=buffer.device)):
        yield


def require_features(ddp: DistributedDataParallel, **wishes: object) -> None:
    """Raises InvalidArgument for what the hook does on the CPU only."""
    if not any(each.is_cuda for each in ddp.module.parameters()):
        return
    asked = [name for name, wish in wishes.items() if wish is not None]
    if asked:
        raise InvalidArgument(
            f"{asked[0]}= is for models on the CPU; this one is on a GPU: leave it out, or keep it "
            "in the optimizer"
        )

"""What runs in Python in a step of DDP with the hook: few calls, in few files."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import gradwire
import pytest
import torch
import torch_ranks
from gradwire.torch import register
from torch.nn.parallel import DistributedDataParallel
from torch_training import backward, mlp

PACKAGE = Path(gradwire.__file__).parent
MOST_CALLS, MOST_FILES = 200, 15


def calls_of_a_step(codec: str) -> Counter[str]:
    """The calls in gradwire of one step, by file, on this thread and on the hook's."""
    calls: Counter[str] = Counter()
    counts = threading.Event()

    def count(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if counts.is_set() and event == "call" and path.is_relative_to(PACKAGE):
            calls[str(path.relative_to(PACKAGE))] += 1

    threading.setprofile(count)  # of threads that start from now on
    ddp = DistributedDataParallel(mlp())
    register(ddp, codec)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(6):  # DDP rebuilds its buckets in the first ones
        if step == 5:
            counts.set()
            sys.setprofile(count)
        optimizer.zero_grad()
        backward(ddp, step)
        optimizer.step()
    sys.setprofile(None)
    threading.setprofile(None)
    return calls


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_step_takes_few_calls_in_few_files(codec: str) -> None:
    for calls in torch_ranks.run(2, calls_of_a_step, codec):
        assert "torch/ddp/hook.py" in calls
        assert "torch/exchange/steps.py" in calls  # the hook's thread counts the step
        assert sum(calls.values()) <= MOST_CALLS, calls
        assert len(calls) <= MOST_FILES, sorted(calls)

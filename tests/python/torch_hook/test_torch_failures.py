"""Ranks of a DDP training that fail: typed errors out of the step, a clean end, a new start."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gradwire
import pytest
import resumed_training
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.torch import Ranks, register
from ranks import LIMIT, nightly
from stopwatch import own_time, queued
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


def model(*, buffers: bool = False) -> nn.Module:
    torch.manual_seed(3)
    between = nn.BatchNorm1d(100) if buffers else nn.ReLU()
    return nn.Sequential(nn.Linear(20, 100), between, nn.Linear(100, 10))


def step(ddp: DistributedDataParallel, number: int) -> None:
    source = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    x, y = torch.randn(16, 20, generator=source), torch.randn(16, 10, generator=source)
    mse_loss(ddp(x), y).backward()


SMALL_BUCKETS = {"bucket_cap_mb": 0.005}
SETTINGS: dict[str, dict[str, Any]] = {
    "one bucket": {},
    "small buckets": SMALL_BUCKETS,
    "static graph": {"static_graph": True},
    "looks for unused parameters": {"find_unused_parameters": True},
    "buffers": {},  # and so a broadcast in forward
}


@pytest.mark.parametrize("setting", SETTINGS)
@torch_ranks.on_ranks(3, dying=(1,))
def test_a_killed_rank_is_a_typed_error_of_every_step(setting: str) -> None:
    store = dist.distributed_c10d._get_default_store()
    ddp = DistributedDataParallel(model(buffers=setting == "buffers"), **SETTINGS[setting])
    state = register(ddp)
    for number in range(5):  # from the fifth step on each bucket travels at once
        step(ddp, number)
    if dist.get_rank() == 1:
        store.set("died", str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    before = queued()
    with pytest.raises(gradwire.TransportError) as raised:
        step(ddp, 5)
    waited = time.monotonic() - float(store.get("died")) - (queued() - before)
    assert repr(raised.value) == repr(state.error)
    with pytest.raises(gradwire.TransportError) as again:  # before it could hang in forward
        step(ddp, 6)
    assert repr(again.value) == repr(state.error)
    assert (type(state.error).__name__, state.error.peer) == ("TransportError", 1)
    assert "rank 1" in str(state.error)
    assert waited < 4


@pytest.mark.parametrize("setting", ["one bucket", "small buckets", "static graph"])
@torch_ranks.on_ranks(3, dying=(1,))
def test_a_rank_that_is_lost_before_buckets_are_rebuilt_is_named(setting: str) -> None:
    """Loses a rank after the first backward; in the second forward DDP itself agrees on buckets."""
    ddp = DistributedDataParallel(model(), **SETTINGS[setting])
    state = register(ddp)
    step(ddp, 0)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(gradwire.TransportError) as raised:
        step(ddp, 1)
    assert repr(raised.value) == repr(state.error)
    assert (type(raised.value).__name__, raised.value.peer) == ("TransportError", 1)
    assert "rank 1" in str(raised.value)


def train_unevenly(ddp: DistributedDataParallel, by_all: bool, within: str) -> None:
    """Rank 1 dies in a step of which rank 0 has no part."""
    with ddp.join(divide_by_initial_world_size=by_all):
        for number in range(2 if dist.get_rank() == 0 else 9):
            if number == 5 and dist.get_rank() == 1:
                if within == "forward":
                    torch_ranks.die()
                next(ddp.parameters()).register_hook(lambda _: torch_ranks.die())
            step(ddp, number)


@pytest.mark.parametrize(("by_all", "within"), [(False, "forward"), (True, "backward")])
@torch_ranks.on_ranks(3, dying=(1,))
def test_a_rank_that_is_lost_within_join_is_named(by_all: bool, within: str) -> None:
    ddp = DistributedDataParallel(model(), **SMALL_BUCKETS)
    state = register(ddp)
    with pytest.raises(gradwire.TransportError) as raised:
        train_unevenly(ddp, by_all, within)
    assert "rank 1" in str(state.error)
    assert raised.value.peer == 1
    assert repr(raised.value) == repr(state.error)


# How a rank's program ends, outside of backward, and what the others are told.
ENDS = {
    "raises": ("raise ValueError('bad batch')", "Aborted", "rank 1.* ValueError: bad batch"),
    "exits": ("", "TransportError", "rank 1 closed its communicator, or ended its program"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "TransportError", "rank 1"),
}


@pytest.mark.parametrize("how", ENDS)
@torch_ranks.on_ranks(3, dying=(1,))
def test_a_rank_that_ends_alone_is_named_in_backward(how: str) -> None:
    """Rank 1 does, while the others are within backward."""
    store = dist.distributed_c10d._get_default_store()
    ddp = DistributedDataParallel(model(), **SMALL_BUCKETS)
    register(ddp)
    for number in range(2):
        step(ddp, number)
    if dist.get_rank() == 1:
        store.wait(["a bucket waits"])
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.pythonapi.PyRun_SimpleString(ENDS[how][0].encode())  # as a program's main module
        atexit._run_exitfuncs()  # as sys.exit does; it then takes seconds to let go of torch
        os._exit(3)
    last = list(ddp.parameters())[-1]
    last.register_post_accumulate_grad_hook(lambda _: store.set("a bucket waits", "yes"))
    with pytest.raises((gradwire.Aborted, gradwire.TransportError)) as raised:
        step(ddp, 2)
    _, name, text = ENDS[how]
    found = (type(raised.value).__name__, raised.value.peer, str(raised.value))
    assert found[:2] == (name, 1)
    assert re.search(text, found[2])


@torch_ranks.on_ranks(3)
def test_a_stopped_rank_is_a_timeout_that_names_it() -> None:
    store = dist.distributed_c10d._get_default_store()
    ddp = DistributedDataParallel(model())
    state = register(ddp, ranks=Ranks(timeout=2))
    for number in range(2):
        step(ddp, number)
    if dist.get_rank() == 1:
        store.set("stopped", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(gradwire.Timeout) as raised:
        step(ddp, 2)
    assert "It has not been heard of for" in str(raised.value)
    store.set(f"seen by {dist.get_rank()}", "")
    if dist.get_rank() == 0:
        store.wait(["seen by 2"])  # which would hear of rank 1 again
        os.kill(int(store.get("stopped")), signal.SIGCONT)
    assert type(state.error).__name__ == "Timeout"
    assert state.error.peer == 1


def interrupt_backward() -> tuple[str, float]:
    """A signal reaches rank 0 while its backward waits for rank 1, which hears of it."""
    ddp = DistributedDataParallel(model())
    state = register(ddp)
    for number in range(2):  # in the second forward DDP itself communicates
        step(ddp, number)
    if dist.get_rank() == 1:
        with pytest.raises(gradwire.Aborted) as raised:
            state.communicator.recv(torch.empty(1), 0)
        assert raised.value.peer == 0
        return str(raised.value), 0.0
    wait = state._steps.end_backward

    def soon() -> None:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        wait()

    state._steps.end_backward = soon  # type: ignore[method-assign]
    began = own_time()
    with pytest.raises(KeyboardInterrupt):
        step(ddp, 2)
    return type(state.error).__name__, own_time() - began


def test_ctrl_c_ends_a_backward_that_waits() -> None:
    (error, waited), (heard, _) = torch_ranks.run(2, interrupt_backward)
    assert error == "Aborted"
    assert waited < 2
    assert re.search("rank 0 was interrupted|rank 0: KeyboardInterrupt in backward", heard)


class Numbers(Dataset[torch.Tensor]):
    """Rows of random numbers; the first one may end the process that reads it."""

    def __init__(self, end: str = "") -> None:
        self.end = end

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.end == "killed" and index == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.end == "exits" and index == 0:
            os._exit(1)
        return torch.randn(30, generator=torch.Generator().manual_seed(index))


def loader(end: str, workers: int) -> DataLoader[torch.Tensor]:
    context = "fork" if workers else None
    data = Numbers(end)
    return DataLoader(data, batch_size=4, num_workers=workers, multiprocessing_context=context)


@pytest.mark.parametrize("end", ["killed", *nightly("", "exits")])
@torch_ranks.on_ranks(2)
def test_data_loader_workers_may_be_forked_after_init(end: str) -> None:
    models = []
    for workers in (0, 2):
        ddp = DistributedDataParallel(model(), **SMALL_BUCKETS)
        state = register(ddp)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for epoch in range(2):
            for rows in loader("", workers):
                rows = rows + dist.get_rank()
                optimizer.zero_grad()
                mse_loss(ddp(rows[:, :20]), rows[:, 20:]).backward()
                optimizer.step()
            if workers and end and epoch == 0:
                with pytest.raises(RuntimeError):
                    next(iter(loader(end, workers)))
                gc.collect()  # its workers end with the loader, which its exception refers to
        assert state.error is None
        models.append(torch.cat([each.detach().flatten() for each in ddp.parameters()]))
    assert torch.equal(*models)


def reference(directory: str) -> str:
    return resumed_training.train(Path(directory), dies=False)


@pytest.mark.long
def test_torchrun_restarts_and_the_training_resumes(tmp_path: Path) -> None:
    """The training has the bits that it would have had without the failure."""
    (tmp_path / "reference").mkdir()
    (tmp_path / "restarted").mkdir()
    expected = torch_ranks.run(2, reference, str(tmp_path / "reference"))
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    script = [resumed_training.__file__, str(tmp_path / "restarted")]
    ended = start(*torchrun, *meeting, *script, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    out, err = ended.communicate(timeout=LIMIT)
    assert ended.returncode == 0, err
    assert (tmp_path / "restarted" / "died").exists()
    assert sorted(out.splitlines()) == [
        f"rank {rank} attempt 1: {expected[rank]}" for rank in range(2)
    ]


# Rank 1 of 3 kills itself. Rank 0 has no handler for what its step raises; rank 2 has one.
UNCAUGHT = """
import gc, os, signal, sys, time
import gradwire.torch, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 3)
torch.set_num_threads(1)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
ddp = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(4))))
gradwire.torch.register(ddp)
try:
    for step in range(10):
        if rank == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        ddp(torch.ones(4, 200)).sum().backward()
except gradwire.TransportError as error:
    print(f"rank {rank} lost rank {error.peer}")
    if rank == 0:
        raise
del ddp
gc.collect()
dist.destroy_process_group()
"""


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    package = str(Path(gradwire.__file__).parents[1])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    extra = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, **extra, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_script(script: str, *arguments: str) -> None:
    sys.argv, os.environ["GLOO_SOCKET_IFNAME"] = ["-c", *arguments], "lo"
    exec(script, {"__name__": "__main__"})


@pytest.mark.long
def test_survivors_end_as_other_programs_do(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    survivors = [start("-c", UNCAUGHT, rank, store) for rank in ("0", "2")]
    killed = torch_ranks._context.Process(target=run_script, args=(UNCAUGHT, "1", store))
    killed.start()  # forked: how it ends shows no interpreter's end
    try:
        said = [each.communicate(timeout=LIMIT) for each in survivors]
    finally:
        for each in (*survivors, killed):
            each.kill()
        killed.join()
    assert [each.returncode for each in survivors] == [1, 0], said
    assert killed.exitcode == -signal.SIGKILL
    assert [out for out, _ in said] == ["rank 0 lost rank 1\n", "rank 2 lost rank 1\n"]
    assert re.search(r"gradwire.TransportError: .*rank 1", said[0][1])
    assert said[1][1] == ""

"""Every block of Python in the guides to training runs, on two ranks, given what it needs."""

from __future__ import annotations

import ast
import os
import traceback
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch.distributed")

import gradwire
import gradwire.torch
import torch
import torch.distributed as dist
import torch_ranks
from pages import blocks_of
from ranks import nightly
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.training.images import small_cnn

ROOT = Path(__file__).parents[3]
# docs/trainers.md needs packages of its own: `make test-with WHAT=trainers` runs its programs.
DOCUMENTS = (
    *("docs/ddp.md", "docs/optimizers.md", "docs/elastic.md"),
    *nightly("docs/compression.md", "docs/large_batches.md"),
)


def _net(_: Any = None) -> nn.Module:
    layers = {"embedding": nn.Linear(32, 40), "relu": nn.ReLU(), "1": nn.Linear(40, 40)}
    return nn.Sequential(OrderedDict(**layers, last=nn.Linear(40, 1)))


def _ddp(_: Any = None) -> nn.Module:
    return DistributedDataParallel(_net())


def _loss(outputs: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
    return outputs.pow(2).mean() if labels is None else nn.functional.mse_loss(outputs, labels)


def _saved(names: dict[str, Any]) -> dict[str, Any]:
    return {"model": names["model"].state_dict(), "optimizer": names["opt"].state_dict()}


# What `model` is, where it is not a plain module.
MODELS: dict[str, Callable[[dict[str, Any]], nn.Module]] = {
    "docs/compression.md": lambda _: DistributedDataParallel(small_cnn(28)),
    "docs/ddp.md": _ddp,
}
# What blocks take for granted, new for each block that reads it.
GIVEN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "np": lambda _: np,
    "torch": lambda _: torch,
    "dist": lambda _: dist,
    "gradwire": lambda _: gradwire,
    "rank": lambda _: dist.get_rank(),
    "x": lambda _: np.random.default_rng(1).random(1024, np.float32),
    "flat": lambda _: np.ones(1024, np.float32),
    "matrix": lambda _: np.ones((32, 40), np.float32),
    "comm": lambda names: names.get("comm") or gradwire.init(),
    "net": _net,
    "ddp": _ddp,
    "new_ddp": _ddp,
    "steps": lambda _: 10,
    "batches": lambda _: [(torch.randn(4, 32), torch.randn(4, 1)) for _ in range(5)],
    "inputs": lambda _: torch.randn(4, 32),
    "labels": lambda _: torch.randn(4, 1),
    "x1": lambda _: torch.randn(4, 32),
    "x2": lambda _: torch.randn(4, 32),
    "loss": lambda _: _loss,
    "targets": lambda _: torch.zeros(4, 1),
    "loss_of": lambda _: _loss,
    "optimizer": lambda names: torch.optim.SGD(
        (names.get("ddp") or names["model"]).parameters(), 0.1
    ),
    "scheduler": lambda names: torch.optim.lr_scheduler.StepLR(names["optimizer"], 1),
    "saved": _saved,
    "d": _ddp,
    "d_state": lambda names: gradwire.torch.register(
        names["d"], gradwire.torch.Compression("onebit", warm_up=0)
    ),
    "g": lambda _: nn.Linear(8, 32),
    "noise": lambda _: torch.randn(4, 8),
    "generator_loss": lambda _: _loss,
    "examples_per_rank": lambda _: 64,
    "known_batch": lambda _: 64,
    "known_rate": lambda _: 0.1,
}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_runs(document: str, tmp_path: Path):
    blocks = blocks_of((ROOT / document).read_text(encoding="utf-8"))
    assert blocks
    assert _run(2, document, blocks, tmp_path) == [len(blocks)] * 2


def test_a_block_that_fails_is_named(tmp_path: Path):
    assert blocks_of("Text\n\n```python\nx = 1\n```\n\n```\nshell\n```\n") == [(4, "x = 1\n")]
    with pytest.raises(AssertionError, match=r"page\.md, line 7:"):
        _run(1, "page.md", [(7, "model.no_such_method()")], tmp_path)


def _run(ranks: int, document: str, blocks: list[tuple[int, str]], folder: Path) -> list[int]:
    """Beside a store as torchrun's agent has one."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return torch_ranks.run(ranks, run_all, document, blocks, str(folder), store.port)


def run_all(document: str, blocks: list[tuple[int, str]], folder: str, port: int) -> int:
    """Runs blocks one after the other, with what earlier ones have defined; returns how many."""
    os.chdir(folder)
    torch.manual_seed(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    _like_torchrun(rank, size, port)
    _end_group()
    given = {"model": MODELS.get(document, _net), **GIVEN}
    names: dict[str, Any] = {}
    for number, (line, source) in enumerate(blocks):
        begins = "init_process_group" in source
        if dist.is_initialized() and begins:
            _end_group()
        elif not dist.is_initialized() and not begins:
            store = dist.FileStore(f"{folder}/group-{number}", size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        try:
            wanted = names_from_outside(source)
            for name, make in given.items():
                if name in wanted:
                    names[name] = make(names)
            placed = "\n" * (line - 1) + source  # so that tracebacks show the page's lines
            exec(compile(placed, str(ROOT / document), "exec"), names)
        except Exception:
            raise AssertionError(f"{document}, line {line}:\n{traceback.format_exc()}") from None
    return len(blocks)


def _end_group() -> None:
    """Once all ranks have joined it: gloo's join fails where a peer has left again."""
    dist.barrier()
    dist.destroy_process_group()


def names_from_outside(source: str) -> set[str]:
    """The names that a block reads, but for those that it defines itself."""
    found = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Name)]
    written = {each.id for each in found if isinstance(each.ctx, ast.Store)}
    return {each.id for each in found} - written


def _like_torchrun(rank: int, size: int, port: int) -> None:
    """Sets the variables that torchrun would."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "snippets",
        "GRADWIRE_SECRET": "0123456789abcdef",  # as docs/elastic.md says
    }

"""docs/coming_from.md: every name in gradwire's columns is public, and takes what it is given."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire import Communicator
from gradwire._base.environment import VARIABLES
from gradwire._launch import launcher
from gradwire._tools import cli

pytest.importorskip("torch.distributed")

import gradwire.torch
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

PAGE = Path(__file__).parents[3] / "docs" / "coming_from.md"
ROWS = [
    line.strip("| ").split(" | ")
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ")
]
# What the names of the tables are. Members of a class are called on an object of it.
KINDS: dict[str, Any] = {
    "gradwire": gradwire,
    "comm": Communicator,
    "work": gradwire.Work,
    "s": gradwire.torch.elastic.Session,
    "ddp": DistributedDataParallel,
    "model": torch.nn.Module,
    "DistributedDataParallel": DistributedDataParallel,
    "init_process_group": dist.init_process_group,
}


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def resolved(node: ast.expr) -> Any:
    """What a name or an attribute is; raises KeyError or AttributeError where it is nothing."""
    if isinstance(node, ast.Name):
        return KINDS[node.id]
    assert isinstance(node, ast.Attribute), ast.dump(node)
    assert not node.attr.startswith("_")
    owner = resolved(node.value)
    if inspect.ismodule(owner):
        assert node.attr in getattr(owner, "__all__", ()) or owner is gradwire, node.attr
    return getattr(owner, node.attr)


def check_call(node: ast.Call) -> None:
    """Asserts that what is called takes these arguments."""
    function = resolved(node.func)
    method = isinstance(node.func, ast.Attribute) and inspect.isclass(resolved(node.func.value))
    names = [each.arg for each in node.keywords]
    options = {name: None for name in names if name is not None}
    inspect.signature(function).bind(*[None] * method, *node.args, **options)
    for each in node.keywords:
        if each.arg in ("op", "algorithm"):
            with gradwire.init() as comm:
                comm.all_reduce(np.ones(2, np.float32), **{each.arg: ast.literal_eval(each.value)})


def check(text: str) -> None:
    """Asserts that a command, a variable, an option of all_reduce, or Python is what it seems."""
    if text.startswith("gradwire "):
        command, *options = shlex.split(text)[1:]
        parse = launcher._parse if command == "run" else cli._parser().parse_args
        parse(options if command == "run" else [command, *options])
    elif text.startswith("GRADWIRE_"):
        assert text.split("=")[0] in VARIABLES
    else:
        option = re.match(r"(op|async_op)=\S+$", text)
        tree = ast.parse(f"comm.all_reduce(x, {text})" if option else text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                check_call(node)
            elif isinstance(node, ast.Attribute):
                resolved(node)


@pytest.fixture(autouse=True)
def _alone(bare_environment: None) -> None:
    """`gradwire.init()` makes a communicator of one rank."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_name_is_ours_and_takes_what_it_is_given(row: list[str]) -> None:
    _, ours = row
    for each in code(ours):
        check(each)


def test_there_are_three_tables() -> None:
    heads = [row for row in ROWS if row[1] == "gradwire"]
    assert heads == [["mpi4py", "gradwire"], ["NCCL", "gradwire"], ["Horovod", "gradwire"]]
    assert all(code(theirs) or code(ours) for theirs, ours in ROWS if ours != "gradwire")


@pytest.mark.parametrize(
    "wrong",
    [
        "comm.allgather(x)",
        "comm.all_reduce(x, op='mean')",
        "comm.all_reduce(x, root=0)",
        "gradwire.begin()",
        "GRADWIRE_IFNAME",
        "gradwire run --np 4 train.py",
        "gradwire bench --np 4",
    ],
)
def test_what_is_not_ours_is_noticed(wrong: str) -> None:
    with pytest.raises((AttributeError, TypeError, AssertionError, SystemExit, gradwire.Error)):
        check(wrong)


def test_a_communicator_answers_mpis_names_with_those_of_the_table() -> None:
    answered = 0
    with gradwire.init() as comm:
        for theirs, ours in ROWS:
            for name in re.findall(r"`comm\.([A-Z]\w+)\(", theirs):
                with pytest.raises(AttributeError, match=f"MPI's {name} is ") as raised:
                    getattr(comm, name)
                (answer,) = re.findall(r" is (\w+)", str(raised.value))
                assert f"comm.{answer}" in ours
                answered += 1
    assert answered > 15

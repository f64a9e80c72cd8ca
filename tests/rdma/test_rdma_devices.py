"""Which devices are used, and what is said of those that cannot be."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import gradwire
import numpy as np
import pytest
from device import CLASS, PATIENCE, TRANSPORT, on_a_device
from gradwire import Communicator, InvalidArgument
from gradwire._host import transport_kinds
from hosts import Rank

pytestmark = on_a_device

DEVICES = sorted(each.name for each in CLASS.iterdir()) if CLASS.is_dir() else []
NOBODY = 65534
on_two_devices = pytest.mark.skipif(
    DEVICES != ["rxe0", "rxe1"], reason="needs Soft-RoCE's rxe0 and rxe1: `make test-with`"
)


def packets() -> dict[str, int]:
    """That each device has sent."""
    counter = "ports/1/hw_counters/sent_pkts"
    return {each: int((CLASS / each / counter).read_text()) for each in DEVICES}


def total(comm: Communicator) -> float:
    return float(comm.all_reduce(np.ones(20_000, np.float32), algorithm="direct")[-1])


def used(p: int) -> set[str]:
    """The devices over which a sum of so many ranks went."""
    before = packets()
    assert gradwire.spawn(total, p, transports=[TRANSPORT], timeout=PATIENCE) == [p] * p
    after = packets()
    return {each for each in DEVICES if after[each] > before[each]}


@on_two_devices
def test_pairs_take_devices_in_turns() -> None:
    assert used(4) == {"rxe0", "rxe1"}


@on_two_devices
@pytest.mark.parametrize("pattern", ["rxe1", "=rxe1:1", "^rxe0"])
def test_a_pattern_chooses_the_device(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_IB_HCA", pattern)
    assert used(3) == {"rxe1"}


def test_an_index_chooses_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of index 0 is the link-local IPv6 one."""
    monkeypatch.setenv("GRADWIRE_IB_GID_INDEX", "0")
    monkeypatch.setenv("GRADWIRE_IB_MTU", "1024")
    assert all("GID 0 (fe80::" in each and "MTU 1024" in each for each in ports())
    assert used(2) != set()


def ports() -> list[str]:
    context = transport_kinds.context("rdma")
    assert context is not None
    return context.describe()


def refusal(prepare: Callable[[], object]) -> str:
    """Why a process that has done this has no ports."""

    def body(_: object) -> str:
        prepare()
        with pytest.raises(InvalidArgument) as raised:
            gradwire.init(rank=0, ranks=1, store="tcp://127.0.0.1:1", transports=[TRANSPORT])
        return str(raised.value)

    rank = Rank(None, body)
    try:
        ended = rank.outcome()
    finally:
        rank.close()
    assert ended.error is None, ended.error
    return str(ended.value)


def test_a_pattern_that_names_no_device_is_an_error() -> None:
    said = refusal(lambda: os.environ.update(GRADWIRE_IB_HCA="mlx5"))
    assert "transport rdma is not usable here" in said
    assert "GRADWIRE_IB_HCA=mlx5 does not name it" in said


def become_nobody() -> None:
    os.setgid(NOBODY)
    os.setuid(NOBODY)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_memory_that_may_not_be_locked_is_named_with_the_remedy() -> None:
    def prepare() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
        become_nobody()

    said = refusal(prepare)
    assert "the memory-lock limit is 1 MiB" in said
    assert "ulimit -l" in said


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_device_that_may_not_be_opened_is_named_with_the_remedy() -> None:
    nodes = sorted(Path("/dev/infiniband").glob("uverbs*"))
    modes = [each.stat().st_mode for each in nodes]
    for each in nodes:
        each.chmod(0o600)
    try:
        said = refusal(become_nobody)
    finally:
        for each, mode in zip(nodes, modes, strict=True):
            each.chmod(mode)
    assert f"needs read and write access to {nodes[0]}" in said

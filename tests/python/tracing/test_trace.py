"""What `with gradwire.trace(...)` records of collectives and messages."""

from __future__ import annotations

import contextlib
import functools
import time
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire._trace import clock, merge, session
from gradwire._trace import parts as trace_parts
from gradwire.lab import trace_summary as summary
from traces import categories, encloses, of, read, sent_bytes

CALLS = 3


def train(comm: gradwire.Communicator, path: Path, codec: str) -> int:
    """A few calls in a recorded block; returns the bytes that this rank sent in it."""
    x = np.full(20_000, comm.rank + 1, np.float32)
    feedback = None if codec == "none" else gradwire.ErrorFeedback()
    with gradwire.trace(path):
        before = comm.traffic.bytes_sent
        for _ in range(CALLS):
            comm.all_reduce(
                x,
                op="avg",
                algorithm="ring",
                codec=codec,
                feedback=feedback,
                key=None if feedback is None else "layer.weight",
            )
        if comm.size > 1:
            works = [comm.all_reduce(np.ones(100), async_op=True) for _ in range(2)]
            for work in works:
                work.wait()
            exchange(comm)
        return int(comm.traffic.bytes_sent - before)


def exchange(comm: gradwire.Communicator) -> None:
    """A message of several frames around the ring."""
    message = np.empty(50_000, np.float32)
    work = comm.send(message, (comm.rank + 1) % comm.size, async_op=True)
    comm.recv(message.copy(), (comm.rank - 1) % comm.size)
    work.wait()


@pytest.mark.parametrize("codec", ["none", "onebit"])
@pytest.mark.parametrize(("p", "transport"), [(1, "shm"), (2, "tcp"), (3, "shm"), (4, "tcp")])
def test_one_file_has_the_calls_of_all_ranks(
    tmp_path: Path, p: int, transport: str, codec: str
) -> None:
    path = tmp_path / "out.json"
    sent = gradwire.spawn(train, p, args=(path, codec), transports=[transport])
    loaded = read(path)
    assert loaded["gradwire"]["ranks"] == list(range(p))
    assert loaded["gradwire"]["missing"] == []
    assert loaded["gradwire"]["dropped"] == 0
    for rank in range(p):
        calls = of(loaded, "call", rank)
        ours = [each for each in calls if each["args"]["input_bytes"] == 80_000]
        assert len(ours) == CALLS
        for each in ours:
            assert each["args"]["codec"] == codec
            if codec != "none":
                assert each["name"] == "all_reduce: layer.weight"
                assert each["args"]["parameters"] == ["layer.weight"]
            if p > 1:
                before, after = each["args"]["bytes_before"], each["args"]["bytes_after"]
                assert before > 20 * after if codec == "onebit" else before < after
        for inner in (*of(loaded, "wait", rank), *of(loaded, "reduce", rank)):
            assert any(encloses(call, inner) for call in calls)
        # The barriers before and after, by which clocks are compared, are in the file too.
        blocked = of(loaded, "blocked", rank)
        assert len(blocked) >= len(ours)
        assert sent_bytes(loaded, rank) >= sent[rank]
        barriers = [each["args"] for each in calls if each["args"]["input_bytes"] == 0]
        extra = sum(each["bytes_after"] for each in barriers)
        assert sent_bytes(loaded, rank) == sent[rank] + extra
    if p > 1:
        expected = {"encode", "decode"} if codec == "onebit" else {"send", "reduce", "receive"}
        assert expected <= set(categories(loaded))


def wait_for_slow(comm: gradwire.Communicator, path: Path, slow: int) -> None:
    """Calls for which one rank comes late."""
    x = np.ones(5_000, np.float32)
    with gradwire.trace(path):
        for _ in range(4):
            if comm.rank == slow:
                time.sleep(0.25)
            comm.all_reduce(x, algorithm="ring")


def test_a_slow_rank_is_the_one_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    gradwire.spawn(wait_for_slow, 3, args=(path, 2), transports=["shm"])
    found = summary.summarize(path)
    assert found.slowest == 2
    assert found.waited_for_slowest >= 4
    assert found.slowest_share > 0.5
    assert "mostly for rank 2" in found.advice
    assert "slowest: rank 2" in str(found)
    for each in found.ranks:
        assert each.compute + each.transfer + each.codec + each.waiting == pytest.approx(1)
        assert each.rank == 2 or each.waiting > found.ranks[2].waiting
    # Rank 1 waits for rank 0, which waits for rank 2: the neighbour is not at fault.
    waits = of(read(path), "wait", 1)
    assert max(waits, key=lambda each: float(each["dur"]))["args"]["peer"] == 0


def record(comm: gradwire.Communicator, path: Path, skew: int) -> None:
    if comm.rank == 1:
        clock.SKEW = skew
    with gradwire.trace(path):
        for _ in range(20):
            comm.barrier()


@pytest.mark.parametrize("skew", [0, 3_600_000_000_000, -500_000_000])
def test_clocks_are_aligned_by_messages(tmp_path: Path, skew: int) -> None:
    path = tmp_path / "out.json"
    gradwire.spawn(record, 3, args=(path, skew), transports=["tcp"])
    loaded = read(path)
    clocks = {each["ranks"][0]: each for each in loaded["gradwire"]["clocks"]}
    assert clocks[0]["offset_ns"] == clocks[0]["error_ns"] == 0
    for rank, its in ((1, -skew), (2, 0)):  # the processes share one clock, but for the skew
        assert abs(clocks[rank]["offset_ns"] - its) <= clocks[rank]["error_ns"]
        assert clocks[rank]["error_ns"] < 100_000_000
    calls = {rank: of(loaded, "call", rank) for rank in range(3)}
    error = max(each["error_ns"] for each in clocks.values()) / 1e3
    for ours, theirs in zip(calls[0], calls[1], strict=True):  # nobody leaves before all enter
        assert ours["ts"] <= theirs["ts"] + theirs["dur"] + 2 * error


def overflow(comm: gradwire.Communicator, path: Path) -> None:
    with gradwire.trace(path, events=64):
        for _ in range(100):
            comm.barrier()


def test_what_has_no_room_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    gradwire.spawn(overflow, 2, args=(path,), transports=["shm"])
    about = read(path)["gradwire"]
    assert about["dropped"] > 200
    assert about["recorded"] <= 2 * 3 * 64
    assert "older events were dropped" in str(summary.summarize(path))


def split_up(comm: gradwire.Communicator, path: Path) -> None:
    with gradwire.trace(path):
        half = comm.split(comm.rank // 2)
        assert half is not None
        half.all_reduce(np.ones(10, np.float32))
        half.close()


def test_new_communicators_are_recorded_too(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    gradwire.spawn(split_up, 4, args=(path,), transports=["shm"])
    loaded = read(path)
    communicators = {each["args"]["communicator"] for each in of(loaded, "call")}
    assert len(communicators) == 3
    peers = {each["args"]["peer"] for each in of(loaded, "reduce", 3)}
    assert peers == {2}  # by the job's numbers


def split_often(comm: gradwire.Communicator, path: Path) -> None:
    with gradwire.trace(path):
        for _ in range(session._MOST_ENDED + 5):
            comm.split(0).close()  # type: ignore[union-attr]


def test_few_of_many_communicators_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    gradwire.spawn(split_often, 1, args=(path,))
    about = read(path)["gradwire"]
    communicators = {each["args"]["communicator"] for each in of(read(path), "call")}
    assert len(communicators) <= session._MOST_ENDED + 2
    assert about["dropped"] == 0  # nothing was called on them


def test_ranks_that_are_threads_are_recorded_around_spawn(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with gradwire.trace(path):
        gradwire.spawn(lambda comm: comm.all_reduce(np.ones(9, np.float32)), 2, threads=True)
    assert read(path)["gradwire"]["ranks"] == [0, 1]


def raise_in_block(comm: gradwire.Communicator, path: Path) -> None:
    with contextlib.suppress(ZeroDivisionError), gradwire.trace(path):
        comm.barrier()
        raise ZeroDivisionError


def test_a_block_that_raises_leaves_parts(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    gradwire.spawn(raise_in_block, 2, args=(path,), transports=["shm"])
    assert not path.exists()
    folder = Path(f"{path}.parts")
    about = merge.write(trace_parts.read(folder), path)
    assert about["ranks"] == read(path)["gradwire"]["ranks"] == [0, 1]


def write_to_a_folder(comm: gradwire.Communicator, path: Path) -> bool:
    try:
        with gradwire.trace(path):
            comm.barrier()
    except IsADirectoryError:
        return True
    return False


def test_a_file_that_cannot_be_written_leaves_all_parts(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.mkdir()
    found = gradwire.spawn(write_to_a_folder, 2, args=(path,), transports=["shm"])
    assert found == [True, False]
    left = trace_parts.read(Path(f"{path}.parts"))
    assert merge.write(left, tmp_path / "other.json")["ranks"] == [0, 1]


def test_the_part_of_a_lost_rank_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    gradwire.spawn(raise_in_block, 3, args=(path,), transports=["shm"])
    folder = Path(f"{path}.parts")
    (lost,) = folder.glob(f"rank1-*{trace_parts.SUFFIX}")
    lost.unlink()
    about = merge.write(trace_parts.read(folder), path)
    assert about["missing"] == [1]
    assert "missing: rank 1" in merge.describe(about)
    assert "missing: rank 1" in str(summary.summarize(path))


def _abort(comm: gradwire.Communicator, _: object) -> None:
    comm.abort("no more")
    comm.barrier()


def fail_in_trace(comm: gradwire.Communicator, path: Path, at: str) -> bool:
    if comm.rank == 1 and at == "begin":
        comm.abort("no more")
    if at == "end":
        comm.gather_object = functools.partial(_abort, comm)  # type: ignore[method-assign]
    with pytest.raises(gradwire.Aborted), gradwire.trace(path, communicator=comm):
        comm.barrier()
    return session._session is None and comm._track.recorder is None


@pytest.mark.parametrize(("at", "left"), [("begin", False), ("end", True)])
def test_a_failure_ends_a_trace_and_leaves_parts(tmp_path: Path, at: str, left: bool) -> None:
    path = tmp_path / "out.json"
    ended = gradwire.spawn(fail_in_trace, 2, args=(path, at), transports=["shm"])
    assert ended == [True] * 2
    assert not path.exists()
    assert Path(f"{path}.parts").exists() == left


def nest(comm: gradwire.Communicator, path: Path) -> str:
    with gradwire.trace(path), pytest.raises(gradwire.InvalidArgument) as raised:
        gradwire.trace(path).__enter__()
    return str(raised.value)


def test_a_process_records_once(tmp_path: Path) -> None:
    assert "records already" in gradwire.spawn(nest, 1, args=(tmp_path / "out.json",))[0]


@pytest.mark.parametrize(
    ("given", "named"), [({"path": 3}, "path"), ({"path": "x", "events": 3}, "events")]
)
def test_wrong_arguments_are_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(gradwire.InvalidArgument, match=named):
        gradwire.trace(**given)
    assert session._session is None


def record_nothing(comm: gradwire.Communicator) -> tuple[bool, bool]:
    return comm._track.recorder is None, session._session is None


def test_nothing_is_recorded_unless_asked_for() -> None:
    assert gradwire.spawn(record_nothing, 2) == [(True, True)] * 2

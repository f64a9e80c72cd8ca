"""The summary of a trace: shares of time, the rank at the end of a chain of waits, advice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gradwire
import pytest
from gradwire.lab import trace_summary as summary
from gradwire.lab.trace_summary import RankSummary, Summary

CALL = {"communicator": 0, "call": 1, "bytes_before": 400, "bytes_after": 100}


def event(
    rank: int, category: str, name: str, begin: float, length: float, **args: Any
) -> dict[str, Any]:
    common = {"ph": "X", "pid": rank, "tid": 1, "cat": category, "name": name}
    its = {"communicator": 0, "call": 1, **args} if category != "program" else args
    return {**common, "ts": begin, "dur": length, "args": its}


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    about = {"version": 1, "missing": [], "dropped": 0, "clocks": [{"error_ns": 2000}]}
    path.write_text(json.dumps({"gradwire": about, "traceEvents": events}))
    return path


def test_shares_are_of_the_time_from_the_first_step_to_the_last(tmp_path: Path) -> None:
    events = [
        event(0, "program", "step 0", 1000, 400),
        event(0, "program", "step 1", 1500, 500),  # with a gap of 100: the input, say
        event(0, "program", "wait for averages", 1700, 200),
        event(0, "call", "all_reduce", 1600, 290, **CALL),
        event(0, "wait", "wait for 1", 1650, 100, peer=1),
        event(0, "decode", "decode from 1", 1750, 40, decode_us=20, peer=1),
        event(0, "blocked", "blocked in a call", 500, 100),  # before
    ]
    found = summary.summarize(write(tmp_path / "out.json", events))
    (rank,) = found.ranks
    assert rank.seconds == pytest.approx(1e-3)
    assert rank.compute == pytest.approx(0.8)
    assert rank.waiting == pytest.approx(0.05)
    assert rank.codec == pytest.approx(0.02)
    assert rank.transfer == pytest.approx(0.13)
    assert rank.hidden == pytest.approx(0.1)
    assert (found.bytes_before, found.bytes_after) == (400, 100)
    assert found.clock_error_us == 2
    assert "4.0 times fewer" in str(found)


def test_the_slowest_rank_is_at_the_end_of_the_chain(tmp_path: Path) -> None:
    chain = {0: (3, 900.0), 1: (0, 950.0), 2: (1, 970.0), 3: (2, 60.0)}  # rank: peer, microseconds
    events = [
        event(rank, "wait", "wait", 0, length, peer=peer) for rank, (peer, length) in chain.items()
    ]
    events += [event(rank, "call", "all_reduce", 0, 1000, **CALL) for rank in chain]
    found = summary.summarize(write(tmp_path / "out.json", events))
    assert found.slowest == 3
    assert (found.waited_calls, found.waited_for_slowest) == (1, 1)


def test_a_circle_of_waits_ends(tmp_path: Path) -> None:
    events = [event(rank, "wait", "wait", 0, 500, peer=1 - rank) for rank in (0, 1)]
    events += [event(rank, "call", "all_reduce", 0, 1000, **CALL) for rank in (0, 1)]
    assert summary.summarize(write(tmp_path / "out.json", events)).slowest in (0, 1)


@pytest.mark.parametrize(
    ("shares", "sent", "slowest", "text"),
    [
        ((0.02, 0.01, 0.01), 100, 1, "nothing to gain"),
        ((0.1, 0.1, 0.3), 100, 1, "mostly for rank 1"),
        ((0.1, 0.1, 0.3), 100, None, "one rank after the other"),
        ((0.1, 0.3, 0.1), 25, 1, "cheaper codec"),
        ((0.3, 0.0, 0.1), 100, 1, "no codec is for"),
        ((0.3, 0.1, 0.1), 25, 1, "try codec='int4', or exchange less often"),
        ((0.3, 0.1, 0.1), 14, 1, "at work: exchange less often"),
    ],
)
def test_advice_is_about_the_largest_share(
    shares: tuple[float, float, float], sent: int, slowest: int | None, text: str
) -> None:
    transfer, codec, waiting = shares
    rank = RankSummary(0, 1.0, 1 - sum(shares), transfer, codec, waiting, 0.0)
    share = 0.9 if slowest is not None else 0.0
    found = Summary([rank, rank], 10, 100, sent, slowest, 10, 9, share, [], 0, 1.0)
    assert text in found.advice
    assert found.advice.count(". ") == 0  # one sentence
    assert found.to_dict()["shares"]["codec"] == pytest.approx(codec)


LARGE = {"collective": "all_reduce", "op": "avg", "dtype": "float32", "codec": "none"}
LARGE |= {"transports": ["shm", "tcp"], "input_bytes": 1 << 20}


@pytest.mark.parametrize(
    ("others", "text"),
    [
        (
            {},
            "try codec='int8', which sends a quarter of the bytes, or where bits must stay codec=",
        ),
        ({"transports": ["emulated"]}, "try codec='int8'"),
        ({"transports": ["shm"]}, "within hosts, where no codec pays"),
        ({"transports": ["inproc", "shm"]}, "within hosts, where no codec pays"),
        ({"input_bytes": 16}, "calls too small for a codec"),
        ({"dtype": "int64"}, "a dtype that no codec is for"),
        ({"op": "max"}, "no lossy codec is for: try codec='lossless'"),
        ({"collective": "broadcast", "op": None}, "no lossy codec is for: try codec='lossless'"),
        ({"dtype": "bfloat16"}, "no lossy codec is for: try codec='lossless'"),
        ({"op": "max", "dtype": "int64"}, "a dtype that no codec is for"),
        ({"op": "max", "input_bytes": 16}, "calls too small for a codec"),
    ],
)
def test_a_codec_is_advised_where_calls_can_take_it(
    others: dict[str, Any], text: str, tmp_path: Path
) -> None:
    call = {"communicator": 0, "call": 1, "bytes_before": 100, "bytes_after": 100}
    events = [
        event(0, "program", "step 0", 0, 1000),
        event(0, "blocked", "blocked in a call", 100, 800),
        event(0, "call", "all_reduce", 100, 800, **call, **{**LARGE, **others}),
        event(0, "call", "all_reduce", 920, 10, **call, **LARGE),  # the longest calls decide
    ]
    found = summary.summarize(write(tmp_path / "out.json", events))
    assert text in found.advice
    assert ("int8" in found.advice) == ("int8" in text)
    assert ("lossless" in found.advice) == ("lossless" in text or "int8" in text)


def test_a_trace_without_calls_is_refused(tmp_path: Path) -> None:
    with pytest.raises(gradwire.InvalidArgument, match="no call"):
        summary.summarize(write(tmp_path / "out.json", []))


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text(json.dumps({"gradwire": {"version": 99}, "traceEvents": []}))
    with pytest.raises(gradwire.InvalidArgument, match="version 99"):
        summary.summarize(path)

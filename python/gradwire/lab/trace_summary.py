"""Summary of a trace: where the time went, who was waited for, and what to do about it.

Exposed is the time in which the program waits for communication: blocked in calls, or at the end of
backward. Of that, it waits for other ranks, is in codecs, or moves and adds bytes; the rest of the
time it computes, whether communication goes on beside that or not.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire._base.tables import table
from gradwire._errors import InvalidArgument
from gradwire._trace.merge import VERSION

_LEAST_WAIT = 50.0  # microseconds: a call in which no rank waits longer counts as one without
_FOLLOWED = 0.5  # of a rank's wait that the rank waited for waits itself, or it is the culprit
_LITTLE = 0.05  # of the time: not worth a change
_MOST = 0.5  # of the time waited: one rank is the slow one

_WITHIN = {"shm", "inproc"}  # transports within a host
_COMPRESSED = ("all_reduce", "reduce_scatter")
_LARGE = 64 << 10  # bytes of a call, below which its messages take longer than their bytes
_FLOATS = ("float32", "bfloat16", "float16")
OVER_MEMORY, OTHER_CALLS, OTHER_TYPES, SMALL = "over memory", "other calls", "other types", "small"
_LOSSLESS = "codec='lossless' (70 to 85 % of the bytes; below about 1.5 Gbit/s a rank)"
_UNCOMPRESSED = {
    "": "uncompressed: try codec='int8', which sends a quarter of the bytes, or where bits must "
    f"stay {_LOSSLESS}",
    OVER_MEMORY: "within hosts, where no codec pays: exchange less often, or overlap it with "
    "computing",
    OTHER_CALLS: "in collectives, or with an op or a dtype, that no lossy codec is for: try "
    f"{_LOSSLESS}, or exchange less often",
    OTHER_TYPES: "of a dtype that no codec is for: exchange floats, or less often",
    SMALL: "in calls too small for a codec to pay: make fewer and larger ones",
}

_Intervals = npt.NDArray[np.float64]  # rows of (begin, end), disjoint and in order


@dataclass
class RankSummary:
    """Shares of one rank's time, which add up to 1; `hidden` is communication beside computing."""

    rank: int
    seconds: float
    compute: float
    transfer: float  # exposed, neither codec nor waiting
    codec: float
    waiting: float
    hidden: float


@dataclass
class Summary:
    """The contents of a trace, summed up."""

    ranks: list[RankSummary]
    calls: int
    bytes_before: int
    bytes_after: int
    slowest: int | None  # the rank that the others waited for longest
    waited_calls: int  # calls in which some rank waited
    waited_for_slowest: int  # calls in which they waited for that one
    slowest_share: float  # of the time that all ranks waited, for that one
    missing: list[int]
    dropped: int
    clock_error_us: float | None
    # Seconds of calls without a codec, summed over ranks, by why no lossy one would help.
    plain: dict[str, float] = field(default_factory=dict)
    advice: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.advice = _advice(self)

    def share(self, what: str) -> float:
        """The mean of a share over the ranks."""
        return float(np.mean([getattr(each, what) for each in self.ranks]))

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        shares = ("compute", "transfer", "codec", "waiting", "hidden")
        return {**asdict(self), "shares": {name: self.share(name) for name in shares}}

    def __str__(self) -> str:
        return "\n".join([_table(self), "", *_remarks(self), "", self.advice])


def summarize(path: Path) -> Summary:
    """Reads a trace; raises InvalidArgument for a file that is none of gradwire's, or cut off."""
    loaded = load(path)
    about, by_rank = loaded["gradwire"], _by_rank(loaded["traceEvents"])
    if not any(entries["call"] for entries in by_rank.values()):
        raise InvalidArgument(f"{path} has no call of any rank")
    waits = _waits(by_rank)
    slowest, waited, for_slowest, share = _slowest(waits)
    calls = [each for entries in by_rank.values() for each in entries["call"]]
    errors = [each["error_ns"] for each in about["clocks"]]
    return Summary(
        [_of_rank(rank, entries) for rank, entries in sorted(by_rank.items())],
        len({(each["args"]["communicator"], each["args"]["call"]) for each in calls}),
        sum(each["args"]["bytes_before"] for each in calls),
        sum(each["args"]["bytes_after"] for each in calls),
        slowest,
        waited,
        for_slowest,
        share,
        list(about["missing"]),
        int(about["dropped"]),
        None if None in errors else max(errors) / 1e3,
        _plain(calls),
    )


def _plain(calls: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for each in calls:
        if each["args"].get("codec", "none") == "none":
            found[_why_no_codec(each["args"])] += float(each["dur"]) / 1e6
    return dict(found)


def _why_no_codec(call: Mapping[str, Any]) -> str:
    """Why no lossy codec would help a call; empty where one may."""
    if not set(call.get("transports", ())) - _WITHIN:
        return OVER_MEMORY
    if call["input_bytes"] < _LARGE:
        return SMALL
    if call.get("dtype") not in _FLOATS:
        return OTHER_TYPES
    sums = call.get("collective") in _COMPRESSED and call.get("op") in ("sum", "avg")
    return "" if sums and call["dtype"] == "float32" else OTHER_CALLS


def load(path: Path) -> dict[str, Any]:
    """The trace in a file; raises InvalidArgument for a file that is none of gradwire's."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path} is no text, so no trace: {error}") from error
    except json.JSONDecodeError as error:
        raise InvalidArgument(
            f"{path} is no JSON, or was cut off: {error}; a part of a trace needs "
            "gradwire trace merge first"
        ) from error
    about = loaded.get("gradwire") if isinstance(loaded, dict) else None
    if not isinstance(about, dict) or not isinstance(loaded.get("traceEvents"), list):
        raise InvalidArgument(f"{path} was not written by gradwire's trace: it says nothing of it")
    if about.get("version") != VERSION:
        raise InvalidArgument(
            f"{path} is of version {about.get('version')!r} of the format, and this is {VERSION}"
        )
    found: dict[str, Any] = loaded
    return found


_Entries = dict[str, list[dict[str, Any]]]


def _by_rank(events: Iterable[Mapping[str, Any]]) -> dict[int, _Entries]:
    """The complete events of each rank, by category."""
    found: dict[int, _Entries] = {}
    for each in events:
        if each.get("ph") == "X" and "communicator" in each.get("args", {}):
            entries = found.setdefault(int(each["pid"]), defaultdict(list))
            entries[str(each["cat"])].append(dict(each))
    ranks = found.keys()
    for each in events:
        if each.get("ph") == "X" and each.get("cat") == "program" and each["pid"] in ranks:
            found[int(each["pid"])]["program"].append(dict(each))
    return found


# ---- Shares ------------------------------------------------------------------------------------


def _of_rank(rank: int, entries: _Entries) -> RankSummary:
    program = entries["program"]
    steps = [each for each in program if each["name"].startswith("step ")]
    everything = [each for listed in entries.values() for each in listed]
    window = _hull(steps or everything)
    waits = [each for each in program if each["name"] == "wait for averages"]
    exposed = _common(_union([*entries["blocked"], *waits]), window)
    waiting = _length(_common(_union(entries["wait"]), exposed))
    codec = sum(
        _codec_within(each, exposed)
        for category in ("encode", "decode", "send", "receive", "reduce", "local")
        for each in entries[category]
    )
    communicates = _common(_union(entries["call"]), window)
    total, outside = _length(window), _length(exposed)
    codec = min(codec, outside - waiting)
    return RankSummary(
        rank,
        total / 1e6,
        (total - outside) / total,
        (outside - waiting - codec) / total,
        codec / total,
        waiting / total,
        (_length(communicates) - _length(_common(communicates, exposed))) / total,
    )


def _codec_within(entry: Mapping[str, Any], exposed: _Intervals) -> float:
    args = entry["args"]
    spent = float(args.get("encode_us", 0)) + float(args.get("decode_us", 0))
    if not spent or not entry["dur"]:
        return 0.0
    return spent * _length(_common(_union([entry]), exposed)) / float(entry["dur"])


def _union(entries: Iterable[Mapping[str, Any]]) -> _Intervals:
    rows = sorted((float(each["ts"]), float(each["ts"]) + float(each["dur"])) for each in entries)
    merged: list[list[float]] = []
    for begin, end in rows:
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return np.array(merged, np.float64).reshape(-1, 2)


def _hull(entries: Iterable[Mapping[str, Any]]) -> _Intervals:
    rows = _union(entries)
    return np.array([[rows[0, 0], rows[-1, 1]]])


def _common(a: _Intervals, b: _Intervals) -> _Intervals:
    """The intersection of both."""
    found = []
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i, 0], b[j, 0]), min(a[i, 1], b[j, 1])
        if begin < end:
            found.append((begin, end))
        if a[i, 1] < b[j, 1]:
            i += 1
        else:
            j += 1
    return np.array(found, np.float64).reshape(-1, 2)


def _length(rows: _Intervals) -> float:
    return float((rows[:, 1] - rows[:, 0]).sum())


# ---- Who is waited for -------------------------------------------------------------------------

_Waits = dict[tuple[int, int], dict[int, dict[int, float]]]  # call: rank: peer: microseconds


def _waits(by_rank: Mapping[int, _Entries]) -> _Waits:
    found: _Waits = {}
    for rank, entries in by_rank.items():
        for each in entries["wait"]:
            args = each["args"]
            if "peer" in args:
                call = found.setdefault((args["communicator"], args["call"]), {})
                its = call.setdefault(rank, {})
                its[args["peer"]] = its.get(args["peer"], 0.0) + float(each["dur"])
    return found


def _slowest(waits: _Waits) -> tuple[int | None, int, int, float]:
    """The rank that was waited for longest, calls with a wait, those for it, its share of time."""
    seconds: dict[int, float] = defaultdict(float)
    counts: dict[int, int] = defaultdict(int)
    for call in waits.values():
        longest = {rank: sum(peers.values()) for rank, peers in call.items()}
        if max(longest.values()) < _LEAST_WAIT:
            continue
        culprit = _culprit(call, longest)
        seconds[culprit] += sum(longest.values())
        counts[culprit] += 1
    if not counts:
        return None, 0, 0, 0.0
    slowest = max(seconds, key=lambda rank: seconds[rank])
    share = seconds[slowest] / sum(seconds.values())
    return slowest, sum(counts.values()), counts[slowest], share


def _culprit(call: Mapping[int, Mapping[int, float]], longest: Mapping[int, float]) -> int:
    """The end of the chain of ranks that wait for each other, from the one that waits longest."""
    rank = max(longest, key=lambda each: longest[each])
    seen = {rank}
    while True:
        peers = call[rank]
        peer = max(peers, key=lambda each: peers[each])
        waits_little = longest.get(peer, 0.0) < _FOLLOWED * longest[rank]
        if peer in seen or waits_little:
            return peer
        seen.add(peer)
        rank = peer


# ---- Text --------------------------------------------------------------------------------------


def _table(found: Summary) -> str:
    names = ("compute", "transfer", "codec", "waiting", "hidden")
    rows: list[tuple[str, ...]] = [("rank", "seconds", *names)]
    for each in found.ranks:
        shares = (f"{getattr(each, name):.1%}" for name in names)
        rows.append((str(each.rank), f"{each.seconds:.3f}", *shares))
    return table(rows)


def _remarks(found: Summary) -> Iterable[str]:
    sent = f"{found.calls} calls; {found.bytes_after:,} bytes sent"
    if found.bytes_before > found.bytes_after > 0:
        sent += f", {found.bytes_before / found.bytes_after:.1f} times fewer than without a codec"
    yield sent
    if found.slowest is not None:
        yield (
            f"slowest: rank {found.slowest}, the one waited for in {found.waited_for_slowest} of "
            f"{found.waited_calls} calls that waited, and {found.slowest_share:.0%} of that time"
        )
    if found.clock_error_us is None:
        yield "clocks: those of some hosts, since no messages tell their difference"
    elif len(found.ranks) > 1:
        yield f"clocks: within {found.clock_error_us:.0f} us of each other"
    if found.missing:
        yield f"missing: rank {', '.join(map(str, found.missing))}, whose process wrote nothing"
    if found.dropped:
        yield f"{found.dropped} older events were dropped: the shares are of what came after"


def _advice(found: Summary) -> str:
    transfer, codec, waiting = map(found.share, ("transfer", "codec", "waiting"))
    exposed = transfer + codec + waiting
    if exposed < _LITTLE:
        return (
            f"Only {exposed:.0%} of the time is communication that computing does not hide: "
            "there is nothing to gain."
        )
    if waiting >= max(transfer, codec):
        if found.slowest is not None and found.slowest_share >= _MOST:
            return (
                f"Ranks wait {waiting:.0%} of the time, mostly for rank {found.slowest}: find what "
                "slows it (its host, its inputs, its share of the work); no codec or algorithm "
                "will."
            )
        return (
            f"Ranks wait {waiting:.0%} of the time, for one rank after the other: even out their "
            "work, or make fewer and larger calls."
        )
    if codec > transfer:
        return (
            f"Codecs take {codec:.0%} of the time and transfers {transfer:.0%}: use a cheaper "
            "codec (bf16, int8), or none."
        )
    if found.bytes_after > 0.6 * found.bytes_before:
        what = _UNCOMPRESSED[
            max(found.plain, key=lambda why: found.plain[why], default=OTHER_TYPES)
        ]
        return f"Transfers take {transfer:.0%} of the time, {what}."
    smaller = "try codec='int4', or " if found.bytes_after > 0.2 * found.bytes_before else ""
    return (
        f"Transfers take {transfer:.0%} of the time although a codec is at work: {smaller}exchange "
        "less often (larger batches, accumulation, DiLoCo)."
    )

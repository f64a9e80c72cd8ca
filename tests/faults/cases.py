"""A random case from a seed: which ranks make which calls over which links, and what goes wrong."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field

import numpy as np
from gradwire import algorithms

from tests.faults.calls import COLLECTIVES, COLUMNS, REDUCING, ROOTED, SHIFT, Call
from tests.faults.schedules import random_schedule

TRANSPORTS = ("inproc", "shm", "tcp", "mixed")
_PROCESSES = ("shm", "tcp", "mixed")
_SOCKETS = ("tcp", "mixed")
SET_UP = -1  # the number of what comes before call 0
_MOST_BYTES = 4 << 20  # of a large call
_MOST_FRAMES = 100  # that a large call is cut into
_DTYPES = (
    *("float32",) * 4,
    *("float64", "float16", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
_LOSSY = ("int8:block=64", "onebit", "lowrank:rank=2", "threshold:density=0.05", "topk:density=0.1")
_LARGE_MESSAGE = 65536  # bytes; smaller ones may not hold a unit of threshold and topk
_LOSSY_COUNTS = (20 * COLUMNS, 600 * COLUMNS)  # few, so that residuals are met again

# kind -> (how often, the transports on which it can happen)
KINDS: dict[str, tuple[int, tuple[str, ...]]] = {
    "none": (3, TRANSPORTS),
    "slow": (5, TRANSPORTS),  # a rank sleeps for less than the timeout
    "pause": (5, _PROCESSES),  # SIGSTOP, and SIGCONT in time
    "delay": (6, _PROCESSES),  # a link carries nothing for a while
    "kill": (12, _PROCESSES),  # SIGKILL
    "crash": (6, _PROCESSES),  # os._exit, segmentation fault
    "stop": (10, _PROCESSES),  # SIGSTOP
    "silence": (3, _SOCKETS),  # a link carries nothing any more, as behind a dead switch
    "exception": (8, TRANSPORTS),  # in the rank's script, sys.exit too
    "interrupt": (3, _PROCESSES),  # Ctrl-C
    "abort": (6, TRANSPORTS),  # from another thread
    "leave": (4, TRANSPORTS),  # closes early
    "mismatch": (12, TRANSPORTS),  # see _DISAGREEMENTS
    "cut": (8, _PROCESSES),  # a link ends, perhaps in the middle of a frame
    "truncate": (5, _SOCKETS),  # a frame arrives whole, but shorter than it was sent
    "header": (6, _PROCESSES),  # a bit of a frame's header or length flips
    "payload": (3, _SOCKETS),  # a bit of a frame's payload flips
    "garble": (5, _PROCESSES),  # foreign bytes on a control socket
}
_AT_SET_UP = ("slow", "pause", "delay", "kill", "crash", "stop", "cut")  # may happen there too
_SURVIVABLE = ("kill", "crash", "stop", "exception", "abort", "mismatch")  # by whom it is clear
IN_RANK = ("slow", "crash", "exception", "abort", "leave", "mismatch")  # the rank does it itself


@dataclass(frozen=True)
class Fault:
    """A fault: `delay` seconds after the faulty rank has entered call number `call`."""

    kind: str
    faulty: int
    call: int
    delay: float = 0.0
    peer: int = -1  # the other end of the link
    lane: str = ""  # of the link: control, collective or p2p
    detail: str = ""  # which variant
    seconds: float = 0.0  # how long
    seed: int = 0  # for the injector's own choices
    instead: tuple[Call, ...] = field(
        default=(), repr=False
    )  # the faulty rank's calls from `call` on


@dataclass(frozen=True)
class Case:
    """One job: every rank makes `calls`, in this order, then a barrier, then closes."""

    seed: int
    number: int
    ranks: int
    transport: str
    hosts: tuple[tuple[int, ...], ...]
    tuning: dict[str, int]
    timeout: float
    splits: tuple[str, ...]  # communicators made from the first: "same" or "parity"
    calls: tuple[Call, ...]
    fault: Fault
    goes_on: bool = False  # the survivors shrink, and make more calls

    def calls_of(self, rank: int) -> tuple[Call, ...]:
        """The calls of this rank, which differ from the others' in a mismatch."""
        fault = self.fault
        if fault.kind != "mismatch" or rank != fault.faulty:
            return self.calls
        after = self.calls[fault.call + len(fault.instead) :]
        return (*self.calls[: fault.call], *fault.instead, *after)

    def members(self, communicator: int, rank: int) -> list[int]:
        """The ranks of the communicator that `rank` has under this number, in order."""
        every = list(range(self.ranks))
        if communicator == 0 or self.splits[communicator - 1] == "same":
            return every
        return every[rank % 2 :: 2]

    def link(self, low: int, high: int) -> str:
        """The transport that joins two ranks."""
        if self.transport != "mixed":
            return self.transport
        together = any(low in host and high in host for host in self.hosts)
        return "shm" if together else "tcp"


def make_case(seed: int, number: int, kind: str | None = None) -> Case:
    """The same for the same numbers, on every machine; `kind` asks for one kind of fault."""
    rng = random.Random(f"{seed}/{number}")
    names = list(KINDS)
    drawn = rng.choices(names, [KINDS[name][0] for name in names])[0]
    kind = kind or drawn
    ranks = rng.randint(2, 6)
    transport = rng.choice(KINDS[kind][1])
    kinds_of_split = ("same", "parity") if ranks >= 4 else ("same",)  # no half of one rank
    splits = tuple(rng.choices(kinds_of_split, k=rng.choice((0, 0, 0, 1, 2))))
    hosts = _hosts(rng, ranks)
    tuning = _tuning(rng)
    calls = _calls(rng, ranks, splits, _most_bytes(tuning), _codecs(kind, tuning))
    return Case(
        seed,
        number,
        ranks,
        transport,
        hosts,
        tuning,
        _timeout(rng, kind),
        splits,
        calls,
        _fault(rng, kind, hosts, calls),
        goes_on=not splits and kind in _SURVIVABLE and rng.random() < 0.6,
    )


def _hosts(rng: random.Random, ranks: int) -> tuple[tuple[int, ...], ...]:
    cut = rng.randint(1, ranks - 1)
    return tuple(range(cut)), tuple(range(cut, ranks))


def _tuning(rng: random.Random) -> dict[str, int]:
    largest = rng.choice((4096, 16384, 65536, 256 * 1024))
    return {"max_message": largest, "segment_bytes": rng.choice((0, 4096, 16384))}


def _most_bytes(tuning: dict[str, int]) -> int:
    frame = min(tuning["max_message"], tuning["segment_bytes"] or tuning["max_message"])
    return min(_MOST_BYTES, _MOST_FRAMES * frame)


def _codecs(kind: str, tuning: dict[str, int]) -> tuple[str, ...]:
    """Codecs that lose something; a payload's flipped bit must stay one wrong element, so none."""
    if kind == "payload":
        return ()
    return _LOSSY if tuning["max_message"] >= _LARGE_MESSAGE else _LOSSY[:3]


def _timeout(rng: random.Random, kind: str) -> float:
    """Long where a wait for it would hide a mistake; short where a case waits for it.

    But not so short that a rank which a busy machine lets wait is late for it as well: the others
    would name that one, and rightly.
    """
    return round(rng.uniform(2.5, 3.0), 2) if kind in ("stop", "silence") else 20.0


def _calls(
    rng: random.Random,
    ranks: int,
    splits: tuple[str, ...],
    most_bytes: int,
    codecs: tuple[str, ...],
) -> tuple[Call, ...]:
    total = rng.randint(4, 24)
    large = rng.sample(range(total), 2)
    return tuple(
        _call(rng, ranks, splits, rng.randint(most_bytes // 4, most_bytes), codecs)
        if index in large
        else _call(rng, ranks, splits, _few_bytes(rng), codecs)
        for index in range(total)
    )


def _few_bytes(rng: random.Random) -> int:
    return rng.choice((0, 1, 8, rng.randint(2, 1000), rng.randint(1000, 100_000)))


def _call(
    rng: random.Random, ranks: int, splits: tuple[str, ...], size: int, codecs: tuple[str, ...]
) -> Call:
    communicator = rng.randint(0, len(splits))
    halves = communicator > 0 and splits[communicator - 1] == "parity"
    size = ranks // 2 if halves else ranks  # of the smaller half
    collective = rng.choice(("all_reduce",) * 10 + COLLECTIVES + (SHIFT,))
    dtype = rng.choice(_DTYPES)
    blocks = 1 if collective in ("all_reduce", "reduce", "broadcast", SHIFT) else ranks
    call = Call(
        collective,
        -(-size // (np.dtype(dtype).itemsize * blocks)),
        root=rng.randrange(size) if collective in ROOTED else 0,
        async_op=rng.random() < 0.4,
        communicator=communicator,
        dtype=dtype,
    )
    if collective in ("barrier", SHIFT):
        return call
    call = dataclasses.replace(call, algorithm=rng.choice([*algorithms(collective), "auto"]))
    if collective in REDUCING:
        call = _reducing(rng, call)
    if collective == "all_reduce" and codecs and rng.random() < 0.15:
        call = _compressed(rng, call, codecs)
    if collective == "all_reduce" and communicator == 0 and call.algorithm != "gather":
        call = _special(rng, call, ranks)
    return call


def _reducing(rng: random.Random, call: Call) -> Call:
    call = dataclasses.replace(call, op=rng.choice(_ops(call.dtype)))
    if _takes_codec(call) and rng.random() < 0.3:
        call = dataclasses.replace(call, codec=rng.choice(("fp16", "bf16")))
    return call


def _ops(dtype: str) -> tuple[str, ...]:
    """Operations of the dtype, the sum twice."""
    kind = np.dtype(dtype).kind
    if kind == "c":
        return ("sum", "sum", "avg")
    found = ("sum", "sum", "min", "max", "prod") + ("avg",) * (kind == "f")
    return found + ("band", "bor", "bxor", "land", "lor", "lxor") * (kind in "iub")


def _takes_codec(call: Call) -> bool:
    sums = call.dtype == "float32" and call.op in ("sum", "avg")
    return sums and call.algorithm != "recursive_doubling"


def _compressed(rng: random.Random, call: Call, codecs: tuple[str, ...]) -> Call:
    """A call with a lossy codec, with feedback; sometimes its payloads are gathered."""
    codec, algorithm = rng.choice(codecs), call.algorithm
    if algorithm == "recursive_doubling":
        algorithm = "auto"
    if not codec.startswith("lowrank") and rng.random() < 0.4:
        algorithm = "gather"
    return dataclasses.replace(
        call,
        dtype="float32",
        op=rng.choice(("sum", "avg")),
        codec=codec,
        algorithm=algorithm,
        count=rng.choice(_LOSSY_COUNTS),
    )


def _special(rng: random.Random, call: Call, ranks: int) -> Call:
    """Sometimes over the hosts, sometimes by a schedule of one's own."""
    chance = rng.random()
    if chance < 0.2:
        return dataclasses.replace(call, schedule=random_schedule(rng, ranks))
    if chance < 0.4:
        halves = rng.choice(("ring", "star", "direct")), rng.choice(("ring", "halving_doubling"))
        return dataclasses.replace(call, algorithm=f"hierarchical({','.join(halves)})")
    return call


def _fault(
    rng: random.Random, kind: str, hosts: tuple[tuple[int, ...], ...], calls: tuple[Call, ...]
) -> Fault:
    faulty, peer = _ends(rng, hosts)
    fault = Fault(
        kind,
        faulty,
        _early(rng, SET_UP if kind in _AT_SET_UP else 0, len(calls)),
        delay=rng.choice((0.0, rng.uniform(0, 0.002), rng.uniform(0, 0.01))),
        peer=peer,
        lane=rng.choice(_lanes(calls)),
        detail=rng.choice(_DETAILS.get(kind, ("",))),
        seconds=round(rng.uniform(0.05, 0.5), 3),
        seed=rng.getrandbits(32),
    )
    if kind == "mismatch":
        return _mismatch(rng, fault, calls, sum(map(len, hosts)))
    if kind == "garble":
        return dataclasses.replace(fault, lane="control")
    if kind in ("truncate", "header", "payload", "silence"):
        return dataclasses.replace(fault, lane="collective")
    return fault


def _ends(rng: random.Random, hosts: tuple[tuple[int, ...], ...]) -> tuple[int, int]:
    """The faulty rank and a peer on the other host, to which the link is tcp where any is."""
    ends = [rng.choice(host) for host in hosts]
    rng.shuffle(ends)
    return ends[0], ends[1]


def _early(rng: random.Random, first: int, last: int) -> int:
    """Rather than late: what happens after the end is noticed by nobody."""
    return min(rng.randint(first, last), rng.randint(first, last))


def _lanes(calls: tuple[Call, ...]) -> list[str]:
    """Lanes that carry something, weighted by how much."""
    shifts = any(each.collective == SHIFT and each.communicator == 0 for each in calls)
    return ["collective"] * 4 + ["control"] + ["p2p"] * shifts


_DETAILS = {
    "crash": ("exit", "segv"),
    "exception": ("ValueError", "SystemExit"),
    "cut": ("at once", "in a frame", "reset"),
    "garble": ("bytes", "frame", "bit"),
}


def _mismatch(rng: random.Random, fault: Fault, calls: tuple[Call, ...], ranks: int) -> Fault:
    """Another call in the place of one, or two calls in the wrong order."""
    able = [i for i, each in enumerate(calls) if each.collective in _DISAGREEMENTS]
    if not able:
        return dataclasses.replace(fault, kind="none")
    index = rng.choice(able)
    call = calls[index]
    following = calls[index + 1] if index + 1 < len(calls) else call
    ways = [way for way in _DISAGREEMENTS[call.collective] if _can_differ(call, way)]
    ways += ["order"] * _clash(call, following)
    what = rng.choice(ways)
    instead = (following, call) if what == "order" else (_changed(rng, call, what, ranks),)
    return dataclasses.replace(fault, call=index, detail=what, instead=instead)


# What ranks can disagree in, beside the order of two calls; gather, scatter and all_to_all may have
# other sizes on every rank, and messages have no common order with collectives.
_DISAGREEMENTS = {
    "all_reduce": ("count", "dtype", "op", "algorithm", "codec", "schedule", "collective"),
    "reduce": ("count", "dtype", "op", "root", "codec", "collective"),
    "reduce_scatter": ("count", "dtype", "op", "algorithm", "codec", "collective"),
    "all_gather": ("count", "dtype", "algorithm", "collective"),
    "broadcast": ("count", "dtype", "root", "collective"),
    SHIFT: ("count",),
}


def _plain(call: Call) -> Call:
    """The call without a codec, nor options that only one can be used with."""
    algorithm = "auto" if call.algorithm == "gather" else call.algorithm
    return dataclasses.replace(call, codec="none", algorithm=algorithm)


def _other_schedule(rng: random.Random, ranks: int, than: str) -> str:
    while (found := random_schedule(rng, ranks)) == than:
        pass
    return found


def _can_differ(call: Call, way: str) -> bool:
    if way == "codec":
        return _takes_codec(call) and not call.codec.startswith("lowrank")
    return way != "schedule" or call.communicator == 0


def _clash(one: Call, other: Call) -> bool:
    """Whether their order can be told: on one communicator, and of different kinds."""
    have_order = all(
        "collective" in _DISAGREEMENTS.get(each.collective, ()) for each in (one, other)
    )
    same = one.communicator == other.communicator
    return have_order and same and one.collective != other.collective


def _changed(rng: random.Random, call: Call, what: str, ranks: int) -> Call:
    if what == "codec":
        return dataclasses.replace(call, codec="fp16" if call.codec != "fp16" else "bf16")
    if what == "schedule":
        other = _other_schedule(rng, ranks, call.schedule)
        return dataclasses.replace(call, schedule=other, algorithm="auto")
    if what == "count":
        more = 1000 if call.codec.startswith("lowrank") else rng.choice((1, 1000))
        return dataclasses.replace(call, count=call.count + more)
    if what == "dtype":
        other = "int32" if call.dtype != "int32" else "int64"
        return dataclasses.replace(_plain(call), dtype=other, op="sum")
    if what == "op":
        one, other = ("sum", "avg") if call.dtype.startswith("complex") else ("min", "max")
        return dataclasses.replace(_plain(call), op=one if call.op != one else other)
    if what == "root":
        return dataclasses.replace(call, root=1 - min(call.root, 1))
    if what == "algorithm" and (call.schedule or call.algorithm != "auto"):
        other = "ring" if call.algorithm != "ring" else "direct"
        return dataclasses.replace(call, algorithm=other, schedule="")
    other = "all_gather" if call.collective != "all_gather" else "all_reduce"
    return Call(
        other, call.count, call.dtype, async_op=call.async_op, communicator=call.communicator
    )

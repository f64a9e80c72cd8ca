"""Closed forms of all_reduce, for any number of ranks, on networks of several levels.

A schedule is a sequence of rounds in which all ranks do alike, or a tree. A message is cut into
frames as exec/plan/plan.h cuts it. As in csrc/gradwire/schedule/cost.h, each has three prices:
the processor's work at its two ends, the time of the busiest link, and the whole way of a segment.
A round of segments takes the longest of the three. Where several levels of a network carry a round,
the slowest one counts. Sources of the shapes: `gradwire.algorithms`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gradwire import _core
from gradwire._errors import InvalidArgument
from gradwire._model import CostModel
from gradwire._schedules.schedule import BINOMIAL_TREE
from gradwire.lab.simulation.topology import Topology, seconds_of_byte

MOST_RANKS = 10_000_000
_HEADER = 32.0  # bytes of a frame's header
_FRAME = 2046 * 64 - _HEADER  # bytes of the largest frame's payload
_LEAST_SEGMENT, _SEGMENTS_WANTED = 32 * 1024, 4
_LEAST_SLICE = 8 * 1024  # of a chunk beside others in a message
_FAR = {"512K": 512 << 10, "4M": 4 << 20, "8M": 8 << 20, "16M": 16 << 20, "32M": 32 << 20}
_NEAR = 64 << 10  # bytes of calls for which the factor is 1


@dataclass(frozen=True)
class RoundCost:
    """Equal rounds that follow each other, in which every rank sends and lands `messages`.

    `leaving(g)` counts the messages that leave the busiest group of g ranks, `far(g)` is the share
    of the busiest rank's own messages that do, and `path(g)` the share of the rounds in which one
    chunk does, on its way. `landing` says what becomes of a message: "reduce", "copy", or "first"
    for the first copies of what a rank has just finished. Several messages of one content
    (`alike`) are staged once. `cold` says which share of the bytes that are staged, and that are
    landed on, the rank has not touched for rounds.
    """

    nbytes: float  # of the array, in one message
    leaving: Callable[[int], float]
    far: Callable[[int], float]
    landing: str
    messages: int = 1
    times: int = 1
    alike: bool = False
    cold: tuple[float, float] = (0.0, 1.0)
    path: Callable[[int], float] | None = None  # None: as leaving, all or nothing
    beside: int = 1  # ranks of a host that send at once, each to another rank


@dataclass(frozen=True)
class Tree:
    """A tree up which sums climb and down which they come; all of it works at once on segments.

    `fan` is the most children of a rank. `leaving(g)` counts the messages, up and down, that leave
    the busiest group of g ranks, and `near` says whether the lower levels join neighbours.
    """

    nbytes: float  # in one message
    depth: int
    fan: int
    leaving: Callable[[int], float]
    near: bool = False
    parents: int = 1  # of a rank that has children


def seconds(
    algorithm: str,
    nbytes: float,
    ranks: int,
    topology: Topology,
    model: CostModel,
    codec: str = "none",
) -> float:
    """The seconds of one all_reduce; `model` is the topology's.

    Raises InvalidArgument for an algorithm without closed form, or more ranks than one covers.
    """
    require_covered(algorithm, ranks)
    if ranks == 1:
        return model.parameters["call"]
    parts = _parts(algorithm, nbytes, ranks, topology)
    prices = Prices(model.parameters, topology, ranks, nbytes, codec)
    sizes = [each.nbytes * prices.ratio for each in parts]
    frames = dict.fromkeys(sizes, 1) if algorithm == BINOMIAL_TREE else frames_of(sizes)
    cut = [(each, frames[size]) for each, size in zip(parts, sizes, strict=True)]
    trees = sum(_tree(each, prices, count) for each, count in cut if isinstance(each, Tree))
    rounds = [(each, count) for each, count in cut if isinstance(each, RoundCost)]
    return prices.call + trees + _rounds(rounds, prices)


def require_covered(algorithm: str, ranks: int) -> None:
    """Raises InvalidArgument for what has no closed form."""
    if not is_covered(algorithm):
        names = ", ".join((*_SHAPES, "hierarchical(direct,ring)"))
        raise InvalidArgument(f"{algorithm!r:.80} has no closed form: these have: {names}")
    if not 1 <= ranks <= MOST_RANKS:
        raise InvalidArgument(f"ranks={ranks}: closed forms cover 1 to {MOST_RANKS:,}")


def is_covered(algorithm: str) -> bool:
    """Whether an algorithm has a closed form."""
    nested = _nested(algorithm)
    if nested is None:
        return algorithm in _SHAPES
    return nested[0] in _HALVES and nested[1] in _IN_ROUNDS


@dataclass(frozen=True)
class Ends:
    """The processor's seconds to stage a message, to send it to one rank, and to land it."""

    stage: float
    send: float
    land: float


class Prices:
    """Costs of the messages of one call, by the cost model and the network."""

    def __init__(
        self,
        parameters: Mapping[str, float],
        topology: Topology,
        ranks: int,
        nbytes: float,
        codec: str,
    ) -> None:
        self._of = parameters
        self.host = min(topology.per_host, ranks)
        self._growth = growth_of(parameters, nbytes)
        self._codec = None if codec == "none" else codec_costs_of(parameters, codec)
        self.call = parameters["call"]
        self.ratio = 1.0 if codec == "none" else ratio_of(codec, nbytes)
        inside = parameters["within.beta"]
        self._levels = [(1, inside, 0.0)] if self.host > 1 else []
        for each in topology.levels:
            beta = seconds_of_byte(each.rate)
            first = each is topology.levels[0]
            self._levels.append((each.ranks, beta, 0.0 if first else each.latency or 0.0))

    def wire(self, nbytes: float) -> float:
        """The bytes of a segment on the wire."""
        return nbytes * self.ratio + _HEADER

    def link(self, nbytes: float, leaving: Callable[[int], float]) -> float:
        """The seconds of the busiest link in one round of segments."""
        wire = self.wire(nbytes)
        return max(leaving(ranks) * beta for ranks, beta, _ in self._levels) * wire

    def latency(self, path: Callable[[int], float]) -> float:
        """The seconds of a bit on its way; `path(g)` is how often it leaves a group of g."""
        far = path(self.host)
        own = far * self._of["between.latency"] + (1 - far) * self._of["within.latency"]
        return own + sum(path(ranks) * latency for ranks, _, latency in self._levels)

    def ends(self, nbytes: float, far: float, landing: str, cold: tuple[float, float]) -> Ends:
        """The processor's seconds of a message of `nbytes` of the array."""
        wire = self.wire(nbytes)
        alpha = self._mixed("alpha", far) + self._mixed("copy", far) * wire
        staged, landed = (
            work * nbytes * (1 + share * (self._growth - 1))
            for work, share in zip(self._work(landing), cold, strict=True)
        )
        return Ends(staged, alpha, alpha + landed)

    def inside(self, leaving: Callable[[int], float]) -> float:
        """Returns 1.0 for a round that stays within hosts, else 0."""
        return 0.0 if leaving(self.host) else 1.0

    def far(self, of: Callable[[int], float]) -> float:
        """The share of messages that leave a host."""
        return of(self.host)

    def _mixed(self, name: str, far: float) -> float:
        return far * self._of[f"between.{name}"] + (1 - far) * self._of[f"within.{name}"]

    def _work(self, landing: str) -> tuple[float, float]:
        move, gamma = self._of["move"], self._of["gamma"]
        if self._codec is None:
            return move, gamma if landing == "reduce" else move
        encode, decode = self._codec
        if landing == "reduce":
            return encode, decode
        again = move * self.ratio
        return again + (encode + decode if landing == "first" else 0.0), decode


def _rounds(rounds: Iterable[tuple[RoundCost, int]], prices: Prices) -> float:
    """The seconds of rounds that follow each other; each is given with the frames of a message."""
    total = last = 0.0
    for each, frames in rounds:
        way, busy = _round(each, prices, each.nbytes / frames)
        total += each.times * max(frames * busy, way)
        last = way + (frames - 1) * busy - max(frames * busy, way)
    return total + last


def _round(each: RoundCost, prices: Prices, part: float) -> tuple[float, float]:
    """The seconds of one segment's round alone, and of each of many that follow each other."""
    ends = prices.ends(part, prices.far(each.far), each.landing, each.cold)
    staged = ends.stage * (1 if each.alike else each.messages)
    work = staged + each.messages * (ends.send + ends.land)
    link = prices.link(part, each.leaving)

    def always(g: int) -> float:
        return 1.0 if each.leaving(g) else 0.0

    path = each.path or always
    far = path(prices.host) * bool(prices.far(each.far))
    on_path = prices.ends(part, far, each.landing, each.cold)
    flight = prices.latency(path) + on_path.land
    own = link * max(path(prices.host), prices.inside(each.leaving)) / each.beside
    first = on_path.stage + on_path.send + flight + own
    all_sent = staged + each.messages * ends.send + flight + link / max(1, each.messages)
    several = max(work, all_sent) if each.messages > 1 else 0.0
    return max(first, several), max(link, work)


def _tree(tree: Tree, prices: Prices, segments: int) -> float:
    part = tree.nbytes / segments
    near = min(tree.depth, prices.host.bit_length() - 1) if tree.near else 0
    far = tree.depth - near
    way = near * _climb_and_descend(tree, prices, part, 0.0)
    way += far * _climb_and_descend(tree, prices, part, 1.0)
    up, down = _ends_of_tree(tree, prices, part, float(far > 0))
    work = tree.fan * (up.land + down.send) + down.stage
    work += tree.parents * (up.stage + up.send + down.land)
    return way + (segments - 1) * max(work, prices.link(part, tree.leaving))


def _ends_of_tree(tree: Tree, prices: Prices, part: float, far: float) -> tuple[Ends, Ends]:
    """The seconds of a message up and of one down: the first child's meets cold bytes."""
    up = prices.ends(part, far, "reduce", (0.0, 1 / tree.fan))
    return up, prices.ends(part, far, "copy", (0.0, float(tree.depth > 1)))


def _climb_and_descend(tree: Tree, prices: Prices, part: float, far: float) -> float:
    """The seconds in which one segment passes a level of a tree, up and down again."""

    def path(g: int) -> float:
        return 1.0 if far or g == 1 else 0.0

    up, down = _ends_of_tree(tree, prices, part, far)
    one = prices.link(part, path)
    wide = tree.fan * one
    if tree.near and far:  # all ranks of a host are at it at once
        wide = max(wide, prices.link(part, tree.leaving) * 2 / 3)
    more = tree.fan - 1
    latency = prices.latency(path)
    climb = up.stage + up.send + latency + max(wide, one + more * up.land) + up.land
    fall = down.stage + tree.fan * down.send + latency + max(one, wide - more * down.send)
    return climb + fall + down.land


def _parts(algorithm: str, nbytes: float, ranks: int, topology: Topology) -> list[RoundCost | Tree]:
    nested = _nested(algorithm)
    if nested is None:
        return list(_SHAPES[algorithm](nbytes, ranks))
    each = min(topology.per_host, ranks)
    hosts = -(-ranks // each)
    if ranks % each:
        raise InvalidArgument(
            f"ranks={ranks}: the closed form of {algorithm} needs hosts of {each} ranks each"
        )
    inner: list[RoundCost | Tree] = [*_SHAPES[nested[0]](nbytes, each)] if each > 1 else []
    outer: list[RoundCost | Tree] = [*_SHAPES[nested[1]](nbytes / each, hosts)] if hosts > 1 else []
    half = len(inner) // 2
    return [
        *map(_within, inner[:half]),
        *(_spread(part, each) for part in outer),
        *map(_within, inner[half:]),
    ]


def _within(part: RoundCost | Tree) -> RoundCost:
    """The same round in each of many hosts: nothing leaves one."""
    assert isinstance(part, RoundCost)
    leaving = part.leaving
    return replace(
        part,
        leaving=lambda g: leaving(1) if g == 1 else 0.0,
        far=lambda _: 0.0,
        path=lambda g: 1.0 if g == 1 else 0.0,
    )


def _spread(part: RoundCost | Tree, each: int) -> RoundCost:
    """A round between hosts, which `each` ranks of every host make at once."""
    assert isinstance(part, RoundCost)
    leaving, far, path = part.leaving, part.far, part.path
    return replace(
        part,
        leaving=lambda g: leaving(max(1, g // each)) * min(g, each),
        far=lambda _: far(1),
        path=None if path is None else lambda g: path(max(1, g // each)),
        beside=each,
    )


def _ring(nbytes: float, p: int) -> list[RoundCost]:
    def leaving(g: int) -> float:
        return 1.0 if g < p else 0.0

    def path(g: int) -> float:
        return 1 / g if g < p else 0.0

    def far(g: int) -> float:  # of a rank between two hosts: it sends to one, or lands from one
        return leaving(g) * (1.0 if g == 1 else 0.5)

    chunk = nbytes / p
    return [
        RoundCost(chunk, leaving, far, landing, times=times, path=path, cold=(first, 1.0))
        for landing, times, first in (
            ("reduce", 1, 1.0),
            ("reduce", p - 2, 0.0),
            ("first", 1, 0.0),
            ("copy", p - 2, 0.0),
        )
    ]


def _direct(nbytes: float, p: int) -> list[RoundCost]:
    def leaving(g: int) -> float:
        return float(g * (p - g)) if g < p else 0.0

    def far(g: int) -> float:
        return max(0, p - g) / (p - 1)

    return [
        RoundCost(nbytes / p, leaving, far, "reduce", p - 1, cold=(1.0, 1 / (p - 1))),
        RoundCost(nbytes / p, leaving, far, "first", p - 1, alike=True, cold=(0.0, 0.0)),
    ]


def _exchange(mask: int, p: int) -> tuple[Callable[[int], float], Callable[[int], float]]:
    """The messages that leave a group where each rank exchanges with the one `mask` away."""

    def far(g: int) -> float:
        if g >= p:
            return 0.0
        return 1.0 if mask >= g or g % (2 * mask) else 0.0

    def leaving(g: int) -> float:
        whole = g if mask >= g else min(g, 2 * mask)
        return far(g) * whole

    return leaving, far


def _folded(nbytes: float, p: int) -> tuple[int, list[RoundCost], list[RoundCost]]:
    """The power of two that takes part, and the rounds before and after it for the other ranks."""
    core = 1 << (p.bit_length() - 1)
    if core == p:
        return core, [], []

    def leaving(g: int) -> float:
        return 1.0 if g % 2 else 0.0

    before, after = (RoundCost(nbytes, leaving, leaving, each) for each in ("reduce", "copy"))
    return core, [before], [after]


def _halving_doubling(nbytes: float, p: int) -> list[RoundCost]:
    core, before, after = _folded(nbytes, p)
    masks = [core >> (i + 1) for i in range(core.bit_length() - 1)]

    def part(mask: int, landing: str, staged: bool, landed: bool) -> RoundCost:
        return RoundCost(nbytes * mask / core, *_exchange(mask, p), landing, cold=(staged, landed))

    down = [part(m, "reduce", m == masks[0], m == masks[0]) for m in masks]
    up = [part(m, "first" if m == 1 else "copy", False, m > 1) for m in reversed(masks)]
    return [*before, *down, *up, *after]


def _recursive_doubling(nbytes: float, p: int) -> list[RoundCost]:
    core, before, after = _folded(nbytes, p)
    masks = [1 << i for i in range(core.bit_length() - 1)]
    exchanges = [
        RoundCost(nbytes, *_exchange(m, p), "reduce", cold=(float(m == 1), 0.0)) for m in masks
    ]
    return [*before, *exchanges, *after]


def _binary_tree(nbytes: float, p: int) -> list[Tree]:
    passes = 3.0 if p >= 5 else float(min(2, p - 1))

    def leaving(g: int) -> float:
        return passes * min(g, max(0, p - g))

    return [Tree(nbytes, p.bit_length() - 1, min(2, p - 1), leaving, True, int(p >= 4))]


def _double_binary_tree(nbytes: float, p: int) -> list[Tree]:
    """Two trees that work at once; a block of neighbours joins the others by few edges of each."""
    passes = 2 * min(2.0, p / 2)

    def leaving(g: int) -> float:  # counted in schedules of 16 to 256 ranks
        if g >= p:
            return 0.0
        return passes * (1.0 if g == 1 else 1.5 if 2 * g >= p else 2.0 if g == 2 else 2.5)

    return [Tree(nbytes / 2, (p - 1).bit_length(), min(2, p - 1), leaving, parents=2)]


def _star(nbytes: float, p: int) -> list[Tree]:
    def leaving(g: int) -> float:
        return float(max(0, p - g))

    return [Tree(nbytes, 1, p - 1, leaving, parents=0)]


def _binomial_tree(nbytes: float, p: int) -> list[RoundCost]:
    """Whole arrays pass from child to parent, and from parent to child, without segments.

    It is the reduction tree of Iandola et al. 2016 (FireCaffe), fig. 4.
    """

    def leaving(g: int) -> float:
        return 1.0 if g < p else 0.0

    height = (p - 1).bit_length()
    return [RoundCost(nbytes, leaving, leaving, each, times=height) for each in ("reduce", "copy")]


_Shape = Callable[[float, int], "list[RoundCost] | list[Tree]"]
_SHAPES: dict[str, _Shape] = {
    "ring": _ring,
    "halving_doubling": _halving_doubling,
    "recursive_doubling": _recursive_doubling,
    "binary_tree": _binary_tree,
    "double_binary_tree": _double_binary_tree,
    "direct": _direct,
    "star": _star,
    BINOMIAL_TREE: _binomial_tree,
}
_HALVES = ("direct", "halving_doubling")
_IN_ROUNDS = ("ring", "halving_doubling", "recursive_doubling", "direct")
ALGORITHMS = tuple(each for each in _SHAPES if each != BINOMIAL_TREE)


def _nested(algorithm: str) -> tuple[str, str] | None:
    if not (algorithm.startswith("hierarchical(") and algorithm.endswith(")")):
        return None
    inner, _, outer = algorithm[len("hierarchical(") : -1].partition(",")
    return inner.strip(), outer.strip()


def frames_of(sizes: Sequence[float]) -> dict[float, int]:
    """The frames into which gradwire cuts the messages of a call, by their bytes.

    The smallest message is one chunk. (csrc/gradwire/schedule/cost.h: Cut)
    """
    largest, chunk = max(sizes), min(sizes)
    wanted = math.floor(largest / _SEGMENTS_WANTED)
    segments = max(1, math.ceil(largest / min(max(wanted, _LEAST_SEGMENT), _FRAME)))
    least = min(_LEAST_SLICE, largest / (2 * segments))
    slices = min(max(1, math.floor(chunk / least)), segments)
    return {size: min(segments, math.ceil(size / chunk * slices)) for size in sizes}


def growth_of(parameters: Mapping[str, float], nbytes: float) -> float:
    """The factor of far memory, linear in the octaves between the sizes that are known."""
    known = [1.0, *(parameters[f"far.{name}"] for name in _FAR)]
    sizes = np.log2([_NEAR, *_FAR.values()])
    return float(np.interp(math.log2(max(nbytes, _NEAR)), sizes, known))


def ratio_of(codec: str, nbytes: float) -> float:
    """The bytes of a payload over those of its array, as the core's model takes them."""
    elements = int(nbytes / 4) + 1
    return _core.Codec(codec).usual_bytes(elements) / (4 * elements)


def codec_costs_of(parameters: Mapping[str, float], codec: str) -> tuple[float, float]:
    """The seconds per byte of the array to encode and to decode it."""
    name = codec.partition(":")[0]
    name = name if f"{name}.encode" in parameters else "any"
    return parameters[f"{name}.encode"], parameters[f"{name}.decode"]

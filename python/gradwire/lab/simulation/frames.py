"""Messages of a schedule: those that each rank sends and lands, round by round.

It is csrc/gradwire/schedule/frames.h in Python, for networks that the core's simulator has not.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from gradwire._schedules.report import Edge
from gradwire._schedules.schedule import Schedule

_NEAR_ROUNDS = 1  # after which a chunk is no longer in a cache: csrc/gradwire/schedule/frames.cc
_LAG = 2  # ticks between the rounds of a segment: csrc/gradwire/schedule/frames.h


@dataclass
class Effort:
    """Seconds of a processor: with chunks that are far for it, and that are in a cache."""

    far: float = 0.0
    near: float = 0.0

    def seconds(self, growth: float) -> float:
        """Returns the sum; those of far chunks grow."""
        return self.far * growth + self.near


@dataclass
class Message:
    """All edges of a round from one rank to another: bytes on the wire, and what landing takes."""

    src: int
    dst: int
    wire: float = 0.0
    work: Effort = field(default_factory=Effort)
    staging: Effort = field(default_factory=Effort)
    content: list[Edge] = field(default_factory=list)


@dataclass
class Send:
    """Messages of one content, which are staged once: their numbers, and what staging takes."""

    work: Effort
    copies: list[int]


@dataclass(frozen=True)
class Costs:
    """Seconds per byte of the array: to move and to add it, and of a codec's two ways, if any."""

    move: float
    gamma: float
    codec: tuple[float, float] | None
    ratio: float


class Frames:
    """The messages of a schedule over an array of `nbytes`, on hosts of `per_host` ranks."""

    def __init__(self, schedule: Schedule, nbytes: float, per_host: int, costs: Costs) -> None:
        self.ranks = schedule.ranks
        self.rounds = len(schedule.rounds)
        self.messages: list[Message] = []
        self.sends: list[dict[int, list[Send]]] = []
        self.receives: list[dict[int, list[int]]] = []
        self._chunk = nbytes / schedule.chunks
        self._per_host = per_host
        self._costs = costs
        self._finished: set[tuple[int, int]] = set()  # rank and chunk
        self._touched: dict[tuple[int, int], int] = {}  # in which round last, by rank and chunk
        for edges in schedule.rounds:
            self._add_round(edges)

    def _add_round(self, edges: tuple[Edge, ...]) -> None:
        numbers: dict[tuple[int, int], int] = {}
        for edge in sorted(edges, key=lambda each: each.src):  # stable: list order for each source
            key = edge.src, edge.dst
            if key not in numbers:
                numbers[key] = len(self.messages)
                self.messages.append(Message(*key))
            self._stage(edge, self.messages[numbers[key]])
        for edge in edges:
            self._land(edge, self.messages[numbers[edge.src, edge.dst]])
        sends: dict[int, list[Send]] = defaultdict(list)
        latest: dict[tuple[int, int], Send] = {}  # by rank and first chunk
        for number in numbers.values():
            self._add_send(sends[self.messages[number].src], latest, number)
        receives: dict[int, list[int]] = defaultdict(list)
        for edge in edges:
            number = numbers[edge.src, edge.dst]
            if number not in receives[edge.dst]:
                receives[edge.dst].append(number)
        self.sends.append(dict(sends))
        self.receives.append(dict(receives))
        for edge in edges:
            if not edge.reduces:
                self._finished.update((edge.dst, chunk) for chunk in edge.chunks)

    def _stage(self, edge: Edge, message: Message) -> None:
        costs = self._costs
        message.content.append(edge)
        for chunk in edge.chunks:
            message.wire += self._chunk * costs.ratio
            if costs.codec is None:
                seconds = self._chunk * costs.move
            elif edge.reduces:
                seconds = self._chunk * costs.codec[0]
            else:
                seconds = self._hand_on(edge.src, chunk, costs.codec)
            self._touch(edge.src, chunk, seconds, message.staging)

    def _hand_on(self, rank: int, chunk: int, codec: tuple[float, float]) -> float:
        """The seconds to stage a finished chunk: who sends it first encodes and adopts it."""
        coded = 0.0 if (rank, chunk) in self._finished else self._chunk * sum(codec)
        self._finished.add((rank, chunk))
        return coded + self._chunk * self._costs.ratio * self._costs.move

    def _land(self, edge: Edge, message: Message) -> None:
        costs = self._costs
        if costs.codec is not None:
            each = costs.codec[1]
        else:
            each = costs.gamma if edge.reduces else costs.move
        for chunk in edge.chunks:
            self._touch(edge.dst, chunk, self._chunk * each, message.work)

    def _touch(self, rank: int, chunk: int, seconds: float, effort: Effort) -> None:
        """Books seconds of work on a chunk, as far or as near."""
        round = len(self.sends)
        last = self._touched.get((rank, chunk), -_NEAR_ROUNDS - 1)
        self._touched[rank, chunk] = round
        if round - last > _NEAR_ROUNDS:
            effort.far += seconds
        else:
            effort.near += seconds

    def _add_send(
        self, sends: list[Send], latest: dict[tuple[int, int], Send], number: int
    ) -> None:
        message = self.messages[number]
        key = message.src, message.content[0].chunks.start
        last = latest.get(key)
        if last is not None and self._is_alike(self.messages[last.copies[0]], message):
            last.copies.append(number)
            return
        latest[key] = Send(message.staging, [number])
        sends.append(latest[key])

    def _is_alike(self, one: Message, other: Message) -> bool:
        near = [each.src // self._per_host == each.dst // self._per_host for each in (one, other)]
        contents = ([(e.chunks, e.reduces) for e in each.content] for each in (one, other))
        first, second = contents
        return near[0] == near[1] and first == second


def wavefront(rounds: int, segments: int) -> list[tuple[int, int]]:
    """The order of all frames of a rank: pairs of round and segment."""
    places = [
        (segment + _LAG * each, segment, each)
        for each in range(rounds)
        for segment in range(segments)
    ]
    return [(each, segment) for _, segment, each in sorted(places)]

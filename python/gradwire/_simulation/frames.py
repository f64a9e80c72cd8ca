"""Messages of a schedule: those that each rank sends and lands, round by round.

It is csrc/gradwire/schedule/frames.h in Python, for networks that the core's simulator has not.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from gradwire._schedules.report import Edge
from gradwire._schedules.schedule import Schedule

_LAG = 2  # ticks between the rounds of a segment: csrc/gradwire/schedule/frames.h


@dataclass
class Message:
    """All edges of a round from one rank to another: bytes on the wire, and seconds to land."""

    src: int
    dst: int
    wire: float = 0.0
    work: float = 0.0
    staging: float = 0.0
    content: list[Edge] = field(default_factory=list)


@dataclass
class Send:
    """Messages of one content, which are staged once: their numbers, and the seconds of staging."""

    work: float
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
        for edges in schedule.rounds:
            self._add_round(edges)

    def _add_round(self, edges: tuple[Edge, ...]) -> None:
        numbers: dict[tuple[int, int], int] = {}
        for edge in sorted(edges, key=lambda each: each.src):  # stable: list order for each source
            key = edge.src, edge.dst
            if key not in numbers:
                numbers[key] = len(self.messages)
                self.messages.append(Message(*key))
            self._add_edge(edge, self.messages[numbers[key]])
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

    def _add_edge(self, edge: Edge, message: Message) -> None:
        size, costs = self._chunk * len(edge.chunks), self._costs
        message.wire += size * costs.ratio
        message.content.append(edge)
        if costs.codec is None:
            message.work += size * (costs.gamma if edge.reduces else costs.move)
            message.staging += size * costs.move
            return
        encode, decode = costs.codec
        message.work += size * decode
        message.staging += size * encode if edge.reduces else self._hand_on(edge)

    def _hand_on(self, edge: Edge) -> float:
        """The seconds to stage finished chunks: who sends one first encodes and adopts it."""
        encode, decode = self._costs.codec or (0.0, 0.0)
        seconds = 0.0
        for chunk in edge.chunks:
            if (edge.src, chunk) not in self._finished:
                seconds += self._chunk * (encode + decode)
            self._finished.add((edge.src, chunk))
            seconds += self._chunk * self._costs.ratio * self._costs.move
        return seconds

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

"""A simulation event by event on networks of several levels, in which one rank may be slow.

It follows csrc/gradwire/schedule/simulate.cc, without ranks that share cores and without bursts:
where both run, they give the same times. A message that leaves a rack takes the rack's uplink and
the other rack's downlink too; bits pass through. Where a rack has several uplinks, messages of
different hosts may meet on one while others are idle.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from gradwire.lab.simulation.frames import Frames, Message, Send, wavefront
from gradwire.lab.simulation.topology import Group, Topology, seconds_of_byte

_HEADER = 32.0
_NEVER = math.inf
_PROCEED = 1 << 62  # in place of a flight: the rank can go on
_MOST_FRAMES, _MOST_SEGMENTS = 8192, 16  # that are simulated; the time of more is extrapolated


@dataclass
class _Link:
    """One direction of a link: seconds per byte, latency, and the time from which it is free."""

    beta: float
    latency: float
    free: float = 0.0


class Network:
    """The links of a topology, and the processors' costs of messages on them."""

    def __init__(
        self,
        topology: Topology,
        parameters: Mapping[str, float],
        slow: float = 1.0,
        slow_rank: int = 0,
    ) -> None:
        self._topology = topology
        self._parameters = parameters
        self._slow, self._slow_rank = slow, slow_rank
        self._links: dict[tuple[str, int, int, int], _Link] = {}

    def fresh(self) -> Network:
        """The same network, all of whose links are free."""
        return Network(self._topology, self._parameters, self._slow, self._slow_rank)

    def factor(self, rank: int) -> float:
        """Returns how many times slower a rank's processor is."""
        return self._slow if rank == self._slow_rank else 1.0

    def is_near(self, message: Message) -> bool:
        """Returns whether a message stays on its host."""
        each = self._topology.per_host
        return message.src // each == message.dst // each

    def cost(self, message: Message, name: str) -> float:
        """The parameter "alpha" or "copy" of the message's way."""
        return self._parameters[f"{'within' if self.is_near(message) else 'between'}.{name}"]

    def path(self, message: Message) -> list[_Link]:
        """The links that a message takes, one after the other."""
        if self.is_near(message):
            beta, latency = (self._parameters[f"within.{name}"] for name in ("beta", "latency"))
            return [
                self._link("out", -1, message.src, beta, latency),
                self._link("in", -1, message.dst, beta, 0.0),
            ]
        crossed = [
            (level, each)
            for level, each in enumerate(self._topology.groups)
            if message.src // each.ranks != message.dst // each.ranks
        ]
        way = []
        for level, each in crossed:
            latency = (each.latency or 0.0) if level else self._parameters["between.latency"]
            beta, uplink = seconds_of_byte(each.rate) * each.uplinks, self._uplink(message, each)
            way.append(self._link("out", level, message.src // each.ranks, beta, latency, uplink))
        for level, each in reversed(crossed):
            beta, uplink = seconds_of_byte(each.rate) * each.uplinks, self._uplink(message, each)
            way.append(self._link("in", level, message.dst // each.ranks, beta, 0.0, uplink))
        return way

    def _uplink(self, message: Message, group: Group) -> int:
        """The uplink of a pair of hosts: by a hash, as switches choose equal ways (RFC 2992)."""
        hosts = [each // self._topology.per_host for each in (message.src, message.dst)]
        return zlib.crc32(b"%d %d" % (hosts[0], hosts[1])) % group.uplinks

    def _link(
        self, way: str, level: int, number: int, beta: float, latency: float, uplink: int = 0
    ) -> _Link:
        key = way, level, number, uplink
        if key not in self._links:
            members = 1 if level < 0 else self._topology.groups[level].ranks
            is_slow = level <= 0 and number == self._slow_rank // members
            self._links[key] = _Link(beta * (self._slow if is_slow else 1.0), latency)
        return self._links[key]


@dataclass
class _State:
    """A rank: its sends and receives in order, the next of each, and what it waits for."""

    sends: list[tuple[int, int, Send]]
    receives: list[tuple[int, int, int]]
    sent: list[int]
    landed: list[int]
    sent_before: list[int]
    received_before: list[int]
    next_send: int = 0
    next_receive: int = 0
    lands_next: bool = False
    awaits: int = -1
    asleep_since: float = 0.0


class _Simulation:
    def __init__(
        self, frames: Frames, network: Network, growth: float, call: float, parts: int, count: int
    ) -> None:
        self._frames, self._network = frames, network
        self._growth, self._parts, self._count = growth, parts, count
        self._paths = [network.path(each) for each in frames.messages]
        self._arrivals = [_NEVER] * (len(frames.messages) * count)
        self._ends = [0.0] * len(self._arrivals)  # when the last bit has passed the last link
        self._states = [_state(frames, rank, count) for rank in range(frames.ranks)]
        self._events = [(call, rank, _PROCEED, 0) for rank in range(frames.ranks)]
        self._last = call

    def run(self) -> float:
        """The time at which the last rank has finished."""
        heapq.heapify(self._events)
        while self._events:
            time, rank, flight, hop = heapq.heappop(self._events)
            if flight == _PROCEED:
                self._proceed(rank, time)
            else:
                self._pass(flight, hop, time)
        return self._last

    def _proceed(self, rank: int, time: float) -> None:
        state = self._states[rank]
        while True:
            send, receive = self._next_send(state), self._next_receive(state)
            lands = receive is not None and self._arrivals[receive] <= time
            if lands and receive is not None and (send is None or state.lands_next):
                time = self._land(state, receive, time)
            elif send is not None:
                time = self._stage(rank, state, send, time)
            else:
                break
            self._last = max(self._last, time)
            if self._events and self._events[0] < (time, rank, _PROCEED, 0):
                heapq.heappush(self._events, (time, rank, _PROCEED, 0))
                return
        if receive is None:
            return
        if self._arrivals[receive] < _NEVER:
            heapq.heappush(self._events, (max(self._arrivals[receive], time), rank, _PROCEED, 0))
        else:
            state.awaits, state.asleep_since = receive, time

    def _next_send(self, state: _State) -> Send | None:
        if state.next_send == len(state.sends):
            return None
        round, segment, send = state.sends[state.next_send]
        return send if state.landed[segment] >= state.received_before[round] else None

    def _next_receive(self, state: _State) -> int | None:
        if state.next_receive == len(state.receives):
            return None
        round, segment, message = state.receives[state.next_receive]
        ready = state.sent[segment] >= state.sent_before[round + 1]
        return message * self._count + segment if ready else None

    def _bytes(self, message: Message) -> float:
        return message.wire / self._parts + _HEADER

    def _stage(self, rank: int, state: _State, send: Send, time: float) -> float:
        _, segment, _ = state.sends[state.next_send]
        factor = self._network.factor(rank)
        time += factor * send.work.seconds(self._growth) / self._parts
        for number in send.copies:
            message = self._frames.messages[number]
            copy = self._network.cost(message, "copy") * self._bytes(message)
            time += factor * (self._network.cost(message, "alpha") + copy)
            self._pass(number * self._count + segment, 0, time)
        state.sent[segment] += 1
        state.next_send += 1
        state.lands_next = True
        return time

    def _pass(self, flight: int, hop: int, time: float) -> None:
        """Lets the first bit of a flight enter a link of its path."""
        message = self._frames.messages[flight // self._count]
        path = self._paths[flight // self._count]
        link = path[hop]
        start = max(time, link.free)
        link.free = start + self._bytes(message) * link.beta
        self._ends[flight] = max(self._ends[flight], link.free) + link.latency
        if hop + 1 < len(path) and path[hop + 1].beta > 0:
            heapq.heappush(self._events, (start + link.latency, message.dst, flight, hop + 1))
        else:
            self._arrive(flight, message.dst)

    def _arrive(self, flight: int, rank: int) -> None:
        self._arrivals[flight] = time = self._ends[flight]
        state = self._states[rank]
        if state.awaits == flight:
            state.awaits = -1
            heapq.heappush(self._events, (max(time, state.asleep_since), rank, _PROCEED, 0))

    def _land(self, state: _State, flight: int, time: float) -> float:
        message = self._frames.messages[flight // self._count]
        seconds = self._network.cost(message, "alpha")
        seconds += self._network.cost(message, "copy") * self._bytes(message)
        seconds += message.work.seconds(self._growth) / self._parts
        state.landed[flight % self._count] += 1
        state.next_receive += 1
        state.lands_next = False
        return time + self._network.factor(message.dst) * seconds


def _state(frames: Frames, rank: int, segments: int) -> _State:
    sends: list[tuple[int, int, Send]] = []
    receives: list[tuple[int, int, int]] = []
    for round, segment in wavefront(frames.rounds, segments):
        sends += [(round, segment, each) for each in frames.sends[round].get(rank, ())]
        receives += [(round, segment, each) for each in frames.receives[round].get(rank, ())]
    sent, received = [0], [0]
    for round in range(frames.rounds):
        sent.append(sent[-1] + len(frames.sends[round].get(rank, ())))
        received.append(received[-1] + len(frames.receives[round].get(rank, ())))
    return _State(sends, receives, [0] * segments, [0] * segments, sent, received)


def _busiest(frames: Frames, network: Network, growth: float, segments: int) -> float:
    """The seconds that the busiest processor or link works, whatever waits for what."""
    ranks: dict[int, float] = defaultdict(float)
    links: dict[int, float] = defaultdict(float)
    for sends in frames.sends:
        for rank, own in sends.items():
            ranks[rank] += sum(each.work.seconds(growth) for each in own)
    for message in frames.messages:
        wire = message.wire + segments * _HEADER
        each = segments * network.cost(message, "alpha")
        each += network.cost(message, "copy") * wire
        ranks[message.src] += each
        ranks[message.dst] += each + message.work.seconds(growth)
        for link in network.path(message):
            links[id(link)] += link.beta * wire
    processors = (seconds * network.factor(rank) for rank, seconds in ranks.items())
    return max(*processors, *links.values(), 0.0)


def seconds(frames: Frames, network: Network, growth: float, call: float, segments: int) -> float:
    """The seconds of one call, its messages cut into `segments`.

    Few of many segments are simulated, and the time of the others is extrapolated, at no more than
    the pace of the busiest processor or link.
    """
    room = _MOST_FRAMES // max(1, len(frames.messages))
    most = min(max(room, 2), _MOST_SEGMENTS)

    def simulated(count: int) -> float:
        return _Simulation(frames, network.fresh(), growth, call, segments, count).run()

    if segments <= most:
        return simulated(segments)
    some, more = simulated(most // 2), simulated(most)
    pace = _busiest(frames, network.fresh(), growth, segments) / segments
    return more + max((more - some) / (most - most // 2), pace) * (segments - most)

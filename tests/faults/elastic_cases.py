"""Random cases of elastic jobs: who dies, stops or joins, and when."""

from __future__ import annotations

import random
from dataclasses import dataclass

TRANSPORTS = (("shm",), ("tcp",), ("shm", "tcp"))
# kind -> how often
KINDS = {
    "kill": 4,  # SIGKILL of a member
    "crash": 1,  # SIGSEGV
    "pause": 2,  # SIGSTOP, shorter than any deadline
    "stop": 1,  # SIGSTOP until the others have gone on
    "join": 5,  # a process joins
    "join and die": 2,  # one that dies when it has sent so many messages of the resize
    "die in a resize": 2,  # a member that does, when another process joins
}
_LONGEST = 0.15  # seconds between two events


@dataclass(frozen=True)
class Event:
    """One thing that happens to the job."""

    kind: str
    pick: int  # of the living members, in the order of their start
    delay: float  # seconds after the event before
    point: int  # messages until death; hundredths of a second of a pause


@dataclass(frozen=True)
class Case:
    """One job: so many ranks at first, and events."""

    seed: int
    number: int
    transports: tuple[str, ...]
    ranks: int
    events: tuple[Event, ...]
    least: int | None = 1  # ranks that go on; None: a majority of those before

    @property
    def timeout(self) -> float:
        """The limit of calls, in seconds: short where ranks are to wait for it."""
        return 3.0 if any(each.kind == "stop" for each in self.events) else 60.0


def make_case(seed: int, number: int) -> Case:
    """Makes the same case for the same numbers, on every machine."""
    dice = random.Random(f"{seed}/{number}")

    def event() -> Event:
        kind = dice.choices(list(KINDS), list(KINDS.values()))[0]
        delay = dice.choice((0.0, dice.uniform(0, 0.01), dice.uniform(0, _LONGEST)))
        return Event(kind, dice.randrange(100), delay, dice.randrange(10))

    events = tuple(event() for _ in range(dice.randrange(1, 5)))
    transports, ranks = dice.choice(TRANSPORTS), dice.randrange(1, 5)
    return Case(seed, number, transports, ranks, events, dice.choice((1, None)))

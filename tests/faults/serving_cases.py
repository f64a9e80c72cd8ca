"""Random cases of the parameter server: who fails, in which phase, over which transport."""

from __future__ import annotations

import random
from dataclasses import dataclass

SHARDS = 2
CLIENTS = 3  # the first one is the actor: it is in the phase, and fails where a client does
PHASES = ("joining", "idle", "push", "pull", "snapshot")
TRANSPORTS = ("shm", "tcp")
# kind -> (how often, who can be faulty)
KINDS: dict[str, tuple[int, tuple[str, ...]]] = {
    "none": (1, ("client",)),
    "kill": (4, ("client", "server")),  # SIGKILL
    "crash": (2, ("client", "server")),  # SIGSEGV
    "stop": (3, ("client", "server")),  # SIGSTOP, until the others have noticed or gone on
    "late": (2, ("client",)),  # one more client joins
    "restart": (3, ("server",)),  # SIGKILL, then another server goes on; clients reconnect
}
_SIZES = (10, 60_000, 1_500_000)  # elements


@dataclass(frozen=True)
class Case:
    """One job: two servers of a shard each, and clients that push ones and pull."""

    seed: int
    number: int
    kind: str
    faulty: str  # "client" or "server"
    shard: int  # of the faulty server
    phase: str  # of the actor, when it happens
    delay: float  # seconds after the phase began
    transport: str
    size: int
    atomic: bool
    first: bool  # the actor brings the initial values

    @property
    def timeout(self) -> float:
        """The limit of calls, in seconds: short where clients are to wait for it."""
        return 4.0 if (self.kind, self.faulty) == ("stop", "server") else 60.0


def make_case(seed: int, number: int) -> Case:
    """Makes the same case for the same numbers, on every machine."""
    rng = random.Random(f"{seed}/{number}")
    kind = rng.choices(list(KINDS), [often for often, _ in KINDS.values()])[0]
    faulty = rng.choice(KINDS[kind][1])
    phase = rng.choice(PHASES)
    # A client that is stopped with the initial values in hand holds up those that wait for them.
    first = faulty == "client" and kind != "stop" and rng.random() < 0.5
    return Case(
        seed,
        number,
        kind,
        faulty,
        rng.randrange(SHARDS),
        phase,
        rng.choice((0.0, rng.uniform(0, 0.003), rng.uniform(0, 0.03))),
        rng.choice(TRANSPORTS),
        rng.choice(_SIZES),
        rng.random() < 0.5,
        first,
    )

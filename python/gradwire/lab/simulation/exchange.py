"""Seconds of one all_reduce: by events where the schedule is small, else by a closed form."""

from __future__ import annotations

from collections.abc import Callable

from gradwire import _core
from gradwire._errors import InvalidArgument, ScheduleError
from gradwire._model import CostModel
from gradwire._schedules.schedule import BINOMIAL_TREE, Schedule, groups_of
from gradwire.lab.simulation import closed_forms
from gradwire.lab.simulation.topology import Topology, seconds_of_byte

EVENTS, CLOSED_FORM = "events", "closed form"
MOST_MESSAGES = 400_000  # of a schedule whose events are simulated
_TREE_RANKS = 2048  # of a tree whose events say by how much its closed form is off
_MOST_RANKS = 1 << 15  # of any schedule: csrc/gradwire/schedule/rules.h
_SLOWEST = 1000.0


def seconds(
    algorithm: str | Schedule,
    nbytes: float,
    ranks: int,
    topology: Topology,
    model: CostModel,
    *,
    codec: str = "none",
    slow: float = 1.0,
    most_messages: int = MOST_MESSAGES,
) -> tuple[float, str]:
    """The seconds of one all_reduce, and how they were found: EVENTS or CLOSED_FORM.

    `model` is the topology's. Rank 0 is `slow` times slower than the others, with its host's link;
    closed forms take all ranks to wait for it in every round. Raises InvalidArgument for what
    neither covers.
    """
    _check(algorithm, codec, slow)
    why = _why_no_events(algorithm, ranks, topology, most_messages)
    if why is None:
        schedule = _schedule(algorithm, ranks, topology)
        return _by_events(schedule, nbytes, topology, model, codec, slow), EVENTS
    name = algorithm.name if isinstance(algorithm, Schedule) else algorithm
    if isinstance(algorithm, Schedule) or not closed_forms.is_covered(algorithm):
        raise InvalidArgument(f"{name!r:.80} has no closed form, and {why}")
    if topology.collides:
        raise InvalidArgument(
            f"{name!r:.80}: no closed form knows on which uplinks messages meet, and {why}; leave "
            "out the number of uplinks"
        )
    slower = slowed(model, topology, slow)
    found = closed_forms.seconds(algorithm, nbytes, ranks, *slower, codec)
    if (
        algorithm in _TREES
        and ranks > _TREE_RANKS
        and messages(algorithm, _TREE_RANKS, 1) <= most_messages
    ):
        found *= _of_smaller_tree(algorithm, nbytes, topology, model, codec, slow)
    return found, CLOSED_FORM


def _of_smaller_tree(
    algorithm: str, nbytes: float, topology: Topology, model: CostModel, codec: str, slow: float
) -> float:
    """Time by events over that by the closed form, which hardly changes from here on."""
    events_took, _ = seconds(
        algorithm, nbytes, _TREE_RANKS, topology, model, codec=codec, slow=slow
    )
    slower = slowed(model, topology, slow)
    return events_took / closed_forms.seconds(algorithm, nbytes, _TREE_RANKS, *slower, codec)


def _check(algorithm: str | Schedule, codec: str, slow: float) -> None:
    if codec != "none" and isinstance(algorithm, str) and "recursive_doubling" in algorithm:
        raise InvalidArgument(
            f"recursive_doubling adds a sum twice, so it cannot sum in codec {codec!r}: take "
            "halving_doubling"
        )
    if not 1 <= slow <= _SLOWEST:
        raise InvalidArgument(f"slow={slow} is not from 1 to {_SLOWEST:g}")


def _schedule(algorithm: str | Schedule, ranks: int, topology: Topology) -> Schedule:
    if isinstance(algorithm, Schedule):
        return algorithm
    hosts = groups_of(ranks, min(topology.per_host, ranks))
    try:
        return Schedule.generate(algorithm, ranks, groups=hosts)
    except ScheduleError as error:
        raise InvalidArgument(str(error)) from error


def _by_events(
    schedule: Schedule,
    nbytes: float,
    topology: Topology,
    model: CostModel,
    codec: str,
    slow: float,
) -> float:
    """The seconds by the core, which simulates every message."""
    each = min(topology.per_host, schedule.ranks)
    beyond = topology.levels[1:] if topology.narrow and schedule.ranks > each else ()
    levels = [
        (group.ranks, seconds_of_byte(group.rate), group.latency or 0.0, group.uplinks)
        for group in beyond
    ]
    hosts, by = groups_of(schedule.ranks, each), _core.Codec(codec)
    return model._core.predict(schedule._core, nbytes, hosts, by, levels=levels, slow=slow)


def slowed(model: CostModel, topology: Topology, factor: float) -> tuple[Topology, CostModel]:
    """The network and the model of ranks whose processors and hosts' links are slower."""
    if factor == 1:
        return topology, model
    same = ("cores", "sharing", "within.latency", "between.latency", "turn")
    parameters = {
        name: value
        if name in same or name.startswith("far.") or name.endswith(".burst")
        else value * factor
        for name, value in model.parameters.items()
    }
    return topology.slowed(factor), CostModel(parameters)


def _why_no_events(
    algorithm: str | Schedule, ranks: int, topology: Topology, most_messages: int
) -> str | None:
    if algorithm == BINOMIAL_TREE:
        return "it sends whole arrays"
    if ranks > _MOST_RANKS:
        return f"schedules have at most {_MOST_RANKS:,} ranks"
    if isinstance(algorithm, Schedule):
        count = sum(map(len, algorithm.rounds))
    else:
        count = messages(algorithm, ranks, min(topology.per_host, ranks))
    if count > most_messages:
        return f"its {count:,} messages are more than the {most_messages:,} that are simulated"
    return None


def messages(algorithm: str, ranks: int, per_host: int) -> int:
    """The number of messages of a schedule, roughly."""
    if algorithm.startswith("hierarchical("):
        inner, _, outer = algorithm[len("hierarchical(") :].removesuffix(")").partition(",")
        hosts = -(-ranks // per_host)
        between = messages(outer, hosts, 1) * per_host
        return hosts * messages(inner, per_host, per_host) + between
    of = _MESSAGES.get(algorithm)
    return 2 * ranks * ranks if of is None else of(ranks)


_TREES = ("binary_tree", "double_binary_tree")
_MESSAGES: dict[str, Callable[[int], int]] = {
    "halving_doubling": lambda p: 2 * p * p.bit_length(),
    "recursive_doubling": lambda p: p * p.bit_length(),
    "binary_tree": lambda p: 2 * p,
    "double_binary_tree": lambda p: 4 * p,
    "star": lambda p: 2 * p,
}


def algorithms(ranks: int, per_host: int, codec: str = "none") -> list[str]:
    """The algorithms that can sum in this codec on these hosts, those that `auto` tries."""
    lossy = codec != "none"
    names = [
        each for each in closed_forms.ALGORITHMS if not (lossy and each == "recursive_doubling")
    ]
    if 1 < per_host < ranks and ranks % per_host == 0:
        names += [f"hierarchical(direct,{each})" for each in ("ring", "halving_doubling", "direct")]
    return names


def check_codec(codec: str) -> str:
    """Checks a codec's specification; raises InvalidArgument."""
    _core.Codec(codec)
    return codec

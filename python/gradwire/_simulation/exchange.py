"""Seconds of one all_reduce: by events where the schedule is small, else by a closed form."""

from __future__ import annotations

from collections.abc import Callable

from gradwire import _core
from gradwire._errors import InvalidArgument, ScheduleError
from gradwire._model import CostModel
from gradwire._schedules.schedule import Schedule
from gradwire._simulation import closed_forms
from gradwire._simulation.topology import Topology

EVENTS, CLOSED_FORM = "events", "closed form"
MOST_MESSAGES = 400_000  # of a schedule whose events are simulated
_MOST_RANKS = 1 << 15  # of any schedule: csrc/gradwire/schedule/rules.h


def seconds(
    algorithm: str | Schedule,
    nbytes: float,
    ranks: int,
    topology: Topology,
    model: CostModel,
    *,
    codec: str = "none",
    most_messages: int = MOST_MESSAGES,
) -> tuple[float, str]:
    """The seconds of one all_reduce, and how they were found: EVENTS or CLOSED_FORM.

    `model` is the topology's. Events know hosts and the links between them, but no racks whose
    links limit the hosts'. Raises InvalidArgument for what neither covers.
    """
    _require_in_tree(algorithm, codec)
    why = _why_no_events(algorithm, ranks, topology, most_messages)
    if why is None:
        return _by_events(algorithm, nbytes, ranks, topology, model, codec), EVENTS
    if isinstance(algorithm, Schedule):
        raise InvalidArgument(f"schedule {algorithm.name!r:.80} has no closed form, and {why}")
    if not closed_forms.is_covered(algorithm):
        raise InvalidArgument(f"{algorithm!r:.80} has no closed form, and {why}")
    return closed_forms.seconds(algorithm, nbytes, ranks, topology, model, codec), CLOSED_FORM


def _require_in_tree(algorithm: str | Schedule, codec: str) -> None:
    if codec != "none" and isinstance(algorithm, str) and "recursive_doubling" in algorithm:
        raise InvalidArgument(
            f"recursive_doubling adds a sum twice, so it cannot sum in codec {codec!r}: take "
            "halving_doubling"
        )


def _by_events(
    algorithm: str | Schedule,
    nbytes: float,
    ranks: int,
    topology: Topology,
    model: CostModel,
    codec: str,
) -> float:
    per_host = min(topology.per_host, ranks)
    try:
        return model.predict(algorithm, nbytes, ranks, per_host=per_host, codec=codec)
    except ScheduleError as error:
        raise InvalidArgument(str(error)) from error


def _why_no_events(
    algorithm: str | Schedule, ranks: int, topology: Topology, most_messages: int
) -> str | None:
    if algorithm == closed_forms.BINOMIAL_TREE:
        return "it is no schedule"
    if topology.narrow and ranks > topology.per_host:
        return "events know no links of racks"
    if isinstance(algorithm, Schedule):
        return None
    if ranks > _MOST_RANKS:
        return f"schedules have at most {_MOST_RANKS:,} ranks"
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

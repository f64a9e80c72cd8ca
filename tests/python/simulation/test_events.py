"""The simulation of events on racks, with several uplinks, and with a slow rank."""

from __future__ import annotations

import pytest
from gradwire import InvalidArgument, Schedule
from gradwire.lab.simulation import closed_forms, exchange
from gradwire.lab.simulation.exchange import EVENTS
from gradwire.lab.simulation.topology import flat, parse

RACKS = parse("2 per host, 10gbit, 20us; 4 hosts a rack, oversubscription 4, 2us")


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "direct", "recursive_doubling"])
def test_closed_forms_are_near_on_racks(algorithm: str) -> None:
    model = RACKS.model()
    for nbytes in (1 << 16, 4 << 20):
        events, how = exchange.seconds(algorithm, nbytes, 32, RACKS, model)
        assert how == EVENTS
        form = closed_forms.seconds(algorithm, nbytes, 32, RACKS, model)
        assert form == pytest.approx(events, rel=0.3), nbytes


def test_racks_slow_what_crosses_them() -> None:
    full = parse("2 per host, 10gbit, 20us; 4 hosts a rack")
    one, _ = exchange.seconds("direct", 32e6, 32, full, full.model())
    other, _ = exchange.seconds("direct", 32e6, 32, RACKS, RACKS.model())
    assert other > 2.5 * one


def test_messages_meet_on_one_of_several_uplinks() -> None:
    """One flow has one uplink; many flows share all of them, but not evenly."""
    one = parse("1 per host, 10gbit, 20us; 1 hosts a rack")
    four = parse("1 per host, 10gbit, 20us; 1 hosts a rack, 4 uplinks")
    whole, _ = exchange.seconds("direct", 32e6, 2, one, one.model())
    quarter, how = exchange.seconds("direct", 32e6, 2, four, four.model())
    assert how == EVENTS
    assert quarter / whole == pytest.approx(4, rel=0.25)
    many = parse("2 per host, 10gbit, 20us; 4 hosts a rack, oversubscription 4, 2us, 8 uplinks")
    for algorithm, least, most in (("direct", 1.1, 2.0), ("ring", 7.0, 8.1)):
        shared, _ = exchange.seconds(algorithm, 32e6, 32, RACKS, RACKS.model())
        meeting, _ = exchange.seconds(algorithm, 32e6, 32, many, many.model())
        assert least * shared < meeting < most * shared, algorithm


def test_uplinks_are_simulated_by_events_only() -> None:
    many = parse("1 per host, 10gbit; 32 hosts a rack, 4 uplinks")
    with pytest.raises(
        InvalidArgument, match=r"on which uplinks messages meet, and its .* messages"
    ):
        exchange.seconds("direct", 1e6, 4096, many, many.model())


def test_a_slow_leaf_costs_a_tree_less_than_a_slow_root() -> None:
    """Rank 0 is the root of a tree, and waits for nobody in a ring."""
    topology = flat("1gbit,20us")
    model = topology.model()
    for algorithm in ("ring", "binary_tree", "halving_doubling"):
        plain, _ = exchange.seconds(algorithm, 4e6, 16, topology, model)
        slow, how = exchange.seconds(algorithm, 4e6, 16, topology, model, slow=4.0)
        every = exchange.slowed(model, topology, 4.0)
        bound = closed_forms.seconds(algorithm, 4e6, 16, *every)
        assert how == EVENTS
        assert 1.5 * plain < slow < 1.4 * bound, algorithm


def test_a_users_schedule_runs_on_racks() -> None:
    mine = Schedule.parse(Schedule.generate("ring", 32).dump())
    found, how = exchange.seconds(mine, 1e6, 32, RACKS, RACKS.model())
    named, _ = exchange.seconds("ring", 1e6, 32, RACKS, RACKS.model())
    assert (found, how) == (named, EVENTS)


def test_schedules_without_closed_form_have_a_limit() -> None:
    with pytest.raises(InvalidArgument, match=r"no closed form, and its .* messages are more than"):
        exchange.seconds(
            Schedule.generate("ring", 32), 1e6, 32, RACKS, RACKS.model(), most_messages=1000
        )

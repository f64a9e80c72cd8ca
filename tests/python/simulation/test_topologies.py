"""Topologies: their text, and what limits their ranks."""

from __future__ import annotations

import pytest
from gradwire import CostModel, InvalidArgument
from gradwire.lab.simulation.topology import flat, parse


def test_levels_are_read_from_the_inside_out() -> None:
    found = parse(
        "8 per host, 400gbit, 5us; 32 hosts a rack, oversubscription 4, 1us; "
        "16 racks per hall, 2tbit"
    )
    assert [each.name for each in found.levels] == ["host", "rack", "hall"]
    assert [each.ranks for each in found.levels] == [8, 256, 4096]
    assert [each.rate for each in found.levels] == [400e9, 3.2e12, 2e12]
    assert found.levels[2].latency is None
    assert [each.latency for each in found.levels[:2]] == pytest.approx([5e-6, 1e-6])
    assert found.per_host == 8


def test_an_oversubscription_can_be_a_ratio() -> None:
    one = parse("1 per host, 10gbit; 40 hosts a rack, 2:1")
    assert one == parse("1 per host, 10gbit; 40 hosts a rack, 200gbit")
    assert one.narrow


def test_full_racks_are_not_narrow() -> None:
    assert not parse("4 per host, 10gbit; 40 hosts a rack").narrow
    assert parse("4 per host, 10gbit; 40 hosts a rack, 1us").narrow


def test_the_model_has_the_hosts_links() -> None:
    parameters = flat("1gbit,70us", 4, "8gbit").model(CostModel()).parameters
    assert parameters["between.beta"] == pytest.approx(8e-9 * 1514 / 1448)
    assert parameters["between.latency"] == 7e-5
    assert parameters["within.beta"] == 1e-9
    assert parameters["cores"] >= 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no level"),
        ("hosts", "no level"),
        ("0 per host, 1gbit", "no level"),
        ("9" * 5000 + " per host, 1gbit", "no level"),
        ("8 per host, 1gbit; 4 hosts a rack, 1.2.3:1", "a time"),
        ("8 per host", "lacks the rate"),
        ("8 per host, -1gbit", "positive"),
        ("8 per host, 0gbit", "positive"),
        ("8 per host, infgbit", "positive"),
        ("8 per host, 1gbit, soon", "a time"),
        ("8 per host, 1gbit; 4 hosts a rack, oversubscription 0.5", "at least 1"),
        ("8 per host, oversubscription 2", "of a group of hosts"),
        ("8 per host, 1gbit, 2 uplinks", "a group of hosts has 1 uplink or more"),
        ("8 per host, 1gbit; 4 hosts a rack, 0 uplinks", "a group of hosts has 1 uplink or more"),
        ("8 per host, 1gbit; 4 hosts a rack, inside 5gbit", "a rate|a time"),
    ],
)
def test_what_is_no_topology_is_refused(text: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        parse(text)

"""Which address a rank listens on, and what it says where none will do."""

from __future__ import annotations

import pytest
from gradwire import _interfaces
from gradwire._errors import RendezvousError
from gradwire._interfaces import Interface, address_towards, choose, interfaces, matches

LO = Interface("lo", "127.0.0.1")
ETH = Interface("eth0", "192.0.2.7")
IB = Interface("ib0", "198.51.100.7")


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_interfaces, "interfaces", lambda: [LO, ETH, IB])


@pytest.mark.parametrize(
    ("pattern", "chosen"),
    [
        ("eth", {"eth0", "eth10"}),
        ("eth,ib", {"eth0", "eth10", "ib0"}),
        ("=eth0", {"eth0"}),
        ("=eth0,ib0", {"eth0", "ib0"}),
        ("=eth", set()),
        ("^docker,lo", {"eth0", "eth10", "ib0"}),
        ("^=eth0", {"eth10", "ib0", "lo", "docker0"}),
    ],
)
def test_patterns_select_as_in_nccl(pattern: str, chosen: set[str]) -> None:
    names = ["lo", "eth0", "eth10", "ib0", "docker0"]
    assert {name for name in names if matches(name, pattern)} == chosen


def test_loopback_is_among_this_machines_interfaces() -> None:
    found = [each for each in interfaces() if each.address == "127.0.0.1"]
    assert len(found) == 1
    assert found[0].loopback


def test_the_address_towards_loopback_is_loopback() -> None:
    assert address_towards("127.0.0.1", 9) == "127.0.0.1"


def test_a_host_that_does_not_exist_is_an_error_that_names_it() -> None:
    with pytest.raises(RendezvousError, match=r"'no-such-host\.invalid'"):
        address_towards("no-such-host.invalid", 9)


@pytest.mark.usefixtures("three")
def test_the_default_is_the_address_that_reaches_the_store() -> None:
    choice = choose("198.51.100.7", pattern=None, several_hosts=True)
    assert str(choice) == "ib0 (198.51.100.7): it reaches the store"


@pytest.mark.usefixtures("three")
def test_a_local_store_means_loopback() -> None:
    assert choose(None, pattern=None, several_hosts=False).interface == LO


@pytest.mark.usefixtures("three")
def test_a_store_on_this_host_does_not_mean_loopback_when_ranks_are_elsewhere() -> None:
    choice = choose("127.0.1.1", pattern=None, several_hosts=True)
    assert choice.interface == ETH
    assert "some ranks are not" in choice.reason


@pytest.mark.usefixtures("three")
def test_a_pattern_wins_and_prefers_what_reaches_the_store() -> None:
    assert choose("198.51.100.7", pattern="eth", several_hosts=True).interface == ETH
    assert choose("198.51.100.7", pattern="^docker", several_hosts=True).interface == IB
    assert choose("203.0.113.1", pattern="^docker", several_hosts=False).interface == ETH


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize(("pattern", "why"), [("wlan", "nothing"), ("lo", "only loopback")])
def test_a_pattern_that_fits_nothing_usable_lists_what_there_is(pattern: str, why: str) -> None:
    with pytest.raises(RendezvousError, match=f"{why}.*eth0, ib0, lo"):
        choose("192.0.2.7", pattern=pattern, several_hosts=True)


def test_a_host_with_loopback_only_cannot_serve_other_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_interfaces, "interfaces", lambda: [LO])
    with pytest.raises(RendezvousError, match="no interface but loopback"):
        choose("127.0.0.1", pattern=None, several_hosts=True)

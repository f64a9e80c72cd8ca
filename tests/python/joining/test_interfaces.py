"""The address that a rank listens on, what ranks learn of it, and errors when none will do."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import pytest
from gradwire._bootstrap.endpoints import require_route
from gradwire._bootstrap.mesh import AddressInfo, choose_transport, unpack_address_info
from gradwire._bootstrap.rendezvous import choose_transports
from gradwire._errors import InvalidArgument, RendezvousError
from gradwire._host import interfaces as _interfaces
from gradwire._host.interfaces import Choice, Interface, address_towards, interfaces, matches
from gradwire._host.transport_kinds import DEFAULTS

LO = Interface("lo", "127.0.0.1")
ETH = Interface("eth0", "192.0.2.7")
IB = Interface("ib0", "198.51.100.7")
DOCKER = Interface("docker0", "172.17.0.1")


def choose(towards: str | None, *, pattern: str | None, **hosts: Any) -> Choice:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GRADWIRE_SOCKET_IFNAME", raising=False)
        if pattern is not None:
            patch.setenv("GRADWIRE_SOCKET_IFNAME", pattern)
        return _interfaces.choose(towards, **hosts)


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
@pytest.mark.parametrize("towards", ["127.0.0.1", "127.0.1.1", "::1"])
def test_ranks_of_one_host_use_the_loopback_address_that_reaches_the_store(towards: str) -> None:
    choice = choose(towards, pattern=None, several_hosts=False)
    assert str(choice) == f"lo ({towards}): all ranks are on this host"
    outer = choose("192.0.2.7", pattern=None, several_hosts=False)
    assert outer.interface == LO


@pytest.mark.usefixtures("three")
def test_on_the_stores_host_it_is_the_address_at_which_others_reach_it() -> None:
    choice = choose("127.0.1.1", pattern=None, several_hosts=True, reached=["198.51.100.7"])
    assert (
        str(choice)
        == "ib0 (198.51.100.7): other hosts reach the store, which is on this one, at it"
    )


def with_interfaces(monkeypatch: pytest.MonkeyPatch, *found: Interface, default: str = "") -> None:
    monkeypatch.setattr(_interfaces, "interfaces", lambda: list(found))
    monkeypatch.setattr(_interfaces, "_default_sources", lambda: iter([default]))


def test_without_any_hint_it_is_the_address_of_the_default_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_interfaces(monkeypatch, LO, DOCKER, ETH, IB, default="198.51.100.7")
    choice = choose("127.0.1.1", pattern=None, several_hosts=True)
    assert choice.interface == IB
    assert "default route" in choice.reason


def test_without_a_default_route_it_is_no_bridge_for_containers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_interfaces(monkeypatch, LO, DOCKER, ETH, IB)
    assert choose("127.0.1.1", pattern=None, several_hosts=True).interface == ETH
    with_interfaces(monkeypatch, LO, DOCKER)
    assert choose("127.0.1.1", pattern=None, several_hosts=True).interface == DOCKER


def test_a_pattern_prefers_the_family_of_the_stores_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inner = Interface("eth0", "fd00::7")
    with_interfaces(monkeypatch, LO, ETH, inner)
    assert choose("fd00::9", pattern="eth", several_hosts=True).interface == inner
    assert choose("192.0.2.9", pattern="eth", several_hosts=True).interface == ETH
    reached = choose("::1", pattern="eth", several_hosts=True, reached=["fd00::5"])
    assert reached.interface == inner


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


@pytest.mark.parametrize("address", ["127.0.0.1", "192.0.2.7", "fd00::7"])
def test_a_socket_address_is_just_that(address: str) -> None:
    assert Interface("eth0", address).target("fd00::9", 7) == ("fd00::9", 7)


def test_a_link_local_socket_address_names_the_interface() -> None:
    index = socket.if_nametoindex("lo")
    assert Interface("lo", "::1").target("fe80::9", 7) == ("fe80::9", 7, 0, index)


@pytest.mark.parametrize("pattern", [None, "eth"])
def test_a_link_local_address_is_that_of_the_interface_of_its_scope(
    monkeypatch: pytest.MonkeyPatch, pattern: str | None
) -> None:
    found = [Interface(name, "fe80::1") for name in ("eth0", "eth1")]
    with_interfaces(monkeypatch, *found)
    choice = choose("fe80::1%eth1", pattern=pattern, several_hosts=True)
    assert choice.interface == Interface("eth1", "fe80::1")


def test_a_scope_is_nothing_that_the_others_share(monkeypatch: pytest.MonkeyPatch) -> None:
    with_interfaces(monkeypatch, LO, ETH, Interface("eth1", "fe80::1"))
    choice = choose("::1", pattern=None, several_hosts=True, reached=["fe80::1%theirs"])
    assert choice.interface.name == "eth1"


def test_a_link_local_address_without_its_interface_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_interfaces(monkeypatch, LO, ETH)
    lost = choose("fe80::1%gone0", pattern=None, several_hosts=True).interface
    with pytest.raises(RendezvousError, match=r"'gone0'.*set GRADWIRE_SOCKET_IFNAME"):
        lost.target(lost.address, 0)


def test_a_socket_address_has_its_scope_as_a_number_only() -> None:
    index = socket.if_nametoindex("lo")
    assert Interface("lo", "fe80::1").target("fe80::9%lo", 7) == ("fe80::9", 7, 0, index)


def test_a_host_with_loopback_only_cannot_serve_other_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_interfaces, "interfaces", lambda: [LO])
    with pytest.raises(RendezvousError, match="no interface but loopback"):
        choose("127.0.0.1", pattern=None, several_hosts=True)


# Between two ranks

ADDRESS_INFO = AddressInfo("host a", "a:1", ("shm", "tcp"), "x", "192.0.2.1", 1)


@pytest.mark.parametrize(
    ("other", "transport"),
    [
        (ADDRESS_INFO, "shm"),
        (replace(ADDRESS_INFO, host="host b"), "tcp"),
        (replace(ADDRESS_INFO, transports=("tcp",)), "tcp"),
        (replace(ADDRESS_INFO, host="host b", transports=("shm",)), None),
    ],
)
def test_a_pair_takes_the_best_transport_that_both_have(
    other: AddressInfo, transport: str | None
) -> None:
    assert choose_transport(ADDRESS_INFO, other) == transport


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("fd00::2", "one is IPv4 and one IPv6"),
        ("127.0.0.1", "loopback only leads back"),
        ("192.0.2.1", "both hosts have this address"),
    ],
)
def test_addresses_that_do_not_meet_are_an_error_that_names_both(address: str, why: str) -> None:
    other = replace(ADDRESS_INFO, host="host b", name="b:2", address=address, interface="eth7")
    message = rf"rank 3 \(a:1\) .* and rank 5 \(b:2\) eth7 .*{why}.*GRADWIRE_SOCKET_IFNAME"
    with pytest.raises(RendezvousError, match=message):
        require_route(3, ADDRESS_INFO, 5, other)


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b'{"host": 1}', b"[" * 100_000, ADDRESS_INFO.pack()[:-2] + b', "x": 1}'],
)
def test_foreign_address_information_is_an_error_that_names_the_rank(data: bytes) -> None:
    with pytest.raises(RendezvousError, match="rank 3 published no address information"):
        unpack_address_info(data, 3)


def test_address_information_survives_its_trip() -> None:
    assert unpack_address_info(ADDRESS_INFO.pack(), 0) == ADDRESS_INFO


def test_a_transport_that_this_version_lacks_joins_nobody() -> None:
    newer = replace(ADDRESS_INFO, transports=("foo", "tcp"))
    assert choose_transport(newer, newer) == "tcp"


@pytest.mark.parametrize("names", [[], ["ib"], ["tcp", "inproc"]])
def test_unknown_transports_are_refused(names: list[str]) -> None:
    with pytest.raises(InvalidArgument, match=f"use {', '.join(DEFAULTS)}"):
        choose_transports(names)


def test_a_choice_reads_well() -> None:
    assert str(Choice(Interface("eth0", "192.0.2.7"), "why")) == "eth0 (192.0.2.7): why"

"""Decisions of Python about rdma; its links have tests in C++ and by `make test-with WHAT=rdma`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace

import gradwire
import pytest
from gradwire import InvalidArgument, _core
from gradwire._bootstrap import connect
from gradwire._bootstrap.mesh import AddressInfo, choose_transport
from gradwire._bootstrap.rendezvous import choose_transports
from gradwire._host import transport_kinds
from gradwire._host.interfaces import LOOPBACK
from gradwire._host.transport_kinds import networks_of, why_not
from gradwire._tools import doctor

ABSENT = "the RDMA library does not load"


@pytest.fixture(autouse=True)
def nothing_is_open(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable, *_ in transport_kinds.KINDS["rdma"].settings:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("GRADWIRE_TRANSPORT", raising=False)
    transport_kinds._opened.clear()
    yield
    transport_kinds._opened.clear()


Settings = Mapping[str, str]
Opened = tuple[object, str]


def replace_rdma(monkeypatch: pytest.MonkeyPatch, opens: Callable[[Settings], Opened]) -> None:
    genuine = _core.open_transport

    def open_transport(name: str, settings: Settings) -> Opened:
        return opens(settings) if name == "rdma" else genuine(name, settings)

    monkeypatch.setattr(_core, "open_transport", open_transport)


@pytest.fixture
def no_ports(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """A machine without the library; what the ports were asked for with."""
    asked: list[Settings] = []

    def opens(settings: Settings) -> Opened:
        asked.append(settings)
        return None, ABSENT

    replace_rdma(monkeypatch, opens)
    return asked


@pytest.fixture
def two_ports(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """A machine with two RDMA ports; what they were asked for with."""
    ports = ["rxe0:1, RoCE v2, GID 1 (198.18.0.1), MTU 4096", "mlx5_0:1, InfiniBand, LID 3"]
    any_network = ["ethernet, any network", "infiniband, any network"]
    asked: list[Settings] = []
    context = SimpleNamespace(
        describe=lambda: ports,
        networks=lambda only: ["ethernet 198.18.0.0/24", *(any_network if only else [])],
    )

    def opens(settings: Settings) -> Opened:
        asked.append(settings)
        return context, ""

    replace_rdma(monkeypatch, opens)
    return asked


@pytest.mark.usefixtures("no_ports")
def test_without_ports_it_is_left_out_unless_it_is_asked_for():
    assert networks_of(choose_transports(None)) == ()
    with pytest.raises(InvalidArgument, match=f"transport rdma is not usable here: {ABSENT}"):
        choose_transports(["rdma"])
    with pytest.raises(InvalidArgument, match=ABSENT):
        gradwire.init(transports=["shm", "rdma"])


@pytest.mark.usefixtures("two_ports")
def test_with_ports_it_comes_between_shm_and_tcp(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "gradwire"):
        found = choose_transports(None)
        assert found.index("shm") < found.index("rdma") < found.index("tcp")
        assert networks_of(choose_transports(None))
    assert "GID 1 (198.18.0.1)" in caplog.text
    assert choose_transports(["rdma"]) == ("rdma",)


@pytest.mark.usefixtures("no_ports")
def test_a_device_that_was_named_and_is_not_used_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    networks_of(["rdma", "tcp"])
    assert caplog.text == ""
    monkeypatch.setenv("GRADWIRE_IB_TIMEOUT", "22")  # a whole site's, say
    networks_of(["rdma", "tcp"])
    assert caplog.text == ""
    monkeypatch.setenv("GRADWIRE_IB_HCA", "mlx5_7")
    networks_of(["rdma", "tcp"])
    assert f"GRADWIRE_IB_HCA=mlx5_7, and rdma is not used: {ABSENT}" in caplog.text


def test_the_environment_chooses(no_ports: list[Settings], monkeypatch: pytest.MonkeyPatch):
    assert why_not("rdma") == ABSENT
    chosen = {"HCA": "=rxe0", "LINK_LAYER": "ethernet", "GID_INDEX": "3", "MTU": "1024"}
    given = {f"GRADWIRE_IB_{name}": value for name, value in chosen.items()}
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    why_not("rdma")
    assert no_ports == [{}, given]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GRADWIRE_IB_LINK_LAYER", "token ring"),
        ("GRADWIRE_IB_GID_INDEX", "-1"),
        ("GRADWIRE_IB_MTU", "1500"),
        ("GRADWIRE_TRAFFIC_CLASS", "256"),
        ("GRADWIRE_IB_SL", "high"),
        ("GRADWIRE_IB_TIMEOUT", "0"),
    ],
)
def test_a_wrong_setting_is_an_error_even_where_tcp_would_do(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
):
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgument, match=f"{name}={value!r}"):
        networks_of(["rdma", "tcp"])
    (check,) = (each for each in doctor.checks() if each.name == "rdma")
    assert check.ok is False
    assert value in check.detail


def test_ports_are_opened_once_a_process_and_for_its_settings(
    two_ports: list[Settings], monkeypatch: pytest.MonkeyPatch
):
    for _ in range(3):
        assert why_not("rdma") is None
    assert two_ports == [{}]
    monkeypatch.setattr("os.getpid", lambda: 1)  # as in a forked child
    why_not("rdma")
    monkeypatch.setenv("GRADWIRE_TRAFFIC_CLASS", "1")
    why_not("rdma")
    assert two_ports == [{}, {}, {"GRADWIRE_TRAFFIC_CLASS": "1"}]


def test_what_fails_is_tried_again(no_ports: list[Settings]):
    assert why_not("rdma") == why_not("rdma") == ABSENT
    assert len(no_ports) == 2


def test_no_device_is_opened_where_shared_memory_joins_all_ranks(no_ports: list[dict[str, object]]):
    with gradwire.init() as comm:
        assert comm.size == 1
    assert gradwire.spawn(lambda comm: comm.transports, 2) == [{1: "shm"}, {0: "shm"}]
    listeners, address = connect.listen(("shm", "rdma", "tcp"), LOOPBACK)
    for each in listeners:
        each.close()
    assert (address.networks, no_ports) == ((), [])


@pytest.mark.usefixtures("two_ports")
def test_networks_say_who_is_reached():
    assert networks_of(["shm", "tcp"]) == ()
    assert networks_of(["shm", "rdma", "tcp"]) == ("rdma ethernet 198.18.0.0/24",)
    assert networks_of(["rdma"]) == (
        "rdma ethernet 198.18.0.0/24",
        "rdma ethernet, any network",
        "rdma infiniband, any network",
    )


def test_a_network_of_one_transport_is_none_of_another():
    quic = replace(ADDRESS_INFO, networks=("quic ethernet 198.18.0.0/24",))
    assert choose_transport(quic, replace(quic, host="host b")) == "tcp"


@pytest.mark.usefixtures("two_ports")
def test_the_doctor_shows_ports_with_their_addresses():
    (check,) = (each for each in doctor.checks() if each.name == "rdma")
    assert check.ok is True
    assert check.detail.startswith("rxe0:1, RoCE v2, GID 1 (198.18.0.1), MTU 4096; mlx5_0:1")


ALL = ("shm", "rdma", "tcp")
ADDRESS_INFO = AddressInfo(
    "host a", "a:1", ALL, "x", "192.0.2.1", 1, "eth0", ("rdma ethernet 198.18.0.0/24",)
)
FAR = replace(ADDRESS_INFO, host="host b")


@pytest.mark.parametrize(
    ("other", "transport"),
    [
        (ADDRESS_INFO, "shm"),
        (FAR, "rdma"),
        (
            replace(FAR, networks=("rdma ethernet 198.18.1.0/24", "rdma ethernet 198.18.0.0/24")),
            "rdma",
        ),
        (replace(FAR, networks=("rdma ethernet 198.18.1.0/24",)), "tcp"),
        (replace(FAR, networks=()), "tcp"),
        (replace(FAR, transports=("shm", "tcp")), "tcp"),
        (replace(FAR, transports=("rdma",), networks=("rdma infiniband, any network",)), None),
    ],
)
def test_a_pair_takes_rdma_where_both_are_on_one_network(other: AddressInfo, transport: str | None):
    assert choose_transport(ADDRESS_INFO, other) == transport

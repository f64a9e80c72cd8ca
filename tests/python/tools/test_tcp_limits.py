"""What the doctor says of a long link beside the kernel's limits of TCP."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from gradwire import InvalidArgument
from gradwire._host import streams
from gradwire._tools import cli, tcp_limits

LIMITS = {
    "net.ipv4.tcp_wmem": "4096 16384 4194304",
    "net.ipv4.tcp_rmem": "4096 131072 6291456",
    "net.ipv4.tcp_window_scaling": "1",
    "net.core.wmem_max": "212992",
    "net.core.rmem_max": "212992",
}


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The usual limits, to be changed; each name is a path below /proc/sys."""
    found = dict(LIMITS)

    def read(path: Path, *_: object, **__: object) -> str:
        name = str(path).removeprefix("/proc/sys/").replace("/", ".")
        if name not in found:
            raise FileNotFoundError(path)
        return found[name]

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.delenv("GRADWIRE_TCP_STREAMS", raising=False)
    monkeypatch.delenv("GRADWIRE_RATE", raising=False)
    return found


def said(link: str) -> dict[str, tuple[bool | None, str]]:
    return {name: rest for name, *rest in tcp_limits.checks(tcp_limits.way_of(link))}


def test_a_long_link_wants_the_sysctl_that_fills_it(limits: dict[str, str]) -> None:
    found = said("1gbit,80ms")
    assert found["on the way"][1] == "1000 Mbit/s, 80 ms: 10 MB when it is full"
    assert found["gradwire, streams: 5"][0] is True
    ok, detail = found["one stream"]
    assert ok is False
    assert "31% of the link" in detail
    assert "net.ipv4.tcp_wmem='4096 16384 16777216'" in detail
    assert "net.ipv4.tcp_rmem='4096 131072 33554432'" in detail


def test_what_it_says_to_set_fills_the_link(limits: dict[str, str]) -> None:
    _, detail = said("10gbit,80ms")["one stream"]
    limits.update(re.findall(r"(net\.ipv4\.tcp_[rw]mem)='([0-9 ]+)'", detail))
    assert streams.most_in_flight() >= 1e8
    assert said("10gbit,80ms")["one stream"][0] is True


def test_a_short_link_needs_nothing(limits: dict[str, str]) -> None:
    found = said("10gbit,100us")
    assert found["one stream"][0] is found["gradwire, streams: 1"][0] is True
    assert not any("sysctl" in detail for _, detail in found.values())


def test_the_streams_are_those_that_were_asked_for(
    limits: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADWIRE_TCP_STREAMS", "2")
    assert said("1gbit,80ms")["gradwire, streams: 2"][0] is False


def test_a_cap_is_the_rate_of_the_link(
    limits: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADWIRE_RATE", "100mbit")
    assert said("1gbit,80ms")["one stream"][0] is True


def test_a_window_that_cannot_grow_is_named(limits: dict[str, str]) -> None:
    assert "window scaling" not in said("1gbit,80ms")
    limits["net.ipv4.tcp_window_scaling"] = "0"
    assert said("1gbit,80ms")["window scaling"][0] is False


def test_the_round_trip_to_a_host_is_measured() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = [tcp_limits.way_of(f"{rate}127.0.0.1:{port}") for rate in ("", "50mbit,")]
    found.append(tcp_limits.way_of(f"50mbit,127.0.0.1:{port}"))  # it refuses now
    assert all(0 < each.round_trip < 1 for each in found)
    assert [each.rate for each in found] == [1e9, 5e7, 5e7]


@pytest.mark.parametrize("wrong", ["", "1gbit", "1gbit,", "fast,80ms", "1gbit,a:b", "1gbit,5s"])
def test_what_is_no_link_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidArgument):
        tcp_limits.way_of(wrong)


def test_the_command_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--link", "1gbit,80ms"]) == 0
    assert "1000 Mbit/s, 80 ms: 10 MB" in capsys.readouterr().out
    assert cli.main(["doctor", "--link", "far too long"]) != 0
    assert cli.main(["doctor"]) == 0
    assert "gradwire doctor --link" in capsys.readouterr().out

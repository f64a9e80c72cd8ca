"""The benchmarks' links: held to their rate, measured, and refused where they are not."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

import gradwire
import numpy as np
import pytest
from gradwire import Communicator
from hosts import Network
from ranks import LIMIT

from bench.network import links

MISSING = links.missing()
needs_links = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
MESSAGES = (100_000, 200_000)  # bytes


@pytest.fixture
def shaped() -> Iterator[links.ShapedLinks]:
    """Links shaped to a rate so low that a busy machine keeps up."""
    with contextlib.closing(links.ShapedLinks(3, links.rate("20mbit"))) as made:
        yield made


@needs_links
def test_plain_sockets_have_the_rate(shaped: links.ShapedLinks):
    found = links.check(shaped, MESSAGES)
    assert [(each.pattern, each.message) for each in found] == [
        (pattern, message)
        for pattern in ("one pair", "ring", "one to all", "all to one")
        for message in MESSAGES
        if (pattern, message) != ("all to one", 200_000)  # for which the queue is too short
    ]
    for each in found[:4]:
        at_the_rate = links.wire_bytes(each.message) * 8e3 / 20e6
        assert each.ms == pytest.approx(at_the_rate, rel=links.TOLERANCE)
    assert shaped.dropped() == 0


@needs_links
def test_the_path_of_most_users_is_enough(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # Debian has tc elsewhere
    links.ShapedLinks(1, links.rate("1gbit")).close()


@needs_links
def test_links_that_are_held_to_more_are_refused(shaped: links.ShapedLinks):
    shaped.rate = shaped.rate._replace(bits=shaped.rate.bits / 2)
    with pytest.raises(RuntimeError, match=r"not held to 20mbit(.|\n)*\| 100,000 \|.*too fast"):
        links.check(shaped, MESSAGES[:1])


@needs_links
def test_links_that_are_held_to_less_are_refused(shaped: links.ShapedLinks):
    shaped.rate = shaped.rate._replace(bits=shaped.rate.bits * 2)
    with pytest.raises(RuntimeError, match=r"\| 100,000 \|.*too slow"):
        links.check(shaped, MESSAGES[:1], attempts=1)


@needs_links
@pytest.mark.parametrize("spoilt", ["sends", "receives"])
def test_a_large_burst_is_refused(shaped: links.ShapedLinks, spoilt: str):
    tbf = ["tbf", "rate", "20mbit", "burst", "1mb", "limit", "256kb"]
    host, nic = (shaped.hosts[0], "eth0") if spoilt == "sends" else (shaped.switch, "eth0-0")
    host.command("tc", "qdisc", "change", "dev", nic, "root", *tbf)
    with pytest.raises(RuntimeError, match=r"too fast"):
        links.check(shaped, MESSAGES[:1])


@needs_links
@pytest.mark.parametrize("spoilt", ["sends", "receives"])
def test_an_end_without_a_bucket_is_refused(shaped: links.ShapedLinks, spoilt: str):
    host, nic = (shaped.hosts[0], "eth0") if spoilt == "sends" else (shaped.switch, "eth0-0")
    host.command("tc", "qdisc", "delete", "dev", nic, "root")
    with pytest.raises(RuntimeError, match=r"too fast"):
        links.check(shaped, MESSAGES[:1])


@needs_links
def test_a_byte_needs_no_token_to_wait_for(shaped: links.ShapedLinks):
    assert 1e-6 < links.ping_pong(shaped) < 5e-3


class Hosts(links.ShapedLinks, Network):
    """Hosts that run ranks."""


@needs_links
def test_emulated_links_are_as_fast_as_shaped_ones(monkeypatch: pytest.MonkeyPatch):
    rate = "20mbit"

    def best(comm: Communicator, pipe: object = None) -> float:
        """Milliseconds of an all_reduce, on the slowest rank, of so many tries that some of them
        wait for no processor."""
        x, found = np.zeros(200_000, np.uint8), []
        for _ in range(15):
            comm.barrier()
            start = time.monotonic()
            comm.all_reduce(x, algorithm="ring")
            elapsed = np.array([time.monotonic() - start])
            found.append(float(comm.all_reduce(elapsed, op="max")[0]) * 1e3)
        return min(found)

    with contextlib.closing(Hosts(3, links.rate(rate))) as hosts:
        latency = links.ping_pong(hosts)
        shaped = hosts.values(range(3), best)[0]
    monkeypatch.setenv("GRADWIRE_LINK", f"{rate},{latency * 1e6:.0f}us")
    emulated = gradwire.spawn(best, 3)[0]
    assert emulated >= 0.99 * links.wire_bytes(4 * 200_000 // 3) * 8e3 / 20e6
    assert emulated == pytest.approx(shaped, rel=0.15)


def test_a_rate_is_written_as_tc_writes_it():
    assert links.rate("100mbit").bits == 1e8
    assert links.rate("2.5gbit").bits == 2.5e9
    for wrong in ("100", "fast", "gbit", "1gib"):
        with pytest.raises(ValueError, match="is no rate"):
            links.rate(wrong)


def test_without_a_tool_it_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    command = [sys.executable, "-m", "bench.network.links", "--rate", "20mbit"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 1
    assert "install iproute2" in ended.stderr

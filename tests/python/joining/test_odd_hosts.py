"""Hosts that lack what most have: loopback over IPv4, a known name, threads, or /proc."""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import gradwire
import namespaces
import pytest
from elastic_job import Process
from gradwire._base import environment
from gradwire._bootstrap import rendezvous
from gradwire._errors import RendezvousError
from gradwire._tools import doctor
from namespaces import Namespace
from ranks import LIMIT, reserved_store

SECRET = "0123456789abcdef"
NOBODY = 65534
PROGRAM = """
import gradwire, numpy, os, sys
address = os.environ.get("MASTER_ADDR")
with gradwire.init(transports=sys.argv[1:] or None) as comm:
    comm.all_reduce(numpy.ones(9, numpy.float32))
    os.write(1, f"{sorted(set(comm.transports.values()))} {address}\\n".encode())
"""
pytestmark = pytest.mark.usefixtures("bare_environment")


@pytest.fixture
def host() -> Iterator[Namespace]:
    if why := namespaces.missing():
        pytest.skip(why)
    made = Namespace()
    yield made
    made.close()


def run_on(host: Namespace, *argv: str) -> list[str]:
    """What each of two ranks there says."""
    command = [sys.executable, "-m", "gradwire", "run", "-n", "2", *argv]
    ended = host.run(
        lambda: subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    )
    assert ended.returncode == 0, ended.stderr
    return sorted(ended.stdout.splitlines())


@pytest.fixture
def program(tmp_path: Any) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def test_a_host_whose_loopback_is_ipv6_alone(host: Namespace, program: str) -> None:
    host.ip("addr del 127.0.0.1/8 dev lo")
    assert run_on(host, program) == ["['shm'] ::1"] * 2
    assert run_on(host, program, "tcp") == ["['tcp'] ::1"] * 2


def test_a_host_without_loopback(host: Namespace, program: str) -> None:
    host.ip("link set lo down", "addr flush dev lo")
    assert run_on(host, program) == ["['shm'] None"] * 2


def unknown_name(*_: Any, **__: Any) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_a_store_on_an_unknown_host_is_told_before_the_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", unknown_name)
    with pytest.raises(RendezvousError, match=r"store at tcp://leader:1 is unknown here \(.*not k"):
        gradwire.init(rank=1, ranks=2, store="tcp://leader:1", timeout=LIMIT)


@pytest.fixture
def misspelt(monkeypatch: pytest.MonkeyPatch) -> None:
    environment._warn_of.cache_clear()
    for name in ("GRADWIRE_STOER", "gradwire_trace", "GRADWIRE_ZZZZZZ"):
        monkeypatch.setenv(name, "secret")


@pytest.mark.usefixtures("misspelt")
def test_misspelt_variables_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gradwire"):
        for _ in range(2):
            gradwire.init().close()
    assert [each.getMessage().partition(" (")[0] for each in caplog.records] == [
        "GRADWIRE_STOER is no variable of gradwire, and changes nothing: is GRADWIRE_STORE meant?",
        "GRADWIRE_ZZZZZZ is no variable of gradwire, and changes nothing",
        "gradwire_trace is no variable of gradwire, and changes nothing: is GRADWIRE_TRACE meant?",
    ]


@pytest.mark.usefixtures("misspelt")
def test_one_rank_of_a_host_warns(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with caplog.at_level(logging.WARNING, "gradwire"):
        gradwire.init().close()
    assert not caplog.records


@pytest.mark.usefixtures("misspelt")
def test_doctor_lists_misspelt_variables() -> None:
    table = doctor.as_table(doctor.checks())
    assert "GRADWIRE_STOER         is no variable of gradwire" in table
    assert "is GRADWIRE_TRACE meant?" in table


def test_what_the_system_refuses_is_an_error_with_its_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_proc() -> str:
        raise FileNotFoundError(errno.ENOENT, "No such file", "/proc/self/ns/net")

    monkeypatch.setattr(rendezvous, "host_identity", no_proc)
    with pytest.raises(RendezvousError, match=r"rank 0 of 1 .*cannot connect: .*/proc") as raised:
        gradwire.init()
    assert isinstance(raised.value.__cause__, FileNotFoundError)


def without_threads() -> None:
    """Lets this process start no more threads; root's limit would not hold."""
    if os.getuid() == 0:
        os.setuid(NOBODY)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def test_a_process_that_may_start_no_thread_says_so() -> None:
    def body() -> str:
        without_threads()
        with pytest.raises(RendezvousError, match="ulimit -u") as raised:
            gradwire.init(rank=0, ranks=2, store=store, secret=SECRET, timeout=LIMIT)
        return type(raised.value.__cause__).__name__

    with reserved_store() as store:
        assert Process(body, before=lambda: None).value() == "RuntimeError"

"""Hosts around a switch, on one machine: network namespaces that end with the test's process.

A namespace is kept by a descriptor alone, so nothing is left behind however the tests end, and no
packet leaves it. Making one needs CAP_SYS_ADMIN and CAP_NET_ADMIN, which root mostly has.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import json
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import gradwire
from gradwire._deadline import Deadline
from ranks import LIMIT, Outcome

PORT = 29500  # free: the namespaces are ours
_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_libc = ctypes.CDLL(None, use_errno=True)

_T = TypeVar("_T")


@functools.cache
def missing() -> str | None:
    """Why there can be no hosts here; None where there can."""
    if shutil.which("ip") is None:
        return "no `ip` command: install iproute2"
    try:
        Network(1).close()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces cannot be made here ({error}): needs root"
    return None


def _checked(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Namespace:
    """A network namespace with nothing in it but loopback."""

    def __init__(self) -> None:
        self.fd = _on_a_thread(_new_namespace)
        self.ip("link set lo up")

    @property
    def path(self) -> str:
        """By which processes of this user find it, while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def run(self, function: Callable[[], _T]) -> _T:
        """What the function returns; it, and what it starts, is in the namespace."""

        def inside() -> _T:
            _checked(_libc.setns(self.fd, _CLONE_NEWNET))
            return function()

        return _on_a_thread(inside)

    def ip(self, *commands: str) -> None:
        """Runs `ip` with each of the commands."""
        text = "".join(f"{command}\n" for command in commands)
        self.run(
            lambda: subprocess.run(
                ["ip", "-batch", "-"], input=text, text=True, check=True, timeout=30
            )
        )

    def await_states(self, *down: str) -> None:
        """Returns when the kernel has noticed which interfaces are connected: all but `down`."""
        deadline = Deadline(LIMIT)
        command = ["ip", "-json", "link", "show"]
        while True:
            shown = self.run(lambda: subprocess.run(command, check=True, capture_output=True))
            states = {each["ifname"]: each["operstate"] for each in json.loads(shown.stdout)}
            up = {name for name, state in states.items() if state == "UP" or name == "lo"}
            if up == states.keys() - set(down):
                return
            assert not deadline.passed, states

    def close(self) -> None:
        """It ends when its last process has, with all its interfaces."""
        os.close(self.fd)


def enter(path: str) -> None:
    """Puts the calling thread, and what it starts from now on, into a namespace."""
    with open(path) as file:
        _checked(_libc.setns(file.fileno(), _CLONE_NEWNET))


def _new_namespace() -> int:
    _checked(_libc.unshare(_CLONE_NEWNET))
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _on_a_thread(function: Callable[[], _T]) -> _T:
    with ThreadPoolExecutor(1) as pool:  # a thread of its own: its namespace ends with it
        return pool.submit(function).result()


class Rank:
    """A process on a host."""

    def __init__(self, host: Namespace | None, function: Callable[[Any], Any]) -> None:
        """Runs `function(pipe)` there, or here; the pipe leads to this object's."""
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_child, args=(function, theirs))
        with warnings.catch_warnings():  # pytest's process may have idle threads
            warnings.simplefilter("ignore", DeprecationWarning)
            (host.run if host else lambda start: start())(self._process.start)
        theirs.close()

    def outcome(self, timeout: float = LIMIT) -> Outcome:
        """How the function ended; raises AssertionError when it has not by then."""
        assert self.pipe.poll(timeout), f"a rank did not end within {timeout} s"
        try:
            found = self.pipe.recv()
        except EOFError:
            return Outcome(died=True)
        assert isinstance(found, Outcome), found
        return found

    def died(self, timeout: float = LIMIT) -> float:
        """When the process ended, by the monotonic clock."""
        assert multiprocessing.connection.wait([self._process.sentinel], timeout)
        return time.monotonic()

    def close(self) -> None:
        """Kills the process where it has not ended."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self.pipe.close()


def _child(function: Callable[[Any], Any], pipe: Any) -> None:
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=sys.__stderr__)
    try:
        outcome = Outcome(function(pipe))
    except BaseException as error:
        outcome = Outcome(error=error)
    try:
        pipe.send(outcome)
    except (pickle.PicklingError, AttributeError, TypeError):
        pipe.send(Outcome(error=RuntimeError(repr(outcome))))


class Network:
    """Hosts 0 … n - 1 with eth0 on one switch: 10.77.0.1 … n and fd77::1 … n, or `addresses`.

    With `decoys` each has two more interfaces, before eth0 by name and by number: docker0 with one
    address on all hosts, and dead0, whose addresses look as if the hosts shared a network.
    """

    def __init__(
        self,
        count: int,
        *,
        addresses: Sequence[str] = ("10.77.0.{}/24", "fd77::{}/64"),
        decoys: bool = False,
    ) -> None:
        self._stack = contextlib.ExitStack()
        self._switch = self._namespace()
        self.hosts = [self._namespace() for _ in range(count)]
        self._add_bridge("br0")
        for host in range(count):
            if decoys:
                self._add_decoys(host)
            self.plug(host, "eth0", [each.format(host + 1) for each in addresses], "br0")

        for each in self.hosts:
            each.await_states()

    def _add_decoys(self, host: int) -> None:
        self.hosts[host].ip(
            "link add docker0 type bridge",
            "link add container type veth peer name inside",
            "link set container master docker0 up",
            "link set inside up",
            "addr add 172.17.0.1/16 dev docker0",
            "link set docker0 up",
        )
        self._add_bridge(f"apart{host}")
        self.plug(host, "dead0", [f"10.99.0.{host + 1}/24"], f"apart{host}")

    def _add_bridge(self, name: str) -> None:
        self._switch.ip(f"link add {name} type bridge mcast_snooping 0", f"link set {name} up")

    def plug(self, host: int, name: str, addresses: Sequence[str], bridge: str) -> None:
        """Gives a host an interface that leads to a bridge of the switch."""
        there = self.hosts[host]
        self._switch.ip(
            f"link add {name}-{host} type veth peer name {name} netns {there.path}",
            f"link set {name}-{host} master {bridge} up",
        )
        # Addresses are usable at once, with nobody asked whether they are free.
        add = [f"addr add {each} dev {name}{' nodad' * (':' in each)}" for each in addresses]
        there.ip(f"link set {name} addrgenmode none up", *add)

    @contextlib.contextmanager
    def cut(self, host: int) -> Iterator[None]:
        """Meanwhile no packet gets to the host or from it; nobody is told."""
        self._switch.ip(f"link set eth0-{host} nomaster")
        try:
            yield
        finally:
            self._switch.ip(f"link set eth0-{host} master br0")

    @contextlib.contextmanager
    def start(
        self,
        places: Sequence[int],
        body: Callable[..., Any],
        *,
        store: str | None = f"tcp://10.77.0.1:{PORT}",
        environment: Callable[[int], Mapping[str, str]] = lambda rank: {},
        etc_hosts: Callable[[int], Path] | None = None,
        timeout: float = 30.0,
    ) -> Iterator[list[Rank]]:
        """Rank r on host places[r] runs `body(comm, pipe)`; killed at the end of the block.

        Without a store, its place in the job is what `environment` says.
        """

        def rank_body(rank: int, pipe: Any) -> Any:
            os.environ.update({"GRADWIRE_SECRET": "0123456789abcdef", **environment(rank)})
            if etc_hosts is not None:
                _replace_etc_hosts(etc_hosts(places[rank]))
            place = {"rank": rank, "size": len(places), "store": store} if store else {}
            with gradwire.init(**place, timeout=timeout) as comm:
                return body(comm, pipe)

        with contextlib.ExitStack() as stack:
            ranks = []
            for rank, place in enumerate(places):
                started = Rank(self.hosts[place], lambda pipe, rank=rank: rank_body(rank, pipe))
                ranks.append(started)
                stack.callback(started.close)
            yield ranks

    def outcomes(
        self, places: Sequence[int], body: Callable[..., Any], **how: Any
    ) -> list[Outcome]:
        """How each rank's body ended."""
        with self.start(places, body, **how) as ranks:
            return [rank.outcome() for rank in ranks]

    def values(self, places: Sequence[int], body: Callable[..., Any], **how: Any) -> list[Any]:
        """What each rank's body returned; raises what the first rank raised."""
        ended = self.outcomes(places, body, **how)
        for each in ended:
            if each.error is not None:
                raise each.error
        assert not any(each.died for each in ended)
        return [each.value for each in ended]

    def close(self) -> None:
        """Lets go of all namespaces."""
        self._stack.close()

    def _namespace(self) -> Namespace:
        made = Namespace()
        self._stack.callback(made.close)
        return made


def debians_etc_hosts(scratch: Path) -> Callable[[int], Path]:
    """Each host's /etc/hosts, in which host 0's name, node0, means loopback there."""

    def make(host: int) -> Path:
        path = scratch / f"hosts{host}"
        path.write_text(f"127.0.0.1 localhost\n{'127.0.1.1' if host == 0 else '10.77.0.1'} node0\n")
        return path

    return make


def _replace_etc_hosts(by: Path) -> None:
    """For this process alone."""
    _checked(_libc.unshare(_CLONE_NEWNS))
    _checked(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))
    _checked(_libc.mount(os.fsencode(by), b"/etc/hosts", None, _MS_BIND, None))

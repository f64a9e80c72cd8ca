"""Hosts around a switch, on one machine: network namespaces that end with the process.

A namespace is kept by a descriptor alone, so nothing is left behind however the process ends, and
no packet leaves it. Making one needs CAP_SYS_ADMIN and CAP_NET_ADMIN, which root mostly has.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# Debian has tc in the last two, to which a user's PATH does not lead.
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
_LIMIT = 30.0  # seconds, after which the kernel is taken not to do it
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)

_T = TypeVar("_T")


@functools.cache
def missing() -> str | None:
    """Why there can be no hosts here; None where there can."""
    if shutil.which("ip") is None:
        return "no `ip` command: install iproute2"
    try:
        Switch(1).close()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces cannot be made here ({error}): needs root"
    return None


def checked(result: int) -> None:
    """Raises OSError for the failure of a C function."""
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
            checked(_libc.setns(self.fd, _CLONE_NEWNET))
            return function()

        return _on_a_thread(inside)

    def command(self, *words: str, text: str | None = None) -> str:
        """What a program prints when it runs in the namespace, with `text` to read."""
        command = [shutil.which(words[0], path=PATH) or words[0], *words[1:]]
        return self.run(
            lambda: (
                subprocess.run(
                    command,
                    input=text,
                    text=True,
                    check=True,
                    stdout=subprocess.PIPE,
                    timeout=_LIMIT,
                ).stdout
            )
        )

    def ip(self, *commands: str) -> None:
        """Runs `ip` with each of the commands."""
        self.command("ip", "-batch", "-", text="".join(f"{each}\n" for each in commands))

    def await_states(self, *down: str) -> None:
        """Returns when the kernel has noticed which interfaces are connected: all but `down`."""
        deadline = time.monotonic() + _LIMIT
        while True:
            shown = json.loads(self.command("ip", "-json", "link", "show"))
            states = {each["ifname"]: each["operstate"] for each in shown}
            up = {name for name, state in states.items() if state == "UP" or name == "lo"}
            if up == states.keys() - set(down):
                return
            assert time.monotonic() < deadline, states

    def close(self) -> None:
        """It ends when its last process has, with all its interfaces."""
        os.close(self.fd)


def enter(path: str) -> None:
    """Puts the calling thread, and what it starts from now on, into a namespace."""
    with open(path) as file:
        checked(_libc.setns(file.fileno(), _CLONE_NEWNET))


def _new_namespace() -> int:
    checked(_libc.unshare(_CLONE_NEWNET))
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _on_a_thread(function: Callable[[], _T]) -> _T:
    with ThreadPoolExecutor(1) as pool:  # a thread of its own: its namespace ends with it
        return pool.submit(function).result()


class Switch:
    """Hosts 0 … n - 1 with eth0 on one bridge: 10.77.0.1 … n and fd77::1 … n, or `addresses`."""

    def __init__(
        self, count: int, *, addresses: Sequence[str] = ("10.77.0.{}/24", "fd77::{}/64")
    ) -> None:
        self._stack = contextlib.ExitStack()
        self.switch = self._namespace()
        self.hosts = [self._namespace() for _ in range(count)]
        self.add_bridge("br0")
        for host in range(count):
            self.prepare(host)
            self.plug(host, "eth0", [each.format(host + 1) for each in addresses], "br0")
        for each in self.hosts:
            each.await_states()

    def prepare(self, host: int) -> None:
        """What a host gets before its eth0; nothing here."""

    def add_bridge(self, name: str) -> None:
        """Gives the switch another bridge."""
        self.switch.ip(f"link add {name} type bridge mcast_snooping 0", f"link set {name} up")

    def plug(self, host: int, name: str, addresses: Sequence[str], bridge: str) -> None:
        """Gives a host an interface that leads to a bridge of the switch, where it is NAME-HOST."""
        there = self.hosts[host]
        self.switch.ip(
            f"link add {name}-{host} type veth peer name {name} netns {there.path}",
            f"link set {name}-{host} master {bridge} up",
        )
        # Addresses are usable at once, with nobody asked whether they are free.
        add = [f"addr add {each} dev {name}{' nodad' * (':' in each)}" for each in addresses]
        there.ip(f"link set {name} addrgenmode none up", *add)

    def let_in(self, host: int, *ports: int) -> None:
        """Drops, from now on, who connects to the host over IPv4 and TCP but to these ports.

        As a firewall or NAT does: answers to what the host itself has begun get through.
        """
        there, rule = self.hosts[host], "filter add dev eth0 parent ffff: protocol ip prio"
        tcp = "u32 match ip protocol 6 0xff match"
        there.ip("link add sink type veth peer name drain", "link set sink up")
        there.command(*["tc", "qdisc", "add", "dev", "eth0", "ingress"])
        for port in ports:
            there.command("tc", *f"{rule} 1 {tcp} u16 {port} 0xffff at 22 flowid 1:1".split())
        begins = "u8 0x02 0x12 at 33 action mirred egress redirect dev sink"  # SYN without ACK
        there.command("tc", *f"{rule} 2 {tcp} {begins}".split())

    @contextlib.contextmanager
    def cut(self, host: int) -> Iterator[None]:
        """Meanwhile no packet gets to the host or from it; nobody is told."""
        self.switch.ip(f"link set eth0-{host} nomaster")
        try:
            yield
        finally:
            self.switch.ip(f"link set eth0-{host} master br0")

    @contextlib.contextmanager
    def divide(self, part: Sequence[int]) -> Iterator[None]:
        """Meanwhile these hosts reach only each other, and the rest only theirs; nobody is told."""
        self.add_bridge("apart")
        self.switch.ip(*(f"link set eth0-{host} master apart" for host in part))
        try:
            yield
        finally:
            self.switch.ip(*(f"link set eth0-{host} master br0" for host in part))
            self.switch.ip("link del apart")

    def close(self) -> None:
        """Lets go of all namespaces."""
        self._stack.close()

    def _namespace(self) -> Namespace:
        made = Namespace()
        self._stack.callback(made.close)
        return made

"""Ranks on hosts around a switch, on one machine: see namespaces.py."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gradwire
from namespaces import Namespace, Switch, checked
from ranks import LIMIT, Outcome
from stopwatch import queued

PORT = 29500  # free: the namespaces are ours
_CLONE_NEWNS = 0x20000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_libc = ctypes.CDLL(None, use_errno=True)


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

    @property
    def pid(self) -> int:
        """The id of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def outcome(self, timeout: float = LIMIT) -> Outcome:
        """The outcome of the function; raises AssertionError when it has not ended by then."""
        assert self.pipe.poll(timeout), f"a rank did not end within {timeout} s"
        try:
            found = self.pipe.recv()
        except EOFError:
            return Outcome(died=True)
        assert isinstance(found, Outcome), found
        return found

    def died(self, timeout: float = LIMIT) -> float:
        """The time at which the process ended, by the monotonic clock."""
        assert multiprocessing.connection.wait([self._process.sentinel], timeout)
        return time.monotonic()

    def close(self) -> None:
        """Kills the process where it has not ended."""
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _child(function: Callable[[Any], Any], pipe: Any) -> None:
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=sys.__stderr__)
    try:
        outcome = Outcome(function(pipe))
    except BaseException as error:
        outcome = Outcome(error=error)
    outcome.queued = queued()
    try:
        pipe.send(outcome)
    except (pickle.PicklingError, AttributeError, TypeError):
        pipe.send(Outcome(error=RuntimeError(repr(outcome))))


class Network(Switch):
    """A switch whose hosts run ranks.

    With `decoys` each has two more interfaces, before eth0 by name and by number: docker0 with one
    address on all hosts, and dead0, whose addresses look as if the hosts shared a network.
    """

    def __init__(self, count: int, *, decoys: bool = False, **setting: Any) -> None:
        self._decoys = decoys
        super().__init__(count, **setting)

    def prepare(self, host: int) -> None:
        """Adds the decoys."""
        if not self._decoys:
            return
        self.hosts[host].ip(
            "link add docker0 type bridge",
            "link add container type veth peer name inside",
            "link set container master docker0 up",
            "link set inside up",
            "addr add 172.17.0.1/16 dev docker0",
            "link set docker0 up",
        )
        self.add_bridge(f"apart{host}")
        self.plug(host, "dead0", [f"10.99.0.{host + 1}/24"], f"apart{host}")

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
            place = {"rank": rank, "ranks": len(places), "store": store} if store else {}
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
        """The outcome of each rank's body."""
        with self.start(places, body, **how) as ranks:
            return [rank.outcome() for rank in ranks]

    def values(self, places: Sequence[int], body: Callable[..., Any], **how: Any) -> list[Any]:
        """The result of each rank's body; raises the first rank's error."""
        ended = self.outcomes(places, body, **how)
        for each in ended:
            if each.error is not None:
                raise each.error
        assert not any(each.died for each in ended)
        return [each.value for each in ended]


def debians_etc_hosts(scratch: Path) -> Callable[[int], Path]:
    """Each host's /etc/hosts, in which host 0's name, node0, means loopback there."""

    def make(host: int) -> Path:
        path = scratch / f"hosts{host}"
        path.write_text(f"127.0.0.1 localhost\n{'127.0.1.1' if host == 0 else '10.77.0.1'} node0\n")
        return path

    return make


def _replace_etc_hosts(by: Path) -> None:
    """Replaces /etc/hosts for this process alone."""
    checked(_libc.unshare(_CLONE_NEWNS))
    checked(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))
    checked(_libc.mount(os.fsencode(by), b"/etc/hosts", None, _MS_BIND, None))

"""`python -m tests.faults.serving`: random faults of a parameter server's servers and clients."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from gradwire._bootstrap.launch_info import DEFAULT_JOB
from gradwire._bootstrap.store import parse_address
from gradwire._bootstrap.store_server import StoreServer

from tests.faults.options import add_choice, campaign_parser, numbers_of
from tests.faults.serving_cases import CLIENTS, SHARDS, Case, make_case
from tests.faults.serving_judge import problems
from tests.faults.serving_processes import Client, Process, server

_LIMIT = 90.0  # seconds for each thing that is waited for, however busy the machine
_STEPS_AFTER = 5  # that the others must make after the fault
_TURN = 0.005
_SIGNALS = {
    "kill": signal.SIGKILL,
    "crash": signal.SIGSEGV,
    "stop": signal.SIGSTOP,
    "restart": signal.SIGKILL,
}


class Result(NamedTuple):
    """A case and what must not be of it."""

    case: Case
    problems: list[str]
    longest: float  # seconds of a step of those that are not faulty


class Hung(Exception):
    """Something did not happen in time."""


class _Stage:
    """The processes of a case."""

    def __init__(self, case: Case, store: str, folder: Path) -> None:
        self.case = case

        def serving(shard: int) -> Process:
            body = functools.partial(server, case, shard, store, folder)
            return Process(f"shard {shard}", body)

        def client(i: int) -> Process:
            name = f"replica {'abcd'[i]}"
            return Process(name, lambda pipe: Client(case, name, store, i == 0, pipe).run())

        self.servers = [serving(shard) for shard in range(SHARDS)]
        self.spare = serving(case.shard)
        self.actor, *self.others = (client(i) for i in range(CLIENTS))
        self.late = client(CLIENTS)

    @property
    def all(self) -> list[Process]:
        return [*self.servers, self.spare, self.actor, *self.others, self.late]

    @property
    def faulty(self) -> Process:
        return self.actor if self.case.faulty == "client" else self.servers[self.case.shard]

    def wait(self, what: str, holds: Callable[[], object]) -> None:
        """Waits until something holds."""
        end = time.monotonic() + _LIMIT
        while not holds():
            if time.monotonic() > end:
                raise Hung(f"{what} in {_LIMIT:g} s")
            for each in self.all:
                each.hear(_TURN / len(self.all))
            if failed := next((each for each in self.all if each.failed), None):
                raise Hung(f"{what}: {failed.name} failed: {failed.said[-1]}")

    def play(self) -> None:
        """Plays the case until all clients have ended that can."""
        for each in self.servers:
            each.tell("go")
        self.wait("no servers", lambda: all("ready" in each.said for each in self.servers))
        begin = [self.actor, *self.others] if self.case.first else [*self.others, self.actor]
        for each in begin[:1] if self.case.first else begin[:-1]:
            each.tell("go")
        if not self.case.first:
            self.wait("no first steps", lambda: all(each.steps > 1 for each in self.others))
        for each in begin:
            if each in ([self.actor] if not self.case.first else self.others):
                each.tell("go")
        self.wait("no phase", lambda: "phase" in self.actor.said)
        self._fire()
        self._watch()

    def _fire(self) -> None:
        end = time.monotonic() + self.case.delay
        while time.monotonic() < end:
            pass
        if self.case.kind in _SIGNALS:
            self.faulty.signal(_SIGNALS[self.case.kind])
        if self.case.kind == "late":
            self.late.tell("go")
        if self.case.kind in ("kill", "crash", "restart"):
            self.wait("it lives on", lambda: self.faulty.ended)
        if self.case.kind == "restart":
            self.spare.tell("go")
        if self.case.phase == "idle":
            self.actor.tell("go on")

    def _watch(self) -> None:
        kind, faulty = self.case.kind, self.case.faulty
        going_on = [*self.others, *([self.late] if kind == "late" else [])]
        if kind in ("none", "late", "restart"):
            going_on.append(self.actor)
        if faulty == "server" and kind != "restart":
            going_on.append(self.actor)
            self.wait("clients do not notice", lambda: all(each.outcome for each in going_on))
            self._let_go_on()
            return
        before = {each.name: each.steps for each in going_on}
        self.wait(
            "clients do not go on",
            lambda: all(
                each.outcome or each.steps >= before[each.name] + _STEPS_AFTER for each in going_on
            ),
        )
        self._let_go_on()
        if kind == "stop":
            going_on.append(self.actor)
            self.wait(
                "the stopped one does not go on", lambda: self.actor.outcome or self.actor.steps > 3
            )
        for each in going_on:
            each.tell("end")
        self.wait("clients do not end", lambda: all(each.outcome for each in going_on))

    def _let_go_on(self) -> None:
        if self.case.kind == "stop":
            self.faulty.signal(signal.SIGCONT)


def run_case(case: Case) -> Result:
    """Runs a case and judges it; leaves no process behind."""
    name = f"unix://gradwire-faults-{secrets.token_hex(8)}"
    with tempfile.TemporaryDirectory() as folder:
        job = os.environ.get("GRADWIRE_JOB") or DEFAULT_JOB
        store = StoreServer(parse_address(name), job, b"")
        stage = _Stage(case, name, Path(folder))
        hung = ""
        with store:  # whose thread begins when all processes are there
            try:
                stage.play()
            except Hung as error:
                hung = str(error)
            finally:
                for each in stage.all:
                    each.end()
    found = [hung] if hung else []
    others = [each.outcome.longest for each in stage.others if each.outcome is not None]
    found += problems(case, stage.actor, stage.others, stage.late, stage.servers[case.shard].pid)
    return Result(case, found, max(others, default=0.0))


def _numbered(seed: int, number: int) -> Result:
    logging.disable()  # of what is meant to happen here
    return run_case(make_case(seed, number))


def main() -> int:
    """Runs the command; returns 0 when nothing went wrong."""
    parser = campaign_parser("tests.faults.serving", __doc__, count=200)
    add_choice(parser, jobs=os.cpu_count() or 1)
    options = parser.parse_args()
    numbers = numbers_of(options)
    print(f"seed {options.seed}: {len(numbers)} cases, {options.jobs} at a time", flush=True)
    began = time.monotonic()
    results = []
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(options.jobs, fork) as pool:
        for result in pool.map(functools.partial(_numbered, options.seed), numbers):
            results.append(result)
            for line in result.problems:
                print(f"case {result.case.number}, {result.case}: {line}", flush=True)
    _print_table(results)
    bad = sum(bool(each.problems) for each in results)
    print(f"{len(results)} cases in {time.monotonic() - began:.0f} s, {bad} with problems")
    return int(bad > 0)


def _print_table(results: list[Result]) -> None:
    by_kind: dict[str, list[Result]] = defaultdict(list)
    for each in results:
        by_kind[f"{each.case.kind} of a {each.case.faulty}"].append(each)
    print("| fault | cases | problems | longest step of the others, s |\n|---|---|---|---|")
    for kind, those in sorted(by_kind.items()):
        bad = sum(bool(each.problems) for each in those)
        print(f"| {kind} | {len(those)} | {bad} | {max(each.longest for each in those):.2f} |")


if __name__ == "__main__":
    sys.exit(main())

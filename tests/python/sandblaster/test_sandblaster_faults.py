"""Faults in which a step must end soon, go on rightly, or leave nothing behind."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import re
import resource
import selectors
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradwire import InvalidArgument, Timeout, TransportError, serve
from gradwire._bootstrap.authenticator import RefusalLog
from gradwire._host.identity import process_name
from gradwire.serve import _coordinator, _lead, _replica
from gradwire.serve._sandblaster.messages import OF_REPLICAS, Reader, pack
from gradwire.serve._vectors import Fold
from ranks import eventually
from sandblaster_team import EACH, PORTIONS, Team, blocks
from test_sandblaster import LEAD, script


def test_a_server_that_ends_while_replicas_compute_is_named(bare_environment: None) -> None:
    stopped = threading.Event()
    with serve.Server(2) as server:
        team_options: dict[str, Any] = {"portions": 2, "store": server.store, "timeout": 60}

        def waiting(parameters: Any, _: int) -> tuple[float, Any]:
            threading.Thread(target=lambda: (server.stop(), stopped.set())).start()
            stopped.wait(30)
            finish.wait(30)
            return 1.0, [np.ones_like(parameters[0])]

        finish = threading.Event()
        job = serve.DistributedLBFGS([np.zeros(8)], waiting, **team_options)
        replica = threading.Thread(target=_suppressed(job.serve))
        replica.start()
        lead = serve.DistributedLBFGS([np.zeros(8)], waiting, **team_options)
        try:
            with pytest.raises(TransportError, match="shard"):
                lead.step()
        finally:
            finish.set()
            lead.close()
            replica.join(30)
        assert not replica.is_alive()


def _suppressed(run: Callable[[], None]) -> Callable[[], None]:
    def body() -> None:
        with contextlib.suppress(TransportError):
            run()

    return body


class Failing:
    """A selector whose next turns fail, as without memory; all of them where it is broken."""

    def __init__(self, real: selectors.BaseSelector, failures: float) -> None:
        self._real, self.failures = real, failures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def select(self, timeout: float | None = None) -> Any:
        if self.failures > 0:
            self.failures -= 1
            raise MemoryError
        return self._real.select(timeout)


def begun(lead: serve.DistributedLBFGS) -> _coordinator.Coordinator:
    lead.step()
    assert lead._lead is not None
    return lead._lead._coordinator


def test_a_coordinator_survives_turns_that_fail(team: Team) -> None:
    lead = team.lead()
    team.replica()
    coordinator = begun(lead)
    failing = Failing(coordinator._selector, 3)
    coordinator._selector = failing  # type: ignore[assignment]
    team.replica()
    assert lead.step().loss < 1e9
    assert failing.failures == 0


def test_a_coordinator_whose_turns_all_fail_ends_the_step_with_the_reason(team: Team) -> None:
    lead = team.lead(timeout=1)
    team.replica()
    coordinator = begun(lead)
    real = coordinator._selector
    coordinator._selector = Failing(real, math.inf)  # type: ignore[assignment]
    with pytest.raises(Timeout, match="no portion was computed for 1 s: MemoryError"):
        lead.step()
    coordinator._selector = real


def test_a_replica_that_cannot_be_registered_is_alone(
    team: Team, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_coordinator, "refusals", RefusalLog())
    lead = team.lead()
    team.replica()
    coordinator = begun(lead)
    register, failures = coordinator._selector.register, 1

    def fails(*arguments: Any) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return register(*arguments)

    monkeypatch.setattr(coordinator._selector, "register", fails)
    team.replica()
    eventually(lambda: "refused a connection from a replica" in caplog.text)
    assert coordinator._thread.is_alive()
    assert lead.step().loss < 1e9


def test_losses_whose_sum_overflows_end_no_coordinator(team: Team) -> None:
    def huge(parameters: Any, portion: int) -> tuple[float, Any]:
        return (1e308 if parameters[0].any() else 1.0), blocks(parameters, portion)[1]

    lead = team.lead(function=huge)
    team.replica(function=huge)
    step = lead.step()
    assert (step.step, step.loss) == (0, PORTIONS)


def test_what_an_ended_coordinator_left_at_the_shards_is_forgotten(team: Team) -> None:
    lead = team.lead()
    job = team.make(replica="left")
    with job._connect("replica") as server:
        server.push([np.ones(PORTIONS * EACH)], staged=(1, 0, 0))
        team.replica()
        lead.step()
        assert lead._lead is not None
        with pytest.raises(InvalidArgument, match="batch 1 is over"):
            lead._lead._server._command([Fold("d", 1, [(0, 0)])])


def test_an_interrupted_step_leaves_nothing_to_the_next(team: Team) -> None:
    lead = team.lead()
    team.replica()
    lead.step()
    assert lead._lead is not None
    coordinator = lead._lead._coordinator
    wait, begun = coordinator._over.wait, threading.Event()

    def interrupted(timeout: float | None = None) -> bool:
        begun.set()
        raise KeyboardInterrupt

    coordinator._over.wait = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        lead.step()
    coordinator._over.wait = wait  # type: ignore[method-assign]
    # The batch that was interrupted ends after the next one was asked for.
    old = _coordinator.Evaluated(1.0, [(9, 9)], {}, {})
    ring = coordinator._ring

    def late() -> None:
        coordinator._finish(old)
        ring()

    coordinator._ring = late  # type: ignore[method-assign]
    assert lead.step().loss < 1e9


class Leading:
    """A coordinator's end of a replica's socket, which a test writes to."""

    def __init__(self, compute: Callable[[int], tuple[float, Any]], far: bool = False) -> None:
        self.sock, theirs = socket.socketpair()
        if far:
            number = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD, 2000)
            theirs.close()
            theirs = socket.socket(fileno=number)
        self._reader = Reader(OF_REPLICAS)
        self.pushed: list[tuple[int, int, int]] = []
        self.error: BaseException | None = None
        self.replica = _replica.Replica(
            theirs, "the coordinator (here:1)", lambda: None, compute, self._push
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _push(self, _: Any, staged: tuple[int, int, int]) -> None:
        self.pushed.append(staged)

    def _run(self) -> None:
        try:
            self.replica.run("r", PORTIONS)
        except Exception as error:
            self.error = error

    def hear(self, told: list[int]) -> list[str]:
        """Names of the next messages; the tickets of pushes go to `told`."""
        found: list[str] = []
        while not found:
            data = self.sock.recv(1 << 16)
            assert data
            for each in self._reader.feed(data):
                found.append(each["what"])
                told += each.get("tickets", [])
        return found

    def end(self) -> BaseException | None:
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.sock.close()
        return self.error


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (pack("welcome", replica=0, push_every=0), "push"),
        (pack("work", batch=1, ticket=0, portion=PORTIONS), "portion"),
        (pack("refused", text="\x1b[2Jred"), r"\\x1b\[2Jred"),
    ],
)
def test_a_replica_ends_where_its_coordinator_says_what_cannot_be(
    messages: bytes, text: str
) -> None:
    lead = Leading(lambda _: (1.0, [np.ones(3)]))
    lead.sock.sendall(messages)
    found = lead.end()
    assert isinstance(found, InvalidArgument)
    assert re.search(text, str(found))


def test_a_replica_whose_listener_fails_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> bool:
        raise MemoryError("no room")

    monkeypatch.setattr(_replica.Replica, "_obey", broken)
    lead = Leading(lambda _: (1.0, [np.ones(3)]))
    lead.sock.sendall(pack("push", batch=1))
    assert "MemoryError" in str(lead.end())


def test_a_socket_of_a_large_number_is_heard() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 3000:
        pytest.skip("descriptors are few here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 3000), before[1]))
    try:
        lead = Leading(lambda _: (1.0, [np.ones(3)]), far=True)
        lead.sock.sendall(pack("end"))
        assert lead.end() is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_push_is_never_too_long_to_be_told() -> None:
    """However rarely the coordinator wants pushes."""
    first, count = 10**17, 4000
    lead = Leading(lambda _: (1.0, [np.ones(1)]))
    told: list[int] = []
    lead.sock.sendall(pack("welcome", replica=0, push_every=10**6))
    for ticket in range(first, first + count):
        lead.sock.sendall(pack("work", batch=1, ticket=ticket, portion=0))
        while "report" not in (heard := lead.hear(told)):
            assert heard
        lead.sock.sendall(pack("keep", batch=1, ticket=ticket))
    lead.sock.sendall(pack("push", batch=1))
    while len(told) < count:
        assert lead.hear(told)
    assert told == list(range(first, first + count))
    lead.sock.sendall(pack("end"))
    assert lead.end() is None


def test_a_stopped_coordinator_is_left_for_another(
    team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_replica, "_LOOK_SECONDS", 0.05)
    replica = team.replica()
    stopping = LEAD.replace("SIGKILL", "SIGSTOP")
    with script(tmp_path, stopping, team, str(tmp_path / "state.json"), "1") as stopped:
        try:
            os.waitpid(stopped.pid, os.WUNTRACED)
            lead = team.lead()
            lead._lead = lead._begin()
            lead._lead._patience = 0.1
            with pytest.raises(Timeout, match="no replica is there"):
                lead.step()
            replica.join()
        finally:
            stopped.kill()
    assert f"({process_name()}) has begun" in str(replica.error)
    team.replica()
    lead._lead._patience = 30
    assert lead.step().loss < 1e9


@pytest.mark.parametrize("batch", ["all", 1000, 2000])
def test_batches_of_uneven_portions_are_means(batch: Any) -> None:
    """With a loss of one for each sample the mean is one, whichever portions are drawn."""
    torch = pytest.importorskip("torch")
    import gradwire.torch

    w = torch.nn.Parameter(torch.ones(1))
    fit = gradwire.torch.Sandblaster(
        [w], lambda indices: w.sum() * len(indices), samples=2050, portion=1000, batch=batch
    )
    losses = [fit._differentiate(None, portion)[0] for portion in range(3)]
    drawn = losses if batch == "all" else losses[: batch // 1000]
    assert sum(drawn) == pytest.approx(1, abs=2e-3)
    assert max(losses) == pytest.approx(min(losses), abs=2e-3)


def test_a_batch_of_more_than_all_samples_is_refused() -> None:
    torch = pytest.importorskip("torch")
    import gradwire.torch

    with pytest.raises(InvalidArgument, match="batch=2051 samples: there are 2050"):
        gradwire.torch.Sandblaster(
            [torch.nn.Parameter(torch.ones(1))], torch.sum, samples=2050, batch=2051
        )


def test_a_state_in_no_folder_is_refused_at_once(team: Team, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="there is no folder"):
        team.make(state=tmp_path / "none" / "state.json").step()


def test_a_state_that_was_not_written_is_written_first(
    team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another iteration would write over the vectors that the file names."""
    team.options["function"] = lambda parameters, portion: (
        float((portion + 1) * (parameters[0] ** 2).sum() - parameters[0].sum()),
        [2 * (portion + 1) * parameters[0] - 1],
    )
    lead = team.lead(state=tmp_path / "state.json")
    team.replica()
    lead.step()

    def full(*_: Any) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(_lead.json, "dump", full)
        for _ in range(2):
            with pytest.raises(OSError, match="full"):
                lead.step()
    assert lead.step().iteration == 3
    assert [each.name for each in tmp_path.iterdir()] == ["state.json"]

"""A coordinator and replicas over real shards: results, deaths, errors, hostile peers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradwire import InvalidArgument, RendezvousError, Timeout, TransportError, serve
from gradwire._base.deadline import Deadline
from gradwire.serve import _directory, _replica
from gradwire.serve._sandblaster.messages import LENGTH, MAX_BYTES, OF_REPLICAS, Reader, pack
from gradwire.serve._vectors import Absmax, Abssum, Dots
from ranks import eventually
from sandblaster_team import EACH, PORTIONS, Replica, Team, blocks
from test_lbfgs import Torch, network

DISTANCE = sum(EACH * portion**2 for portion in range(PORTIONS)) / 2


def test_replicas_minimize_as_torch_does(team: Team) -> None:
    function, start = network()

    def shared(parameters: Any, portion: int) -> tuple[float, Any]:
        loss, gradient = function(np.concatenate([parameters["a"], parameters["b"]]))
        parts = np.split(gradient / PORTIONS, [100])
        return loss / PORTIONS, {"b": parts[1], "a": parts[0]}

    team.like = lambda: dict(zip("ab", map(np.array, np.split(start, [100])), strict=True))
    team.options["function"] = shared
    lead = team.lead()
    replicas = [team.replica() for _ in range(3)]
    steps = [lead.step() for _ in range(10)]
    lead.close()
    for each in replicas:
        each.join()
        assert each.error is None
        found = np.concatenate(list(each.job._like.values()))  # type: ignore[union-attr]
        assert np.abs(found - Torch(network(), 10, "strong_wolfe").end).max() <= 1e-12
    assert [each.iteration for each in steps] == list(range(1, 11))
    assert sum(each.evaluations for each in steps) == 12
    assert sum(steps[0].portions.values()) >= steps[0].evaluations * PORTIONS
    assert any("replica 0 (" in name for name in steps[0].portions)


def test_float32_has_the_same_bits_for_any_number_of_shards(bare_environment: None) -> None:
    function, start = network(np.float32)
    found = []
    for shards in (1, 2, 3, 7):
        with serve.Server(shards) as server:
            options: dict[str, Any] = {"portions": 1, "store": server.store, "timeout": 30}

            def whole(parameters: Any, _: int) -> tuple[float, Any]:
                loss, gradient = function(parameters[0])
                return loss, [gradient]

            replica = Replica(serve.DistributedLBFGS([start.copy()], whole, **options))
            with serve.DistributedLBFGS([start], whole, **options) as lead:
                losses = [lead.step().loss for _ in range(15)]
            replica.join()
            found.append((losses, np.asarray(replica.job._like[0]).tobytes()))  # type: ignore[index]
    assert found.count(found[0]) == len(found)


def test_a_batch_may_be_some_of_the_portions(team: Team) -> None:
    team.options |= {"batch": 3, "iterations_per_batch": 2}
    lead = team.lead()
    team.replica()
    first, second, third = (lead.step() for _ in range(3))
    assert second.loss <= first.loss < DISTANCE
    assert third.evaluations == 2  # one to begin with the new batch
    assert sum(second.portions.values()) == 3


def test_replicas_come_at_any_time(team: Team) -> None:
    lead = team.lead()
    taken = threading.Event()

    def slow(parameters: Any, portion: int) -> tuple[float, Any]:
        taken.wait()
        return blocks(parameters, portion)

    team.replica(function=slow, replica="a")
    late: list[Any] = []

    def join() -> None:
        late.append(team.replica(replica="b"))
        taken.set()

    threading.Timer(0.2, join).start()
    step = lead.step()
    assert sum(step.portions.values()) >= PORTIONS


def test_an_end_after_an_error_is_one_for_replicas(team: Team) -> None:
    lead = team.lead()
    first = team.replica()
    lead.step()
    with pytest.raises(KeyError), lead:
        raise KeyError("odd")
    first.join()
    assert isinstance(first.error, TransportError)
    assert "has ended with an error: KeyError: 'odd'" in str(first.error)

    other = team.lead()

    def failing(*_: Any) -> tuple[float, Any]:
        eventually(lambda: len(other._lead._coordinator._peers) == 2)  # the other one is in, too
        raise ValueError("no such sample")

    def waiting(parameters: Any, portion: int) -> tuple[float, Any]:
        failed.wait(30)  # or it would compute the failing one's portions as well
        return blocks(parameters, portion)

    failed = threading.Event()
    team.replica(function=failing, replica="odd")
    patient = team.replica(function=waiting)
    with pytest.raises(InvalidArgument, match="no such sample"):
        other.step()
    failed.set()
    other.close()
    patient.join()
    assert isinstance(patient.error, TransportError)
    assert "has ended with an error: InvalidArgument: odd (" in str(patient.error)


def test_an_end_after_a_step_that_was_repeated_is_none(team: Team) -> None:
    team.options["timeout"] = 0.5
    lead = team.lead()
    with pytest.raises(Timeout, match="no replica is there"):
        lead.step()
    replica = team.replica(timeout=30)
    lead.step()
    lead.close()
    replica.join()
    assert replica.error is None


def test_replicas_of_one_name_are_counted_apart(team: Team) -> None:
    lead = team.lead()
    for _ in range(2):
        team.replica(replica=None)
    step = lead.step()
    assert sum(step.portions.values()) >= step.evaluations * PORTIONS


KILLED = """
import os, signal, sys
import numpy as np
from sandblaster_team import EACH, PORTIONS, blocks
from gradwire import serve
from gradwire.serve import _replica
where, when = sys.argv[1], int(sys.argv[2])
say, push = _replica.Replica._say, serve.ParameterServer.push

def count(what):
    global when
    if what == where:
        when -= 1
        if when < 0:
            os.kill(os.getpid(), signal.SIGKILL)

def _say(self, what, **fields):
    count("before " + what)
    say(self, what, **fields)
    count("after " + what)

def _push(self, arrays, **options):
    count("before push")
    pending = push(self, arrays, async_op=True, **options)
    count("during push")
    pending.wait()

_replica.Replica._say, serve.ParameterServer.push = _say, _push
options = {"portions": PORTIONS, "push_every": 2, "timeout": 30, "replica": "dying"}
serve.DistributedLBFGS([np.zeros(PORTIONS * EACH)], blocks, **options).serve()
"""
STEPS = [f"{when} {what}" for what in ("report", "staged") for when in ("before", "after")]


def script(path: Path, text: str, team: Team, *arguments: str) -> subprocess.Popen[str]:
    (path / "script.py").write_text(text)
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
    environment = {**os.environ, "GRADWIRE_STORE": team.store, "PYTHONPATH": ":".join(folders)}
    return subprocess.Popen(
        [sys.executable, str(path / "script.py"), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("where", [*STEPS, "before push", "during push"])
def test_each_portion_counts_once_whoever_is_killed(team: Team, tmp_path: Path, where: str) -> None:
    """The gradient says of each portion how often it counted, on every shard."""
    team.options |= {"search": None, "push_every": 2}
    lead = team.lead()
    with script(tmp_path, KILLED, team, where, "1") as dying:
        release = threading.Event()

        def after_the_death(parameters: Any, portion: int) -> tuple[float, Any]:
            release.wait()
            return blocks(parameters, portion)

        team.replica(function=after_the_death)
        threading.Thread(target=lambda: (dying.wait(), release.set()), daemon=True).start()
        lead.step()
        assert dying.wait() == -signal.SIGKILL
    _check_counts(lead)


def _check_counts(lead: serve.DistributedLBFGS) -> None:
    """After a step of t along -g, with g = w - c, the gradient is (1 - t) times the first one."""
    assert lead._lead is not None
    server, minimizer = lead._lead._server, lead._lead._minimizer
    at = minimizer._at
    assert at is not None
    total, largest, (square,) = server._command(
        [Abssum(at.gradient), Absmax(at.gradient), Dots([(at.gradient, at.gradient)])]
    )
    numbers = np.repeat(np.arange(PORTIONS, dtype=float), EACH)
    rest = 1 - 1 / numbers.sum()
    assert np.allclose(total, rest * numbers.sum(), rtol=1e-12)
    assert np.allclose(square, rest**2 * (numbers**2).sum(), rtol=1e-12)
    assert np.allclose(largest, rest * (PORTIONS - 1), rtol=1e-12)


def test_a_stopped_replica_holds_up_nobody(team: Team, tmp_path: Path) -> None:
    lead = team.lead(push_every=2)
    stopping = KILLED.replace("SIGKILL", "SIGSTOP")
    with script(tmp_path, stopping, team, "after report", "3") as stopped:
        release = threading.Event()

        def after_the_stop(parameters: Any, portion: int) -> tuple[float, Any]:
            release.wait()
            return blocks(parameters, portion)

        def wait() -> None:
            os.waitpid(stopped.pid, os.WUNTRACED)
            release.set()

        team.replica(function=after_the_stop, push_every=2)
        threading.Thread(target=wait, daemon=True).start()
        try:
            steps = [lead.step() for _ in range(3)]
        finally:
            stopped.kill()
    assert steps[-1].loss < 1e-9 * DISTANCE
    assert sum(steps[0].copies.values()) > 0


def test_a_function_that_raises_is_named(team: Team) -> None:
    def broken(parameters: Any, portion: int) -> tuple[float, Any]:
        raise ZeroDivisionError("no samples")

    lead = team.lead()
    bad = team.replica(function=broken, replica="replica b")
    with pytest.raises(InvalidArgument, match=r"replica b \(.*:\d+\): .*ZeroDivisionError: no sam"):
        lead.step()
    bad.join()
    assert isinstance(bad.error, ZeroDivisionError)
    team.replica()
    assert lead.step().loss < DISTANCE


@pytest.mark.parametrize(
    ("loss", "gradient", "text"),
    [
        (float("nan"), 0.0, "loss of portion .* is nan"),
        (1.0, float("inf"), "gradient of portion .* is NaN or infinite"),
    ],
)
def test_nan_is_named(team: Team, loss: float, gradient: float, text: str) -> None:
    like = np.full(PORTIONS * EACH, gradient)
    lead = team.lead()
    team.replica(function=lambda *_: (loss, [like]), replica="replica b")
    with pytest.raises(InvalidArgument, match=rf"replica b \(.*\): the |replica b .*: a {text}"):
        lead.step()


def test_wrong_gradients_are_refused(team: Team) -> None:
    lead = team.lead()
    replica = team.replica(function=lambda *_: (1.0, [np.zeros(3)]))
    with pytest.raises(InvalidArgument, match=r"has the shape \(3,\), the parameter \(60,\)"):
        lead.step()
    replica.join()


def test_other_portions_are_refused(team: Team) -> None:
    lead = team.lead()
    other = team.replica(portions=PORTIONS + 1)
    team.replica()
    lead.step()
    other.join()
    assert isinstance(other.error, InvalidArgument)
    assert "13 portions, and the coordinator 12" in str(other.error)


def test_nobody_came(team: Team) -> None:
    with pytest.raises(Timeout, match="no replica is there"):
        team.lead(timeout=0.3).step()


LEAD = """
import os, signal, sys
import numpy as np
from gradwire import serve
from sandblaster_team import EACH, PORTIONS, blocks
lead = serve.DistributedLBFGS(
    [np.zeros(PORTIONS * EACH)], blocks, portions=PORTIONS, state=sys.argv[1], timeout=30
)
for _ in range(int(sys.argv[2])):
    print(lead.step().loss, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def rosen_blocks(parameters: Any, portion: int) -> tuple[float, Any]:
    """Blocks of a function with more than one iteration to its minimum."""
    loss, (gradient,) = blocks(parameters, portion)
    return loss * (1 + portion), [gradient * (1 + portion)]


def test_a_new_coordinator_goes_on(team: Team, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    replica = team.replica(function=rosen_blocks)
    with script(tmp_path, LEAD, team, str(state), "3") as killed:
        losses = [float(line) for line in killed.communicate()[0].split()]
        assert killed.returncode == -signal.SIGKILL
    replica.join()
    assert isinstance(replica.error, TransportError)
    assert f":{killed.pid})" in str(replica.error)
    again = team.replica(function=rosen_blocks)
    lead = team.lead(state=state)
    step = lead.step()
    assert step.iteration == 4
    assert step.loss < losses[-1]
    assert step.evaluations == 1  # with the history and the gradient that were there
    assert json.loads(state.read_text())["iteration"] == 4
    lead.close()
    again.join()
    assert again.error is None


def test_a_state_that_is_none_is_refused(team: Team, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    team.replica()
    for text in ("{", "[]", '{"version": 1}', "null"):
        state.write_text(text)
        with pytest.raises(InvalidArgument, match=f"cannot go on from the state in {state}"):
            team.make(state=state).step()
    state.unlink()
    assert team.lead(state=state).step().iteration == 1


def test_hostile_peers_end_alone(team: Team) -> None:
    lead = team.lead()
    team.replica()
    lead.step()
    deadline = Deadline(30)
    with _directory.opened(_directory.service("parameters", team.store, None), deadline) as found:
        job = found.job(deadline)
        hello = pack("hello", name="eve", portions=PORTIONS)
        for data in (
            b"\xff" * 100,
            pack("report", ticket=0, loss=1.0),
            hello + hello,
            hello + pack("report", ticket=99, loss=1.0),
            hello + pack("staged", batch=1, sequence=0, tickets=[1, 2]) + b"\0" * 10,
            hello + pack("forgotten", ticket=0),
            pack("hello", name="a\nb", portions=PORTIONS),
        ):
            sock, _ = _replica.connect(found, job, deadline)
            with sock:
                sock.sendall(data)
                sock.settimeout(30)
                if data.endswith(b"\0"):
                    sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass
            assert lead.step().iteration > 1


def test_a_coordinator_takes_its_own_services_replicas_alone(team: Team) -> None:
    lead = team.lead()
    team.replica()
    lead.step()
    limit = Deadline(30)
    one, other = (_directory.service(name, team.store, None) for name in ("parameters", "other"))
    with _directory.opened(one, limit) as found, _directory.opened(other, limit) as stale:
        job = found.job(limit)
        stale.publish_coordinator(found.find_coordinator(limit))
        _replica.connect(found, job, limit)[0].close()
        with pytest.raises(RendezvousError, match="could not reach the coordinator"):
            _replica.connect(stale, job, Deadline(0.5))


@pytest.mark.parametrize(
    "message",
    [
        b"nothing",
        b"[" * 10_000,
        b"[]",
        b'{"what": "work", "batch": 0, "ticket": 0, "portion": 0}',
        b'{"what": ["report"]}',
        b'{"what": "report", "ticket": 0}',
        b'{"what": "report", "ticket": 0, "loss": NaN}',
        b'{"what": "report", "ticket": 0, "loss": Infinity}',
        b'{"what": "report", "ticket": 0, "loss": "1"}',
        b'{"what": "report", "ticket": 0, "loss": 1%s}' % (b"0" * 400),
        b'{"what": "report", "ticket": -1, "loss": 1}',
        b'{"what": "report", "ticket": true, "loss": 1}',
        b'{"what": "report", "ticket": 1.5, "loss": 1}',
        b'{"what": "report", "ticket": 1, "loss": 1, "more": 1}',
        b'{"what": "staged", "batch": 1, "sequence": 1, "tickets": [[]]}',
        b'{"what": "staged", "batch": 1, "sequence": 1, "tickets": {}}',
    ],
)
def test_messages_are_checked(message: bytes) -> None:
    with pytest.raises(InvalidArgument):
        Reader(OF_REPLICAS).feed(LENGTH.pack(len(message)) + message)


def test_messages_come_in_pieces() -> None:
    data = pack("report", ticket=3, loss=0.1) + pack("forgotten", ticket=4)
    reader = Reader(OF_REPLICAS)
    found = [each for i in range(len(data)) for each in reader.feed(data[i : i + 1])]
    assert found == [
        {"what": "report", "ticket": 3, "loss": 0.1},
        {"what": "forgotten", "ticket": 4},
    ]
    with pytest.raises(InvalidArgument, match="bytes"):
        reader.feed(LENGTH.pack(MAX_BYTES + 1))


def test_a_clock_that_was_set_back_does_not_matter(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards remember which batches are over, so a new coordinator's must have other numbers."""
    hour = 3600
    for now in (100 * hour, 99 * hour, 0):
        monkeypatch.setattr(time, "time_ns", lambda now=now: now * 10**9)
        monkeypatch.setattr(time, "time", lambda now=now: float(now))
        with team.lead() as lead:
            replica = team.replica()
            assert sum(lead.step().portions.values()) >= PORTIONS
        replica.join()
        assert replica.error is None

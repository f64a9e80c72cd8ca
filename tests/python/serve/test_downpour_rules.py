"""What a replica asks of its servers, and when: with stand-ins for these."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch")

import torch
from gradwire import ErrorFeedback, InvalidArgument, TransportError, serve
from gradwire.serve._reconnect import Dialling
from gradwire.torch import Compression, Downpour, _downpour

LOST = Dialling("a server has ended")


class Call(serve.Pending):
    """A push or pull that is over when the test says so, or when it is waited for."""

    def __init__(self, error: Exception | None = None, *, copied: bool = False) -> None:
        self.over, self.error, self.waits, self.is_copy = False, error, 0, copied

    def done(self) -> bool:
        return self.over

    def wait(self, timeout: float | None = None) -> list[int]:
        self.waits, self.over = self.waits + 1, True
        if self.error is not None:
            raise self.error
        return [7, 5]

    @property
    def copied(self) -> bool:
        return self.is_copy


class Servers:
    """A connection whose pushes and pulls are scripted: the next ones' errors, or what they are."""

    def __init__(self) -> None:
        self.first, self.versions, self.closed = True, iter([[9, 9]]), False
        self.given: dict[str, Any] = {}
        self.pushed: list[list[float]] = []  # the first element of each parameter
        self.options: dict[str, Any] = {}  # of the last push
        self.pushes: list[Any] = []
        self.pulls: list[Any] = []
        self.asked: list[dict[str, Any]] = []

    def push(self, values: Any, **options: Any) -> Any:
        call = self.pushes.pop(0) if self.pushes else Call()
        if isinstance(call, Exception):
            raise call
        values = [*values.values()] if isinstance(values, dict) else values
        self.pushed.append([float(each.view(-1)[0]) for each in values])
        self.options = options
        return call

    def pull(self, into: Any, **options: Any) -> Any:
        self.asked.append(options)
        return self.pulls.pop(0) if self.pulls else Call()

    def stats(self) -> list[dict[str, float]]:
        found: Any = next(self.versions)
        if isinstance(found, Exception):
            raise found
        return [{"version": float(each)} for each in found]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    found = Servers()

    def connect(*_: Any, **options: Any) -> Any:
        found.given = options
        return found

    monkeypatch.setattr(serve, "connect", connect)
    return found


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made, which take no time."""
    found: list[float] = []
    monkeypatch.setattr(_downpour, "time", mock.Mock(sleep=found.append))
    return found


def made(rule: serve.Rule | None = None, **options: Any) -> tuple[torch.Tensor, Any]:
    parameter = torch.zeros(3, dtype=torch.float32, requires_grad=True)
    optimizer = Downpour([parameter], rule or serve.SGD(lr=1.0), **options)
    parameter.grad = torch.ones_like(parameter)
    return parameter, optimizer


def test_a_step_waits_for_no_push(servers: Servers) -> None:
    _, optimizer = made(n_fetch=100)
    servers.pushes = calls = [Call() for _ in range(3)]
    first, *_ = servers.pushes
    for _ in range(2):
        optimizer.step()
    assert not first.waits
    assert len(optimizer._outgoing) == 2
    first.over = True
    optimizer.step()  # takes its memory
    assert (first.waits, len(optimizer._outgoing), optimizer._free, calls) == (1, 2, [], [])
    optimizer.fetch()
    assert (len(optimizer._outgoing), len(optimizer._free)) == (0, 2)


def test_memory_of_what_is_copied_is_free_at_once(servers: Servers) -> None:
    _, optimizer = made(n_fetch=100)
    servers.pushes = [Call(copied=True), Call(copied=True), Call()]
    for free in (1, 1, 0):
        optimizer.step()
        assert len(optimizer._free) == free
    optimizer.close()
    assert len(optimizer._free) == 1
    assert servers.closed


def test_close_waits_for_pushes(servers: Servers) -> None:
    _, optimizer = made(n_push=2, n_fetch=100)
    servers.pushes = [one, other] = [Call(), Call()]
    optimizer.step()
    optimizer.step()
    optimizer.close()
    assert (one.over, other.over, len(servers.pushed)) == (True, True, 2)
    optimizer.close()
    assert len(servers.pushed) == 2


def test_servers_are_left_also_after_an_error(servers: Servers) -> None:
    _, optimizer = made(n_fetch=100)
    servers.pushes = [Call(TransportError("it has ended"))]
    optimizer.step()
    with pytest.raises(TransportError, match="it has ended"):
        optimizer.close()
    assert servers.closed


def test_an_error_is_told_once_and_its_memory_is_free(servers: Servers) -> None:
    _, optimizer = made(n_fetch=100)
    servers.pushes = [call := Call(InvalidArgument("NaN"))]
    optimizer.step()
    state = optimizer.state_dict()["downpour"]  # waits, and leaves the error to the next step
    assert call.waits == 1
    assert state["steps"] == 1
    with pytest.raises(InvalidArgument, match="NaN"):
        optimizer.step()
    assert len(servers.pushed) == 1
    assert len(optimizer._free) == 1
    optimizer.step()
    assert len(servers.pushed) == 2


def test_a_closure_is_called_first(servers: Servers) -> None:
    parameter, optimizer = made()

    def closure() -> torch.Tensor:
        parameter.grad = None
        (parameter * 4).sum().backward()
        return torch.tensor(5.0)

    assert optimizer.step(closure) == 5
    assert servers.pushed == [[4.0]]
    assert optimizer.step() is None


@pytest.mark.parametrize(("fetch", "waits"), [("wait", 1), ("ahead", 0)])
def test_values_ahead_are_waited_for_one_fetch_later(
    servers: Servers, fetch: str, waits: int
) -> None:
    _, optimizer = made(fetch=fetch, pull_codec="int8")
    assert servers.asked == [{"codec": "int8", "async_op": True}]  # those of the beginning
    servers.pulls = [call := Call(), Call()]
    optimizer.step()
    assert call.waits == waits
    optimizer.step()
    assert call.waits == 1
    assert len(servers.asked) == 3


@pytest.mark.parametrize(
    ("n_push", "n_fetch", "pushed", "asked"),
    [(1, 1, [1, 1, 1, 1, 1], 5), (2, 3, [1, 2, 2], 1), (3, 2, [1, 3], 2)],
)
def test_pushes_and_fetches_have_their_steps(
    servers: Servers, n_push: int, n_fetch: int, pushed: list[int], asked: int
) -> None:
    _, optimizer = made(n_push=n_push, n_fetch=n_fetch)
    for _ in range(5):
        optimizer.step()
    assert servers.pushed == [[each] for each in pushed]
    assert len(servers.asked) == 1 + asked


def test_a_push_says_what_servers_must_know(servers: Servers) -> None:
    own = ErrorFeedback()
    _, optimizer = made(compression=Compression("onebit", warm_up=6, feedback=own), n_fetch=100)
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.step()
    wanted = {"codec": "int8", "rules": [], "feedback": own, "lr": 0.25, "versions": [7, 5]}
    assert servers.options == {**wanted, "async_op": True}
    assert servers.given["codecs"] == ["none", "onebit", "int8", "none"]
    _, plain = made()
    plain.step()
    assert (servers.options["codec"], servers.options["feedback"]) == ("none", False)


@pytest.mark.parametrize("named", [True, False])
def test_rules_for_small_parameters_have_their_names(servers: Servers, named: bool) -> None:
    model = torch.nn.Linear(64, 64)
    given = model.named_parameters() if named else model.parameters()
    optimizer = Downpour(given, serve.SGD(lr=1.0), compression="onebit")
    optimizer.step()
    assert servers.options["rules"] == [("bias" if named else "1", "int8")]


def test_feedback_may_be_given_up(servers: Servers) -> None:
    _, optimizer = made(compression=Compression("int8", feedback=False))
    optimizer.step()
    assert servers.options["feedback"] is False
    assert optimizer.state_dict()["downpour"]["residuals"] is None


def test_what_a_lost_server_has_not_got_is_pushed_later(servers: Servers) -> None:
    parameter, optimizer = made(local_lr=0.5, n_fetch=100)
    servers.pushes = [LOST, LOST, Call()]
    for step in range(3):
        optimizer.step()
        assert torch.equal(parameter, torch.full((3,), -0.5 * (step + 1)))
    assert servers.pushed == [[3.0]]
    assert len(optimizer._free) + len(optimizer._outgoing) == 1  # one memory for all


def test_no_push_goes_out_while_the_last_one_is_dialled(servers: Servers) -> None:
    _, optimizer = made(local_lr=0.5)
    servers.pushes = [call := Call(LOST)]
    optimizer.step()
    for _ in range(2):
        call.over = False  # it is made again
        optimizer.step()
    assert len(servers.pushed) == 3


def test_values_of_a_lost_server_are_asked_for_once(servers: Servers, slept: list[float]) -> None:
    _, optimizer = made(fetch="ahead")
    servers.pulls = [call := Call(LOST)]
    optimizer.step()
    asked = len(servers.asked)
    optimizer.step()
    assert len(servers.asked) == asked
    assert optimizer._incoming is call
    call.error = None
    optimizer.step()
    assert len(servers.asked) == asked + 1
    assert not slept


def test_a_fetch_waits_while_a_server_is_dialled(servers: Servers, slept: list[float]) -> None:
    _, optimizer = made()
    servers.pulls = [call := Call(LOST)]

    def comes(seconds: float) -> None:
        slept.append(seconds)
        call.error = None

    _downpour.time.sleep = comes
    optimizer.fetch()
    assert call.waits == 2
    assert len(slept) == 1
    assert 0 < slept[0] < 1


@pytest.mark.parametrize(
    ("versions", "pauses"),
    [([[3, 4]], 0), ([[4, 2], LOST, [1, 2], [3, 3]], 3), ([[0, 0], [0, 0], [9, 9]], 2)],
)
def test_a_later_replica_waits_until_all_shards_have_so_many_pushes(
    servers: Servers, slept: list[float], versions: list[Any], pauses: int
) -> None:
    servers.first, servers.versions = False, iter(versions)
    made(warm_start=3)
    assert [*servers.versions] == []
    assert len(slept) in (pauses, pauses - 1)  # none follows progress
    assert all(0 < each < 1 for each in slept)


def test_a_replica_that_makes_progress_is_waited_for(
    servers: Servers, slept: list[float], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The limit is for each push, not for all of them."""
    limits: list[Any] = []

    class Limit:
        def __init__(self, seconds: float) -> None:
            self.seconds, self.looks = seconds, 0
            limits.append(self)

        @property
        def passed(self) -> bool:
            self.looks += 1
            return self.looks == 3

    monkeypatch.setattr(_downpour, "Deadline", Limit)
    servers.first = False
    servers.versions = iter([[0], [0], [1], [1], [1], [2], [2], [2], [2], [2]])
    made(warm_start=9, timeout=8)
    assert [each.seconds for each in limits] == [8] * 4
    assert [*servers.versions] == [[2]]
    assert "no push in 8 s, at 2 of 9" in caplog.text


def test_the_first_replica_and_those_without_a_warm_start_wait_for_nobody(
    servers: Servers, slept: list[float]
) -> None:
    servers.versions = iter([[0, 0]])
    made(warm_start=3)
    servers.first = False
    made()
    assert not slept


def test_a_loaded_state_is_the_saved_one(servers: Servers) -> None:
    _, optimizer = made(n_push=3, n_fetch=100, compression="int8")
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.step()
    optimizer.step()
    saved = optimizer.state_dict()
    other, again = made(n_push=3, n_fetch=100, compression="int8")
    servers.pushes = [call := Call()]
    again.step()
    again.load_state_dict(saved)
    assert call.waits == 1
    assert again.param_groups[0]["lr"] == 0.25
    for _ in range(2):  # of steps 2 and 3, and step 3 pushes
        again.step()
    assert servers.pushed[-1] == [3.0]
    assert torch.equal(saved["downpour"]["accrued"][0], other.grad)  # as it was


@pytest.mark.parametrize(("saves", "loads"), [("none", "int8"), ("int8", "none")])
def test_residuals_go_where_they_are_kept(servers: Servers, saves: str, loads: str) -> None:
    _, optimizer = made(compression=saves)
    _, other = made(compression=loads)
    optimizer.step()
    other.load_state_dict(optimizer.state_dict())
    assert other.state_dict()["downpour"]["steps"] == 1


def test_a_rate_of_zero_is_pushed_as_such(servers: Servers) -> None:
    _, optimizer = made(serve.Adagrad(lr=0.1))
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert servers.options["lr"] == 0


def test_sparse_gradients_are_pushed_dense(servers: Servers) -> None:
    model = torch.nn.Embedding(4, 1, sparse=True)
    optimizer = Downpour(model.parameters(), serve.SGD(lr=1.0))
    model(torch.tensor([0, 0])).sum().backward()
    optimizer.step()
    assert servers.pushed == [[2.0]]


def test_a_default_type_changes_nothing(servers: Servers) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        _, optimizer = made()
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer._fetched[0].dtype == torch.float32


Wrong = Callable[[], Any]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda: made(fetch="never"), "fetch='never'"),
        (lambda: made(n_push=0), "n_push=0"),
        (lambda: made(n_fetch=0), "n_fetch=0"),
        (lambda: made(local_lr=float("nan")), "local_lr=nan"),
        (lambda: made(clip_norm=0.0), "clip_norm=0"),
        (lambda: Downpour([torch.zeros(3)], serve.SGD(lr=1.0)), "no parameter requires"),
        (
            lambda: Downpour(
                [{"params": torch.nn.Linear(2, 2).named_parameters()} for _ in range(2)],
                serve.SGD(lr=1.0),
            ),
            "two parameters have the name 'weight'",
        ),
    ],
)
def test_what_cannot_be_is_refused(servers: Servers, wrong: Wrong, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        wrong()


def test_small_numbers_are_numbers(servers: Servers) -> None:
    made(local_lr=0.5, clip_norm=0.5, n_push=1, n_fetch=1, warm_start=0)


def test_what_is_an_argument_of_connect_has_its_default() -> None:
    own, theirs = (inspect.signature(each).parameters for each in (Downpour, serve.connect))
    shared = own.keys() & theirs.keys()
    assert len(shared) >= 8
    assert all(own[each].default == theirs[each].default for each in shared), shared

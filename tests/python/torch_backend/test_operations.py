"""Works and futures as torch takes them: over works that a test ends, without ranks."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from gradwire import InvalidArgument, TransportError
from gradwire.torch.backend import operations
from gradwire.torch.backend.operations import Done, Finished, Operation, Received, Several
from ranks import LIMIT

BROKEN = TransportError("a link broke")


class Work:
    """A work that is over when the test says so; waits until then."""

    def __init__(self, error: Exception | None = None, *, over: bool = False) -> None:
        self.ended, self.error = threading.Event(), error
        self.limits: list[float | None] = []
        if over:
            self.ended.set()

    def done(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout: float | None = None) -> Any:
        self.limits.append(timeout)
        assert self.ended.wait(LIMIT)
        if self.error is not None:
            raise self.error
        return 7


class Owner:
    """A group whose futures complete when the test says so."""

    def __init__(self) -> None:
        self.submitted: list[tuple[str, Any, Any]] = []

    def completions(self, purpose: str) -> Any:
        return mock.Mock(submit=lambda *what: self.submitted.append((purpose, *what)))

    def explained(self, error: Exception) -> Exception:
        return InvalidArgument(f"{error}, and why")

    def complete(self) -> None:
        for _, wait, finish in self.submitted:
            finish(operations.error_of(wait))
        self.submitted.clear()


def made(work: Any = None, stream: Any = None, purpose: str = "group") -> tuple[Any, Work, Owner]:
    own, owner = work or Work(), Owner()
    return Operation(own, [torch.ones(2)], owner, stream, purpose), own, owner


def test_what_was_over_takes_no_time() -> None:
    assert Done().done() is True
    Done().wait(3.0)
    operation, _, owner = made(Done())
    assert operation.wait()
    assert operation.is_completed()
    assert torch.equal(operation.get_future().value()[0], torch.ones(2))
    assert not owner.submitted  # no thread completes it


def test_several_works_are_over_when_all_are() -> None:
    works = [Work(over=True), Work()]
    several = Several(works)
    assert not several.done()
    works[1].ended.set()
    assert several.done()
    several.wait(3.0)
    assert [each.limits for each in works] == [[3.0], [3.0]]
    with pytest.raises(TransportError):
        Several([Work(BROKEN, over=True), Work()]).wait()


def test_a_work_is_finished_once_and_not_after_an_error() -> None:
    finish = mock.Mock()
    work = Work(over=True)
    finished = Finished(work, finish)
    assert finished.done()
    assert [finished.wait(3.0), finished.wait()] == [7, 7]
    finish.assert_called_once_with()
    assert work.limits == [3.0, None]
    broken = Finished(Work(BROKEN, over=True), finish)
    for _ in range(2):
        with pytest.raises(TransportError):
            broken.wait()
    assert finish.call_count == 1


@pytest.mark.parametrize(
    ("given", "limit"), [((), None), ((timedelta(0),), None), ((timedelta(seconds=3),), 3.0)]
)
def test_wait_takes_torchs_timeout(given: Any, limit: float | None) -> None:
    operation, work, _ = made(Work(over=True))
    assert operation.wait(*given) is True
    assert work.limits == [limit]


def test_an_operation_tells_how_it_is() -> None:
    operation, work, _ = made()
    assert not operation.is_completed()
    assert not operation.is_success()
    assert operation.exception() is None
    assert work.limits == []
    work.ended.set()
    assert operation.is_completed()
    assert work.limits  # so that results are in place
    assert operation.is_success()
    assert operation.exception() is None
    operation.synchronize()
    assert torch.equal(operation.result()[0], torch.ones(2))
    assert not operation.get_future().done() or operation.get_future().value()


def test_an_operation_that_failed_tells_so_at_every_call() -> None:
    operation, _, owner = made(Work(BROKEN, over=True))
    assert operation.is_completed()
    assert not operation.is_success()
    assert operation.exception() is BROKEN
    for ask in (operation.wait, operation.synchronize, operation.result):
        with pytest.raises(TransportError):
            ask()
    future = operation.get_future()
    owner.complete()
    with pytest.raises(Exception, match="a link broke"):
        future.wait()


def test_an_error_of_the_call_is_explained() -> None:
    operation, *_ = made(Work(InvalidArgument("sizes differ"), over=True))
    with pytest.raises(InvalidArgument, match="sizes differ, and why"):
        operation.wait()


def test_a_future_is_one_and_complete_when_wait_returns() -> None:
    operation, work, owner = made(purpose="gather")
    future = operation.get_future()
    assert operation.get_future() is future
    assert [purpose for purpose, *_ in owner.submitted] == ["gather"]
    assert not future.done()
    work.ended.set()
    waits = threading.Thread(target=operation.wait)
    waits.start()
    waits.join(0.05)
    assert waits.is_alive()  # for the future
    owner.complete()
    waits.join(LIMIT)
    assert not waits.is_alive()
    assert torch.equal(future.value()[0], torch.ones(2))


def test_a_timeout_does_not_wait_for_the_future() -> None:
    operation, work, _ = made()
    operation.get_future()
    work.wait = mock.Mock(side_effect=BROKEN)  # type: ignore[method-assign]
    with pytest.raises(TransportError):
        operation.wait(timedelta(seconds=1))


@pytest.mark.parametrize("ask", ["wait", "is_completed"])
def test_a_future_that_is_asked_for_later_is_complete(ask: str) -> None:
    operation, work, owner = made()
    work.ended.set()
    getattr(operation, ask)()
    assert operation.get_future().done()
    assert not owner.submitted


@pytest.mark.parametrize("enqueued", [True, False])
def test_results_on_a_gpu_are_there_for_its_stream(
    enqueued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "stream", lambda each: seen.append(each) or nullcontext())
    futures = mock.Mock(side_effect=lambda devices=None: seen.append(devices) or future)
    future = torch.futures.Future()  # type: ignore[var-annotated]
    monkeypatch.setattr(operations, "Future", futures)
    stream = mock.Mock(device="its device")
    operation, work, owner = made(stream=operations.ResultStream(stream, enqueued))
    work.ended.set()
    operation.get_future()
    assert len(owner.submitted) == (not enqueued)
    owner.complete()
    assert seen == [["its device"], *[stream] * (1 + enqueued)]
    assert future.done()


def test_a_receive_completes_its_future_after_the_match() -> None:
    receive, work, owner = mock.Mock(), Work(), Owner()
    received = Received(receive, work, [torch.ones(2)], owner)
    received.get_future()
    assert not owner.submitted
    (matched,), _ = receive.when_matched.call_args
    matched()
    assert len(owner.submitted) == 1
    work.ended.set()
    assert received.source_rank() == received._source_rank() == 7

"""The threads that complete futures: order, callbacks that block, errors, the end."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
from gradwire.torch.exchange.completions import Completions
from ranks import LIMIT


@pytest.fixture
def completions() -> Iterator[Completions]:
    made = Completions("test-completions")
    yield made
    made.close(LIMIT)
    assert not [each for each in threading.enumerate() if each.name == "test-completions"]


def nothing() -> None:
    pass


def test_waits_in_the_order_of_submission(completions: Completions) -> None:
    order: list[int] = []
    go, done = threading.Event(), threading.Event()
    completions.submit(lambda: go.wait(LIMIT), lambda _: None)
    for number in range(10):
        completions.submit(lambda number=number: order.append(number), lambda _: None)
    completions.submit(nothing, lambda _: done.set())
    assert completions.pending == 12
    go.set()
    assert done.wait(LIMIT)
    assert order == list(range(10))


def test_gives_the_callback_what_waiting_raised(completions: Completions) -> None:
    found: list[Exception | None] = []

    def fail() -> None:
        raise ValueError("lost")

    completions.submit(fail, found.append)
    completions.submit(nothing, found.append)
    completions.close(LIMIT)
    kinds = {type(each) for each in found}
    assert kinds == {ValueError, type(None)}


def test_an_operation_is_over_before_its_callback(completions: Completions) -> None:
    """A callback may close at once, which must not look like a pending operation."""
    seen: list[int] = []
    completions.submit(nothing, lambda _: seen.append(completions.pending))
    completions.close(LIMIT)
    assert seen == [0]


def test_a_callback_may_wait_for_later_operations(completions: Completions) -> None:
    """Each of five callbacks waits for the next one's."""
    events = [threading.Event() for _ in range(6)]
    met: list[bool] = []

    def meet_next(number: int) -> None:
        met.append(events[number + 1].wait(LIMIT))
        events[number].set()

    for number in range(5):
        completions.submit(nothing, lambda _, number=number: meet_next(number))
    completions.submit(nothing, lambda _: events[5].set())
    assert events[0].wait(LIMIT)
    assert met == [True] * 5


def test_keeps_few_threads_when_callbacks_do_not_block(completions: Completions) -> None:
    for _ in range(50):
        done = threading.Event()
        completions.submit(nothing, lambda _, done=done: done.set())
        assert done.wait(LIMIT)
    assert completions.threads < 10


def test_an_idle_thread_holds_nothing_of_the_last_operation(completions: Completions) -> None:
    class Owner:
        pass

    owner = Owner()
    known = weakref.ref(owner, lambda _: gone.set())
    gone = threading.Event()
    completions.submit(nothing, lambda _, owner=owner: None)
    del owner
    gc.collect()
    assert gone.wait(LIMIT)
    assert known() is None

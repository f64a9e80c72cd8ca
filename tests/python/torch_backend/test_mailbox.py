"""The mailbox: which message is for which receive, and whose header is awaited; without ranks."""

from __future__ import annotations

import math
import threading
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from gradwire import InvalidArgument, Timeout, TransportError
from gradwire.torch.backend import mailbox as module
from gradwire.torch.backend.mailbox import Mailbox, Receive
from ranks import LIMIT, eventually

ANY = module._ANY


class Clock:
    """Monotonic seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(module, "time", found)
    return found


def receive(source: int | None = 1, tag: int = 5, size: int = 4, timeout: float = 7) -> Any:
    return Receive(torch.zeros(size, dtype=torch.uint8), source, tag, timeout, 11)


def message(size: int = 4, source: int = 1, memory: Any = None) -> Any:
    own = np.full(size, 9, np.uint8) if memory is None else memory
    return module._Message(source, 5, size, own, mock.Mock())


def made(size: int = 3) -> Any:
    """A mailbox whose listeners only note what they are asked for."""
    box: Any = Mailbox(mock.Mock(size=size))
    asked: dict[int, float] = {}
    box._listener = lambda source: mock.Mock(listen=lambda left: asked.update({source: left}))
    box.asked = asked
    return box


@pytest.mark.parametrize(
    ("source", "tag", "takes"), [(1, 5, True), (2, 5, False), (1, 4, False), (2, 4, False)]
)
def test_a_receive_takes_its_sources_messages_of_its_tag(
    source: int, tag: int, takes: bool
) -> None:
    assert receive().takes(source, tag) is takes
    assert receive(None).takes(source, tag) is (tag == 5)


def test_a_receive_is_done_when_its_message_is_there_or_it_has_failed() -> None:
    matched, failed, own = receive(), receive(), message()
    assert not matched.done()
    matched.match(own)
    own.work.done.return_value = False
    assert not matched.done()
    own.work.done.return_value = True
    assert matched.done()
    failed.fail(TransportError("broke"))
    assert failed.done()
    with pytest.raises(TransportError, match="broke"):
        failed.wait()


@pytest.mark.parametrize(
    ("passed", "timeout", "waits", "told"),
    [(0, None, 12, 7), (3, None, 9, 7), (50, None, 5, 7), (0, 3, 3, 3), (0, 100, 12, 100)],
)
def test_a_receive_gives_up_after_its_timeout(
    clock: Clock, passed: float, timeout: float | None, waits: float, told: float
) -> None:
    own = receive()
    own._wait_for_match = mock.Mock(return_value=False)
    clock.now += passed
    text = f"recv from rank 1 with tag 5 timed out: .* timeout={told} s"
    with pytest.raises(Timeout, match=text) as raised:
        own.wait(timeout)
    own._wait_for_match.assert_called_once_with(waits)
    assert (raised.value.peer, raised.value.job_peer) == (1, 11)
    anybody = receive(None)
    anybody._wait_for_match = own._wait_for_match
    with pytest.raises(Timeout, match="recv from any rank") as raised:
        anybody.wait(timeout)
    assert raised.value.peer < 0


@pytest.mark.parametrize(
    ("timeout", "took", "left"), [(None, 4, None), (10, 4, 6), (3, 4, 1e-3), (4, 4, 1e-3)]
)
def test_the_time_for_the_match_counts(
    clock: Clock, timeout: float | None, took: float, left: float | None
) -> None:
    own, its = receive(), message()

    def match(_: float) -> bool:
        clock.now += took
        own.match(its)
        return True

    own._wait_for_match = match
    assert own.wait(timeout) == 1
    its.work.wait.assert_called_once_with(left)


def test_a_message_is_copied_once() -> None:
    own = receive()
    own.match(message())
    for wanted in (9, 0):
        own.wait()
        assert (own.memory == wanted).all()
        own.memory.zero_()
    straight = receive()
    straight.match(message(memory=straight.memory))
    straight.wait()
    assert not straight.memory.any()


def test_a_message_of_another_size_is_told() -> None:
    own = receive()
    own.match(message(3))
    with pytest.raises(InvalidArgument, match=r"rank 1 sent 3 bytes with tag 5.* expects 4"):
        own.wait()


def test_who_asks_for_the_match_is_called_once() -> None:
    for end in (lambda own: own.match(message()), lambda own: own.fail(TransportError("x"))):
        own, calls = receive(), []
        own.when_matched(lambda calls=calls: calls.append(1))
        assert calls == []
        end(own)
        end(own)
        assert calls == [1]
        own.when_matched(lambda calls=calls: calls.append(2))
        assert calls == [1, 2]


def test_other_ranks_know_of_a_thread_while_it_is_blocked() -> None:
    own, seen = receive(), []

    @contextmanager
    def blocked() -> Any:
        seen.append("blocked")
        own.match(message())
        yield
        seen.append("goes on")

    own.post(blocked)
    assert own.wait() == 1
    assert own.wait() == 1
    assert seen == ["blocked", "goes on"]


@pytest.mark.parametrize(("source", "sender"), [(2, 2), (None, ANY)])
def test_a_blocked_thread_is_counted_until_it_goes_on(source: int | None, sender: int) -> None:
    box = made()
    core = box._communicator._core
    blocked = box._blocked_for(source)
    blocked.__enter__()
    assert core.mock_calls == [mock.call.begin_wait(sender)]
    assert not blocked.__exit__(ValueError, ValueError("own"), None)
    assert core.mock_calls[1:] == [mock.call.end_wait(sender)]


def test_a_message_follows_its_header() -> None:
    box = made()
    memory = torch.zeros(6, dtype=torch.uint8)
    work = box.send(memory, 2, 5, 30.0)
    header, payload = box._communicator.send.call_args_list
    assert header.args[0].tolist() == [5, 6]
    assert payload.args[0] is memory
    assert header.args[1:] == payload.args[1:] == (2,)
    assert header.kwargs == payload.kwargs == {"async_op": True, "timeout": 30.0}
    assert work is box._communicator.send.return_value


def test_a_message_that_came_early_is_taken_once() -> None:
    box = made()
    box._communicator.recv = recv = mock.Mock()
    box._match(1, 4, 2)
    box._match(1, 5, 4)
    assert [each.kwargs for each in recv.call_args_list] == [{"async_op": True}] * 2
    assert [each.args[0].shape for each in recv.call_args_list] == [(2,), (4,)]
    own, other = receive(), receive()
    box.receive(own)
    assert own._message.tag == 5
    assert not box.posted
    assert not box.waits
    box.receive(other)
    assert other._message is None
    assert box.posted
    assert box.waits
    assert [each.tag for each in box._early] == [4]
    box._communicator._core.check_failure.assert_called_with(0)


@pytest.mark.parametrize(("size", "straight"), [(4, True), (3, False), (5, False)])
def test_a_message_that_fits_comes_straight_into_its_memory(size: int, straight: bool) -> None:
    box = made()
    own = receive()
    box.receive(own)
    box._match(1, 5, size)
    (memory, sender), _ = box._communicator.recv.call_args
    assert (memory is own.memory) is straight
    assert (memory.shape, sender) == ((size,), 1)
    assert not box.posted
    assert not box._early
    assert (own._message.size, own._message.source) == (size, 1)


@pytest.mark.parametrize(
    ("posted", "awaited", "asked"),
    [
        ([], [], {}),
        ([1], [], {1: 7}),
        ([1, 2], [], {1: 7, 2: 8}),
        ([1, 1], [], {1: 7}),
        ([1, 2], [1], {2: 8}),
        ([None], [], {ANY: 7}),
        ([2, None], [], {ANY: 7}),
        ([None], [ANY], {}),
        ([1], [ANY], {}),
        ([None], [1], {0: module._LONGEST, 2: module._LONGEST}),
        ([None, 2], [1], {0: module._LONGEST, 2: 8}),
    ],
)
def test_headers_are_awaited_that_a_receive_may_need(
    clock: Clock, posted: list[Any], awaited: list[int], asked: dict[int, float]
) -> None:
    box = made()
    box._posted = [receive(source, timeout=7 + i) for i, source in enumerate(posted)]
    box._awaited = set(awaited)
    box._listen()
    assert box.asked == asked
    assert box._awaited == {*awaited, *asked}


def test_a_receive_whose_time_is_over_is_awaited_for_a_moment(clock: Clock) -> None:
    box = made()
    box._posted = [receive()]
    clock.now += 8
    box._listen()
    assert 0 < box.asked[1] < 0.01


@pytest.mark.parametrize(("source", "from_rank"), [(ANY, None), (1, 1), (0, 0)])
def test_a_header_is_awaited_in_the_background_and_then_the_next_one(
    source: int, from_rank: int | None
) -> None:
    box = made()
    first, second = receive(1), receive(0)
    box._posted, box._awaited = [first, second], {source}
    work = mock.Mock()
    work._core.source.return_value = 1

    def recv(memory: Any, sender: Any, **options: Any) -> Any:
        if options != {"async_op": True}:  # the header
            assert (sender, options) == (from_rank, {"async_op": True, "timeout": 30.0})
            memory[:] = 5, 4
        return work

    box._communicator.recv = recv
    box._receive_next(source, 30.0)
    box._communicator._core.wait.assert_called_once_with(work._core, math.inf, background=True)
    assert first._message.source == 1
    assert set(box.asked) == {0}
    assert box._awaited == {0}


@pytest.mark.parametrize(
    ("size", "possible"),
    [(-1, False), (0, True), (module._MOST_BYTES, True), (module._MOST_BYTES + 1, False)],
)
def test_a_size_that_no_message_has_is_told(size: int, possible: bool) -> None:
    box = made()
    box._communicator._mesh.job_rank.return_value = 12
    if possible:
        box._require_possible(2, size)
        return
    with pytest.raises(TransportError, match=f"rank 2 announced a message of {size}") as raised:
        box._require_possible(2, size)
    assert (raised.value.peer, raised.value.job_peer) == (2, 12)


def test_an_error_ends_all_receives() -> None:
    box = made()
    receives = [receive(1), receive(None)]
    box._posted, box._awaited = list(receives), {1, 2}
    box._communicator.recv.side_effect = error = TransportError("a link broke")
    box._receive_next(1, 30.0)
    assert [each._error for each in receives] == [error, error]
    assert not box.posted
    assert box._awaited == {2}


@pytest.mark.parametrize(
    ("source", "peer", "blamed"), [(1, -1, 1), (None, -1, -1), (1, 0, 0), (1, 2, 2)]
)
def test_who_did_not_send_in_time_is_named(source: int | None, peer: int, blamed: int) -> None:
    error = Timeout("recv timed out")
    error.peer = peer
    assert module._named(error, receive(source)).peer == blamed  # type: ignore[attr-defined]
    broken = TransportError("a link broke")
    assert module._named(broken, receive(source)) is broken


def test_a_listener_awaits_what_it_is_asked_for() -> None:
    came: list[Any] = []
    listener = module._Listener(3, lambda *what: came.append(what))
    assert (listener._thread.name, listener._thread.daemon) == ("gradwire-messages-3", True)
    (other := module._Listener(ANY, mock.Mock())).close(LIMIT)
    assert other._thread.name == "gradwire-messages-any"
    listener.listen(7.0)
    listener.listen(8.0)
    eventually(lambda: came == [(3, 7.0), (3, 8.0)])
    listener.close(LIMIT)
    assert not listener._thread.is_alive()


def test_a_listener_may_be_closed_by_its_own_thread() -> None:
    closed = threading.Event()

    def close(*_: Any) -> None:
        listener.close(LIMIT)
        closed.set()

    listener = module._Listener(3, close)
    listener.listen(1.0)
    assert closed.wait(LIMIT)
    listener._thread.join(LIMIT)


def test_a_closed_mailbox_has_no_listener() -> None:
    box: Any = Mailbox(mock.Mock())
    one = box._listener(1)
    assert box._listener(1) is one
    other = box._listener(2)
    assert other is not one
    box.close(LIMIT)
    assert not box._listeners
    assert not one._thread.is_alive()
    assert not other._thread.is_alive()


def test_a_receive_that_was_not_posted_blocks_nobody() -> None:
    assert receive()._blocked is nullcontext

"""The steps of a hook: buckets that come, a step that ends, errors; with stand-ins for the rest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from gradwire import Aborted, TransportError
from gradwire._communicator import Traffic
from gradwire.torch.ddp import hook as module
from gradwire.torch.ddp.hook import Steps
from gradwire.torch.exchange.gradient_scale import GradientScale
from torch.futures import Future

BROKEN = TransportError("a link broke")


class Queue:
    """Completions that a test makes happen."""

    def __init__(self) -> None:
        self.pending = 0
        self.waiting: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = []
        self.closed_after: float | None = None

    def submit(self, wait: Callable[[], Any], finish: Callable[[Any], Any]) -> None:
        self.waiting.append((wait, finish))

    def complete(self) -> None:
        waiting, self.waiting = self.waiting, []
        for wait, finish in waiting:
            finish(module.error_of(wait))

    def close(self, seconds: float) -> None:
        self.closed_after = seconds


def made(*, holds: bool = False, ddp: Any = None, unused: Any = None) -> Any:
    comm = mock.Mock(rank=0, size=2, _gpu_stream=None, traffic=Traffic(0, 0))
    state = mock.Mock(holds_buckets=holds, unused=unused, names={})
    state.scales.followed = False
    state.ready_buckets.side_effect = lambda bucket, last: [mock.Mock(names=["w"])]
    steps: Any = Steps(comm, "ring", state, ddp)
    steps._spans, steps.completions = mock.Mock(), Queue()
    steps.exchange = mock.Mock(communicator=comm, residuals=mock.Mock(is_counted=True))
    steps.exchange.take.return_value = []
    steps.exchange.end.side_effect = lambda ok: ok
    steps.counters = mock.Mock()
    return steps


def joining(monkeypatch: pytest.MonkeyPatch, **kind: Any) -> tuple[Any, Any]:
    """A model within its `join()`, and what all its steps are."""
    joined, ddp = mock.Mock(**kind), mock.Mock()
    monkeypatch.setattr(module, "JoinStep", mock.Mock(return_value=joined))
    ddp._join_config.enable = True
    return joined, ddp


def on_gpu() -> Any:
    return mock.Mock(is_cuda=True, device="it", numel=lambda: 3, element_size=lambda: 4)


def bucket(steps: Any, last: bool = True, count: int = 3, **kind: Any) -> Any:
    """Submits a bucket; returns its future and its buffer."""
    buffer: Any = on_gpu() if kind else torch.ones(count)
    future: Future[torch.Tensor] = Future()
    steps.submit_bucket(mock.Mock(buffer=lambda: buffer, is_last=lambda: last), future)
    return future, buffer


@pytest.mark.parametrize("holds", [False, True])
def test_a_step_ends_with_its_last_bucket(holds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "naming", naming := mock.MagicMock())
    steps = made(holds=holds)
    steps.end_backward()  # nothing is under way
    one, buffer = bucket(steps, last=False)
    assert steps.submitted_steps == 0
    steps.completions.complete()
    assert one.done() != holds  # held until the end
    two, other = bucket(steps, count=5)
    assert steps.submitted_steps == 1
    assert not two.done()
    assert not steps._step.ended.is_set()
    steps.completions.complete()
    assert one.value() is buffer
    assert two.value() is other
    steps.exchange.open.assert_called_once_with(0, GradientScale())
    steps.exchange.end.assert_called_once_with(True)
    (kept, buckets, nbytes, _), _ = steps.counters.end_step.call_args
    assert (kept, buckets, nbytes) == (True, 2, 4 * (3 + 5))
    assert naming.call_args_list == [mock.call("#bucket 0\nw"), mock.call("#bucket 1\nw")]
    assert steps.done == 1
    steps.end_backward()
    assert steps._step.waiting == []
    bucket(steps)
    assert steps.exchange.open.call_args == mock.call(1, GradientScale())
    assert steps.spans.begin_backward.call_count == 2


def test_backward_waits_for_the_end_and_counts_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = made()
    clock = iter([10.0, 12.5])
    monkeypatch.setattr(module, "time", mock.Mock(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(module, "clock", mock.Mock(now=lambda: 77))
    steps.end_backward()
    steps.counters.waited.assert_called_once_with(2.5)
    steps.spans.end_backward.assert_called_once_with(77)
    steps._step.ended = mock.Mock(wait=mock.Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(module, "time", mock.Mock(perf_counter=lambda: 0.0))
    with pytest.raises(KeyboardInterrupt):
        steps.end_backward()
    steps.communicator.abort.assert_called_once_with("KeyboardInterrupt in backward")
    assert isinstance(steps.error, Aborted)


def test_the_first_error_is_final_and_raised_with_its_traceback_once() -> None:
    steps = made()
    steps.exchange.start.side_effect = [BROKEN, TransportError("a later one")]
    one, _ = bucket(steps, last=False)
    two, _ = bucket(steps)
    steps.completions.complete()
    for future in (one, two):
        with pytest.raises(TransportError, match="a link broke"):
            future.wait()
    steps.exchange.end.assert_called_once_with(False)
    assert not steps.counters.end_step.called
    assert steps.done == 0
    with pytest.raises(TransportError) as raised:
        steps.end_backward()
    assert raised.value is BROKEN
    with pytest.raises(TransportError) as raised:
        steps.raise_error()
    assert raised.value is not BROKEN
    assert str(raised.value) == str(BROKEN)
    three, _ = bucket(steps)
    steps.completions.complete()
    with pytest.raises(TransportError, match="a link broke"):
        three.wait()


@pytest.mark.parametrize("at", ["wait", "end"])
def test_an_error_at_the_end_reaches_all_that_waits(at: str) -> None:
    steps = made(holds=True)
    if at == "wait":
        steps.exchange.take.return_value = [mock.Mock(wait=mock.Mock(side_effect=BROKEN))]
    else:
        steps.exchange.end.side_effect = BROKEN
    futures = [bucket(steps, last=False)[0], bucket(steps)[0]]
    steps.completions.complete()
    for future in futures:
        with pytest.raises(TransportError, match="a link broke"):
            future.wait()
    with pytest.raises(TransportError):
        steps.end_backward()
    assert steps._step.ended.is_set()


def test_ctrl_c_in_a_bucket_ends_the_others() -> None:
    steps = made()
    steps.exchange.start.side_effect = KeyboardInterrupt
    future, _ = bucket(steps)
    steps.communicator.abort.assert_called_once_with("KeyboardInterrupt in backward")
    steps.completions.complete()
    with pytest.raises(Aborted):
        future.wait()


def test_an_error_on_a_gpu_or_of_another_rank_is_raised() -> None:
    steps = made()
    steps.check_failure(2.0)
    steps.communicator._core.check_failure.assert_called_once_with(2.0)
    steps.communicator._core.check_failure.side_effect = BROKEN
    with pytest.raises(TransportError, match="a link broke"):
        steps.check_failure(2.0)
    other = made()
    other.communicator._require_alive_on_gpu.side_effect = BROKEN
    for raises in (other.raise_error, lambda: other.check_failure(0)):
        with pytest.raises(TransportError, match="a link broke"):
            raises()
    assert not other.communicator._core.check_failure.called


def test_an_unfinished_step_is_undone() -> None:
    steps = made()
    steps.abandon_step()  # nothing is under way
    assert not steps.exchange.end.called
    bucket(steps, last=False)
    submit = steps.completions.submit
    steps.completions.submit = lambda *what: (submit(*what), steps.completions.complete())
    steps.abandon_step()
    steps.exchange.end.assert_called_once_with(False)
    steps.end_backward()  # returns
    steps.completions.submit = submit
    _, buffer = bucket(steps)
    steps.completions.complete()
    assert steps.exchange.open.call_count == 2
    assert steps.counters.end_step.call_args.args[1:3] == (1, buffer.nbytes)


@pytest.mark.parametrize("owns", [True, False])
@pytest.mark.parametrize(
    ("pending", "why"),
    [
        (0, None),
        (1, "closed with 1 gradient bucket in flight"),
        (2, "closed with 2 gradient buckets in flight"),
    ],
)
def test_close_ends_what_is_in_flight(pending: int, why: str | None, owns: bool) -> None:
    steps = made()
    bucket(steps, last=False)
    steps.completions.pending = pending
    steps.close(owns)
    assert steps.communicator.abort.call_args_list == [mock.call(why)] * (why is not None)
    assert steps.communicator.close.called == owns
    assert steps.completions.closed_after == module._CLOSE_SECONDS
    steps.exchange.end.assert_called_once_with(False)
    steps.state.remove_hooks.assert_called_once_with()
    assert steps._step.ended.is_set()
    future, _ = bucket(steps)
    with pytest.raises(Aborted, match="the hook's State is closed"):
        future.wait()
    assert len(steps.completions.waiting) == 1  # of before


@pytest.mark.parametrize("joined", [False, True])
def test_the_last_bucket_says_what_was_unused(
    joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    unused = mock.Mock()
    _, ddp = joining(monkeypatch, trains=False, counts=False)
    steps = made(unused=unused, ddp=ddp if joined else None)
    bucket(steps, last=False)
    assert not steps.exchange.add.called
    bucket(steps)
    unused.share.assert_called_once_with(steps.communicator, again=joined)
    steps.exchange.add.assert_called_once_with(unused.share.return_value)


@pytest.mark.parametrize("over_active", [False, True])
def test_ranks_that_have_inputs_left_share_the_average(
    over_active: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined, ddp = joining(monkeypatch, trains=True, counts=over_active)
    joined.correction.return_value = 2.0
    steps = made(ddp=ddp)
    assert steps.in_join
    one, first = bucket(steps, last=False)
    steps.completions.complete()
    assert one.done() != over_active
    _, second = bucket(steps)
    assert joined.share_count.called == over_active
    steps.completions.complete()
    for buffer in (first, second):
        assert (buffer == (2 if over_active else 1)).all()
    assert one.done()
    assert not made().in_join
    ddp._join_config.enable = False
    assert not steps.in_join


def test_a_rank_trains_in_a_step_after_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ddp = joining(monkeypatch, trains=True, counts=False)
    steps = made(ddp=ddp)
    for forwards in ([True, False], [False], []):
        for trains in forwards:
            steps.end_forward(trains=trains)
        bucket(steps)
        steps.completions.complete()
    assert module.JoinStep.call_args_list == [  # type: ignore[attr-defined]
        mock.call(ddp, trains=each) for each in (True, False, False)
    ]


@pytest.mark.parametrize("in_join", [True, False])
def test_the_scale_of_a_step_is_agreed_on_where_ranks_join(in_join: bool) -> None:
    joined = mock.Mock() if in_join else None
    steps = made()
    assert steps._read_scale(joined) == GradientScale()
    steps.state.scales.followed = True
    read = steps.state.scales.read
    found = steps._read_scale(joined)
    read.assert_called_once_with(on_host=in_join)
    assert found is (read.return_value if joined is None else joined.agree_on_scale.return_value)


@pytest.mark.parametrize("handle", [None, 77])
def test_a_bucket_on_a_gpu_is_complete_at_once_for_its_stream(
    handle: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda *a, **o: (a, o))
    monkeypatch.setattr(torch.cuda, "stream", lambda each: seen.append(each) or nullcontext())
    monkeypatch.setattr(module, "_complete", lambda *what: seen.append(what))
    steps = made()
    steps.communicator._gpu_stream = handle
    future, buffer = bucket(steps, last=False, kind="cuda")
    assert not steps.completions.waiting
    stream = [((handle,), {"device": "it"})] if handle else []
    assert seen == [*stream, (buffer, future, None)]


def test_ranges_are_named_where_a_profiler_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    for enabled in (True, False):
        monkeypatch.setattr(torch.autograd, "_profiler_enabled", lambda enabled=enabled: enabled)
        assert (module._profiled("x") is not module._NOTHING) == enabled

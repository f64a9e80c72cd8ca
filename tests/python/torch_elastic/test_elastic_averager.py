"""The averager: which gradients travel when, and what a step leaves that fails, on one rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import gradwire
import pytest
import torch
from gradwire import Communicator, InvalidArgument, TransportError
from gradwire.torch.elastic import averaging
from gradwire.torch.elastic.averaging import Averager, Averaging
from gradwire.torch.elastic.model_buffers import ModelBuffers
from gradwire.torch.exchange.gradient_scale import GradientScale, RatesDifferError
from gradwire.torch.exchange.rules import Rules
from torch import nn

BROKEN = TransportError("a link broke")


@pytest.fixture
def alone() -> Iterator[Communicator]:
    with gradwire.init(rank=0, ranks=1, store="unix://none") as comm:
        yield comm


def made(model: nn.Module, comm: Any, bucket_bytes: int = 1) -> Any:
    how = Averaging("auto", Rules("none"), None, None)
    averager: Any = Averager(dict(model.named_parameters()), ModelBuffers(model), how, bucket_bytes)
    averager.adopt(comm)
    averager.begin(0)
    return averager


def watched(averager: Any) -> list[list[str]]:
    """The names of the parameters in each bucket, as they are sent."""
    sent: list[list[str]] = []
    start = averager._exchange.start

    def started(bucket: Any) -> None:
        sent.append(list(bucket.names))
        start(bucket)

    averager._exchange.start = started
    return sent


def stacked() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))


def test_gradients_travel_as_they_come_and_the_last_layers_first(alone: Communicator) -> None:
    model = stacked()
    averager = made(model, alone)
    sent = watched(averager)
    model(torch.ones(2, 3)).sum().backward()
    assert sent == []  # is a batch of several
    model[0].weight.register_hook(lambda _: early.extend(sent))
    early: list[list[str]] = []
    with averager.sending():
        model(torch.ones(2, 3)).sum().backward()
    assert early == [["2.weight"], ["1.weight"]]
    assert sent == [["2.weight"], ["1.weight"], ["0.weight"]]
    model(torch.ones(2, 3)).sum().backward()
    assert len(sent) == 3
    averager.finish()
    averager.begin(1)
    assert not averager.has_gradients
    with averager.sending():
        model[2:](torch.ones(2, 3)).sum().backward()
    assert averager.has_gradients
    assert len(sent) == 6
    assert not model[0].weight.grad.any()


def test_a_failing_backward_ends_the_sending(alone: Communicator) -> None:
    model = stacked()
    averager = made(model, alone)
    sent = watched(averager)
    with pytest.raises(ValueError, match="own"), averager.sending():
        raise ValueError("own")
    model(torch.ones(2, 3)).sum().backward()
    assert sent == []
    averager.finish()
    assert len(sent) == 3  # what was left


def test_a_closed_averager_leaves_the_parameters(alone: Communicator) -> None:
    model = stacked()
    averager = made(model, alone)
    assert all(each._post_accumulate_grad_hooks for each in model.parameters())
    averager.close()
    averager.close()
    assert not any(each._post_accumulate_grad_hooks for each in model.parameters())
    assert averager._handles == []


def test_frozen_parameters_have_no_part(alone: Communicator) -> None:
    model = stacked()
    model[1].weight.requires_grad_(False)
    averager = made(model, alone, 1 << 20)
    sent = watched(averager)
    averager.finish()
    assert sent == [["2.weight", "0.weight"]]
    assert model[1].weight.grad is None


def test_gradients_of_any_layout_travel(alone: Communicator) -> None:
    model = nn.Conv2d(3, 4, 2, bias=False).to(memory_format=torch.channels_last)
    averager = made(model, alone)
    averager.finish()
    assert model.weight.grad is not None
    assert not model.weight.grad.any()
    averager.begin(1)
    assert model.weight.grad is None
    with averager.sending():
        model(torch.ones(1, 3, 2, 2).to(memory_format=torch.channels_last)).sum().backward()
    averager.finish()
    assert (model.weight.grad == 1).all()


def test_sparse_gradients_are_refused_by_name(alone: Communicator) -> None:
    model = nn.Embedding(4, 2, sparse=True)
    averager = made(model, alone)
    with averager.sending():
        model(torch.tensor([1])).sum().backward()
    with pytest.raises(InvalidArgument, match="'weight' is sparse"):
        averager.finish()


def stubbed(gpus: bool = False, wait: Any = None, start: Any = None) -> Any:
    """An averager of two layers whose exchange is a stand-in."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    comm = mock.Mock(spec=Communicator, size=3)
    averager = made(model, comm)
    exchange = averager._exchange = mock.Mock(communicator=comm, is_open=True)
    exchange.wait.side_effect, exchange.start.side_effect = wait, start
    averager._gpus = {torch.device("cpu")} if gpus else set()
    averager.buffers = mock.Mock()
    averager.buffers.share.return_value = iter(["its work"])
    return averager


def test_a_step_ends_in_order() -> None:
    averager = stubbed()
    comm = averager._exchange.communicator
    averager.finish()
    assert [each[0] for each in averager._exchange.method_calls] == [
        *["start"] * 4,
        *("add", "wait_to_round", "communicator.barrier", "wait"),
    ]
    averager._exchange.add.assert_called_once_with("its work")
    assert [each[0] for each in averager.buffers.method_calls] == ["share", "take"]
    averager.confirm()
    assert comm.barrier.call_count == 1
    comm.barrier.side_effect = BROKEN
    averager.begin(1)
    averager.finish()
    with pytest.raises(TransportError):
        averager.confirm()
    averager.begin(2)
    averager.confirm()


def test_who_does_not_confirm_meets_nobody() -> None:
    averager = stubbed()
    averager.finish(confirms=False)
    assert not averager._exchange.communicator.barrier.called


@pytest.mark.parametrize("gpus", [False, True])
@pytest.mark.parametrize("at", ["start", "wait"])
def test_the_first_error_ends_a_step(gpus: bool, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", mock.Mock())
    averager = stubbed(gpus, **{at: [BROKEN, *[TransportError("a later one")] * 9]})
    exchange = averager._exchange
    with pytest.raises(TransportError, match="a link broke"):
        averager.finish()
    assert exchange.start.call_count == (1 if at == "start" else 4)
    assert exchange.wait.call_count == 1
    assert exchange.communicator.barrier.called == (at == "wait" and not gpus)
    assert averager.buffers.share.called == (at == "wait")
    assert not averager.buffers.take.called
    assert not exchange.communicator._require_success_on_gpu.called


def test_a_step_on_gpus_is_there_when_these_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A barrier of the CPU would say nothing of what GPUs still compute."""
    monkeypatch.setattr(torch.cuda, "current_stream", stream := mock.Mock())
    averager = stubbed(gpus=True)
    comm = averager._exchange.communicator
    averager.finish()
    stream.return_value.synchronize.assert_called_once_with()
    assert (comm._require_success_on_gpu.call_count, comm.barrier.call_count) == (1, 0)
    averager.confirm()
    assert comm.barrier.call_count == 1
    comm.barrier.side_effect = BROKEN
    with pytest.raises(TransportError):
        averager.confirm()
    comm._require_success_on_gpu.side_effect = BROKEN
    averager.begin(1)
    with pytest.raises(TransportError):
        averager.finish()


def test_a_step_is_opened_once_and_ended() -> None:
    averager = stubbed()
    averager.begin(7)
    averager._exchange.is_open = False
    averager._exchange.residuals.scales.read.return_value = GradientScale(2.0)
    averager._send([])
    averager._exchange.open.assert_called_once_with(7, GradientScale(2.0, ranks=3))
    averager._exchange.is_open = True
    averager._send([])
    assert averager._exchange.open.call_count == 1
    averager.end(True)
    averager._exchange.end.assert_called_once_with(True)
    averager._exchange = None
    averager.end(False)


def test_residuals_follow_rates_no_more_where_groups_differ(
    caplog: pytest.LogCaptureFixture,
) -> None:
    averager = stubbed()
    averager._how = averager._how._replace(optimizer=mock.Mock(param_groups=[{"lr": 5.0}]))
    exchange = averager._exchange
    exchange.residuals.scales.read.return_value = GradientScale(rates=(5.0,))
    exchange.open.side_effect = [RatesDifferError("they differ"), None]
    averager._open_step(exchange)
    assert "residuals follow the rates no more" in caplog.text
    assert exchange.open.call_args_list == [
        mock.call(0, GradientScale(rates=(5.0,), ranks=3)),
        mock.call(0, GradientScale(ranks=3)),
    ]
    assert averager._how.optimizer is None


def test_the_state_of_codecs_is_float32_on_the_cpu(alone: Communicator) -> None:
    averager = made(stacked(), alone)
    load = averager._exchange.residuals.load_state_dict = mock.Mock()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            averager.load_state_dict({"feedback": {"0.weight": {"residual": None, "bound": 3}}})
    finally:
        torch.set_default_dtype(torch.float32)
    kept = load.call_args.args[0]["feedback"]["0.weight"]
    assert kept["bound"] == 3
    assert torch.equal(kept["residual"], torch.zeros(9))


Cut = Callable[..., list[list[torch.Tensor]]]


@pytest.mark.parametrize("seed", range(20))
def test_buckets_hold_all_parameters_in_their_order(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one type each, and none is larger than it need be, nor smaller than its limit."""
    chance = random.Random(seed)
    first, most = chance.choice([(24, 60), (101, 60), (40, 41)])
    monkeypatch.setattr(averaging, "_FIRST_BYTES", first)
    types = [torch.float16] if seed % 2 else [torch.float32, torch.bfloat16]
    parameters = [torch.empty(chance.randrange(12), dtype=chance.choice(types)) for _ in range(60)]
    buckets = list(averaging._cut(iter(parameters), most))
    assert [id(each) for some in buckets for each in some] == list(map(id, parameters))
    for i, bucket in enumerate(buckets):
        limit = min(first, most) if i == 0 else most
        assert len({each.dtype for each in bucket}) == 1
        assert sum(each.nbytes for each in bucket[:-1]) < limit
        if bucket is not buckets[-1] and bucket[0].dtype == buckets[i + 1][0].dtype:
            assert sum(each.nbytes for each in bucket) >= limit

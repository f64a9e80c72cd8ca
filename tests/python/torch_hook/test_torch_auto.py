"""The codec "auto": none, lossless, fp16, int8, int4 or lowrank, by links, model and optimizer."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import Mock

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.torch import Compression, State, register
from gradwire.torch.exchange import automatic
from gradwire.torch.exchange.automatic import Chosen, Later, choose
from gradwire.torch.exchange.defaults import Model
from gradwire.torch.exchange.first_steps import FirstSteps
from gradwire.torch.exchange.links import measured
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_training import Books, backward, wrapped

from bench.planning.choices import SimulatedRanks

FOUR_HOSTS = [[0], [1], [2], [3]]


def ranks_of(rate: float, hosts: Any, latency: float = 1e-4) -> SimulatedRanks:
    """Ranks with links of a rate in bit/s; without one their host's memory joins them."""
    link = "between" if len(hosts) > 1 else "within"
    costs = {f"{link}.beta": 8 / rate, f"{link}.latency": latency} if rate else {}
    return SimulatedRanks(gradwire.CostModel(costs), hosts)


def network(width: int) -> Model:
    module = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    return Model(module, dict(module.named_parameters()))


def choice(model: Model, ranks: SimulatedRanks, optimizer: Any = None) -> Chosen:
    its: Any = ranks
    return choose(model, its, Compression("auto"), optimizer, ranks.clock)


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
CASES: list[tuple[float, Any, int, Any, str, str]] = [
    (1e9, FOUR_HOSTS, 512, SGD, "int4", "4.2 MB of gradients over links that were measured at "),
    (1e9, FOUR_HOSTS, 512, ADAMW, "int8", "left out: with AdamW training ends at a higher loss"),
    (1e8, [[0, 1, 2, 3]], 512, None, "int8", "Mbit/s, averaging would take none "),
    (1e8, [[0, 1, 2, 3]], 512, None, "int8", "optimizer= was not given"),
    (1e8, [[0, 1], [2, 3]], 512, SGD, "int4", "Mbit/s, averaging would take none "),
    (1e9, FOUR_HOSTS, 1, SGD, "none", "none "),
    (0, [[0, 1, 2, 3]], 512, SGD, "none", "over shared memory none pays"),
    (1e8, [[0]], 512, SGD, "none", "there is nothing to compress"),
]


@pytest.mark.parametrize(("rate", "hosts", "width", "optimizer", "codec", "why"), CASES)
def test_the_codec_follows_links_model_and_optimizer(
    rate: float, hosts: Any, width: int, optimizer: Any, codec: str, why: str
) -> None:
    model = network(width)
    its = None if optimizer is None else optimizer(model.parameters.values(), lr=0.1)
    found, _ = choice(model, ranks_of(rate, hosts), its)
    assert str(found.last) == codec, found.why
    assert f"codec='auto' chose {codec}: " in found.why
    assert why in found.why
    assert "\n" not in found.why
    assert not found.guess


@pytest.mark.parametrize("rate", [1e8, 1e9, 1e10])
@pytest.mark.parametrize("latency", [2e-5, 4e-2])
@pytest.mark.parametrize("hosts", [FOUR_HOSTS, [[0, 1], [2, 3]], [[0, 1]]])
def test_links_are_measured_whatever_the_cost_model_took_them_for(
    rate: float, latency: float, hosts: Any
) -> None:
    ranks: Any = ranks_of(rate, hosts, latency)
    found = measured(ranks, ranks.clock).parameters
    link = "between" if len(hosts) > 1 else "within"
    assert 8 / found[f"{link}.beta"] == pytest.approx(rate, rel=0.1)
    assert found[f"{link}.latency"] == pytest.approx(latency, rel=0.2)
    assert ranks.seconds < 0.15 + 80 * latency


def test_computing_that_hides_averaging_needs_no_codec() -> None:
    """What is not hidden decides: a step's time, not that of averaging."""
    model = network(512)
    optimizer = SGD(model.parameters.values(), lr=0.1)
    found, later = choice(model, ranks_of(1e9, FOUR_HOSTS), optimizer)
    assert later is not None
    codecs = [str(later.settings(compute).last) for compute in (0.0, 0.02, 0.2, 20.0)]
    assert codecs[0] == str(found.last) == "int4"
    assert codecs[-1] == "none"
    least = ["none", "lossless", "fp16", "int8", "int4", "lowrank"]
    assert codecs == sorted(codecs, key=least.index, reverse=True)
    assert "steps that compute 20 ms would take none " in later.settings(0.02).why


def test_no_bit_is_lost_where_that_is_nearly_as_fast() -> None:
    model = network(512)
    optimizer = ADAMW(model.parameters.values(), lr=0.1)
    _, later = choice(model, ranks_of(1e8, FOUR_HOSTS), optimizer)
    assert later is not None
    codecs = [str(later.settings(compute).last) for compute in (0.1, 3.0, 5.0, 8.0)]
    assert codecs == ["int8", "fp16", "lossless", "none"]


class OnGpu(nn.Parameter):
    """A parameter that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("rate", "hosts", "codec", "why"),
    [
        (1e9, FOUR_HOSTS, "int4", "is left out: what it costs a GPU was not measured"),
        (1e9, [[0, 1], [2, 3]], "int4", "the 4.2 MB of gradients over links"),
        (1e8, [[0, 1, 2, 3]], "none", "between GPUs of one host none pays"),
    ],
)
def test_on_gpus_the_links_between_hosts_decide(
    rate: float, hosts: Any, codec: str, why: str
) -> None:
    model = network(512)
    gpus = {name: OnGpu(each) for name, each in model.parameters.items()}
    optimizer = SGD(gpus.values(), lr=0.1)
    found, later = choice(model._replace(parameters=gpus), ranks_of(rate, hosts), optimizer)
    assert str(found.last) == codec
    assert why in found.why
    assert ("guesses for GPUs" in found.guess) == (later is not None)
    if later is not None:  # a host does not wait for its GPU: a step's time tells
        assert 0.9 < later.computing("int8", 1.0, 0.0) < 1.0
        assert str(later.settings(1.0).last) == "none"


def wide() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 300), nn.Linear(300, 300), nn.Linear(300, 10))


@pytest.mark.parametrize(
    ("link", "codecs"),
    [(None, ["none"]), ("10mbit,100us", ["int4", "Stages((0, 'int8'), (500, 'lowrank'))"])],
)
@torch_ranks.on_ranks(2)
def test_ranks_choose_alike_and_say_why(link: str | None, codecs: list[str]) -> None:
    """The codec that this rank trains with, and what it says of it.

    Which of two is faster depends on what it measures of a link of a busy machine.
    """
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("gradwire")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("GRADWIRE_MODEL", "default")
        if link is not None:
            environment.setenv("GRADWIRE_LINK", link)
        ddp = DistributedDataParallel(wide())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        log.setLevel(logging.INFO)
        log.addHandler(handler)
        state: State = register(ddp, "auto", optimizer=optimizer)
        log.removeHandler(handler)
        backward(ddp, 0)
    why = [each for each in logged if each.startswith("codec='auto'")]
    assert all(each in repr(state) and each in str(state.stats()) for each in (*why, state.why))
    (first, said), (second, silent) = torch_ranks.gathered((str(state.codec), why))
    assert first == second
    assert first in codecs
    assert len(said) == 1
    assert silent == []


SLOW = gradwire.CostModel({"within.beta": 8e-6, "within.latency": 1e-5})  # a megabit a second
CHOSEN_AT = 9  # steps


def computing(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Lets rank 1 compute so long in a step, rank 0 not at all, and links be slow, as measured."""
    mine = seconds * dist.get_rank()
    monkeypatch.setattr(Later, "computing", lambda *_: mine)
    monkeypatch.setattr(automatic, "measured", lambda *_: SLOW)
    monkeypatch.setenv("GRADWIRE_MODEL", "default")
    monkeypatch.setenv("GRADWIRE_LINK", "1gbit,10us")


def trained(ddp: nn.Module, state: State, books: Books, steps: range) -> list[str]:
    """Trains, and returns the codec of each step."""
    codecs = []
    for step in steps:
        backward(ddp, step)
        codecs.append(str(state.codec))
        books.deliver()
    return codecs


@pytest.mark.parametrize(("seconds", "last"), [(100.0, "none"), (0.0, "lowrank")])
@torch_ranks.on_ranks(2)
def test_ranks_choose_again_together_and_lose_no_gradient(seconds: float, last: str) -> None:
    """The slowest rank decides. What lowrank had kept back comes in the next step."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        computing(monkeypatch, seconds)
        ddp, books = wrapped(wide())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        state = register(ddp, Compression("auto", warm_up=1), optimizer=optimizer)
        codecs = trained(ddp, state, books, range(CHOSEN_AT))
        assert all("lowrank" in each for each in codecs[:-1])
        assert last in codecs[-1]
        later = trained(ddp, state, books, range(CHOSEN_AT, CHOSEN_AT + 3))
        assert set(later) == {codecs[-1]}
        feedback = state.feedback
        assert feedback is not None
        assert books.missing(feedback) < 100
        held = max(abs(feedback.residual(name)).max() for name, _ in ddp.module.named_parameters())
        assert (held == 0) == (last == "none")
        assert f"steps that compute {seconds * 1e3:.3g} ms" in state.why
        assert torch_ranks.gathered((codecs, later)) == [(codecs, later)] * 2


@torch_ranks.on_ranks(2)
def test_auto_can_begin_with_none_and_take_up_residuals() -> None:
    """A codec that needs residuals begins to keep them with its first step."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        computing(monkeypatch, 0.0)
        ddp, books = wrapped(wide())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        state = register(ddp, Compression("auto", warm_up=1), optimizer=optimizer)
        first = state._steps.first_steps
        assert first is not None
        first.go_on("none", over=False)
        state._training.feedback = None
        assert "lowrank" not in trained(ddp, state, books, range(CHOSEN_AT - 1))[-1]
        assert "lowrank" in trained(ddp, state, books, range(CHOSEN_AT - 1, CHOSEN_AT + 3))[-1]
        assert books.missing(state.feedback) < 100


@torch_ranks.on_ranks(2)
def test_a_saved_training_goes_on_with_the_codec_that_it_had_chosen() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        computing(monkeypatch, 100.0)
        ddp, books = wrapped(wide())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        state = register(ddp, Compression("auto", warm_up=1), optimizer=optimizer)
        trained(ddp, state, books, range(CHOSEN_AT))
        saved = state.state_dict()
        monkeypatch.setattr(Later, "computing", lambda *_: 0.0)
        again, books = wrapped(wide())
        optimizer = torch.optim.SGD(again.parameters(), lr=0.01)
        other = register(again, Compression("auto", warm_up=1), optimizer=optimizer)
        assert "lowrank" in str(other.codec)
        other.load_state_dict(saved)
        assert set(trained(again, other, books, range(2 * CHOSEN_AT))) == {"none"}
        assert "chose none when this training began" in other.why


def test_a_resumed_training_is_timed_with_the_codec_that_it_had() -> None:
    """On GPUs, where computing is what the codec leaves of a step."""
    model = network(512)
    gpus = {name: OnGpu(each) for name, each in model.parameters.items()}
    _, later = choice(model._replace(parameters=gpus), ranks_of(1e9, FOUR_HOSTS))
    assert later is not None
    state = Mock()
    steps = FirstSteps(later, state)
    found: list[tuple[str, float]] = []
    measure = later.computing

    def computing(codec: str, step: float, waited: float) -> float:
        found.append((codec, measure(codec, 1.0, waited)))
        return found[-1][1]

    later.computing = computing  # type: ignore[method-assign]
    for codec in ("int8", "none", "lowrank"):
        steps.go_on(codec, over=False)
        steps.begin_step(0.0, float)
        steps.begin_step(0.0, float)
    seconds = dict(found)
    assert [*seconds] == ["int8", "none", "lowrank"]
    assert state._change.call_count == 3
    assert seconds["none"] < seconds["int8"] < seconds["lowrank"] == 1.0  # which has no times


def test_ranks_that_round_otherwise_agree_on_the_later_codec() -> None:
    model = network(512)
    _, later = choice(model, ranks_of(1e9, FOUR_HOSTS))
    assert later is not None
    assert later.codecs == ["none", "lossless", "fp16", "int8"]
    given: list[float] = []

    def most(own: float) -> float:
        given.append(own)
        return 2.0  # of a rank that takes fp16

    assert str(later.settings(20.0, most).last) == "fp16"
    assert given == [0]
    assert str(later.settings(20.0).last) == "none"


@torch_ranks.on_ranks(2)
def test_ranks_whose_optimizers_allow_other_codecs_are_refused() -> None:
    """Though they would begin with the same codec."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        computing(monkeypatch, 0.0)
        fast = gradwire.CostModel({"within.beta": 8e-12, "within.latency": 1e-6})
        monkeypatch.setattr(automatic, "measured", lambda *_: fast)
        ddp = DistributedDataParallel(wide())
        optimizer = (SGD, ADAMW)[dist.get_rank()](ddp.parameters(), lr=0.01)
        with pytest.raises(gradwire.InvalidArgument) as raised:
            register(ddp, "auto", optimizer=optimizer)
    assert "a different codec=" in str(raised.value)
    assert "auto, which chose none of none, lossless, fp16, int8, int4, lowrank" in str(
        raised.value
    )


@torch_ranks.on_ranks(2)
def test_an_algorithm_that_only_sums_plainly_is_refused_before_a_codec_is_chosen() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        computing(monkeypatch, 0.0)
        with pytest.raises(gradwire.InvalidArgument, match="recursive_doubling"):
            register(DistributedDataParallel(wide()), "auto", algorithm="recursive_doubling")


@torch_ranks.on_ranks(2)
def test_auto_on_one_rank_alone_is_refused_on_all() -> None:
    with pytest.raises(gradwire.InvalidArgument) as raised:
        register(DistributedDataParallel(wide()), ("auto", "int8")[dist.get_rank()])
    assert "a different codec=" in str(raised.value)


@pytest.mark.parametrize("codec", ["auto", "auto:rank=2"])
def test_auto_elsewhere_is_told_where_it_belongs(codec: str) -> None:
    with gradwire.init() as comm, pytest.raises(gradwire.InvalidArgument) as raised:
        comm.all_reduce(torch.ones(3), codec=codec)
    assert f"codec={codec!r}: only gradwire.torch.register() and" in str(raised.value)

"""How advice is put together: limits, defaults, progress, and which step is the best."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
from gradwire import CostModel, InvalidArgument, _core, advise
from gradwire._base import units
from gradwire._tools import cli
from gradwire.lab.commands import advise as command
from gradwire.lab.planner import advice as module
from gradwire.lab.planner import judgement
from gradwire.lab.planner.advice import Advice
from gradwire.lab.planner.devices import DEVICES
from gradwire.lab.planner.exchanges import PER_BUCKET
from gradwire.lab.planner.steps import LOCAL, SYNCHRONOUS, Prediction
from gradwire.lab.planner.tables import catalogue
from gradwire.lab.planner.tables.network import CONV, Layer, Network

SMALL = Network("small", "a vector", (Layer("fc", "linear", 100, 100, 10, 10, 200.0, ((10, 10),)),))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "network", lambda _: SMALL)


def made(**options: Any) -> Advice:
    given = {"ranks": 2, "link": "1gbit,50us", "compute": 0.1, "codecs": ["fp16"]}
    return advise("small", **{**given, "device": "a100", "optimizer": "SGD", **options})


@pytest.mark.parametrize("name", ["ranks", "batch", "per_host", "accumulate", "local_steps"])
def test_numbers_are_from_1(name: str) -> None:
    made(**{name: 1})
    with pytest.raises(InvalidArgument, match=f"{name}=0"):
        made(**{name: 0})


def test_all_of_it_is_there() -> None:
    found = made(batch=8, accumulate=3, local_steps=5)
    assert (found.network, found.ranks, found.batch, found.compute) == (SMALL, 2, 8, 0.1)
    assert (found.cluster.ranks, found.cluster.per_host) == (2, 1)
    assert [each.layer.name for each in found.volumes] == ["fc"]
    modes = {each.mode for each in found.predictions}
    assert {"synchronous", "accumulated over 3", "local SGD, H = 5", "asynchronous server"} == modes
    assert {each.codec for each in found.predictions} == {"none", "fp16"}
    assert found.best in found.predictions
    assert found.second in found.predictions
    judge = judgement.Judge(SMALL, 8, 0.1, found.cluster, found.predictions)
    assert found.sentences == tuple(judge.sentences())
    assert (found.weak, found.strong) == (tuple(judge.weak()), tuple(judge.strong()))
    assert found.least_batch == judge.least_batch()
    assert found.assumptions == module._ASSUMPTIONS
    lowrank = made(codecs=["lowrank"])
    servers = [each.codec for each in lowrank.predictions if each.mode == "asynchronous server"]
    assert servers == ["none"]  # which takes no factors


def test_progress_goes_from_nothing_to_all() -> None:
    told: list[float] = []
    made(progress=lambda share, _: told.append(share))
    assert (told[0], told[-1]) == (0, 1)
    assert told == sorted(told)
    assert len(set(told)) == len(told)


def test_the_command_has_the_defaults_of_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def noted(model: str, **options: Any) -> Advice:
        given.update(options)
        return made()

    monkeypatch.setattr(command, "advise", noted)
    cli.main(["advise", "small", "--ranks", "2", "--link", "1gbit,50us"])
    defaults = inspect.signature(advise).parameters
    shared = given.keys() & {
        "per_host",
        "batch",
        "compute",
        "device",
        "optimizer",
        "codecs",
        "cores",
    }
    assert len(shared) >= 5
    assert {name: given[name] for name in shared} == {
        name: defaults[name].default for name in shared
    }


@pytest.mark.parametrize(
    ("cores", "per_host", "turns", "overlaps"),
    [(4, 4, 1.0, False), (5, 4, 1.0, True), (2, 4, 2.0, False), (1, 4, 4.0, False)],
)
def test_ranks_that_share_cores_take_turns(
    cores: int, per_host: int, turns: float, overlaps: bool
) -> None:
    found = module._sharing(cores, per_host, DEVICES["cpu"])
    assert found == {"turns": turns, "per_bucket": PER_BUCKET, "overlaps": overlaps}
    assert made(cores=cores, per_host=per_host, device="cpu").compute == pytest.approx(0.1 * turns)


def test_cores_are_those_of_cpus() -> None:
    assert module._sharing(None, 4, DEVICES["cpu"]) == {"per_bucket": PER_BUCKET}
    assert module._sharing(None, 4, DEVICES["a100"]) == {}
    with pytest.raises(InvalidArgument, match="cores=0"):
        module._sharing(0, 4, DEVICES["cpu"])


def test_computing_is_estimated_where_it_is_not_given() -> None:
    device = DEVICES["cpu"]
    seconds, assumed = module._compute(SMALL, 8, None, device)
    assert seconds == pytest.approx(device.seconds(3 * 200 * 8))
    assert assumed == [device.assumption()]
    assert module._compute(SMALL, 8, 0.5, device) == (0.5, [])
    with pytest.raises(InvalidArgument, match="compute=inf is not finite"):
        module._compute(SMALL, 8, float("inf"), device)
    with pytest.raises(InvalidArgument, match="has no operations that can be counted"):
        module._compute(Network("none", "", ()), 8, None, device)


def test_links_inside_a_host_are_the_devices() -> None:
    inside = module._topology("1gbit", 4, DEVICES["a100"]).inside
    assert inside == pytest.approx(DEVICES["a100"].inside)
    assert module._topology("1gbit", 4, DEVICES["cpu"]).inside is None
    own = CostModel({"gamma": 1e-9})
    assert made(cost_model=own).cluster.base == own
    assert made().cluster.base != own


BIASED = {"onebit", "topk", "lowrank"}


def codecs_of(found: Advice) -> set[str]:
    return {each.codec for each in found.predictions}


@pytest.mark.parametrize("name", ["adamw", "Adam", "Lion", "Muon", "adafactor", "mine"])
def test_codecs_that_need_error_feedback_are_for_sgd_alone(name: str) -> None:
    """As docs/compression.md says, of optimizers that are not named there too."""
    slow = {"link": "1mbit", "codecs": None}
    assert codecs_of(made(**slow)) > BIASED
    found = made(**slow, optimizer=name)
    assert codecs_of(found) == {"none", "fp16", "int8"}
    assert "int8" in found.sentences[0]
    assert any(f"{name} is not linear in the gradient" in each for each in found.assumptions)
    with pytest.raises(InvalidArgument, match=f"codec 'topk' is not for {name}.*int8"):
        made(codecs=["int8", "topk"], optimizer=name)


@pytest.mark.parametrize("optimizer", ["SGD", "adamw", "lion"])
def test_lossless_is_for_every_optimizer_but_not_for_gpus(optimizer: str) -> None:
    given: dict[str, Any] = {"codecs": None, "optimizer": optimizer}
    assert "lossless" in codecs_of(made(**given, device="cpu"))
    assert "lossless" not in codecs_of(made(**given))


def test_without_an_optimizer_the_report_says_which_it_assumes() -> None:
    found = made(codecs=None, optimizer=None)
    assert codecs_of(found) > BIASED
    assert "the optimizer is SGD" in str(found)
    assert "the optimizer is SGD" not in str(made())


def test_adamw_is_told_of_one_bit_adam_but_not_for_a_cnn(monkeypatch: pytest.MonkeyPatch) -> None:
    line: dict[str, Any] = {"link": "1mbit", "codecs": None}
    offered = made(**line, optimizer="AdamW").sentences[-1]
    assert "OneBitAdam" in offered
    assert "OneBitAdam" not in str(made(**line, optimizer="lion"))
    found = made(**line, optimizer="OneBitAdam")
    assert codecs_of(found) == {"none", "int8", "onebit"}
    assert not found.cluster.overlaps  # it averages in its step
    steps = [each.step for each in found.predictions if each.codec == "onebit"]
    assert f"would take {units.show_seconds(steps[0])} a step" in offered
    cnn = replace(SMALL, layers=(replace(SMALL.layers[0], kind=CONV),))
    monkeypatch.setattr(catalogue, "network", lambda _: cnn)
    assert "OneBitAdam" not in str(made(**line, optimizer="AdamW"))
    assert codecs_of(made(**line, optimizer="one_bit_adam")) == {"none", "fp16", "int8"}


@pytest.mark.parametrize(
    ("gpus", "name"),
    [
        ([], "cpu"),
        (["NVIDIA H200"], "h200"),
        (["NVIDIA A100-SXM4-80GB", "NVIDIA H200"], "a100"),
        (["NVIDIA GeForce RTX 4090"], "NVIDIA GeForce RTX 4090, taken for an a100"),
    ],
)
def test_the_device_is_this_machines(
    gpus: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_core, "cuda_info", lambda: {"devices": [{"name": each} for each in gpus]})
    found = made(device=None, compute=None)
    assert any(each.startswith(f"{name}: computing reaches") for each in found.assumptions)


def step(codec: str, seconds: float, mode: str = SYNCHRONOUS) -> Prediction:
    return Prediction("ring", codec, mode, seconds, 0.1)


def test_the_best_step_is_the_least_harmful_of_the_fastest() -> None:
    dense, rounded, biased = step("none", 1.04), step("fp16", 1.02), step("onebit", 1.0)
    assert module._best([biased, rounded, dense]) is dense
    assert module._best([biased, step("none", judgement.WORTH)]).codec == "none"
    assert module._best([biased, rounded, step("none", 1.06)]) is rounded
    assert module._best([biased, step("fp16", 1.1)]) is biased
    assert module._best([step("fp16", 1.03), rounded]) is rounded
    assert module._best([rounded, step("lossless", 1.04)]).codec == "lossless"
    assert module._best([step("lossless", 1.02), dense]) is dense  # which does no work
    best, second = module._two_best([step("none", 0.5, LOCAL), biased, step("fp16", 1.2)])
    assert (best.codec, second.codec) == ("onebit", "fp16")
    assert module._two_best([dense]) == (dense, dense)

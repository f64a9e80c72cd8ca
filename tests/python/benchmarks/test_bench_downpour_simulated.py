"""Downpour SGD in virtual time: its clock, and its report."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from gradwire import serve

from bench.asynchronous import (
    downpour_events,
    downpour_search_report,
    downpour_simulated_report,
    perceptron,
)
from bench.asynchronous.downpour_events import Network, Plan, Task
from bench.asynchronous.downpour_replica import network
from bench.asynchronous.downpour_service import Client, Service
from bench.asynchronous.downpour_simulated_report import LINKS, REPLICAS, TASKS, WAYS
from bench.training import images

GRADIENTS = 60
CODECS = ("none", "onebit", "int8")
STRICT: tuple[dict[str, Any], dict[str, Any]] = ({}, {"strict": True})
FAST = Network(1e12, 0.0, 1e-6)


@pytest.fixture(scope="module")
def data() -> images.Images:
    pytest.importorskip(
        "sklearn"
    )  # not at once: every worker collects, and its import takes seconds
    return images.load_digits()


@pytest.fixture(scope="module")
def task(data: images.Images) -> Task:
    def network(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

    return Task(data, network, 4, 0.01)


def test_equal_replicas_take_turns(task: Task) -> None:
    found = downpour_events.train(task, Plan(serve.SGD(lr=0.1), 4), FAST, 1, GRADIENTS)
    seconds, pushed, accuracy = found["curve"][-1]
    assert pushed == GRADIENTS
    assert seconds == pytest.approx(GRADIENTS / 4 * 0.01, rel=0.15)
    assert 2.5 <= found["staleness"] <= 3.5  # all others push while one computes
    assert accuracy > found["curve"][0][2]


def test_a_slow_replica_holds_nobody_up(task: Task) -> None:
    plan = Plan(serve.SGD(lr=0.1), 4, slow=1000.0)
    found = downpour_events.train(task, plan, FAST, 1, GRADIENTS)
    assert found["curve"][-1][0] == pytest.approx(GRADIENTS / 3 * 0.01, rel=0.15)


def test_a_warm_start_is_one_replicas(task: Task) -> None:
    plan = Plan(serve.SGD(lr=0.1), 4, warm_start=GRADIENTS)
    found = downpour_events.train(task, plan, FAST, 1, GRADIENTS)
    assert found["staleness"] == 0
    assert found["curve"][-1][0] == pytest.approx(GRADIENTS * 0.01, rel=0.15)


@pytest.mark.parametrize(("push", "pull"), [("none", "none"), ("onebit", "int8")])
def test_thin_cards_take_turns_with_bytes(task: Task, push: str, pull: str) -> None:
    rate = 20e3  # bytes a second: the values of 2,600 B take longer than the gradient
    plan = Plan(serve.SGD(lr=0.1), 4, push_codec=push, pull_codec=pull)
    found = downpour_events.train(task, plan, Network(rate, 0.0, 0.0), 1, GRADIENTS)
    model = task.network(1)
    most = max(downpour_events.payload_bytes(model, each) for each in (push, pull))
    bound = most / downpour_events.SHARDS / rate
    gradient = max(bound, 0.01 / 4)
    assert gradient * 0.85 <= found["curve"][-1][0] / GRADIENTS <= 2.1 * gradient


@pytest.mark.parametrize(("push", "pull"), [("none", "none"), ("onebit", "int8")])
@pytest.mark.parametrize("options", [{}, {"staleness": "divide"}, {"max_staleness": 2}])
def test_events_compute_what_the_service_computes(
    push: str, pull: str, options: dict[str, Any]
) -> None:
    step = 1e-6 if pull == "none" else 2e-3  # one of int8, which an ulp before it may decide
    rule, draw = serve.Adagrad(lr=0.1), np.random.default_rng(0)
    start = [draw.standard_normal(shape, np.float32) for shape in ((40, 50), (7,))]
    divide, most = options.get("staleness") == "divide", options.get("max_staleness")
    modelled = Service(rule, divide=divide, max_staleness=most)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(serve.Server(1)).store
        connect = functools.partial(serve.connect, start, rule, codecs=CODECS, store=store)
        pairs = [
            (Client(modelled, start), stack.enter_context(connect(**options))) for _ in range(4)
        ]
        feedback = [(gradwire.ErrorFeedback(), gradwire.ErrorFeedback()) for _ in pairs]
        have = [[each.copy() for each in start], [each.copy() for each in start]]
        for client in [0, 1, 2, 3, 3, 0, 1, 2, 0, 0, 0, 0, 3, 1, 2]:
            gradients = [draw.standard_normal(each.shape, np.float32) for each in start]
            for side, ps in enumerate(pairs[client]):
                ps.pull(have[side], codec=pull) if client % 2 else None
                rules = [("1", "int8")] if push == "onebit" else []
                kept: Any = feedback[client][side]
                ps.push(gradients, codec=push, rules=rules, feedback=kept, **STRICT[side])
                ps.pull(have[side], codec=pull)
            for ours, theirs in zip(*have, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=step)
        stats = pairs[0][1].stats()[0]
        assert modelled.version == stats["version"]
        assert modelled.mean_staleness == pytest.approx(stats["mean_staleness"])


def test_gradients_by_hand_are_torchs(data: images.Images) -> None:
    model = network(0, 8)
    shown, labels = data.train_images[:20], data.train_labels[:20]
    torch.nn.functional.cross_entropy(model(shown), labels).backward()
    wanted = [each.grad.numpy() for each in model.parameters() if each.grad is not None]
    found = [np.empty_like(each) for each in wanted]
    values = [each.detach().numpy() for each in model.parameters()]
    perceptron.gradients(values, shown.numpy(), labels.numpy(), found)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_report_has_all_ways(tmp_path: Path) -> None:
    runs: list[dict[str, Any]] = []
    for task in TASKS:
        for link, rate in LINKS.items():
            for replicas in REPLICAS if rate is None else REPLICAS[:1]:
                for way in WAYS:
                    run = {"task": task, "link": link, "replicas": replicas, "way": way.name}
                    curve = [[5.0, 500, 0.5], [10.0, 1000, 0.85]]
                    runs.append({**run, "seed": 1, "gradients": 1000, "curve": curve})
                    runs[-1]["staleness"] = replicas - 1.0
    head = {"date": "2020-01-01", "machine": "a machine", "command": "-m bench"}
    found = {**head, "gradient_seconds": 0.01, "serving_seconds": {TASKS[0]: 1e-3}, "runs": runs}
    text = downpour_simulated_report.document(found, "stem")
    assert "| Adagrad, warm start | 85.00 (3.0) | 85.00 (15.0) | 85.00 (63.0) |" in text
    assert "| Adagrad, warm start | 10.00, 85.00 | 10.00, 85.00 |" in text
    downpour_simulated_report.draw(found, tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_of_the_search_has_both_tables(tmp_path: Path) -> None:
    runs = [
        {"way": way.name, "replicas": replicas, "seed": seed, "gradients": 1000}
        | {"curve": [[1.0, 1000, 0.85 - 0.001 * place + seed / 100]], "staleness": 3.0}
        for seed in (1, 2)
        for replicas, ways in downpour_search_report.CASES.items()
        for place, way in enumerate(ways)
    ]
    found = {"date": "2020-01-01", "machine": "a machine", "command": "-m bench", "data": "Images"}
    text = downpour_search_report.document({**found, "runs": runs}, "stem")
    assert "| uncompressed | 86.50 ± 0.71 | +0.00 ± 0.00 |" in text
    assert "| uncompressed, no warm start | 86.40 ± 0.71 | -0.10 ± 0.00 |" in text
    assert "| 64 | synchronous, rate 0.04 | 86.40 ± 0.71 | 3.0 |" in text
    downpour_search_report.draw({**found, "runs": runs}, tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")

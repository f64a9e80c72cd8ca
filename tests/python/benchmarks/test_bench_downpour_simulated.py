"""Downpour SGD in virtual time: its clock, and its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

import torch
from gradwire import serve

from bench.asynchronous import downpour_events, downpour_simulated_report
from bench.asynchronous.downpour_events import Network, Plan, Task
from bench.asynchronous.downpour_simulated_report import LINKS, REPLICAS, TASKS, WAYS
from bench.training import images

GRADIENTS = 60
FAST = Network(1e12, 0.0, 1e-6)


@pytest.fixture(scope="module")
def task() -> Task:
    data = images.load_digits()

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

"""The benchmark of large batches: what it trains, what it reports, and that it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import small_images
from ranks import LIMIT
from test_bench_trials import TRIAL

from bench.training import large_batch
from bench.training.train_runs import append
from bench.training.trials import exchanges, large_batch_report
from bench.training.trials.trial import Outcome, Point, Trial, best_rate, read

SGD = TRIAL._replace(task="cnn", optimizer="sgd", rate=0.1, epochs=8)
DENSE = 6000  # bytes a step of a thousand parameters


def trained(batch: int, accuracy: float, exchange: str = "none", ratio: float = 1, **more: object):
    """Two seeds that see 640,000 images, and are at 90 % half-way if that accuracy is above it."""
    steps = 640_000 // batch
    runs = [
        SGD._replace(batch=batch, steps=steps, exchange=exchange, seed=seed, **more)
        for seed in (1, 2)
    ]
    curve = [
        Point(steps // 2, 1.0, min(0.9, accuracy), 1.0, steps // 2 * DENSE / ratio),
        Point(steps, 1.0, accuracy, 1.0, steps * DENSE / ratio),
    ]
    return [Outcome(run, "Images", 1000, curve, True, 0.02, "2020", {}) for run in runs]


FOUND = [
    *trained(64, 0.910),
    *trained(64, 0.5, rate=0.2)[:1],
    *trained(64, 0.95, epochs=20),  # of which there are not as many
    *trained(512, 0.907),
    *trained(1024, 0.880),
    *trained(64, 0.908, "lowrank+int8=0.05", 50),
    *trained(64, 0.89, "DiLoCo/16", 16),
    *trained(64, 0.91, optimizer="lamb", rate=0.002),
    *trained(1024, 0.905, optimizer="lamb", rate=0.004),
]


def test_rates_grow_with_the_batch():
    assert large_batch.RULES["sgd"].rates(64) == [0.05, 0.1]
    assert large_batch.RULES["sgd"].rates(1024) == [0.05, 0.1, 0.2, 0.4]
    lamb = large_batch.RULES["lamb"]
    assert lamb.rates(1024)[0] == pytest.approx(4 * lamb.rates(64)[0])


def test_batches_grow_to_8192_and_savings_have_the_best_rates(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["large_batch.py"])
    monkeypatch.setattr(large_batch, "_count", lambda _: 60_000)
    options = large_batch.parse_options()
    swept = list(large_batch.sweep(options))
    assert {each.batch for each in swept} == {64 << power for power in range(8)}
    made = [
        trained(each.batch, 0.9)[0]._replace(run=each)
        for each in swept
        if each.rate == large_batch.RULES[each.optimizer].rates(each.batch)[1]
    ]
    planned = list(large_batch.plan(options, made))
    assert len(set(planned)) == len(planned)
    assert all(
        each.rate == large_batch.RULES[each.optimizer].rates(each.batch)[1] for each in planned
    )
    assert {exchanges.check(each.exchange) for each in planned} > {"none", "int8", "DiLoCo/16"}
    assert {each.steps * each.batch // 1000 for each in planned} <= set(range(471, 481))
    assert {each.epochs for each in planned} == {8}


def test_the_best_rate_is_the_most_accurate_one():
    more = [trained(64, 0.95, rate=0.3)[0], *FOUND]
    assert best_rate(more, SGD._replace(batch=64, steps=10_000), lambda e: -e.accuracy) == 0.3


def rows() -> list[large_batch_report.Row]:
    return large_batch_report.rows_of(FOUND)


def test_growth_shows_cost_and_where_it_breaks():
    table = list(large_batch_report.growth(rows(), 0.9))
    assert (
        "| 64 | 10,000 | 0.1 | 91.00 ± 0.00 | 5,000, 30 | 0.002 | 91.00 ± 0.00 | 5,000, 30 |"
        in table
    )
    assert "| 1,024 | 625 | 0.1 | 88.00 ± 0.00 | – | 0.004 | 90.50 ± 0.00 | 312, 2 |" in table
    sgd, lamb = large_batch_report.breaks(rows())
    assert "batches to 512 end within 1 point of 64; the first that does not is 1,024" in sgd
    assert "batches to 1,024" in lamb
    assert "all that were tried" in lamb


def test_ways_are_ordered_by_their_bytes():
    table = list(large_batch_report.savings(rows(), 0.9))[2:]
    assert table[0].startswith(
        "| batch 64, `lowrank` | 90.80 ± 0.00 | yes | 1.2 | 50.0× | 0.6 | 50.0× |"
    )
    assert "| batch 64, DiLoCo every 16 | 89.00 ± 0.00 | no | 3.8 | 16.0× | – | – |" in table
    assert "| batch 1,024, LAMB | 90.50 ± 0.00 | yes | 3.8 | 16.0× | 1.9 | 16.0× |" in table
    assert table[-1] == "| batch 64 | 91.00 ± 0.00 | yes | 60.0 | 1.0× | 30.0 | 1.0× |"


def test_the_report_has_tables_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for each in FOUND:
        append(tmp_path / "runs", each)
    large_batch_report.write(read(tmp_path / "runs"), tmp_path / "runs", tmp_path / "out", 0.9)
    text = capsys.readouterr().out
    assert (tmp_path / "out.md").read_text(encoding="utf-8") + "\n" == text
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "| SGD | 64 | 0.1: 91.00, 0.2: 50.00 |" in text


@pytest.mark.nightly
def test_it_trains_with_growing_batches(tmp_path: Path):
    small_images.write(tmp_path)
    command = [sys.executable, "-m", "bench.training.large_batch", "--data", str(tmp_path)]
    command += ["--quick", "--ranks", "2", "--target", "0.1", "--runs", str(tmp_path / "runs")]
    command += ["--batches", "64", "256", "512", "512", "--output", str(tmp_path / "out")]
    subprocess.run(command, timeout=LIMIT, check=True)
    found = read(tmp_path / "runs")
    assert {(each.run.optimizer, each.run.batch) for each in found} == {
        (optimizer, batch) for optimizer in large_batch.RULES for batch in (64, 512)
    }
    assert all(isinstance(each.run, Trial) and each.identical for each in found)

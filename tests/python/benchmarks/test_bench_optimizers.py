"""The benchmark of optimizers: what it trains, what it reports, and that it goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import small_images
from ranks import LIMIT
from test_bench_trials import TRIAL, outcome

from bench.training import optimizers
from bench.training.train_runs import append
from bench.training.trials import exchanges, optimizers_report
from bench.training.trials.trial import Outcome, read

LM = TRIAL._replace(task="lm", rate=0.004)


def options(monkeypatch: pytest.MonkeyPatch, *arguments: str):
    monkeypatch.setattr(sys, "argv", ["optimizers.py", *arguments])
    return optimizers.parse_options()


def of(exchange: str, loss: float, ratio: float = 1, seeds: int = 2) -> list[Outcome]:
    """Seeds whose losses are the given one, and 0.01 more for each next one."""
    return [
        outcome(LM._replace(exchange=exchange, seed=seed), loss + seed / 100, ratio)
        for seed in range(1, seeds + 1)
    ]


FOUND = [
    *of("none", 2.0),
    *of("int8", 2.002, 4),
    *of("OneBitAdam", 2.02, 30),
    *of("OneBitAdam-feedback", 2.5, 30),
    *of("OneBitAdam/codec=topk:density=0.005", 2.02, 50),
    *of("lowrank:rank=4+int8=0.1", 2.2, 25),
    outcome(LM._replace(rate=0.1), 3.0),
    outcome(LM._replace(optimizer="lion", rate=0.001), 2.1),
    outcome(LM._replace(optimizer="lion", rate=0.001, exchange="int8"), None, 30),
]


def rows_with(lines: list[str], first: str) -> list[str]:
    return [line for line in lines if first in line]


def test_every_exchange_is_one_and_has_a_rate(monkeypatch: pytest.MonkeyPatch):
    chosen = options(monkeypatch, "--seeds", "5", "6")
    swept = list(optimizers.sweep(chosen))
    assert len(set(swept)) == len(swept)
    assert {each.seed for each in swept} == {5}
    made = [outcome(each, loss=each.rate) for each in swept]
    planned = list(optimizers.plan(chosen, made))
    assert len(set(planned)) == len(planned)
    for each in planned:
        exchanges.check(each.exchange)
        assert each.rate == min(optimizers.RATES[each.optimizer])
    by_seed = [{each._replace(seed=0) for each in planned if each.seed == s} for s in (5, 6)]
    assert by_seed[0] == by_seed[1]
    assert {each.task for each in planned} == {"lm", "vit", "cnn"}


def test_a_control_has_its_exchange_beside_it():
    for own in optimizers.EXCHANGES.values():
        for each in own:
            assert each.removesuffix("-feedback") in own
        assert len(set(own)) == len(own)


def test_steps_are_timed_over_links_but_gloos(monkeypatch: pytest.MonkeyPatch):
    arguments = ["--tasks", "lm", "--optimizers", "adamw", "--rate", "0.1", "--seeds", "1"]
    chosen = options(monkeypatch, *arguments, "--links", "1gbit,100us")
    assert list(optimizers.sweep(chosen)) == []
    timed = [each for each in optimizers.plan(chosen, []) if each.link]
    assert {each.link for each in timed} == {"1gbit,100us"}
    assert not [each for each in timed if each.exchange.startswith("gloo")]
    assert {each.first_steps for each in timed} == {21}
    alone = options(monkeypatch, *arguments[:4], "--links", "1gbit,100us", "--timed-only")
    assert list(optimizers.sweep(alone)) == []
    planned = list(optimizers.plan(alone, []))
    assert {each._replace(rate=0.0) for each in planned} == {e._replace(rate=0.0) for e in timed}


def test_losses_are_compared_seed_by_seed_and_with_goals():
    (table,) = optimizers_report.tables_of(FOUND)
    assert table.row("adamw", "none").outcomes[0].run.rate == 0.004  # which more seeds have
    goals = list(optimizers_report.goal_lines(table))
    assert rows_with(goals, "| OneBitAdam |")[0].endswith("| ≥ 25, ≥ 10 | 30.0×, 13.0× | yes")
    assert rows_with(goals, "OneBitAdam/codec")[0].endswith("| ≥ 60, ≥ 1 | 50.0×, 15.2× | no")
    assert rows_with(goals, "int8 |")[0].endswith("| 4.0×, 4.0× | yes")
    assert rows_with(goals, "lowrank")[0].split(" | ")[3] == "+9.93 ± 0.03"
    assert not rows_with(goals, "feedback")


def test_low_rank_momenta_have_the_goal_of_low_rank_gradients():
    goal = optimizers_report.goal_of("lowrank:rank=4+int8=0.1")
    assert optimizers_report.goal_of("OneBitAdam/codec=lowrank:rank=4+int8=0.29") == goal
    assert optimizers_report.goal_of("OneBitAdam/every=3") != goal


def test_blocks_of_one_bit_momenta_have_the_goal_of_any():
    goal = optimizers_report.goal_of("OneBitAdam")
    assert optimizers_report.goal_of("OneBitAdam/codec=onebit:block=256+int8=0.29") == goal
    assert optimizers_report.goal_of("OneBitAdam/every=3") != goal


def test_steps_over_links_are_a_table_where_any_were_timed():
    assert list(optimizers_report.links(FOUND)) == []
    timed = [
        outcome(LM._replace(exchange=exchange, link=link))._replace(seconds_per_step=seconds)
        for exchange, link, seconds in (
            ("none", "100mbit,100us", 0.4),
            ("none", "1gbit,100us", 0.1),
            ("OneBitAdam", "100mbit,100us", 0.05),
        )
    ]
    lines = list(optimizers_report.links([*FOUND, *timed]))
    assert lines[2] == "| task | | 100mbit,100us | 1gbit,100us |"
    assert lines[4:] == [
        "| language model | AdamW, `none` | 400.0 | 100.0 |",
        "| language model | `OneBitAdam` | 50.0 | – |",
    ]


def test_the_report_has_tables_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for each in FOUND:
        append(tmp_path / "runs", each)
    optimizers_report.write(read(tmp_path / "runs"), tmp_path / "runs", tmp_path / "out")
    text = capsys.readouterr().out
    assert (tmp_path / "out.md").read_text(encoding="utf-8") + "\n" == text
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert read(tmp_path / "out-runs.jsonl") == FOUND
    lines = text.splitlines()
    assert "| 0.004: 2.0100 (best), 0.1: 3.0000 |" in text
    assert rows_with(lines, "| language model | OneBitAdam | +23.")
    assert rows_with(lines, "| Lion, int8 | 0.001 | 1 | not finite | diverged | diverged |")


def test_the_report_says_whether_replicas_were_bit_identical() -> None:
    for identical, said in ((True, "yes"), (False, "NO")):
        found = [FOUND[0], FOUND[1]._replace(identical=identical)]
        rows = list(optimizers_report._rows(optimizers_report.Table("lm", found)))
        assert said in rows[-1]


def test_the_summary_compares_with_adamw():
    rows = list(optimizers_report.summary(FOUND))
    assert rows[0] == "| | language model, % | seeds | ratio | whole run |"
    assert not rows_with(rows, "Lion")
    (one_bit,) = rows_with(rows, "| `OneBitAdam`, warm-up of 20 % of the steps |")
    assert one_bit.split(" | ")[1:4] == ["+0.99 ± 0.00", "2", "30.0×"]
    ratios = [float(line.split(" | ")[3].rstrip("×")) for line in rows[2:]]
    assert ratios == sorted(ratios)


def test_other_optimizers_are_compared_with_their_own_dense_loss():
    more = outcome(LM._replace(optimizer="lion", rate=0.001, exchange="fp16"), 2.121, 2)
    rows = list(optimizers_report.others([*FOUND, more]))
    assert rows[2:] == [
        "| language model | Lion, `none` | 2.1000 | – | 1.0× | 1.2× |",
        "| language model | Lion, `fp16` | 2.1210 | +1.00 | 2.0× | 2.2× |",
        "| language model | Lion, `int8` | not finite | diverged | 30.0× | 13.0× |",
    ]


def test_records_of_ways_that_are_no_more_are_left_out(tmp_path: Path):
    for each in (FOUND[0], FOUND[0]._replace(run=LM._replace(exchange="DeMo/top_k=16"))):
        append(tmp_path / "runs", each)
    assert optimizers_report.read(tmp_path / "runs") == FOUND[:1]


def test_without_outcomes_there_is_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    arguments = ["optimizers.py", "--report", "--runs", str(tmp_path / "none")]
    monkeypatch.setattr(sys, "argv", arguments)
    assert optimizers.main() == 1
    assert "none has no outcomes" in capsys.readouterr().err


@pytest.mark.nightly
def test_it_trains_what_is_not_there_yet(tmp_path: Path):
    small_images.write(tmp_path)
    runs = tmp_path / "runs.jsonl"
    command = [sys.executable, "-m", "bench.training.optimizers", "--data", str(tmp_path)]
    command += ["--tasks", "vit", "--optimizers", "adamw", "--ranks", "2", "--seeds", "1"]
    command += ["--steps", "4", "--runs", str(runs), "--output", str(tmp_path / "out")]
    subprocess.run([*command, "--exchanges", "none"], timeout=LIMIT, check=True)
    first = read(runs)
    assert [each.run.rate for each in first] == list(optimizers.RATES["adamw"])
    subprocess.run([*command, "--exchanges", "none", "int8"], timeout=LIMIT, check=True)
    assert read(runs)[:-1] == first
    assert read(runs)[-1].run.exchange == "int8"
    assert "| AdamW, int8 |" in (tmp_path / "out.md").read_text(encoding="utf-8")

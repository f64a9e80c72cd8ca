"""The training benchmark: what it counts, that it goes on where it stopped, and what it reports."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import gradwire
import numpy as np
import pytest
from ranks import LIMIT

from bench.training import images, methods, train, train_links, train_report
from bench.training.methods import Method, Options
from bench.training.train_runs import Point, Result, Run, append, read_results

RUN = Run("none", 16, 1, 3, 0.1, 0.1, 4, "auto", "Fashion-MNIST")


def result(
    method: str, seed: int, accuracy: float, loss: float | None, ratio: float = 1, ms: int = 20
) -> Result:
    """A result of 100 steps and 1,000 parameters; a biased codec begins with ten dense steps."""
    dense = 2 * 3 / 4 * 4 * 1000
    first = 10 * dense / (1 if Method.parse(method).first_share(0.1) else ratio)
    curve = [
        Point(10, accuracy / 2, 2, first),
        Point(50, accuracy, 1, first + 40 * dense / ratio),
        Point(100, accuracy, 0.5, first + 90 * dense / ratio),
    ]
    run = RUN._replace(method=method, seed=seed)
    return Result(run, 1000, accuracy, loss, True, ms / 1e3, curve, "2020-01-01", {"torch": "2"})


def row_of(table: str, first: str) -> list[str]:
    """The cells of the rows that begin so."""
    return [line for line in table.splitlines() if line.startswith(f"| {first} |")]


def write_idx(path: Path, values: np.ndarray) -> None:
    header = b"\0\0\x08" + bytes([values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(header + values.astype(np.uint8).tobytes())


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """48 images of 8 × 8 pixels to train with, 16 to test with."""
    random = np.random.default_rng(1)
    for stem, count in (("train", 48), ("t10k", 16)):
        write_idx(tmp_path / f"{stem}-images-idx3-ubyte", random.integers(0, 256, (count, 8, 8)))
        write_idx(tmp_path / f"{stem}-labels-idx1-ubyte", random.integers(0, 10, count))
    return tmp_path


def test_the_network_has_1_02_million_parameters():
    model = images.small_cnn(28, hidden=640)
    assert sum(each.numel() for each in model.parameters()) == 1_015_370


def test_points_begin_early_and_end_with_the_last_step():
    points = RUN._replace(epochs=1, warm_up=0.05).points(60_000)
    assert points[:6] == [5, 10, 20, 40, 47, 93]  # 47 steps are the warm-up
    assert points[-2:] == [930, 937]


def test_the_learning_rate_rises_in_the_warm_up_and_falls_to_nothing():
    steps = RUN.steps(60_000)
    factors = [RUN.learning_rate_factor(step, 60_000) for step in range(steps + 1)]
    highest = factors.index(max(factors))
    assert highest == RUN.warm_up_steps(60_000) == 281
    assert (factors[highest], factors[-1]) == (1, 0)
    assert factors[:highest] == sorted(factors[:highest])
    assert factors[highest:] == sorted(factors[highest:], reverse=True)


@pytest.mark.parametrize(
    "text",
    [
        "onebit",
        "topk:density=0.01-feedback",
        "gloo:fp16",
        "onebit:block=64+momentum+rate+feedback",
        "lowrank+small=int8+int8=0.1",
    ],
)
def test_a_method_is_what_its_text_says(text: str):
    assert str(Method.parse(text).check()) == text


def test_a_method_has_options_of_the_hook():
    method = Method.parse("onebit+momentum+ends=int8+int8=0.15-feedback")
    assert method.options == Options(momentum=True, ends="int8", int8=0.15)
    assert (method.family, method.feedback, method.first_share(0.05)) == ("onebit", False, 0.15)
    assert Method.parse("onebit").first_share(0.05) == 0.05
    assert Method.parse("int8+feedback").first_share(0.05) == 0


@pytest.mark.parametrize(
    "text", ["onebit+nesterov", "onebit+int8=1", "onebit+ends=int9", "gloo+momentum", "onebits"]
)
def test_a_method_that_is_none_is_refused(text: str):
    with pytest.raises(gradwire.InvalidArgument):
        Method.parse(text).check()


@pytest.mark.parametrize(
    ("text", "feeds_back", "control"),
    [
        ("onebit", True, "onebit-feedback"),
        ("onebit-feedback", False, "onebit-feedback"),
        ("int8", False, "int8"),
        ("int8+feedback", True, "int8"),
        ("gloo", False, "gloo"),
    ],
)
def test_a_control_is_the_same_without_feedback(text: str, feeds_back: bool, control: str):
    method = Method.parse(text)
    assert (method.feeds_back, str(method.control)) == (feeds_back, control)


def test_the_ends_of_a_model_have_rules():
    rules = methods._at_ends(images.small_cnn(28, hidden=640), "int8")
    # All but the second convolution's weights, and the first linear layer's.
    names = ["0.weight", "0.bias", "2.bias", "5.bias", "7.weight", "7.bias"]
    assert rules == [(name, "int8") for name in names]


def test_momentum_is_the_optimizers_or_the_hooks():
    model = images.small_cnn(8)
    momenta = [
        Method.parse(text).optimizer(model, 0.1).defaults["momentum"]
        for text in ("onebit", "onebit+momentum")
    ]
    assert momenta == [0.9, 0]


def test_a_ratio_leaves_the_steps_before_the_codec_out():
    found = result("onebit+int8=0.5", 1, 0.9, 0.3, ratio=30)
    assert train_report.first_share(found) == 0.5
    assert train_report.first_share(result("onebit", 1, 0.9, 0.3)) == 0.1


def test_a_ratio_leaves_the_warm_up_out():
    found = result("onebit", 1, 0.9, 0.3, ratio=30)
    assert found.ratio(after=0.1) == pytest.approx(30)
    assert found.ratio() == pytest.approx(100 / (10 + 90 / 30))


def test_results_are_read_as_they_were_written(tmp_path: Path):
    written = [result("none", 1, 0.9, 0.3), result("threshold-feedback", 2, 0.1, None)]
    for each in written:
        append(tmp_path / "runs", each)
    assert read_results(tmp_path / "runs") == written


def test_the_report_compares_seed_by_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    found = [
        *(result("none", seed, 0.9 + seed / 100, 0.3) for seed in (1, 2)),
        *(result("onebit", seed, 0.897 + seed / 100, 0.31, 30) for seed in (1, 2)),
        *(result("onebit-feedback", seed, 0.8, 0.5 + seed / 100, 30) for seed in (1, 2)),
        *(result("topk", seed, 0.897 + seed / 100, 0.31, 99) for seed in (1, 2)),
        result("int8+feedback", 1, 0.1, None, 4),
    ]
    train_report.write(found, tmp_path / "train")
    text = capsys.readouterr().out
    assert (tmp_path / "train.md").read_text(encoding="utf-8") + "\n" == text
    assert (tmp_path / "train.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((tmp_path / "train.json").read_text())["results"]) == len(found)
    assert "| gradwire none | 91.50 ± 0.71 | – | 0.3000 ± 0.0000 | 6.0 | 1.0× | 1.0× |" in text
    assert "| gradwire int8 with feedback | 10.00 | −81.00 | not finite | 1.5 | 4.0× |" in text
    goal, control = row_of(text, "onebit")
    assert goal.endswith("| ≤ 0.5 | +0.30 ± 0.00 | ≥ 28 | 30.0× | yes |")
    assert control == "| onebit | 16 | −0.2050 ± 0.0071 | 2 of 2 | +11.20 ± 0.71 |"
    (missed,) = row_of(text, "topk")
    assert missed.endswith("| ≥ 100 | 99.0× | no |")


def test_accuracy_is_composed_with_the_step_times_of_links(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    found = [
        *(result(method, 1, accuracy, 0.3) for method, accuracy in (("gloo", 0.9), ("none", 0.9))),
        result("onebit+momentum", 1, 0.895, 0.3),  # of 100 steps, the first 10 are in int8
    ]
    step_ms = {"gloo": 500, "local step": 5, "none": 400, "int8": 100, "onebit+momentum": 20}
    times = {"step_ms": {"none": {"none": 9}, "100mbit": step_ms}, "batch": 16, "ranks": 4}
    (tmp_path / "times.json").write_text(json.dumps(times))
    train_links.write(found, tmp_path / "times.json", tmp_path / "train")
    text = capsys.readouterr().out
    assert "| gradwire onebit | 20.0 | 25.0× | 2.8 | 17.9× | 89.50 | 1.8 |" in text
    assert "| gloo DDP | 500.0 | 1.0× | 50.0 | 1.0× | 90.00 | 25.0 |" in text
    assert "local step" not in text
    assert (tmp_path / "train-seconds.png").read_bytes().startswith(b"\x89PNG")


def test_every_codec_is_trained_with_its_control(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    runs = train.plan(train.parse_options(), "Fashion-MNIST")
    assert len(set(runs)) == len(runs)
    assert {(run.batch, run.seed) for run in runs} == {(b, s) for b in (16, 64) for s in (1, 2, 3)}
    assert {run.ranks for run in runs} == {4}
    assert min(run.epochs for run in runs) >= 3
    for batch in (16, 64):
        for seed in (1, 2, 3):
            chosen = [Method.parse(run.method) for run in runs if run[1:3] == (batch, seed)]
            with_feedback = {each.family for each in chosen if each.feeds_back}
            without = {each.family for each in chosen if not each.feeds_back}
            trained = set(gradwire.codecs()) - {"lossless"}  # which trains as none does
            assert with_feedback == trained - {"none"}
            assert without == {*trained, *methods.PEERS}
            # A control differs in nothing but feedback.
            assert {each.control for each in chosen if each.feeds_back} <= set(chosen)


def without_fashion_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int) -> list[str]:
    """The commands that are run instead of apt-get's, which fail."""
    ran = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(" ".join(command))
        return subprocess.CompletedProcess(command, int("install" in command))

    monkeypatch.setattr(images, "DEBIAN_FASHION_MNIST", tmp_path / "absent")
    monkeypatch.setattr("os.geteuid", lambda: user)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(subprocess, "run", run)
    return ran


def test_the_images_are_asked_for_without_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    ran = without_fashion_mnist(tmp_path, monkeypatch, user=1000)
    monkeypatch.setattr(sys, "argv", ["train.py", "--runs", str(tmp_path / "runs")])
    assert train.main() == 1
    assert "sudo apt-get install dataset-fashion-mnist" in capsys.readouterr().err
    assert ran == []


def test_root_installs_the_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ran = without_fashion_mnist(tmp_path, monkeypatch, user=0)
    with pytest.raises(RuntimeError, match=r"apt-get install failed; .* dataset-fashion-mnist"):
        images.load_fashion_mnist()
    assert [each.split()[3] for each in ran] == ["update", "install"]
    assert ran[1].endswith("dataset-fashion-mnist")


@pytest.mark.nightly
def test_it_trains_what_is_not_there_yet(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    runs = tiny / "runs.jsonl"
    command = ["train.py", "--data", str(tiny), "--runs", str(runs), "--ranks", "2"]
    command += ["--methods", "none", "fp16", "--batches", "4", "--seeds", "1", "--epochs", "1"]
    command += ["--learning-rate", "0.1", "--warm-up", "0.5", "--output", str(tiny / "report")]
    there = Run("none", 4, 1, 1, 0.1, 0.5, 2, "auto", tiny.name)
    append(runs, result("none", 1, 0.9, 0.3)._replace(run=there))

    monkeypatch.setattr(sys, "argv", command)
    assert train.main() == 2  # wants --resume

    program = [sys.executable, "-m", "bench.training.train", *command[1:], "--resume"]
    subprocess.run(program, timeout=LIMIT, check=True)
    dense, half = read_results(runs)
    assert (dense.run, half.run) == (there, there._replace(method="fp16"))
    assert [each.step for each in half.curve] == [1, 2, 3, 4, 5, 6]
    assert half.identical
    assert half.ratio() == pytest.approx(2, rel=0.05)  # for headers
    assert "| gradwire fp16 |" in (tiny / "report.md").read_text(encoding="utf-8")

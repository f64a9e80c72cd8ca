"""The demo: links that hold every library back, its tables, and how it ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import LIMIT

from bench.network import links, pacing
from bench.training import demo, demo_ranks, demo_report, images
from bench.training.demo_report import Row

ROOT = Path(__file__).parents[3]
DENSE = Row("gloo DDP", [0.5] * 4, 0, 0, 6.1, 0.125, True, [(1, 0.1), (2, 0.125)])
FAST = Row("gradwire lowrank", [0.1] * 2 + [0.02] * 9, 2, 0.5, 0.09, 0.7, True, [(1, 0.5)])


def run(*arguments: str, expect: int = 0) -> str:
    command = [sys.executable, "-m", "bench.training.demo", *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == expect, ended.stderr
    return ended.stdout


def test_an_epoch_counts_the_first_steps_at_their_own_pace():
    assert DENSE.after(10) == pytest.approx(5)
    assert FAST.step == pytest.approx(0.02)
    assert FAST.after(10) == pytest.approx(5 * 0.1 + 5 * 0.02)


def test_the_table_tells_the_seconds_saved():
    rows = demo_report.link_table([DENSE, FAST], "links of 100mbit", 2, 100)[3:5]
    assert rows[0].split()[-1] == "50"
    assert rows[1].split()[-2:] == ["6", "44"]


def test_replicas_that_differ_stand_out():
    different = FAST._replace(identical=False)
    assert "DIFFERENT" in demo_report.host_table([DENSE, different], 4)[-1]


def test_a_demo_whose_replicas_differ_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["demo.py", "--link", "none"])
    monkeypatch.setattr(images, "load", lambda _: images.random_images(64))
    for identical, code in ((True, 0), (False, 1)):
        rows = [DENSE, FAST._replace(identical=identical)]
        monkeypatch.setattr(demo_ranks, "run", lambda *_, rows=rows: rows)
        assert demo.demonstrate(demo.parse_options()) == code
    assert "replicas differ" in capsys.readouterr().err


def test_the_kernel_paces_a_connection_of_any_library():
    near, far = pacing.paced_pair(20e6)
    with near, far:
        assert links.payload_rate(near, far) < 1.15 * 20e6


def test_connections_of_this_process_are_found_and_paced():
    near, far = pacing.paced_pair(1e9)
    with near, far:
        pacing.pace_connections(20e6)
        assert near.getsockopt(1, 47) == far.getsockopt(1, 47) == 2_500_000


def test_generated_images_are_the_same_everywhere_and_can_be_learned():
    data = images.generated(2000, 500)
    assert torch.equal(data.train_images[:9], images.generated(2000, 500).train_images[:9])
    assert data.side == 28
    means = torch.stack([data.train_images[data.train_labels == c].mean(0) for c in range(10)])
    nearest = torch.cdist(data.test_images.flatten(1), means.flatten(1)).argmin(1)
    assert (nearest == data.test_labels).float().mean() > 0.3  # 0.1 by chance


def test_the_demo_says_why_its_images_are_generated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    few = images.generated(64, 8)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--link", "none", "--steps", "0"])
    monkeypatch.setattr(images, "DEBIAN_FASHION_MNIST", tmp_path / "missing")
    monkeypatch.setattr(images, "generated", lambda: few)
    assert demo.demonstrate(demo.parse_options()) == 0
    printed = capsys.readouterr().out
    assert "dataset-fashion-mnist" in printed
    assert "generated, 64 images" in printed


def test_packages_that_cannot_be_installed_are_named(tmp_path: Path):
    for name in ("sh", "id"):  # and neither ip nor apt-get
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    command = [str(tmp_path / "sh"), str(ROOT / ".ci" / "system-packages"), "--demo"]
    ended = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"sudo apt-get install .*iproute2$", ended.stdout)


@pytest.mark.nightly
def test_the_demo_trains_over_a_slow_link_and_over_shared_memory(tmp_path: Path):
    picture = tmp_path / "demo.png"
    few = ["--ranks", "2", "--methods", "gloo", "fp16", "--seconds", "0.1", "--steps", "3"]
    printed = run(*few, "--picture", str(picture))
    assert [row.split()[0] for row in printed.splitlines() if " identical" in row] == [
        *("gloo", "gradwire"),
        *("gloo", "gradwire"),
    ]
    assert printed.splitlines()[-1].startswith("  gradwire run -n 2 examples/ddp.py")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
def test_interrupted_ranks_end_with_the_demo():
    command = [sys.executable, "-m", "bench.training.demo", "--link", "none", "--steps", "99999"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert any("training by" in line for line in iter(process.stdout.readline, ""))
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(LIMIT) == 130
        assert process.stdout.read() == ""  # returns when no rank has it open any more
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)

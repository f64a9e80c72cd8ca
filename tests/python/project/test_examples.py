"""Every example runs as its docstring says, and prints what it is there to show."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gradwire._base import units
from ranks import LIMIT

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
needs_torch = pytest.mark.usefixtures("torch")


@pytest.fixture
def torch() -> None:
    pytest.importorskip("torch.distributed")


def command(example: Path) -> list[str]:
    """The command of the docstring, with this environment's programs."""
    docstring = ast.get_docstring(ast.parse(example.read_text())) or ""
    program, *arguments = shlex.split(re.findall(r"^Run: (.+)$", docstring, re.MULTILINE)[0])
    return [str(Path(sys.executable).with_name(program)), *arguments]


def run(name: str) -> str:
    """The output of the example, which must succeed."""
    return finished(command(ROOT / "examples" / name)).stdout


def finished(argv: list[str]) -> subprocess.CompletedProcess[str]:
    """The process of an example, which must succeed."""
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 0, ended.stderr
    return ended


def numbers(pattern: str, text: str) -> list[float]:
    """The groups of the first match."""
    found = re.search(pattern, text)
    assert found is not None, text
    return [float(each) for each in found.groups()]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: each.name)
def test_a_docstring_names_its_own_file(example: Path):
    assert f"examples/{example.name}" in command(example)


@pytest.mark.nightly  # compiles the core; `make test` builds the same program in another way
@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
def test_the_cpp_example_is_built_as_it_says(tmp_path: Path):
    text = (ROOT / "examples" / "cpp" / "all_reduce.cc").read_text(encoding="utf-8")
    commands = "\n".join(re.findall(r"^//   (.+)$", text, re.MULTILINE))
    assert commands in (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    here = "set -e\n" + commands.replace("build/example", str(tmp_path))
    ended = subprocess.run(here, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert sorted(re.findall(r"rank (\d) of 4: the average is 1.5", ended.stdout)) == list("0123")


def test_all_reduce():
    printed = run("all_reduce.py")  # by ranks that may write into each other's lines
    for rank in range(4):
        assert printed.count(f"rank {rank} of 4: the average is 1.5") == 1


@needs_torch
def test_ddp():
    printed = run("ddp.py")
    (first,) = numbers(r"step 0: loss ([\d.]+)", printed)
    (last,) = numbers(r"step 100: loss ([\d.]+)", printed)
    assert last < first / 20
    assert "replicas bit-identical: True" in printed


@pytest.mark.long
@needs_torch
def test_ddp_onebit():
    found = numbers(
        r"none +loss +([\d.]+), +[\d.]+ s, +([\d.]+) MB sent\n"
        r"Stages.* +loss +([\d.]+), +[\d.]+ s, +([\d.]+) MB sent",
        run("ddp_onebit.py"),
    )
    dense_loss, dense_sent, loss, sent = found
    assert loss < 1.5 * dense_loss
    assert sent < dense_sent / 10


@needs_torch
def test_diloco():
    printed = run("diloco.py")
    (first,) = numbers(r"round 1: loss ([\d.]+), steps by rank \(", printed)
    last, sent = numbers(r"loss ([\d.]+) in [\d.]+ s, ([\d.]+) MB sent, same on all", printed)
    assert last < first / 4
    assert sent < 10  # 150 MB with float32 gradients in every step


@needs_torch
def test_onebit_adam():
    pattern = r"loss ([\d.]+), ([\d.]+) MB sent"
    printed = run("onebit_adam.py")
    dense_loss, dense_sent = numbers(f"AdamW +{pattern}", printed)
    loss, sent = numbers(f"OneBitAdam +{pattern}", printed)
    assert dense_loss < 3  # ln 128 = 4.9 before
    assert loss < 1.05 * dense_loss
    assert sent < dense_sent / 10


@needs_torch
def test_downpour():
    printed = run("downpour.py")
    rates = {}
    for rank in range(4):
        loss, rates[rank] = numbers(rf"replica {rank}: loss ([\d.]+), (\d+) steps/s", printed)
        assert loss < 0.7  # ln 5 = 1.6 before
    assert rates[3] < 50  # it sleeps for 20 ms in each step, and the others for 2


@needs_torch
def test_sandblaster():
    printed = run("sandblaster.py")
    (first,) = numbers(r"iteration 5: loss ([\d.]+)", printed)
    (last,) = numbers(r"iteration 15: loss ([\d.]+)", printed)
    assert last < first < 1.6  # ln 5 at the beginning
    counts = {rank: numbers(rf"replica {rank}: (\d+)", printed)[0] for rank in (1, 2, 3)}
    assert counts[3] < max(counts[1], counts[2])  # it sleeps for 50 ms in each portion
    for rank in (1, 2, 3):
        assert numbers(rf"replica {rank}: accuracy ([\d.]+) %", printed)[0] > 80


@needs_torch
def test_hybrid():
    found = numbers(
        r"all data-parallel: loss ([\d.]+), ([\d.]+) MB a step.*\n"
        r"hybrid: loss ([\d.]+), ([\d.]+) MB a step, split: \['2.0', '2.2'\]",
        run("hybrid.py"),
    )
    dense_loss, dense_sent, loss, sent = found
    assert max(dense_loss, loss) < 1.5  # ln 16 = 2.8 before
    assert sent < dense_sent / 10


def test_own_codec():
    without, kept = numbers(r"([\d.]+) without feedback, ([\d.]+) with it", run("own_codec.py"))
    assert kept < without / 20


def test_own_schedule():
    printed = run("own_schedule.py")
    assert re.search(r"^correct +yes$", printed, re.MULTILINE)
    assert all(f"rank {rank}: the sum is 10.0" in printed for rank in range(4))


def test_shrink_and_go_on():
    printed = run("shrink_and_go_on.py")  # of ranks that may write into each other's lines
    for new, old in enumerate((0, 1, 3)):
        assert f"rank {old} lost rank 2: now rank {new} of 3" in printed
        assert f"rank {old} ends with 1.333 after 10 steps" in printed  # the mean of 0, 1 and 3


@needs_torch
def test_elastic():
    ended = finished(command(ROOT / "examples" / "elastic.py"))
    found = re.findall(r"(a|the new) rank ends after step 512: weights (\w{12})\n", ended.stdout)
    assert sorted(who for who, _ in found) == ["a", "a", "the new"]
    assert len({weights for _, weights in found}) == 1
    assert "no rank is lost" not in ended.stderr  # the new one came as the lost one went


def without_slots(argv: list[str]) -> list[str]:
    """The command without the options that begin with --, and what follows each."""
    return [
        each
        for before, each in zip(["", *argv], argv, strict=False)
        if not each.startswith("--") and not before.startswith("--")
    ]


@needs_torch
@pytest.mark.long
def test_slots():
    argv = without_slots(command(ROOT / "examples" / "slots.py"))
    assert re.search(r"step 300 of 300: weights \w{12}\n", finished(argv).stdout)


def test_a_slot_ends_within_the_training():
    example = ROOT / "examples" / "slots.py"
    argv = command(example)
    slot, margin = (units.duration(argv[argv.index(each) + 1]) for each in ("--slot", "--margin"))
    text = example.read_text()
    (steps,) = numbers(r"\nSTEPS, BATCH = (\d+),", text)
    (seconds,) = numbers(r"\nSECONDS = ([\d.]+)", text)
    assert slot - margin <= steps * seconds <= 2 * (slot - margin)


@needs_torch
@pytest.mark.nightly
def test_a_slot_ends_and_the_training_goes_on():
    ended = finished(command(ROOT / "examples" / "slots.py"))
    steps = [int(each) for each in re.findall(r"step (\d+) of 300", ended.stdout)]
    assert len(steps) > 1
    assert steps == sorted(set(steps))
    assert steps[-1] == 300
    assert ended.stderr.count("the slot is over; the next one begins") == len(steps) - 1


@needs_torch
@pytest.mark.nightly
def test_a_training_in_slots_ends_with_the_same_bits(tmp_path: Path):
    def train(checkpoint: str, **slot: str) -> tuple[int, str]:
        argv = without_slots(command(ROOT / "examples" / "slots.py"))
        argv.append(str(tmp_path / checkpoint))
        environment = {**os.environ, **slot}
        with subprocess.Popen(
            argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                out, _ = process.communicate(timeout=2 * LIMIT)
            finally:
                process.terminate()  # the launcher, which ends its ranks
        return process.returncode, out

    # The slot ended in 1970, so ranks stop as soon as they ask.
    code, out = train("stopped", GRADWIRE_SLOT_ENDS="1")
    assert (code, out.startswith("step 1 of 300: ")) == (75, True)
    resumed, whole = train("stopped"), train("whole")
    assert resumed == whole
    assert whole[0] == 0
    assert list(tmp_path.iterdir()) == []

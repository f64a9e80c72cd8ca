"""The benchmark of steps on slow links: its bound, its goals, and a run of all its parts."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.network import links
from bench.training import methods, step_report, step_times
from bench.training.step_report import EMULATED, LOCAL, NO_LINK, Bound

ONEBIT = "onebit:block=8192+momentum"
DENSE = 2 * 3 / 4 * step_report.PARAMETERS * 4  # bytes that a rank of four sends without a codec


def step(ms: float, sent: float, codec_ms: float | None, processor_ms: float = 0) -> dict[str, Any]:
    frames = None if codec_ms is None else 12
    return {
        "ms": ms,
        "middle_half_ms": [ms, ms],
        "steps": 60,
        "processor_ms": processor_ms,
        "sent": sent,
        "wire": 1.1 * sent,
        "codec_ms": codec_ms,
        "frames": frames,
    }


def measured(gloo_ms: float = 600, onebit_ms: float = 40) -> dict[str, Any]:
    """A local step takes 10 ms, of which 4 ms are processor time; dense bytes travel 510 ms."""
    steps = {
        LOCAL: step(10, 0, None, 4),
        "gloo": step(gloo_ms, DENSE, None, 6),
        "none": step(550, DENSE, 0, 5),
        ONEBIT: step(onebit_ms, DENSE / 30, 2, 9),
    }
    own = {name: each for name, each in steps.items() if name != "gloo"}
    calls = {"gradwire ring": {"200000": 30.0}, "gloo": {"200000": 31.0}}
    socket = links.Measured("ring", 36_000, 2.9, 2.8, 2.7, 3.2)
    check = {
        "burst": 4542,
        "credit": links.rate("100mbit").credit(),
        "latency_us": 10.2,
        "sockets": [socket._asdict()],
    }
    slower = {**own, "none": step(700, DENSE, 0)}
    return {
        "ranks": 4,
        "batch": 16,
        "machine": "a machine",
        "command": "-m bench.training.step_times",
        "checks": {"100mbit": check},
        "links": {
            NO_LINK: {"steps": steps, "calls": calls},
            "100mbit": {"steps": steps, "calls": calls, "dropped": 0},
            EMULATED + "100mbit": {"steps": slower, "calls": calls, "latency_us": 10.2},
        },
    }


def row(text: str, *first: str) -> list[str]:
    """The cells after the first of the only row that begins so."""
    start = "| " + " | ".join(first) + " |"
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return [cell.strip() for cell in line.removeprefix(start).strip("| ").split("|")]


def test_the_bound_is_local_step_and_codec_and_travel(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    bound = Bound(measured(), "100mbit")
    dense, sent = (links.wire_bytes(round(each)) * 8 / 1e5 for each in (DENSE, DENSE / 30))
    assert dense == pytest.approx(DENSE * 1514 / 1448 * 8 / 1e5, rel=1e-4)  # ms at 100 Mbit/s
    assert bound.codec(ONEBIT) == 2
    assert bound.step(ONEBIT, 2) == pytest.approx(10 + 2 + sent)
    assert bound.speed_up(ONEBIT, 2) == pytest.approx((10 + dense) / (10 + 2 + sent))
    assert bound.reached(ONEBIT) == 600 / 40
    assert bound.share(ONEBIT, 2) == pytest.approx(15 * (12 + sent) / (10 + dense))
    # The laxer reading: 5 ms beyond the local step's, for four ranks on two processors.
    assert bound.processor(ONEBIT) == 10
    assert bound.codec("gloo") is None
    assert bound.share("gloo", None) is None


def test_credit_is_a_burst_for_every_frame_or_all_that_is_sent():
    bound = Bound(measured(), "100mbit")
    assert bound.credit("none", 4542) == pytest.approx(12 * 4542 * 8 / 1e5)
    assert bound.credit(ONEBIT, 100_000) == pytest.approx(DENSE / 30 * 8 / 1e5)
    assert bound.credit("gloo", 4542) is None


def test_goals_are_met_or_not():
    text = step_report.document(measured(), "found")
    fast = "steps ≥ 10× as fast as gloo DDP's"
    assert row(text, "100mbit", "gradwire onebit", fast) == ["15.0×", "yes"]
    assert row(text, "100mbit", "gradwire onebit", "share ≥ 80%") == ["84%", "yes"]
    text = step_report.document(measured(gloo_ms=380), "found")
    assert row(text, "100mbit", "gradwire onebit", fast) == ["9.5×", "no"]
    assert row(text, "100mbit", "gradwire onebit", "share ≥ 80%") == ["53%", "no"]
    assert row(text, "100mbit", "gradwire none", "share ≥ 80%") == ["69%", "no"]


def test_the_document_has_what_was_measured():
    text = step_report.document(measured(), "found")
    assert "bursts of 4,542 bytes, 9,084 where received" in text
    assert row(text, "ring", "36,000") == ["2.90", "2.80", "2.70 to 3.20", "held"]
    shaped = text[text.index("## Links held to 100mbit") :]
    assert row(shaped[: shaped.index("## Emulated links")], "gradwire onebit")[:9] == [
        *("40.00", "15.00×", "203.1", "223.4", "4.36", "2.00", "17.92×", "84%", "72%")
    ]
    emulated = text[text.index("## Emulated links") : text.index("## Emulated beside")]
    assert row(emulated, "gradwire onebit")[3] == "–"  # its interface is others', too


def test_emulated_links_are_judged_by_shaped_ones():
    text = step_report.document(measured(), "found")
    assert "2 of 3 figures are within 15%." in text
    link = "100mbit, 10 µs"
    assert row(text, link, "step, gradwire none") == ["550.00", "700.00", "1.27", "no"]
    assert row(text, link, "step, gradwire onebit") == ["40.00", "40.00", "1.00", "yes"]
    all_reduce = "all_reduce of 200,000 B, gradwire ring"
    assert row(text, link, all_reduce) == ["30.00", "30.00", "1.00", "yes"]


def test_titles_are_short_where_that_leaves_no_two_alike():
    names = [LOCAL, "gloo:fp16", ONEBIT, "topk", "topk:density=0.1", "int8+feedback"]
    assert step_report.titles(names) == {
        LOCAL: LOCAL,
        "gloo:fp16": "gloo DDP, fp16 hook",
        ONEBIT: "gradwire onebit",
        "topk": "gradwire topk",
        "topk:density=0.1": "gradwire topk:density=0.1",
        "int8+feedback": "gradwire int8 with feedback",
    }


def test_a_legend_has_what_titles_leave_out():
    names = ["gloo", "none", ONEBIT, f"{ONEBIT}-feedback", "topk", "topk:density=0.1"]
    assert methods.legend(names) == ["", f"gradwire onebit: `{ONEBIT}`."]
    assert methods.legend([f"{ONEBIT}-feedback"]) == [
        *("", f"gradwire onebit without feedback: `{ONEBIT}-feedback`.")
    ]
    assert methods.legend(["gloo", "none"]) == []


def test_links_are_checked_with_the_methods_messages():
    steps = measured()["links"][NO_LINK]["steps"]
    assert step_times.messages(steps, 4) == [34_000, 1_000_000]


def test_without_root_it_says_what_needs_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    why = "network namespaces cannot be made here: needs root"
    monkeypatch.setattr(links, "missing", lambda: why)
    monkeypatch.setattr(sys, "argv", ["step_times.py", "--output", str(tmp_path / "found")])
    assert step_times.main() == 1
    said = capsys.readouterr().err
    assert why in said
    assert "--emulated-only" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_steps_are_timed_on_emulated_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    random = np.random.default_rng(1)
    for stem, count in (("train", 64), ("t10k", 8)):
        for what, shape in (("images-idx3", (count, 8, 8)), ("labels-idx1", (count,))):
            header = b"\0\0\x08" + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
            values = random.integers(0, 10, shape).astype(np.uint8)
            (tmp_path / f"{stem}-{what}-ubyte").write_bytes(header + values.tobytes())
    command = ["step_times.py", "--emulated-only", "--methods", "gloo", "none", "onebit"]
    command += ["--ranks", "2", "--steps", "2", "--block", "1", "--batch", "4"]
    command += ["--link", "100mbit", "--calls", "20000", "--data", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*command, "--output", str(tmp_path / "found")])
    assert step_times.main() == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found["step_ms"]["none"]) == {LOCAL, "gloo", "none", "onebit"}
    assert set(found["step_ms"][EMULATED + "100mbit"]) == {LOCAL, "none", "onebit"}
    steps = found["links"][EMULATED + "100mbit"]["steps"]
    # 164,000 parameters of an 8 × 8 image's network; one bit instead of 32, and small tensors.
    assert steps["none"]["sent"] > 15 * steps["onebit"]["sent"] > 0
    assert steps["none"]["ms"] > steps["none"]["sent"] * 8 / 1e5
    assert (steps["none"]["codec_ms"], steps[LOCAL]["codec_ms"]) == (0, None)
    assert steps["onebit"]["codec_ms"] > 0
    assert (tmp_path / "found.md").read_text(encoding="utf-8").startswith("# Steps of DDP")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")

"""gradwire.advise and the command: what is printed, the sentences, and bad input."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import gradwire
import pytest
from gradwire._tools import cli
from gradwire.lab.planner import published
from gradwire.lab.planner.report import Advice

advise = partial(gradwire.advise, device="a100")


@pytest.fixture(scope="module")
def slow() -> Advice:
    return advise("resnet50", ranks=8, link="1gbit,50us", compute=0.1)


def test_str_is_the_report(slow: Advice) -> None:
    text = str(slow)
    assert "25,557,032 parameters" in text
    assert "all data-parallel" in text
    for codec in ("fp16", "int8", "onebit", "topk", "lowrank"):
        assert codec in text
    for mode in ("accumulated over 4", "local SGD, H = 16", "asynchronous server"):
        assert mode in text
    assert "best: " in text
    assert "Assumed:" in text


def test_slow_links_ask_for_compression(slow: Advice) -> None:
    assert slow.sentences[0].startswith("Compression pays")
    assert "Gbit/s on it would not" in slow.sentences[0]
    assert slow.best.codec != "none"
    assert slow.least_batch is not None
    assert slow.least_batch > 32


def test_the_least_batch_waits_for_a_tenth(slow: Advice) -> None:
    batch = slow.least_batch
    assert batch is not None
    for each, waits in ((batch, False), (batch - 1, True)):
        found = advise(
            "resnet50",
            ranks=8,
            link="1gbit,50us",
            compute=0.1 * each / 32,
            batch=each,
            codecs=["none"],
        )
        assert (1 - found.best.efficiency >= 0.1) == waits


def test_fast_links_do_not() -> None:
    found = advise("resnet50", ranks=8, link="400gbit,2us", compute=0.1)
    assert found.sentences[0].startswith("Compression does not pay")
    assert "below about" in found.sentences[0]
    assert found.best.codec == "none"
    assert found.best.efficiency > 0.9
    assert found.sentences[1].startswith("8 ranks pay")


def test_ranks_that_do_not_pay_are_said_to() -> None:
    """VGG-16 on Ethernet: two ranks exchange longer than they compute."""
    found = advise("vgg16", ranks=4, link="100mbit", compute=0.5, codecs=["none"])
    (sentence,) = found.sentences
    assert sentence.startswith("More than 1 ranks do not pay")
    assert "From about" in sentence


def test_a_biased_codec_is_compared_with_an_unbiased_one() -> None:
    codecs = ["onebit", "int8"]
    found = advise("vgg16", ranks=4, link="100mbit", compute=0.5, codecs=codecs)
    assert "without; the best unbiased codec, int8, takes" in found.sentences[0]


def test_where_bits_must_stay_lossless_is_the_best_over_slow_links() -> None:
    for link, best in (("100mbit", "lossless"), ("10gbit", "none")):
        options = {"link": link, "compute": 0.5, "codecs": ["lossless"], "device": "cpu"}
        found = gradwire.advise("nin", ranks=2, **options)
        assert {each.codec for each in found.predictions} == {"none", "lossless"}
        assert found.best.codec == best


def test_the_turning_point_turns() -> None:
    """Just below the stated rate compression pays by the same model, and well above it does not."""
    found = advise("resnet50", ranks=8, link="100gbit,10us", compute=0.02)
    number, unit = found.sentences[0].rpartition("about ")[2].split()[:2]
    for factor, pays in ((0.5, True), (2.0, False)):
        link = f"{float(number) * factor}{unit[:4].lower()},10us"
        there = advise("resnet50", ranks=8, link=link, compute=0.02)
        assert there.sentences[0].startswith("Compression pays") == pays


def test_codecs_are_a_list() -> None:
    with pytest.raises(gradwire.InvalidArgument, match="a list of codecs"):
        advise("nin", ranks=2, link="1gbit", codecs="int8")
    found = advise("nin", ranks=2, link="1gbit", codecs=["fp16", "fp16"])
    assert repr(found).startswith("<Advice nin on 2 ranks: ")
    assert list(found.to_dict()["codecs"]) == ["none", "fp16"]


def test_scaling_begins_with_one_rank(slow: Advice) -> None:
    assert [row[0] for row in slow.weak] == [1, 2, 4, 8]
    assert slow.weak[0][1:] == (slow.compute, 1.0)
    assert slow.strong[-1][2] < slow.weak[-1][2]


def test_scaling_goes_by_powers_of_two_up_to_the_ranks() -> None:
    found = advise("nin", ranks=5, link="1gbit", compute=0.1, codecs=["none"])
    assert [row[0] for row in found.weak] == [row[0] for row in found.strong] == [1, 2, 4, 5]


def test_json_has_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    line = "advise alexnet --ranks 4 --link 1gbit --device cpu --codecs none int8 --json"
    assert cli.main(line.split()) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 62_378_344
    assert found["codecs"]["int8"] == pytest.approx(3.97, abs=0.1)
    modes = {each["mode"] for each in found["predictions"]}
    assert len(modes) == 4
    assert {each["advice"] for each in found["layers"]} == {"data", "model"}
    assert found["bytes_sent"]["hybrid"] < found["bytes_sent"]["all_data"]


def test_a_module_is_walked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net_to_advise.py").write_text(
        "import torch\ndef net(): return torch.nn.Linear(8, 4)"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    line = "advise net_to_advise:net --sample 8 --ranks 2 --link 1gbit --codecs none"
    assert cli.main(line.split()) == 0
    assert "36 parameters" in capsys.readouterr().out


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "advice.png"
    line = f"advise nin --ranks 2 --link 1gbit --codecs none --plot {path}"
    assert cli.main(line.split()) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("resnet51 --ranks 4 --link 1gbit", "resnet50"),
        ("resnet50 --ranks 0 --link 1gbit", "ranks=0"),
        ("resnet50 --ranks 4 --link=-1gbit", "positive"),
        ("resnet50 --ranks 4 --link 1gbit,-5us", "positive"),
        ("resnet50 --ranks 4 --link fast", "a rate"),
        ("resnet50 --ranks 4 --link 1gbit --compute=-3ms", "positive"),
        ("resnet50 --ranks 4 --link 1gbit --compute 180", "a time"),
        ("resnet50 --ranks 4 --link 1gbit --batch 0", "batch=0"),
        ("resnet50 --ranks 4 --link 1gbit --codecs nope", "nope"),
        ("resnet50 --ranks 4 --link 1gbit --per-host 0", "per_host=0"),
        ("resnet50 --ranks 4", "link"),
        ("--ranks 4 --link 1gbit", "model"),
        ("nowhere:net --ranks 4 --link 1gbit --sample 3", "nowhere"),
        ("torch.nn:Identity --ranks 4 --link 1gbit", "--sample|shape"),
        ("resnet50 --ranks 20000000 --link 1gbit", "10,000,000"),
    ],
)
def test_bad_input_is_one_clear_line(
    arguments: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["advise", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert any(each in captured.err for each in says.split("|"))


def test_published_speed_ups_have_their_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["advise", "--published"]) == 0
    text = capsys.readouterr().out
    for each in published.claims():
        assert f"{each.predicted():.0f}" in text
        assert all(note in text for note in each.assumptions)
        assert abs(each.error) < 0.5


def test_ranks_may_share_the_cores_of_a_host() -> None:
    line = {"ranks": 8, "per_host": 4, "link": "1gbit,50us", "compute": 0.05, "codecs": ["int8"]}
    alone, roomy, crowded = (
        advise("nin", **line, cores=cores)  # type: ignore[arg-type]
        for cores in (None, 8, 2)
    )
    assert (alone.compute, roomy.compute, crowded.compute) == pytest.approx((0.05, 0.05, 0.1))
    assert alone.best.step < roomy.best.step < crowded.best.step
    with pytest.raises(gradwire.InvalidArgument, match="cores"):
        advise("nin", ranks=8, link="1gbit", cores=0)

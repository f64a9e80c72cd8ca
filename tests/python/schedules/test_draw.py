"""The diagram: well-formed, an arrow for each edge, and nothing on top of something else."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from gradwire import Schedule
from gradwire._schedules.schedule import edges_of, groups_of

NAMESPACE = {"svg": "http://www.w3.org/2000/svg"}
NAMES = ["ring", "halving_doubling", "double_binary_tree", "direct", "hierarchical(ring,direct)"]


def generate(name: str, ranks: int) -> Schedule:
    groups = groups_of(ranks, 4) if name.startswith("hier") else None
    return Schedule.generate(name, ranks, groups=groups)


def parse(schedule: Schedule) -> ET.Element:
    return ET.fromstring(schedule.draw())


def arrows(svg: ET.Element) -> list[ET.Element]:
    return [g for g in svg.iterfind("svg:g", NAMESPACE) if g.get("class", "").startswith("edge ")]


def labels(svg: ET.Element) -> list[ET.Element]:
    return [text for text in svg.iterfind("svg:text", NAMESPACE) if text.get("class") == "chunks"]


@pytest.mark.parametrize("ranks", [1, 2, 5, 16])
@pytest.mark.parametrize("name", NAMES)
def test_every_edge_has_its_arrow_in_the_colour_of_its_landing(name: str, ranks: int):
    schedule = generate(name, ranks)
    svg = parse(schedule)
    edges = [edge for _, edge in edges_of(schedule)]
    landings = ["edge reduce" if edge.reduces else "edge copy" for edge in edges]
    assert [arrow.get("class") for arrow in arrows(svg)] == landings
    colours = {
        (arrow.get("class"), arrow.find("svg:path", NAMESPACE).get("stroke"))
        for arrow in arrows(svg)
    }
    assert len(colours) == len(set(landings))


def test_an_arrow_says_which_round_ranks_and_chunks_it_is():
    first = arrows(parse(Schedule.generate("ring", 4)))[0]
    assert first.findtext("svg:title", namespaces=NAMESPACE) == (
        "round 0: rank 1 reduces chunk 3 from rank 0"
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_arrow_is_labelled_and_no_two_labels_share_a_place(name: str):
    schedule = generate(name, 9)
    places = [(text.get("x"), text.get("y")) for text in labels(parse(schedule))]
    assert len(places) == sum(map(len, schedule.rounds))
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("name", NAMES)
def test_everything_lies_within_the_picture(name: str):
    svg = parse(generate(name, 16))
    width, height = float(svg.get("width", "")), float(svg.get("height", ""))
    for arrow in arrows(svg):
        path = arrow.find("svg:path", NAMESPACE).get("d")
        x0, y0, x1, y1 = map(float, re.findall(r"-?[\d.]+", path))
        assert 0 < x0 < x1 < width
        assert 0 < min(y0, y1) <= max(y0, y1) < height


def test_the_title_and_the_facts_are_there():
    text = Schedule.generate("recursive_doubling", 4).draw()
    assert "all_reduce by recursive_doubling: 4 ranks, 2 rounds, 1 chunk" in text
    assert "✓ correct" in text
    assert "✗ in-tree" in text


def test_a_wrong_schedule_is_drawn_with_what_is_wrong():
    wrong = Schedule.builder("all_reduce", ranks=2, chunks=1, name="<&>").reduce(0, 0, 1, 0)
    svg = parse(wrong.build())
    words = " ".join(text.text or "" for text in svg.iterfind("svg:text", NAMESPACE))
    assert "✗ correct" in words
    assert "rank 0" in words
    assert "<&>" in words

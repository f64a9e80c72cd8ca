"""Properties of every generator, for p = 1 … 17, every collective and every root."""

from __future__ import annotations

from itertools import pairwise

import pytest
from gradwire import Schedule, algorithms
from gradwire._schedules.schedule import edges_of
from gradwire.lab.tuning.measure import COLLECTIVES
from hypothesis import given, settings
from hypothesis import strategies as st

MOST_RANKS = 17
ROOTED = ("broadcast", "reduce", "gather", "scatter")
# Every rank finishes every sum by itself: no rank sends its partial sum only once.
NOT_IN_TREE = ("recursive_doubling",)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    collective = draw(st.sampled_from(COLLECTIVES))
    algorithm = draw(st.sampled_from(algorithms(collective)))
    ranks = draw(st.integers(1, MOST_RANKS))
    root = draw(st.integers(0, ranks - 1)) if collective in ROOTED else 0
    return Schedule.generate(algorithm, ranks, collective=collective, root=root)


@st.composite
def hierarchies(draw: st.DrawFn) -> Schedule:
    ranks = draw(st.permutations(range(draw(st.integers(1, MOST_RANKS)))))
    cuts = sorted(draw(st.sets(st.integers(1, len(ranks)), max_size=4)) | {0, len(ranks)})
    groups = [ranks[a:b] for a, b in pairwise(cuts)]
    halves = [name for name in algorithms() if name not in NOT_IN_TREE]
    inner, outer = draw(st.sampled_from(halves)), draw(st.sampled_from(algorithms()))
    return Schedule.generate(f"hierarchical({inner},{outer})", len(ranks), groups=groups)


@settings(max_examples=400, deadline=None)
@given(schedules())
def test_every_generated_schedule_holds_its_facts(schedule: Schedule):
    report = schedule.verify()
    assert report.ok, report.problems
    assert report.in_tree == (schedule.name not in NOT_IN_TREE or schedule.ranks <= 1)
    known = schedule.closed_form()
    assert known is not None
    assert report.rounds == known.rounds == len(schedule.rounds)
    assert report.max_sent == pytest.approx(known.max_sent)


@settings(max_examples=150, deadline=None)
@given(hierarchies())
def test_every_hierarchy_holds_its_facts(schedule: Schedule):
    report = schedule.verify()
    assert report.ok, report.problems


@settings(max_examples=200, deadline=None)
@given(schedules())
def test_the_text_form_reads_back(schedule: Schedule):
    assert Schedule.parse(schedule.dump()) == schedule
    assert Schedule.parse(schedule.dump()).rounds == schedule.rounds


@settings(max_examples=100, deadline=None)
@given(schedules())
def test_the_builder_makes_what_the_generator_made(schedule: Schedule):
    builder = Schedule.builder(
        schedule.collective,
        ranks=schedule.ranks,
        chunks=schedule.chunks,
        name=schedule.name,
        root=schedule.root,
    )
    for index, edge in edges_of(schedule):
        add = builder.reduce if edge.reduces else builder.copy
        add(index, edge.src, edge.dst, edge.chunks)
    assert builder.build() == schedule


@settings(max_examples=200, deadline=None)
@given(schedules().filter(lambda schedule: any(schedule.rounds)), st.data())
def test_no_edge_of_a_schedule_can_be_left_out(schedule: Schedule, data: st.DataObject):
    lines = schedule.dump().splitlines()
    left_out = data.draw(st.sampled_from([k for k, line in enumerate(lines) if "->" in line]))
    rest = Schedule.parse("\n".join(lines[:left_out] + lines[left_out + 1 :]))
    report = rest.verify()
    assert not report.ok
    assert report.problems

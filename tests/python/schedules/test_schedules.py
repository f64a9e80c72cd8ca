"""Schedules as values, and the user's own: what the builder and the text form let through."""

from __future__ import annotations

import pickle

import pytest
from gradwire import InvalidArgument, Schedule, ScheduleError, algorithms
from gradwire._schedules.report import Edge, Shape
from gradwire._schedules.schedule import groups_of

CHAIN = """
gradwire schedule 1
all_reduce chain ranks=3 chunks=1 root=0   # the sum goes right to left, and back
round 0
  2 -> 1 reduce 0
round 1
  1 -> 0 reduce 0
round 2
  0 -> 1 copy 0
  0 -> 2 copy 0
"""


def chain() -> Schedule:
    return (
        Schedule.builder("all_reduce", ranks=3, chunks=1, name="chain")
        .reduce(0, src=2, dst=1, chunks=0)
        .reduce(1, src=1, dst=0, chunks=0)
        .copy(2, src=0, dst=1, chunks=0)
        .copy(2, src=0, dst=2, chunks=0)
        .build()
    )


def test_a_generated_schedule_says_what_it_is():
    schedule = Schedule.generate("ring", 8)
    assert repr(schedule) == "<Schedule all_reduce ring p=8 rounds=14>"
    assert (schedule.collective, schedule.name, schedule.ranks) == ("all_reduce", "ring", 8)
    assert schedule.rounds[0][0] == Edge(src=0, dst=1, chunks=range(7, 8), reduces=True)
    rooted = Schedule.generate("star", 4, collective="broadcast", root=2)
    assert repr(rooted) == "<Schedule broadcast star p=4 root=2 rounds=1>"


def test_the_first_algorithm_of_all_reduce_is_the_ring():
    assert algorithms()[0] == "ring"
    assert "pairwise" in algorithms("all_to_all")
    with pytest.raises(InvalidArgument, match="all_reduce"):
        algorithms("all_recduce")


def test_an_unknown_algorithm_is_refused_with_the_known_ones():
    with pytest.raises(ScheduleError, match=r"'rong'.*ring, halving_doubling"):
        Schedule.generate("rong", 4)


def test_hierarchical_needs_groups_that_hold_every_rank_once():
    schedule = Schedule.generate("hierarchical(direct,ring)", 5, groups=groups_of(5, 2))
    assert schedule.verify().ok
    with pytest.raises(ScheduleError):
        Schedule.generate("hierarchical(direct,ring)", 4, groups=[[0, 1], [1, 2, 3]])


def test_groups_hold_all_ranks_in_order():
    assert groups_of(5, 2) == [[0, 1], [2, 3], [4]]


def test_equal_schedules_are_equal_hash_alike_and_survive_pickling():
    one, other = Schedule.generate("direct", 3), Schedule.generate("direct", 3)
    assert one == other
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == one
    assert one != Schedule.generate("direct", 4)
    assert one != "direct"


def test_the_builder_and_the_text_make_the_same_schedule():
    assert chain() == Schedule.parse(CHAIN)
    report = chain().verify()
    assert report
    assert report.problems == ()
    assert report.shape == Shape(rounds=3, max_sent=2.0)
    assert chain().closed_form() is None


def test_chunks_are_a_number_a_range_or_a_slice():
    def copies(chunks):
        builder = Schedule.builder("broadcast", ranks=2, chunks=4, name="x")
        return builder.copy(0, 0, 1, chunks).build()

    assert copies(range(1, 3)) == copies(slice(1, 3))
    assert copies(2).rounds[0][0].chunks == range(2, 3)
    for gap in (range(0, 4, 2), slice(None, 3)):
        with pytest.raises(InvalidArgument, match="without gaps"):
            copies(gap)


def test_a_missing_contribution_is_named():
    lacking = Schedule.builder("reduce", ranks=3, chunks=1, name="lacking").reduce(0, 1, 0, 0)
    report = lacking.build().verify()
    assert not report
    assert not report.complete or not report.correct
    assert any("rank 0" in text and "rank 2" in text for text in report.problems)


def test_a_contribution_counted_twice_names_its_round():
    twice = Schedule.builder("reduce", ranks=2, chunks=1, name="twice")
    report = twice.reduce(0, 1, 0, 0).reduce(1, 1, 0, 0).build().verify()
    assert not report.correct
    assert any(text.startswith("round 1: rank 0 reduces") for text in report.problems)


def test_a_rank_that_sends_to_itself_is_named():
    own = Schedule.builder("broadcast", ranks=2, chunks=1, name="own").copy(0, 0, 0, 0)
    report = own.copy(1, 0, 1, 0).build().verify()
    assert not report.ok
    assert any("round 0" in text and "itself" in text for text in report.problems)


@pytest.mark.parametrize(
    ("edge", "fault"),
    [
        ((0, 1, 2, 0), r"round 0: edge 1 -> 2: rank 2 is not in"),
        ((3, -1, 0, 0), r"round 3: edge -1 -> 0: rank -1"),
        ((1, 1, 0, range(1, 5)), r"round 1: edge 1 -> 0: chunks 1:5"),
        ((1, 1, 0, range(2, 2)), r"round 1: edge 1 -> 0: chunks 2:2"),
        ((-1, 1, 0, 0), r"round -1"),
    ],
)
def test_an_edge_out_of_range_names_its_round_and_ranks(edge, fault):
    builder = Schedule.builder("all_reduce", ranks=2, chunks=2, name="x").reduce(*edge)
    with pytest.raises(ScheduleError, match=fault):
        builder.build()


def test_a_bad_text_names_its_line():
    with pytest.raises(ScheduleError, match=r"line 4.*'reuse'"):
        Schedule.parse(CHAIN.strip().replace("2 -> 1 reduce 0", "2 -> 1 reuse 0"))


def test_a_report_reads_as_a_table():
    text = str(Schedule.generate("recursive_doubling", 4).verify())
    assert "correct       yes" in text
    assert "in_tree       NO" in text
    assert "2 n by any rank" in text


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 13])
def test_a_binomial_tree_can_be_verified_and_drawn(ranks: int) -> None:
    tree = Schedule.generate("binomial_tree", ranks)
    assert tree.verify().correct
    assert len(tree.rounds) == 2 * (ranks - 1).bit_length()
    assert sum(map(len, tree.rounds)) == 2 * (ranks - 1)
    assert "binomial_tree" in tree.draw()


def test_a_butterfly_is_halving_and_doubling() -> None:
    assert Schedule.generate("butterfly", 8) == Schedule.generate("halving_doubling", 8)

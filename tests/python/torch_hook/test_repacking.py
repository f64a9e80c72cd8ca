"""The layouts in which a job's buckets travel, from its first step and from a saved one on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradwire.torch.ddp.training_state import BucketRepacker, Layout
from gradwire.torch.exchange.rules import Bucket

SIZES = {"a": 2, "b": 3, "c": 4}
A: Layout = (("c", "b"), ("a",))
B: Layout = (("b", "a"), ("c",))
C: Layout = (("a", "b", "c"),)


class Step:
    """One step in DDP's layout: what travelled, and the gradients after averages of 5."""

    def __init__(self, repacker: BucketRepacker, number: int, layout: Layout, ok: bool = True):
        repacker.begin_step(number)
        self.holds = repacker.holds_buckets
        self.buckets = [self._bucket(names) for names in layout]
        self.early: list[Bucket] = []
        for each in self.buckets[:-1]:
            self.early += repacker.put(each, False)
        self.sent = [*self.early, *repacker.put(self.buckets[-1], True)]
        for each in self.sent:
            for part in each.whole:
                part.fill_(5)
        repacker.end_step(ok)

    def _bucket(self, names: Any) -> Bucket:
        flat = torch.zeros(sum(SIZES[name] for name in names))
        parts = flat.split([SIZES[name] for name in names])
        return Bucket([flat], names, list(parts))

    @property
    def layout(self) -> Layout:
        return tuple(tuple(each.names) for each in self.sent)

    @property
    def in_parts(self) -> bool:
        return all(len(each.whole) == len(each.names) for each in self.sent)

    @property
    def averaged(self) -> bool:
        return all(bool((each.whole[0] == 5).all()) for each in self.buckets)


def test_the_first_steps_of_a_job_are_packed_alike() -> None:
    repacker = BucketRepacker()
    first = Step(repacker, 0, A)
    assert (first.holds, first.layout, first.in_parts) == (False, A, True)
    assert len(first.early) == 1
    assert repacker.layout == ()
    for number in (1, 2, 3):  # DDP has rebuilt its buckets
        step = Step(repacker, number, B)
        assert (step.holds, step.layout, step.in_parts) == (True, A, True)
        assert step.early == []
        assert step.averaged
        assert repacker.layout == B
    step = Step(repacker, 4, B)
    assert (step.holds, step.layout, step.in_parts) == (False, B, False)
    assert step.averaged


def test_buckets_that_are_not_rebuilt_within_three_steps_stay() -> None:
    repacker = BucketRepacker()
    found = []
    for number in range(4):
        Step(repacker, number, A)
        found.append(repacker.layout)
    assert found == [(), (), A, A]


@pytest.mark.parametrize("ok", [True, False])
def test_a_resumed_job_travels_in_the_saved_layout_until_ddp_has_it(
    ok: bool, caplog: pytest.LogCaptureFixture
) -> None:
    repacker = BucketRepacker()
    repacker.resume(B, 4)
    assert repacker.layout == B
    step = Step(repacker, 4, A, ok)
    assert (step.holds, step.layout, step.early, step.in_parts) == (True, B, [], False)
    assert [each.whole[0].shape for each in step.sent] == [(5,), (4,)]
    assert step.averaged == ok  # copies come back, unless the step failed
    assert repacker.layout == B
    step = Step(repacker, 5, B)
    assert step.sent == step.buckets  # themselves
    assert step.averaged
    step = Step(repacker, 6, B)
    assert not step.holds
    assert repacker.layout == B
    assert caplog.text == ""


@pytest.mark.parametrize("layouts", [[A, C], [A, A, A]])
def test_a_job_that_gets_other_buckets_says_so_once(
    layouts: list[Layout], caplog: pytest.LogCaptureFixture
) -> None:
    repacker = BucketRepacker()
    repacker.resume(B, 4)
    for number, layout in enumerate([*layouts, layouts[-1], layouts[-1]], start=4):
        assert len(caplog.records) == (number >= 4 + len(layouts))
        Step(repacker, number, layout)
    assert len(caplog.records) == 1
    assert repacker.layout == layouts[-1]


@pytest.mark.parametrize(
    ("saved", "steps", "warned"), [(4, [], 1), (3, [A, B], 0), (3, [A, A, B], 1), (3, [A] * 4, 0)]
)
def test_a_state_without_a_layout_is_of_the_first_steps(
    saved: int, steps: list[Layout], warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    repacker = BucketRepacker()
    repacker.resume((), saved)
    for number, layout in enumerate(steps, start=saved):
        Step(repacker, number, layout)
    assert len(caplog.records) == warned


def test_a_layout_of_other_parameters_is_not_used() -> None:
    repacker = BucketRepacker()
    repacker.resume((("x",), ("a", "b", "c")), 4)
    step = Step(repacker, 4, A)
    assert step.sent == step.buckets
    assert step.holds


def test_gradients_without_names_travel_as_they_come() -> None:
    repacker = BucketRepacker()
    repacker.begin_step(0)
    flat = torch.zeros(3)
    nameless = Bucket([flat], [], [])
    assert repacker.put(nameless, True) == [nameless]
    repacker.end_step(True)
    assert repacker.layout == ()


def test_gradients_of_any_shape_are_copied_end_to_end() -> None:
    repacker = BucketRepacker()
    repacker.resume((("n", "m"),), 4)
    repacker.begin_step(4)
    matrix, number = torch.ones(2, 3), torch.full((), 2.0)
    repacker.put(Bucket([matrix], ["m"], [matrix]), False)
    (packed,) = repacker.put(Bucket([number], ["n"], [number]), True)
    assert packed.whole[0].tolist() == [2, 1, 1, 1, 1, 1, 1]
    assert [each.shape for each in packed.gradients] == [(), (2, 3)]

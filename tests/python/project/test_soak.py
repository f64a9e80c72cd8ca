"""What the soak takes for a plateau, and what for a leak."""

from __future__ import annotations

import pytest

from tests.soak import MOST_GROWTH, SAMPLES, Sample, judge

MIB = 1 << 20


def samples(per_hour: float, *, descriptors: float = 0.0, noise: int = MIB) -> list[Sample]:
    """Two hours: caches fill in the first third, and malloc's stock goes up and down."""
    made = []
    for i in range(SAMPLES):
        hours = 2 * i / SAMPLES
        filled = min(20, i) * MIB
        private = 50 * MIB + filled + int(per_hour * hours) + noise * (i % 3)
        made.append(Sample(3600 * hours, i, private, 30 + i % 2 * 12 + int(descriptors * hours)))
    return made


def test_a_plateau_is_one() -> None:
    assert judge(samples(0.0)) == ""
    assert judge(samples(MOST_GROWTH / 2)) == ""


@pytest.mark.parametrize("per_hour", [1.5 * MOST_GROWTH, 30 * MIB])
def test_growth_is_told_with_its_rate(per_hour: float) -> None:
    assert f"grows by {per_hour / MIB:.0f}" in judge(samples(per_hour, noise=0)).replace(".0 ", " ")
    assert "memory grows" in judge(samples(per_hour))


def test_descriptors_that_become_more_are_told() -> None:
    assert "descriptors, and ever more" in judge(samples(0.0, descriptors=60))


def test_too_short_a_run_is_told() -> None:
    assert "more time" in judge(samples(0.0)[:3])

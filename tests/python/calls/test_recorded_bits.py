"""Results have the bits that they had in the last release, whatever changed inside."""

from __future__ import annotations

import json

import pytest
import recorded_bits


@pytest.mark.parametrize(
    "p", [pytest.param(p, marks=pytest.mark.nightly if p > 4 else ()) for p in recorded_bits.SIZES]
)
def test_results_have_the_recorded_bits(p: int) -> None:
    recorded = json.loads(recorded_bits.FILE.read_text())[str(p)]
    assert recorded_bits.measured(p) == recorded

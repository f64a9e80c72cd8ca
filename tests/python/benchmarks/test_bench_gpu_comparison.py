"""What comparing calls costs many ranks: messages counted in schedules, and times by a fit."""

from __future__ import annotations

import pytest

from bench.cuda.comparison import Fit, Times, fit, messages, simulate


def test_messages_are_those_of_the_schedules() -> None:
    for ranks, rounds in ((2, 1), (8, 3), (64, 6)):
        assert messages("round", ranks) == 2 * rounds
        assert messages("alone", ranks) == 2 * (ranks - 1)


def test_a_line_is_found() -> None:
    line = Fit(call=100.0, message=5.0)
    found = fit([(count, line.of(count)) for count in (6, 14, 30)])
    assert found == pytest.approx(line)


def test_more_ranks_take_what_their_messages_take() -> None:
    line = Fit(call=100.0, message=5.0)
    measured = {
        ranks: Times(line.of(messages("alone", ranks)), line.of(messages("round", ranks)))
        for ranks in (4, 8, 16)
    }
    _, times = simulate(measured, 128)
    assert times == pytest.approx((line.of(254), line.of(14)))

"""codec="auto" is nearly as fast as the best codec; the whole grid is a benchmark."""

from __future__ import annotations

from bench.planning import choices


def test_what_auto_chooses_is_nearly_the_fastest_over_a_grid() -> None:
    """Small and large models, that compute for long or not, over slow links and fast ones."""
    cases = choices.grid((1, 100), (0.01, 1.0), (0.1, 1.0, 10.0), (2,))
    found = list(choices.results(cases))
    assert len(found) == len(cases) == 24
    far = [str(each) for each in found if each.slower > choices.CLOSE]
    assert not far
    assert {each.chosen for each in found} == {"none", "fp16", "int8", "int4", "lowrank"}


def test_a_choice_that_ignores_computing_is_not() -> None:
    """The grid would notice: what is chosen before computing is known is slower, or as lossy."""
    cases = choices.grid((10, 100), (1.0,), (1.0, 3.0), (2,))
    found = list(choices.results(cases))
    assert any(each.first != each.chosen for each in found)

"""What is said of compression and ranks: by what holds for any figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from gradwire import CostModel
from gradwire.lab.planner import judgement, steps
from gradwire.lab.planner.exchanges import Cluster
from gradwire.lab.planner.steps import Prediction
from gradwire.lab.simulation.topology import flat
from small_plans import PARTS, cluster, matrix, net


def judge(ranks: int = 8, compute: float = 0.05, batch: int = 4, **options: Any) -> Any:
    here = cluster(ranks, by_events=False, **options)
    made = [
        steps.synchronous(PARTS, compute, here, "ring", codec)
        for codec in ("none", "fp16", "onebit")
    ]
    other = Prediction("ring", "none", steps.LOCAL, 0.0, 0.0)  # is no step of SGD
    model = net(*(matrix(600, 600) for _ in range(6)))
    return judgement.Judge(model, batch, compute, here, [*made, other])


def test_powers_of_two_end_with_the_ranks() -> None:
    found = [judgement._powers(each) for each in (1, 2, 3, 4, 5, 8, 9)]
    assert found == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 5], [1, 2, 4, 8], [1, 2, 4, 8, 9]]


@pytest.mark.parametrize("at", [1e6, 3.3e8, 7e12])
def test_a_boundary_is_found_within_two_digits(at: float) -> None:
    assert judgement._boundary(lambda rate: rate <= at) == pytest.approx(at, rel=0.06)
    assert judgement._boundary(lambda _: True) is None
    assert judgement._boundary(lambda _: False) is None


def test_codecs_harm_training_more_or_less() -> None:
    codecs = ("none", "lossless", "fp16", "onebit")
    assert [judgement.loss(each) for each in codecs] == [0, 0, 1, 2]


def test_scaling_begins_with_one_rank_that_computes() -> None:
    found = judge(6)
    for rows, share in ((list(found.weak()), 1), (list(found.strong()), 2)):
        assert [ranks for ranks, *_ in rows] == [1, 2, 4, 6]
        assert rows[0] == (1, 0.05, 1.0)
        ranks, step, speed_up = rows[1]
        assert step >= 0.05 / share
        assert speed_up == pytest.approx((ranks if share == 1 else 1) * 0.05 / step)
    assert list(found.weak())[1][1] == found._step(found._cluster.of(2), 0.05)
    assert list(found.strong())[1][1] == found._step(found._cluster.of(2), 0.025)


def test_the_least_batch_is_the_first_with_which_ranks_hardly_wait() -> None:
    found = judge(8, compute=0.05, batch=4)
    least = found.least_batch()

    def waits(batch: int) -> float:
        step = found._step(found._cluster, 0.05 / 4 * batch)
        return float(1 - 0.05 / 4 * batch / step)

    assert least is not None
    assert waits(least) < 0.1 <= waits(least - 1)
    assert judge(1).least_batch() == 1
    assert judge(8, compute=1e-12).least_batch() is None


def test_a_star_is_only_for_two() -> None:
    asked: list[tuple[int, str]] = []
    found = judge(2)
    seconds = Cluster.seconds

    def noted(self: Cluster, algorithm: str, *rest: Any) -> float:
        asked.append((self.ranks, algorithm))
        return seconds(self, algorithm, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cluster, "seconds", noted)
        found._step(found._cluster, 0.05)
        found._step(found._cluster.of(4), 0.05)
    stars = {ranks for ranks, algorithm in asked if algorithm == "star"}
    assert stars == {2}


def judged(rate: str, compute: float, codecs: Sequence[str] = ("none", "fp16", "onebit")) -> Any:
    here = Cluster(8, flat(f"{rate},50us"), CostModel(), by_events=False)
    made = [steps.synchronous(PARTS, compute, here, "ring", codec) for codec in codecs]
    return judgement.Judge(net(*(matrix(600, 600) for _ in range(6))), 4, compute, here, made)


def test_lossless_is_offered_where_it_pays_beside_a_faster_codec() -> None:
    words = "; lossless, by which every bit stays as without, takes "
    for rate, offered in (("100mbit", True), ("10gbit", False)):
        sentence = next(judged(rate, 0.05, ("none", "lossless", "int8")).sentences())
        assert (words in sentence) == offered
    alone = next(judged("100mbit", 0.05, ("none", "lossless")).sentences())
    assert "with lossless, 1.2 times as fast as without. From about" in alone


@pytest.mark.parametrize(
    ("rate", "compute", "compression", "scaling"),
    [
        ("10mbit", 0.05, (" takes 6.36 s.",), "More than 1 ranks do not pay: 8 do the work of 0.1"),
        ("100mbit", 0.5, (" takes 862 ms.", " From about "), "8 ranks pay: with onebit they"),
        ("1gbit", 0.5, ("It would below about ",), "8 ranks pay: with onebit they"),
        ("10gbit", 0.05, ("It would on no link.",), "8 ranks pay: with onebit they"),
    ],
)
def test_compression_pays_where_links_are_slow(
    rate: str, compute: float, compression: tuple[str, ...], scaling: str
) -> None:
    found = judged(rate, compute)
    first, second = found.sentences()
    gain = found._dense.step / found._encoded.step
    if gain >= judgement.WORTH:
        begin = "Compression pays: a step takes "
        assert f"onebit, {gain:.1f} times as fast as without; the best unbiased codec, fp1" in first
    else:
        begin = "Compression does not pay: the best codec, onebit, "
        assert f"saves {1 - 1 / gain:.1%} of a step. " in first
    assert first.startswith(begin)
    assert all(each in first for each in compression)
    assert second.startswith(scaling)
    assert (" on they would." in second) == ("do not pay" in second)


def test_a_turning_point_is_where_the_gain_ends_at_any_rate() -> None:
    found = [judged(rate, 0.5) for rate in ("10mbit", "1gbit", "100gbit")]
    (bits,) = {each._turning_point("onebit") for each in found}
    gains = []
    for rate in (bits / 1.2, bits * 1.2):
        here = found[0]._cluster.at_rate(rate)
        gains.append(found[0]._step(here, 0.5) / found[0]._step(here, 0.5, "onebit"))
    assert gains[0] > judgement.WORTH > gains[1]


def test_ranks_pay_from_a_rate_on() -> None:
    found = judged("10mbit", 0.05)
    bits = found._rate_for_ranks("onebit", 1)
    pays = []
    for rate in (bits / 1.2, bits * 1.2):
        step = found._step(found._cluster.at_rate(rate), 0.05, "onebit")
        pays.append(8 * 0.05 / step > judgement.WORTH)
    assert pays == [False, True]
    assert found._speed_up(1, "onebit") == pytest.approx(1)
    dense = 4 * 0.05 / found._step(found._cluster.of(4), 0.05)
    assert found._speed_up(4, "none") == dense < found._speed_up(4, "onebit")


def test_one_rank_and_one_codec_have_less_to_say() -> None:
    assert list(judge(1).sentences()) == ["One rank exchanges nothing."]
    (only,) = judged("1gbit", 0.5, ["none"]).sentences()
    assert only.startswith("8 ranks pay: with no codec they")
    first, _ = judged("10mbit", 0.5, ["none", "onebit"]).sentences()
    assert "unbiased" not in first
    first, _ = judged("10mbit", 0.5, ["none", "fp16"]).sentences()
    assert "unbiased" not in first

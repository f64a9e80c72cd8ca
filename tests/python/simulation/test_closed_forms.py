"""Closed forms give what the simulation of events gives, where both run."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from gradwire import InvalidArgument, Schedule
from gradwire.lab.simulation import closed_forms, exchange
from gradwire.lab.simulation.topology import flat, parse
from ranks import some

FLAT = ("ring", "halving_doubling", "recursive_doubling", "binary_tree", "double_binary_tree")
NESTED = ("hierarchical(direct,ring)", "hierarchical(direct,halving_doubling)")
SIZES = (1 << 10, 64 << 10, 1 << 20, 64 << 20)


def ratio(algorithm: str, nbytes: float, ranks: int, per_host: int, codec: str = "none") -> float:
    topology = flat("10gbit,20us", per_host)
    model = topology.model()
    events, how = exchange.seconds(algorithm, nbytes, ranks, topology, model, codec=codec)
    assert how == exchange.EVENTS
    return closed_forms.seconds(algorithm, nbytes, ranks, topology, model, codec) / events


@pytest.mark.parametrize("ranks", [2, 8, 32, 48])
@pytest.mark.parametrize("algorithm", [*FLAT, "direct", "star"])
def test_one_rank_a_host(algorithm: str, ranks: int) -> None:
    limit = 0.4 if "tree" in algorithm else 0.15
    for nbytes in SIZES:
        assert ratio(algorithm, nbytes, ranks, 1) == pytest.approx(1, abs=limit), nbytes


@pytest.mark.parametrize("algorithm", [*FLAT, "direct", *NESTED])
def test_several_ranks_a_host(algorithm: str) -> None:
    limit = 0.45 if algorithm == "binary_tree" else 0.25
    for nbytes in SIZES:
        assert ratio(algorithm, nbytes, 32, 4) == pytest.approx(1, abs=limit), nbytes


@pytest.mark.parametrize("hosts", [8, 32])
@pytest.mark.parametrize("algorithm", NESTED)
def test_chunks_that_are_small_beside_their_messages(algorithm: str, hosts: int) -> None:
    for nbytes in (4 << 20, 64 << 20):
        assert ratio(algorithm, nbytes, 8 * hosts, 8) == pytest.approx(1, abs=0.25), nbytes


@pytest.mark.parametrize("ranks", [64, 512, 4096, 32768, 100_000])
def test_a_round_between_many_hosts_costs_what_it_moves(ranks: int) -> None:
    """1 GiB: an outer round moves less of it the more hosts there are, in fewer frames."""
    topology = flat("100gbit,2us", 8)
    model = topology.model()

    def seconds(algorithm: str) -> float:
        return closed_forms.seconds(algorithm, 1 << 30, ranks, topology, model)

    assert seconds("hierarchical(direct,ring)") < seconds("ring")


@pytest.mark.parametrize(
    ("algorithm", "per_host"),
    some(
        product(("binary_tree", "double_binary_tree"), (1, 4)),
        lambda algorithm, per_host: (algorithm == "binary_tree") == (per_host == 1),
    ),
)
def test_large_trees_are_corrected_by_smaller_ones(algorithm: str, per_host: int) -> None:
    topology = flat("10gbit,20us", per_host)
    model = topology.model()
    for nbytes in SIZES:
        times = []
        too_few = exchange.messages(algorithm, 4096, 1) - 1
        for most in (exchange.MOST_MESSAGES, too_few):
            times.append(
                exchange.seconds(algorithm, nbytes, 4096, topology, model, most_messages=most)
            )
        (events, _), (closed, how) = times
        assert how == exchange.CLOSED_FORM
        assert closed == pytest.approx(events, rel=0.07), nbytes


@pytest.mark.parametrize("codec", ["fp16", "int8", "onebit"])
def test_codecs(codec: str) -> None:
    for algorithm in ("ring", "halving_doubling", "direct"):
        assert ratio(algorithm, 8 << 20, 16, 1, codec) == pytest.approx(1, abs=0.15), algorithm


def test_the_server_is_linear_the_tree_logarithmic_and_the_ring_flat() -> None:
    """FireCaffe's comparison (Iandola et al. 2016, sec. 5), for GoogLeNet's 53 MB."""
    topology = flat("100gbit,2us")
    model = topology.model()

    def times(algorithm: str) -> list[float]:
        ranks = [1 << i for i in range(1, 13)]
        return [closed_forms.seconds(algorithm, 53e6, p, topology, model) for p in ranks]

    star, tree, ring = times("star"), times("binomial_tree"), times("ring")
    assert star[11] / star[7] == pytest.approx(16, rel=0.02)  # 4,096 ranks over 256
    steps = [later - earlier for earlier, later in pairwise(tree)]
    assert max(steps) == pytest.approx(min(steps), rel=0.02)
    assert tree[11] == pytest.approx(12 * tree[0], rel=0.02)
    assert ring[5] / ring[2] < 1.3


def test_bytes_and_steps_of_the_papers() -> None:
    """Baidu: a ring sends 2 X (N - 1) / N. Intel: a butterfly has half the steps of a tree."""
    for ranks in (2, 8, 64):
        shape = Schedule.generate("ring", ranks).closed_form()
        assert shape is not None
        assert shape.max_sent == pytest.approx(2 * (ranks - 1) / ranks)
        butterfly = Schedule.generate("recursive_doubling", ranks).closed_form()
        tree = Schedule.generate("binary_tree", ranks).closed_form()
        assert butterfly is not None
        assert tree is not None
        assert 2 * butterfly.rounds == tree.rounds


def test_oversubscribed_racks_slow_what_crosses_them() -> None:
    """Where ranks of all racks exchange with each other at once, the uplinks' rate counts."""
    full = parse("1 per host, 10gbit; 32 hosts a rack")
    quarter = parse("1 per host, 10gbit; 32 hosts a rack, oversubscription 4")
    model = full.model()

    def slower(algorithm: str) -> float:
        one, other = (
            closed_forms.seconds(algorithm, 1 << 30, 1024, topology, model)
            for topology in (full, quarter)
        )
        return other / one

    assert slower("direct") == pytest.approx(4, rel=0.1)
    assert slower("ring") == pytest.approx(1, abs=0.01)  # one message leaves a rack at a time
    assert 2 < slower("halving_doubling") < 4.1


@pytest.mark.parametrize(
    ("algorithm", "ranks", "says"),
    [
        ("nope", 100_000, "no closed form"),
        ("hierarchical(star,ring)", 100_000, "no closed form"),
        ("ring", 20_000_000, "cover 1 to 10,000,000"),
        ("hierarchical(direct,ring)", 100_001, "hosts of 8 ranks each"),
    ],
)
def test_what_no_closed_form_covers_is_refused(algorithm: str, ranks: int, says: str) -> None:
    topology = flat("10gbit", 8)
    with pytest.raises(InvalidArgument, match=says):
        exchange.seconds(algorithm, 1e6, ranks, topology, topology.model())

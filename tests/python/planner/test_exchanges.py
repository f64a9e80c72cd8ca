"""Seconds of one exchange on a cluster, and what buckets become: what holds for any figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gradwire import CostModel, InvalidArgument
from gradwire.lab.planner import exchanges, steps, volumes
from gradwire.lab.planner.exchanges import Cluster, Payload, payload, payloads, ratio, usual_share
from gradwire.lab.planner.steps import Prediction
from gradwire.lab.planner.tables.network import EMBEDDING, OTHER, Layer
from gradwire.lab.simulation import exchange
from gradwire.lab.simulation.topology import flat, parse
from small_plans import PARTS, cluster, layer, matrix, net

KIB = 1024.0


def test_a_plain_cluster_computes_elsewhere_and_its_links_are_the_topologys() -> None:
    plain = cluster()
    assert plain.how("ring") == exchange.EVENTS
    assert (plain.turns, plain.per_bucket, plain.overlaps) == (1, 0, True)
    assert plain.work(Payload(KIB, "none")) == 0
    assert plain.model == plain.topology.model(plain.base) != plain.base
    assert replace(plain, measured=True).model == plain.base


@pytest.mark.parametrize("codec", ["none", "fp16"])
def test_seconds_are_those_of_the_simulation_and_linear_between_powers_of_two(codec: str) -> None:
    here = cluster(by_events=False)
    found = [here.seconds("ring", KIB * each, codec) for each in (1, 1.25, 1.5, 2)]
    for nbytes, one in ((KIB, found[0]), (2 * KIB, found[3])):
        options = {"codec": codec, "most_messages": 0}
        wanted, _ = exchange.seconds("ring", nbytes, 4, here.topology, here.model, **options)
        assert one == pytest.approx(wanted)
    assert found[1] == pytest.approx(found[0] + (found[3] - found[0]) / 4)
    assert found[2] == pytest.approx((found[0] + found[3]) / 2)
    assert found[0] < found[3]
    assert here.seconds("ring", 1, codec) == here.seconds("ring", KIB, codec) > 0
    assert here.seconds("ring", 0, codec) == cluster(1).seconds("ring", KIB, codec) == 0


def test_events_and_closed_forms_both_tell_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "_PLANNED_MESSAGES", exchange.messages("ring", 4, 1))
    assert cluster().how("ring") == exchange.EVENTS
    assert cluster(by_events=False).how("ring") == exchange.CLOSED_FORM
    assert cluster(5).how("ring") == exchange.CLOSED_FORM
    assert cluster(2).seconds("ring", KIB, "none") > 0


def test_another_size_is_another_cluster() -> None:
    here = cluster(by_events=False)
    before = here.seconds("ring", KIB, "onebit")
    for ranks in (2, 8):
        other = here.of(ranks)
        fresh = cluster(ranks, by_events=False)
        assert other.seconds("ring", KIB, "onebit") == fresh.seconds("ring", KIB, "onebit")
        assert other.seconds("ring", KIB, "onebit") != before
    assert here.seconds("ring", KIB, "onebit") == before


@pytest.mark.parametrize("inside", [None, "10gbit"])
def test_another_rate_is_that_of_the_links_between_hosts(inside: str | None) -> None:
    base = CostModel({"between.latency": 3e-5})
    here = Cluster(8, flat("1gbit,50us", 2, inside), base, measured=True)
    other = here.at_rate(5e8)
    (level,), wanted = other.topology.levels, flat("500mbit,50us", 2, inside)
    assert (level.ranks, level.rate, other.topology.inside) == (2, 5e8, wanted.inside)
    assert level.latency == pytest.approx(5e-5)
    assert (other.measured, other.by_events, other.ranks) == (False, False, 8)
    assert other.seconds("ring", 1 << 20, "none") > 1.8 * other.at_rate(1e9).seconds(
        "ring", 1 << 20, "none"
    )
    without = replace(here, topology=flat("1gbit", 2))
    assert without.at_rate(1e9).topology.levels[0].latency == pytest.approx(3e-5)


def test_ranks_that_take_turns_work_longer_and_wait_as_long() -> None:
    before = cluster().model.parameters
    after = cluster(turns=3.0).model.parameters
    factors = {name: after[name] / value for name, value in before.items() if value}
    assert set(factors.values()) == {1.0, 3.0}
    assert factors["gamma"] == factors["between.alpha"] == factors["fp16.encode"] == 3
    assert factors["between.beta"] == factors["between.latency"] == 1


def test_work_adds_up() -> None:
    gamma = CostModel().parameters["gamma"]
    here = cluster(per_bucket=1e-3)
    none = here.work(Payload(0, "none"))
    assert none == 1e-3
    copies = here.work(Payload(4e6, "none")) - none
    assert copies == pytest.approx(exchanges._COPIES * 4e6 * gamma)
    assert here.work(Payload(4e6, "fp16")) == pytest.approx(none + copies)
    feedback = here.work(Payload(4e6, "onebit")) - none - copies
    assert feedback == pytest.approx(exchanges._FEEDBACK * 4e6 * gamma)
    assert cluster().work(Payload(4e6, "onebit")) == pytest.approx(feedback)
    factoring = here.work(Payload(4e6, "none", 1e6)) - none - copies
    assert factoring == pytest.approx(exchanges._FACTORING * 1e6 * gamma)
    twice = cluster(turns=2.0, per_bucket=1e-3)
    assert twice.work(Payload(4e6, "onebit", 1e6)) == pytest.approx(
        2 * (none + copies + feedback + factoring)
    )


@pytest.mark.parametrize("codec", ["topk", "threshold"])
def test_gathered_payloads_grow_with_the_ranks_up_to_the_whole(codec: str) -> None:
    one, two, four, eight = (usual_share(codec, ranks) for ranks in (1, 2, 4, 8))
    assert one == two < 1
    assert four == pytest.approx(min(1, 2 * two))
    assert eight == pytest.approx(min(1, 4 * two))
    assert usual_share(codec, 1 << 20) == 1


@pytest.mark.parametrize("codec", ["none", "lowrank", "fp16", "bf16", "int8", "onebit"])
def test_other_payloads_have_one_size(codec: str) -> None:
    assert 0.1 < usual_share(codec, 2) == usual_share(codec, 64) <= 1


def test_lowrank_sums_its_factors_as_they_are() -> None:
    names = ("lowrank", "lowrank:rank=2", "fp16", "topk:share=0.1")
    assert [exchanges.wire_codec(each) for each in names] == ["none", "none", *names[2:]]


@pytest.mark.parametrize("by_events", [True, False])
def test_lossless_sends_fewer_bytes_and_packs_them(by_events: bool) -> None:
    nbytes, share = float(1 << 24), usual_share("lossless", 4)
    assert 0.8 < share < 0.9
    ratios = []
    for rate in ("10mbit", "1gbit", "100gbit"):
        here = Cluster(4, flat(f"{rate},50us"), CostModel(), by_events)
        dense, packed = (here.seconds("ring", nbytes, each) for each in ("none", "lossless"))
        ratios.append(packed / dense)
    assert ratios[0] == pytest.approx(share, rel=0.01)
    assert ratios == sorted(ratios)
    assert ratios[-1] > 1  # a processor packs more slowly than such links send
    assert ratio([matrix(500, 500)], "lossless") == pytest.approx(1 / share, rel=0.01)
    turns = Cluster(4, flat("100gbit,50us"), CostModel(), by_events, turns=2.0)
    assert turns.seconds("ring", nbytes, "lossless") > 1.5 * packed


def test_lossless_packs_nothing_in_memory_that_ranks_share() -> None:
    here = Cluster(2, flat("1gbit,50us", 2), CostModel())
    dense, packed = (here.seconds("ring", 1e6, each) for each in ("none", "lossless"))
    assert dense == packed
    slow = replace(here, base=CostModel({"within.beta": 8e-9}), measured=True)
    assert slow.seconds("ring", 1e6, "lossless") < slow.seconds("ring", 1e6, "none")


def test_lowrank_factors_what_becomes_smaller() -> None:
    small, other = matrix(4, 4), layer(10, 10)
    norm = matrix(100, 50, weights=0)
    for each in (small, other, norm):
        assert payload([each], "lowrank:rank=2") == Payload(4.0 * each.parameters, "none")
    large = matrix(100, 50)
    found = payload([large, other], "lowrank:rank=2")
    assert found == Payload(4.0 * (150 * 2 + 100 + other.parameters), "none", 4.0 * 100 * 50 * 2)
    assert payload([large], "lowrank") == payload([large], "lowrank:rank=4")
    with pytest.raises(InvalidArgument):
        payload([large], "lowrank:rank=x")
    assert payload([large], "fp16") == Payload(4.0 * large.parameters, "fp16")


def test_only_biased_codecs_leave_sensitive_layers_to_int8() -> None:
    first, last, empty = matrix(100, 50), matrix(50, 100), layer(0, 0)
    both = [first, last, empty]
    for codec in ("none", "fp16"):
        assert payloads(both, [last], codec) == [payload(both, codec)]
    for codec in ("onebit", "lowrank:rank=2"):
        assert payloads(both, [last], codec) == [payload([first], codec), payload([last], "int8")]
    assert payloads(both, [empty], "onebit") == [payload([first, last], "onebit")]
    assert payloads(both, both, "onebit") == [payload([first, last], "int8")]


def test_a_ratio_is_that_of_the_bytes_of_one_rank() -> None:
    large = matrix(1000, 500)
    assert ratio([large], "none") == 1
    assert ratio([large], "fp16") == pytest.approx(2, rel=0.01)
    assert ratio([large], "int8") == pytest.approx(4, rel=0.05)
    assert ratio([large], "lowrank:rank=2") == pytest.approx(501_000 / (3000 + 1000))
    assert ratio([large], "topk") > 10
    assert ratio([layer(0, 0)], "lowrank") == 1


def test_a_cluster_is_told_in_words() -> None:
    words = exchanges.describe(cluster(7, 2))
    assert words.startswith("4 hosts of 2, joined by 1 ")
    assert exchanges.describe(cluster(1, 8)).startswith("1 hosts of 1,")
    racks = Cluster(8, parse("2 per host, 10gbit, 10us; 2 hosts a rack, 1gbit"), CostModel())
    assert "joined by 10 " in exchanges.describe(racks)
    assert racks.at_rate(1e9).topology.levels[0].rate == 1e9


# ---- Steps --------------------------------------------------------------------------------------


def test_layers_without_parameters_are_in_no_bucket_but_take_time() -> None:
    relu = Layer("relu", OTHER, 0, 0, 4, 4, 1000.0)
    (found,) = steps.buckets(net(relu, matrix(2, 2), relu), most=4)
    assert found.layers == (matrix(2, 2),)
    assert found.ready == 1
    assert steps.buckets(net(relu)) == []
    two = steps.buckets(net(relu, matrix(512, 512), matrix(600, 512), relu), most=4)
    assert two[0].ready == pytest.approx((1000 + 2 * 600 * 512) / (2000 + 2 * 1112 * 512))
    assert [len(each.layers) for each in two] == [1, 1]
    assert two[1].ready == 1
    free = replace(matrix(2, 2), flops=0.0)
    assert steps.buckets(net(free))[0].ready == 1


def test_the_first_and_the_last_layer_and_tables_are_sensitive() -> None:
    norm, table = layer(3, 1, weights=0), matrix(20, 2, kind=EMBEDDING)
    inner, first, last = matrix(5, 5), matrix(3, 3), matrix(7, 7)
    (found,) = steps.buckets(net(norm, first, table, inner, last, norm))
    assert set(found.sensitive) == {first, table, last}


def test_a_prediction_says_what_is_exposed() -> None:
    found = Prediction("ring", "none", steps.SYNCHRONOUS, 4.0, 3.0)
    assert (found.exposed, found.efficiency) == (1.0, 0.75)
    assert Prediction("ring", "none", steps.SYNCHRONOUS, 0.0, 0.0).efficiency == 1
    mean = steps.accumulated(found, 4)
    assert (mean.step, mean.mode) == ((3 * 3 + 4) / 4, "accumulated over 4")


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_step_is_at_least_its_parts(overlaps: bool) -> None:
    """Exchanges follow each other; without spare cores nothing is hidden."""
    here = cluster(per_bucket=1e-3, overlaps=overlaps, by_events=False)
    sent = [each for part in PARTS for each in payloads(part.layers, part.sensitive, "onebit")]
    work = sum(map(here.work, sent))
    travels = sum(here.seconds("ring", each.nbytes, each.codec) for each in sent)
    found = steps.synchronous(PARTS, 0.02, here, "ring", "onebit")
    if overlaps:
        assert max(0.02 + work, travels) <= found.step < 0.02 + work + travels
    else:
        assert found.step == pytest.approx(0.02 + work + travels)
    local = steps.local(PARTS, 0.02, here, "ring", "onebit", 5)
    assert local.step == pytest.approx(0.02 + (work + travels) / 5)
    long = steps.synchronous(PARTS, 100.0, here, "ring", "onebit")
    assert long.step == pytest.approx(100 + work, rel=1e-3)
    for alone in (cluster(1, per_bucket=1e-3), replace(here, ranks=1)):
        assert steps.synchronous(PARTS, 0.02, alone, "ring", "onebit").step == 0.02
        assert steps.local(PARTS, 0.02, alone, "ring", "onebit", 5).step == 0.02


def test_work_that_hides_no_exchange_takes_its_time() -> None:
    here = Cluster(4, flat("1000gbit,1us"), CostModel(), per_bucket=0.5, by_events=False)
    found = steps.synchronous(PARTS, 100.0, here, "ring", "none")
    sent = [each for part in PARTS for each in payloads(part.layers, part.sensitive, "none")]
    assert len(sent) > 1
    assert found.step == pytest.approx(100 + sum(map(here.work, sent)))


def test_gradients_are_there_during_the_backward_that_is_two_thirds_of_computing() -> None:
    here = cluster(by_events=False)
    half = [replace(PARTS[0], ready=0.5)]
    alone = here.seconds("ring", 4.0 * sum(x.parameters for x in half[0].layers), "none")
    found = steps.synchronous(half, 0.0, here, "ring", "none")
    assert found.step == pytest.approx(alone)
    for compute in (0.001, 0.002):
        found = steps.synchronous(half, compute, here, "ring", "none")
        assert found.step == pytest.approx(compute / 3 + compute / 3 + alone)


def test_a_server_works_for_all_that_travels() -> None:
    """Links carry a push and a pull to the shards of other hosts; one host has no link between."""
    one, two = cluster(4, 4), cluster(8, 4)
    model = two.model.parameters
    size = 4.0 * sum(each.parameters for part in PARTS for each in part.layers)
    for codec in ("none", "int8"):
        coding = model.get(f"{codec}.encode", 0) + model.get(f"{codec}.decode", 0)
        found = steps.server(PARTS, 0.01, one, codec, 4.0)
        assert found.step == pytest.approx(0.01 + size * (coding + 2 * model["gamma"]))
        busy = steps.server(PARTS, 10.0, two, codec, 4.0).step - 10
        assert busy == pytest.approx(size * (coding + model["between.copy"] + 2 * model["gamma"]))
        wire = size * (1 + 1 / 4.0) * 4 / 2 * model["between.beta"]
        found = steps.server(PARTS, 0.0, two, codec, 4.0)
        assert found.step == pytest.approx(wire + 2 * model["between.latency"])


# ---- Volumes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "columns", "options", "ranks", "advice"),
    [
        (1024, 1024, {}, 4, "model"),
        (1024, 1023, {}, 4, "data"),  # is not large
        (1024, 1024, {}, 3, "data"),  # cannot be divided
        (1024, 1024, {"tied": True}, 4, "data"),
        (1024, 1024, {"kind": OTHER}, 4, "data"),
        (1024, 1024, {"kind": EMBEDDING, "rows": 2}, 4, "sparse"),
        (1024, 1024, {"kind": EMBEDDING, "rows": 2, "tied": True}, 4, "data"),
    ],
)
def test_a_layer_goes_the_way_that_sends_least(
    rows: int, columns: int, options: dict[str, Any], ranks: int, advice: str
) -> None:
    (found,) = volumes.volumes(net(matrix(rows, columns, **options), layer(0, 0)), ranks, 8)
    assert found.advice == advice
    ways = {"data", "model"} | ({"sparse"} if options.get("kind") == EMBEDDING else set())
    assert found.sent.keys() == ways
    assert found.activations == 8 * columns
    assert found.sent["model"] == pytest.approx(
        2 * (ranks - 1) / ranks * 4 * (rows + columns) * 8 * ranks
    )
    assert volumes.total([found]) == found.sent[advice]
    assert volumes.total([found], "data") == found.sent["data"]


def test_layers_of_large_batches_average_their_gradients() -> None:
    (found,) = volumes.volumes(net(matrix(1024, 1024)), 4, 1000)
    assert found.sent["model"] > found.sent["data"]
    assert found.advice == "data"


def test_the_sample_of_values_is_always_the_same() -> None:
    usual_share.cache_clear()
    first = usual_share("topk", 4)
    np.random.default_rng(5)
    usual_share.cache_clear()
    assert usual_share("topk", 4) == first

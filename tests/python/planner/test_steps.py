"""Predicted steps: buckets, what overlaps with backward, and ways to train."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gradwire import CostModel, codec
from gradwire.lab.planner import steps
from gradwire.lab.planner.exchanges import Cluster, payload, payloads, usual_share
from gradwire.lab.planner.tables.catalogue import network
from gradwire.lab.planner.tables.network import EMBEDDING, Network
from gradwire.lab.planner.tables.shapes import dense
from gradwire.lab.simulation.topology import flat


def cluster(ranks: int = 4, link: str = "1gbit,50us") -> Cluster:
    return Cluster(ranks, flat(link), CostModel())


def equal_layers(count: int, width: int) -> Network:
    layers = tuple(dense(f"l{i}", width, width, 1, bias=False) for i in range(count))
    return Network("equal", "a vector", layers)


def test_buckets_fill_from_the_last_layer() -> None:
    """torch's: the first bucket has 1 MiB, the others 25 MiB."""
    found = steps.buckets(equal_layers(10, 1 << 10))  # of 4 MiB each
    assert [len(each.layers) for each in found] == [1, 7, 2]
    assert [each.ready for each in found] == pytest.approx([0.1, 0.8, 1.0])
    assert found[0].layers[0].name == "l9"


def test_a_bucket_that_is_just_full_is_closed() -> None:
    """As torch's is: here one layer fills the first, and 25 layers the others."""
    found = steps.buckets(equal_layers(30, 1 << 9))  # of 1 MiB each
    assert [len(each.layers) for each in found] == [1, 25, 4]


def test_buckets_hold_all_parameters() -> None:
    for name in ("googlenet", "gpt2", "vgg16"):
        parts = steps.buckets(network(name))
        held = sum(each.parameters for part in parts for each in part.layers)
        assert held == network(name).parameters
        assert parts[-1].ready == 1


def test_exchanges_hide_behind_backward() -> None:
    """A fast link leaves only the last bucket exposed, and a slow one all but the first share."""
    net, here = equal_layers(10, 1 << 10), cluster(link="100gbit,1us")
    parts = steps.buckets(net)
    fast = steps.synchronous(parts, 10.0, here, "ring", "none")
    assert fast.exposed == pytest.approx(here.seconds("ring", 8 << 20, "none"), rel=1e-6)
    slow_net = cluster(link="10mbit")
    slow = steps.synchronous(parts, 1e-3, slow_net, "ring", "none")
    whole = sum(slow_net.seconds("ring", each, "none") for each in (4 << 20, 28 << 20, 8 << 20))
    assert slow.step == pytest.approx(whole, rel=1e-3)


def test_one_rank_exchanges_nothing() -> None:
    found = steps.synchronous(steps.buckets(network("nin")), 0.1, cluster(1), "ring", "none")
    assert (found.step, found.efficiency) == (0.1, 1.0)


def test_no_bytes_take_no_time() -> None:
    assert cluster().seconds("ring", 0, "none") == 0


def test_ways_to_train_share_their_exchanges() -> None:
    net, here = network("nin"), cluster()
    parts = steps.buckets(net)
    step = steps.synchronous(parts, 0.01, here, "ring", "none")
    assert steps.accumulated(step, 4).exposed == pytest.approx(step.exposed / 4)
    alone = steps.local(parts, 0.01, here, "ring", "none", 1)
    assert steps.local(parts, 0.01, here, "ring", "none", 8).exposed == pytest.approx(
        alone.exposed / 8
    )
    assert alone.step >= step.step


def test_a_server_costs_a_push_and_a_pull() -> None:
    net, here = network("nin"), cluster(4, "1gbit,50us")
    found = steps.server(steps.buckets(net), 1e-3, here, "none", 1.0)
    nbytes = 2 * 4 * net.parameters * 3 / 4  # three of four shards are elsewhere
    assert found.step == pytest.approx(nbytes * 8 / 1e9, rel=0.06)
    quarter = steps.server(steps.buckets(net), 1e-3, here, "int8", 4.0)
    assert quarter.step == pytest.approx(found.step * 5 / 8, rel=0.02)


def test_payloads_have_their_usual_size() -> None:
    """Payloads of onebit may need a mask of zeros beside the signs, which gradients hardly have."""
    here = cluster(4, "10mbit")
    wire = 1.5 * (16 << 20) * 8 / 10e6
    assert here.seconds("ring", 16 << 20, "onebit") == pytest.approx(0.033 * wire, rel=0.08)
    assert here.seconds("ring", 16 << 20, "int8") == pytest.approx(0.25 * wire, rel=0.08)
    few, many = (usual_share("topk", ranks) for ranks in (2, 64))
    assert few < 0.1 < many <= 1


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_sparse_payloads_are_gathered(ranks: int) -> None:
    """A rank receives the payload of each other one, none of which grows on the way."""
    values = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
    bits = 8 * (ranks - 1) * len(codec.get("topk").encode(values))
    found = cluster(ranks, "1mbit").seconds("ring", values.nbytes, "topk")
    assert found == pytest.approx(bits / 1e6, rel=0.1)


def test_biased_codecs_leave_ends_to_int8() -> None:
    net = equal_layers(10, 1 << 10)
    first, *_, last = steps.buckets(net)
    sent = payloads(last.layers, last.sensitive, "onebit")
    assert [(each.nbytes, each.codec) for each in sent] == [(4 << 20, "onebit"), (4 << 20, "int8")]
    assert [each.codec for each in payloads(first.layers, first.sensitive, "topk")] == ["int8"]
    assert [each.codec for each in payloads(last.layers, last.sensitive, "fp16")] == ["fp16"]
    words = Network("words", "tokens", (replace(net.layers[0], kind=EMBEDDING), *net.layers[1:]))
    assert [each.name for part in steps.buckets(words) for each in part.sensitive] == ["l9", "l0"]


def test_ranks_that_share_cores_take_turns() -> None:
    """Work lasts longer, the hook's own is counted, and nothing is hidden behind backward."""
    net, alone = equal_layers(10, 1 << 10), cluster(link="100gbit,1us")
    parts = steps.buckets(net)
    shared = replace(alone, turns=2.0, per_bucket=1e-3, overlaps=False)
    found = steps.synchronous(parts, 10.0, shared, "ring", "none")
    exchanged = sum(shared.seconds("ring", each, "none") for each in (4 << 20, 28 << 20, 8 << 20))
    copied = 2 * 2 * 40 * (1 << 20) * shared.base.parameters["gamma"]
    assert found.exposed == pytest.approx(exchanged + 3 * 2 * 1e-3 + copied, rel=1e-6)
    assert shared.seconds("ring", 8 << 20, "none") > 1.5 * alone.seconds("ring", 8 << 20, "none")


def test_a_measured_model_keeps_its_links() -> None:
    base = CostModel({"between.beta": 5e-8, "between.burst": 2e4, "sharing": 4})
    here = Cluster(4, flat("1gbit,50us"), base, measured=True)
    assert here.model == base
    assert here.seconds("ring", 8 << 20, "none") > 1.4 * (8 << 20) * 5e-8
    other = replace(here, measured=False).model.parameters
    assert (other["between.burst"], other["sharing"]) == (0, 1)


def test_lowrank_averages_factors() -> None:
    layer = dense("fc", 1000, 500, 1)
    found = payload([layer], "lowrank:rank=2")
    assert found.nbytes == 4 * (2 * (1000 + 500) + 500)  # the bias stays as it is
    assert found.codec == "none"
    assert found.factored == 4 * 2 * 1000 * 500
    assert payload([layer], "fp16").nbytes == 4 * (1000 * 500 + 500)

"""Sites: hosts far apart, between which each element goes once."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import gradwire
import hosts
import namespaces
import numpy as np
import pytest
from gradwire import Communicator, ErrorFeedback, InvalidArgument, ScheduleError
from gradwire._bootstrap import sites
from hosts import Network, Rank
from numpy.typing import NDArray
from ranks import on_ranks, run

from bench.network import two_sites
from bench.network.long_link import PROGRAM

WHY = namespaces.missing()
needs_hosts = pytest.mark.skipif(WHY is not None, reason=str(WHY))
if WHY is None and not os.access("/dev/net/tun", os.R_OK | os.W_OK):
    WHY = "no /dev/net/tun"
if WHY is None and not PROGRAM.exists():
    WHY = f"no {PROGRAM}: `make test-cpp` builds it"
needs_long_link = pytest.mark.skipif(WHY is not None, reason=str(WHY))

PLACES = {  # the names by rank, and the ranks of each site
    "even": (("a", "a", "b", "b"), ((0, 1), (2, 3))),
    "mixed": (("a", "b", "a", "b"), ((0, 2), (1, 3))),
    "uneven": (("a", "a", "a", "b", "b"), ((0, 1, 2), (3, 4))),
    "three": (("a", "b", "b", "c", "c", "a"), ((0, 5), (1, 2), (3, 4))),
    "apart": (("a", "b", "c"), ((0,), (1,), (2,))),
}
LOSSY = ("int8", "fp16", "onebit", "topk", "threshold")


def inputs(rank: int, call: int = 0, count: int = 5000) -> NDArray[np.float32]:
    return np.random.default_rng([rank, call]).standard_normal(count).astype(np.float32)


@pytest.mark.parametrize(
    ("near", "expected"),
    [
        ([{1, 2}, {0, 2}, {0, 1}], ((0, 1, 2),)),
        ([{2}, {3}, {0}, {1}], ((0, 2), (1, 3))),
        ([{2}, {2}, {0, 1}], ((0, 1, 2),)),  # 0 and 1 are both near 2, not near each other
        ([{3}, {2}, {1, 4}, {0}, {2}], ((0, 3), (1, 2, 4))),
        ([set(), {2}, {0, 1}], ((0,), (1, 2))),  # 2 sees the way to a relay, and 0 the whole
    ],
)
def test_a_chain_of_near_ranks_is_one_site(
    near: list[set[int]], expected: tuple[tuple[int, ...], ...]
) -> None:
    assert sites.grouped(near) == expected


def test_round_trips_of_nearly_the_same_length_count_alike() -> None:
    assert sites.rounded(0.0601) == sites.rounded(0.0639) == 0.064
    assert sites.rounded(0) == 0.001


@pytest.mark.parametrize("place", PLACES)
def test_ranks_with_the_same_name_are_at_one_site(place: str) -> None:
    names, expected = PLACES[place]

    def body(comm: Communicator) -> Any:
        part = comm.split(comm.rank % 2)
        assert part is not None
        with part:
            assert part.sites == (tuple(range(part.size)),)  # of ranks of one host
        return comm.sites

    assert run(len(names), body, sites=names) == [expected] * len(names)


@on_ranks(2)
def test_ranks_of_one_host_are_at_one_site(comm: Communicator) -> None:
    assert comm.sites == ((0, 1),)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_sums_over_sites_have_the_same_bits_on_all_ranks(place: str, op: str) -> None:
    names, _ = PLACES[place]

    def body(comm: Communicator) -> list[bytes]:
        found = []
        for dtype in (np.float32, np.float16, np.int64):
            x = (8 * inputs(comm.rank)).astype(dtype)
            if op == "avg" and dtype == np.int64:
                continue
            found.append(comm.all_reduce(x, op=op).tobytes())
        return found

    first, *others = run(len(names), body, sites=names)
    assert all(each == first for each in others)
    how = {"sum": np.sum, "avg": np.mean, "max": np.max}[op]
    expected = how([8 * inputs(rank) for rank in range(len(names))], axis=0)
    assert np.allclose(np.frombuffer(first[0], np.float32), expected, atol=1e-4)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_a_codec_between_sites_keeps_what_it_loses(place: str, codec: str, op: str) -> None:
    names, _ = PLACES[place]

    def body(comm: Communicator) -> Any:
        feedback = ErrorFeedback()
        given, delivered = np.zeros(5000), np.zeros(5000)
        for call in range(4):
            x = inputs(comm.rank, call)
            given += x
            comm.all_reduce(x, op=op, codec=f"{codec}:between=sites", feedback=feedback, key="x")
            delivered += x
        return given, delivered, feedback.residual("x"), x.tobytes()

    found = run(len(names), body, sites=names)
    assert len({each[3] for each in found}) == 1
    scale = len(names) if op == "avg" else 1
    kept = sum(each[2].astype(np.float64) for each in found)
    assert np.abs(kept).max() > 0
    given = sum(each[0] for each in found)
    assert np.allclose(scale * found[0][1] + kept, given, atol=1e-2)


def test_a_codec_between_sites_leaves_sums_within_them_as_they_are() -> None:
    def body(comm: Communicator) -> tuple[float, int]:
        x = inputs(comm.rank, count=100_000)
        before = comm.traffic.bytes_sent
        plain = comm.all_reduce(x.copy())
        between = comm.traffic.bytes_sent
        coded = comm.all_reduce(x, codec="int8:between=sites", feedback=False)
        sent = (between - before) - (comm.traffic.bytes_sent - between)
        return float(np.abs(coded - plain).max()), sent

    found = run(4, body, sites=("a", "a", "b", "b"))
    # Each rank sends half an array to the other site, of which about a quarter is left.
    assert all(0 < error < 0.2 for error, _ in found)
    assert all(saved == pytest.approx(0.75 * 200_000, rel=0.1) for _, saved in found)


@on_ranks(3)
def test_a_codec_between_sites_changes_nothing_at_one_site(comm: Communicator) -> None:
    feedback = ErrorFeedback()
    x = inputs(comm.rank)
    comm.all_reduce(x, codec="int8:between=sites", feedback=feedback, key="x")
    assert x.tobytes() == comm.all_reduce(inputs(comm.rank)).tobytes()


def test_infinite_values_are_seen_on_all_ranks() -> None:
    def body(comm: Communicator) -> Any:
        feedback = ErrorFeedback()
        for call in range(3):
            x = inputs(comm.rank, call)
            if call == 1 and comm.rank == 3:
                x[7] = np.inf
            kept = feedback.residual("x").copy() if call else None
            comm.all_reduce(x, codec="int8:between=sites", feedback=feedback, key="x")
            if call == 1:
                assert (feedback.residual("x") == kept).all()
                assert not np.isfinite(x).all()
        return x.tobytes()

    assert len(set(run(4, body, sites=("a", "a", "b", "b")))) == 1


def test_what_cannot_be_coded_between_sites_is_refused() -> None:
    def body(comm: Communicator) -> None:
        x = np.ones(100, np.float32)
        with pytest.raises(ScheduleError, match="within a site before"):
            comm.all_reduce(x, codec="int8:between=sites", algorithm="ring", feedback=False)
        with pytest.raises(ScheduleError, match="leave out between=sites"):
            comm.all_reduce(x, codec="int8:between=sites", algorithm="gather", feedback=False)
        with pytest.raises(InvalidArgument, match="for all_reduce alone"):
            comm.reduce(x, codec="int8:between=sites", feedback=False)
        for codec in ("lowrank", "none"):
            with pytest.raises(InvalidArgument, match="such as int8"):
                comm.all_reduce(x, codec=f"{codec}:between=sites", feedback=False)

    run(4, body, sites=("a", "a", "b", "b"))


@needs_hosts
def test_hosts_on_a_short_link_are_one_site_unless_they_have_names() -> None:
    def body(comm: Communicator, pipe: Any) -> Any:
        assert comm.all_reduce(np.ones(1000, np.float32), op="sum")[0] == comm.size
        return comm.sites

    with contextlib.closing(Network(3)) as network:
        named = {"environment": lambda rank: {"GRADWIRE_SITE": "north" if rank else "south"}}
        assert network.values(range(3), body) == [((0, 1, 2),)] * 3
        assert network.values(range(3), body, **named) == [((0,), (1, 2))] * 3


@needs_long_link
def test_hosts_on_a_long_link_are_two_sites() -> None:
    count, calls = 1 << 20, 4

    def body(rank: int, pipe: Any) -> Any:
        place = {"rank": rank, "ranks": 4, "store": f"tcp://{two_sites.STORE}:{hosts.PORT}"}
        with gradwire.init(**place, secret="0123456789abcdef") as comm:
            for _ in range(calls):
                x = inputs(comm.rank, count=count)
                comm.all_reduce(x)
            return comm.sites, x.tobytes()

    with two_sites.two_sites(2, 500, 20) as places, contextlib.ExitStack() as stack:
        ranks = []
        for number, place in enumerate(two_sites.hosts_of(places)):
            ranks.append(Rank(place, lambda pipe, number=number: body(number, pipe)))
            stack.callback(ranks[-1].close)
        found = [rank.outcome() for rank in ranks]
        assert [each.error for each in found] == [None] * 4
        sent = two_sites.sent_between(places)
    assert {each.value[0] for each in found} == {((0, 1), (2, 3))}
    assert len({each.value[1] for each in found}) == 1
    once = calls * 4 * count  # bytes each way; some packets are lost when links open
    assert once < sent < 1.35 * once


@pytest.mark.nightly
@needs_long_link
def test_a_step_of_ddp_at_two_sites_sends_each_gradient_between_them_once() -> None:
    torch = pytest.importorskip("torch")
    steps, width = 3, 1024
    sites, ranks = 2, 4

    def gradient(rank: int) -> Any:
        return torch.full((width, width), float(rank + 1))

    def body(rank: int, pipe: Any) -> Any:
        os.environ["GRADWIRE_SECRET"] = "0123456789abcdef"
        import gradwire.torch  # noqa: F401
        import torch.distributed as dist

        place = {"init_method": f"tcp://{two_sites.STORE}:{hosts.PORT}", "rank": rank}
        dist.init_process_group("gradwire", **place, world_size=ranks)
        model = torch.nn.Linear(width, width, bias=False)
        trained = torch.nn.parallel.DistributedDataParallel(model, init_sync=False)
        pipe.send("made")
        assert pipe.recv() == "step"
        for _ in range(steps):
            trained.zero_grad()
            (trained(torch.eye(width)) * gradient(rank).T).sum().backward()
        found = model.weight.grad
        assert torch.equal(found, sum(map(gradient, range(ranks))) / ranks)
        pipe.send("over")
        assert pipe.recv() == "end"
        dist.destroy_process_group()

    with two_sites.two_sites(ranks // sites, 200, 60) as places, contextlib.ExitStack() as stack:
        started = []
        for number, place in enumerate(two_sites.hosts_of(places)):
            started.append(Rank(place, lambda pipe, number=number: body(number, pipe)))
            stack.callback(started[-1].close)
        sent = []
        for told, answer in (("made", "step"), ("over", "end")):
            for each in started:
                assert each.pipe.poll(hosts.LIMIT)
                assert each.pipe.recv() == told
            sent.append(two_sites.sent_between(places))
            for each in started:
                each.pipe.send(answer)
        assert [each.outcome().error for each in started] == [None] * ranks
    once = steps * 4 * width * width
    assert once < sent[1] - sent[0] < 1.5 * once  # some packets are lost when windows open

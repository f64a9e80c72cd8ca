"""send and recv of torch.distributed: tags, any source, batches, and both directions at once."""

from __future__ import annotations

import os
import random
from typing import Any
from unittest import mock

import gradwire
import numpy as np
import pytest
import torch
import torch.distributed as dist
from gradwire.torch.backend.mailbox import Mailbox
from ranks import eventually
from torch_pool import on_ranks
from torch_versions import WRAPS, endpoint_of, forwards_all

LARGE = 1_500_001


def neighbours() -> tuple[int, int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return (rank - 1) % size, (rank + 1) % size


def pattern(sender: int, count: int = LARGE) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + sender


@on_ranks
def test_tags_are_matched_out_of_order() -> None:
    """Receives tags in the reverse of the order in which they are sent."""
    before, after = neighbours()
    sends = [dist.isend(pattern(tag, 10 * tag), after, tag=tag) for tag in range(6)]
    for tag in reversed(range(6)):
        x = torch.empty(10 * tag)
        assert dist.recv(x, before, tag=tag) == before
        assert torch.equal(x, pattern(tag, 10 * tag))
    for work in sends:
        work.wait()


@on_ranks
def test_large_messages_out_of_order() -> None:
    """Posts the receives first in one pair, and last in the other; messages do not fit a link."""
    before, after = neighbours()
    received = [torch.empty(LARGE) for _ in range(3)]
    works = [dist.irecv(received[tag], before, tag=tag) for tag in (2, 0)]
    works += [dist.isend(pattern(tag), after, tag=tag) for tag in range(3)]
    works.append(dist.irecv(received[1], before, tag=1))
    for work in works:
        work.wait()
        assert WRAPS or work.is_completed()
    for tag, each in enumerate(received):
        assert torch.equal(each, pattern(tag))


@on_ranks
def test_messages_of_one_tag_keep_their_order() -> None:
    before, after = neighbours()
    works = [dist.isend(torch.tensor([float(i)]), after, tag=3) for i in range(30)]
    received = [torch.empty(1) for _ in range(30)]
    works += [dist.irecv(each, before, tag=3) for each in received]
    for work in works:
        work.wait()
    assert torch.cat(received).tolist() == list(range(30))


@forwards_all
@on_ranks
def test_receives_from_any_rank_name_the_sender() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank != 0:
        dist.send(torch.full((5,), float(rank)), 0, tag=1)
        dist.send(torch.full((7,), float(rank)), 0, tag=2)
        return
    found, x, y = [], torch.empty(5), torch.empty(7)
    for _ in range(1, size):
        source = dist.recv(y, tag=2)
        assert torch.equal(y, torch.full((7,), float(source)))
        found.append(source)
    assert sorted(found) == list(range(1, size))
    work = dist.irecv(x, tag=1)
    work.wait()
    assert x[0] == work._source_rank() == work.source_rank()
    for source in range(1, size):
        if source != work.source_rank():
            dist.recv(x, source, tag=1)
            assert x[0] == source


@pytest.mark.skipif(not WRAPS, reason="older versions of torch hand out the operation itself")
@on_ranks
def test_what_torch_forgets_of_operations_in_python() -> None:
    """What docs/backend.md says of torch 2.14 and later."""
    if dist.get_rank() == 1:
        dist.send(torch.ones(2), 0)
    if dist.get_rank() == 0:
        x = torch.zeros(2)
        with pytest.raises(RuntimeError, match="sourceRank"):
            dist.recv(x)
        assert x.tolist() == [1.0] * 2
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    assert not work.is_completed()
    eventually(work.get_future().done)


@on_ranks
def test_a_receive_from_any_rank_beside_one_from_a_certain_rank() -> None:
    """Awaits one certain rank and any other at once; the other one's message comes first."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        certain, other = torch.empty(3), torch.empty(4)
        one = dist.irecv(certain, 1, tag=1)
        two = dist.irecv(other, tag=2)
        two.wait()
        assert other.tolist() == [size - 1.0] * 4
        dist.send(torch.zeros(1), 1, tag=9)
        one.wait()
        assert certain.tolist() == [1.0] * 3
    if rank == size - 1:
        dist.send(torch.full((4,), float(rank)), 0, tag=2)
    if rank == 1:
        dist.recv(torch.empty(1), 0, tag=9)
        dist.send(torch.ones(3), 0, tag=1)


@on_ranks
def test_batches() -> None:
    before, after = neighbours()
    x, y = torch.empty(LARGE), torch.empty(8, dtype=torch.int64)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, pattern(dist.get_rank()), after),
            dist.P2POp(dist.isend, torch.arange(8), before, tag=1),
            dist.P2POp(dist.irecv, y, after, tag=1),
            dist.P2POp(dist.irecv, x, before),
        ]
    )
    for work in works:
        work.wait()
    assert torch.equal(x, pattern(before))
    assert torch.equal(y, torch.arange(8))


@on_ranks
def test_receives_go_on_beside_collectives() -> None:
    """A receive that was begun goes on while its rank is in a collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.empty(LARGE)
    work = dist.irecv(x, 1) if rank == 0 else None
    if rank == 1:
        dist.send(pattern(1), 0)  # which ends when it has been received
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [size] * 3
    if work is not None:
        work.wait()
        assert torch.equal(x, pattern(1))


def _received_in_a_future(before: int, after: int) -> list[torch.Tensor]:
    future = dist.irecv(torch.zeros(2), before, tag=4).get_future()
    dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()  # not behind the receive
    dist.send(torch.ones(2), after, tag=4)
    return list(future.wait())


@on_ranks
def test_types_and_strides() -> None:
    before, after = neighbours()
    rank = dist.get_rank()
    for dtype in (torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16, torch.bfloat16):
        given = torch.ones(3, 2).to(dtype)
        work = dist.isend(given, after)
        found = torch.zeros(3, 2).to(dtype)
        dist.recv(found, before)
        work.wait()
        assert torch.equal(found.view(torch.uint8), given.view(torch.uint8))
    x = torch.zeros(4, 6)
    works = [dist.isend(pattern(rank, 24).view(6, 4).t(), after)]
    works.append(dist.irecv(x[:, ::2], before, tag=1))
    works.append(dist.isend(pattern(rank, 12).view(4, 3), after, tag=1))
    y = torch.zeros(6, 4)
    works.append(dist.irecv(y.t(), before))
    for work in works:
        work.wait()
    assert torch.equal(x[:, ::2], pattern(before, 12).view(4, 3))
    assert torch.equal(y, pattern(before, 24).view(6, 4))
    (found,) = _received_in_a_future(before, after)
    assert torch.equal(found, torch.ones(2))


@on_ranks
def test_a_message_to_the_rank_itself() -> None:
    rank = dist.get_rank()
    work = dist.isend(torch.full((3,), 1.0 * rank), rank, tag=7)
    x = torch.empty(3)
    dist.irecv(x, rank, tag=7).wait()
    work.wait()
    assert x.tolist() == [rank] * 3


@forwards_all
@on_ranks
def test_an_operation_that_is_over_has_its_results() -> None:
    """Results are in place once an operation says that it is over, without a wait."""
    before, after = neighbours()
    size = dist.get_world_size()
    sends = [dist.isend(torch.full((3,), 1.0 * tag), after, tag=tag) for tag in (1, 2)]
    dist.recv(torch.empty(3), before, tag=2)  # behind the message of tag 1, which is kept
    kept, strided = torch.zeros(3), torch.ones(4, 2)
    works = [
        dist.irecv(kept, before, tag=1),
        dist.all_reduce(strided[:, 0], async_op=True),
    ]
    for work in works:
        eventually(work.is_completed)
        assert work.is_success()
    assert kept.tolist() == [1.0] * 3
    assert strided.tolist() == [[size, 1.0]] * 4
    kept.zero_()
    works[0].wait()
    assert kept.tolist() == [0.0] * 3  # the program's by now
    for send in sends:
        send.wait()


@on_ranks
def test_messages_in_a_coalesced_batch() -> None:
    """What is sent and received within torch's coalescing manager is over when its work is."""
    before, after = neighbours()
    x, total = torch.zeros(LARGE), torch.ones(3)
    with dist.distributed_c10d._coalescing_manager(
        device=torch.device("cpu"), async_ops=True
    ) as manager:
        dist.irecv(x, before)
        dist.isend(pattern(dist.get_rank()), after)
        dist.broadcast(total, 0, async_op=True)
    manager.wait()
    assert torch.equal(x, pattern(before))


@on_ranks
def test_the_end_of_a_group_that_awaited_more_ranks_than_it_needed() -> None:
    """Destroys a group in which headers are still awaited that no receive needs."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    if rank == 0:
        certain, other = torch.empty(3), torch.empty(4)
        works = [dist.irecv(certain, 1, tag=1, group=group), dist.irecv(other, tag=2, group=group)]
        dist.barrier()
        for work in works:
            work.wait()
        assert (certain.tolist(), other.tolist()) == ([1.0] * 3, [2.0] * 4)
    else:
        dist.barrier()
    if rank == 1:
        dist.send(torch.full((4,), 2.0), 0, tag=2, group=group)
        dist.send(torch.ones(3), 0, tag=1, group=group)
    dist.destroy_process_group(group)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x == size


@on_ranks
def test_a_receive_without_memory_fails_at_once() -> None:
    """The message's memory cannot be had on the thread that takes messages in."""
    rank, group = dist.get_rank(), dist.new_group()
    if rank == 0:
        with (
            mock.patch.object(Mailbox, "_match", side_effect=MemoryError("no memory")),
            pytest.raises(MemoryError, match="no memory"),
        ):
            dist.recv(torch.empty(1), 1, group=group)
    if rank == 1:
        dist.isend(torch.ones(1), 0, group=group)
    dist.barrier()
    group.abort()


@on_ranks
def test_a_fork_cannot_receive() -> None:
    group = dist.new_group()
    dist.irecv(torch.ones(1), dist.get_rank(), group=group)  # there is a thread for it
    dist.isend(torch.ones(1), dist.get_rank(), group=group).wait()
    child = os.fork()
    if child == 0:
        try:
            dist.recv(torch.ones(1), dist.get_rank(), group=group)
        except gradwire.Error:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    dist.destroy_process_group(group)


@on_ranks
def test_a_message_of_another_size_is_refused() -> None:
    before, after = neighbours()
    work = dist.isend(torch.ones(3), after)
    with pytest.raises(gradwire.InvalidArgument, match=r"12 bytes.*expects 8"):
        dist.recv(torch.empty(2), before)
    work.wait()
    with pytest.raises(gradwire.InvalidArgument, match="tag=-1"):
        dist.send(torch.ones(1), after, tag=-1)
    dist.barrier()


@on_ranks
def test_a_header_that_nobody_sends_is_refused() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    if rank == 1:
        endpoint_of(group).communicator.send(np.array([0, -5], np.int64), 0)
    if rank == 0:
        with pytest.raises(gradwire.TransportError, match="1 announced a message of -5") as raised:
            dist.recv(torch.empty(1), 1)
        assert raised.value.peer == 1
    dist.barrier()


def _after_last_like(begun: list[Any], wanted: Any) -> int:
    def key(each: Any) -> Any:
        what, (sender, receiver, tag, *_) = each
        return what, sender, receiver, tag

    places = [place for place, each in enumerate(begun) if key(each) == key(wanted)]
    return max(places, default=-1) + 1


@pytest.mark.parametrize("seed", range(3))
@on_ranks
def test_many_messages_in_any_order(seed: int) -> None:
    """Sends and receives many messages at once, in another order on every rank.

    Messages of tags from 100 on are received from any rank; each such tag has one sender.
    """
    source, size, own = random.Random(seed), dist.get_world_size(), dist.get_rank()
    messages = []
    for number in range(150):
        sender, receiver = source.randrange(size), source.randrange(size)
        tag = source.choice([0, 1, 2, 100 + number])
        messages.append((sender, receiver, tag, source.choice([0, 1, 100, 5000, 150_000]), number))
    source.seed(f"{seed} {own}")
    begun = [("send", each) for each in messages if each[0] == own]
    incoming = [("recv", each) for each in messages if each[1] == own]
    for each in incoming:  # receives of one sender and tag stay in order, between all others
        begun.insert(source.randint(_after_last_like(begun, each), len(begun)), each)
    works, received = [], []
    for what, (sender, receiver, tag, count, number) in begun:
        if what == "send":
            works.append(dist.isend(torch.full((count,), number), receiver, tag=tag))
            continue
        x = torch.empty(count, dtype=torch.int64)
        works.append(dist.irecv(x, None if tag >= 100 else sender, tag=tag))
        received.append((x, number, works[-1], sender))
    source.shuffle(works)
    for work in works:
        work.wait()
    for x, number, work, sender in received:
        assert torch.equal(x, torch.full_like(x, number))
        assert WRAPS or work.source_rank() == sender
    dist.barrier()

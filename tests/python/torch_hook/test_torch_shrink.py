"""A DDP training that goes on without a rank that died, and what is left of one that does not."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import gradwire
import pytest
import torch.distributed as dist
import torch_ranks
from census import Census, census, growth
from gradwire.torch import Compression, State, register
from torch.nn.parallel import DistributedDataParallel
from torch_training import CODECS, SMALL_BUCKETS, Books, Tower, backward, mlp
from trainer_options import grouped

ROUNDING = 16.0  # units in the last place of all that was added up
VICTIM = 1


def go_on_without_a_rank() -> tuple[float, int]:
    """Loses a rank within a backward of which some buckets may have been averaged."""
    module = Tower(len(CODECS))
    books = Books(module)
    books.unit = 1 / 3  # for what a gradient counts in an average
    hook = {"rules": Tower.rules(CODECS), "min_elements": 0}
    ddp = DistributedDataParallel(module, **SMALL_BUCKETS)
    state = register(ddp, **grouped(feedback=True, **hook))
    for step in range(5):  # then each bucket travels at once
        backward(ddp, step)
        books.deliver()
    assert state.feedback is not None
    books.inherit(VICTIM, state.feedback)
    forget = books.mark()
    if dist.get_rank() == VICTIM:
        next(module.parameters()).register_hook(lambda _: torch_ranks.die())
    with pytest.raises(gradwire.TransportError) as raised:  # which keeps the model that failed
        backward(ddp, 5)
    assert raised.value.peer == VICTIM
    forget()
    ddp.zero_grad()

    communicator = state.communicator.shrink()
    state.close()
    survivors = dist.new_group([0, 2], use_local_synchronization=True)
    ddp = DistributedDataParallel(module, process_group=survivors, **SMALL_BUCKETS)
    again = register(ddp, **grouped(feedback=state.feedback, ranks=communicator, **hook))
    books.unit = 1 / 2
    for step in range(6, 11):
        backward(ddp, step)
        books.deliver(ranks=2)
    return books.missing(again.feedback, survivors), again.steps


def test_survivors_go_on_with_their_residuals() -> None:
    ended = torch_ranks.run(3, go_on_without_a_rank, dying=(VICTIM,))
    for missing, steps in (ended[0], ended[2]):
        assert missing < ROUNDING
        assert steps == 5


def train_until_one_dies(
    store: str, rank: int
) -> tuple[State, weakref.ref[DistributedDataParallel]]:
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    ddp = DistributedDataParallel(mlp(), **SMALL_BUCKETS)
    state = register(ddp, Compression("onebit", warm_up=0))
    for step in range(3):
        backward(ddp, step)
    if rank == 1:
        torch_ranks.die()
    with pytest.raises(gradwire.TransportError):
        backward(ddp, 3)
    return state, weakref.ref(ddp)


def count_what_is_left(directory: str) -> list[Census]:
    """Counts on rank 0, after each of the trainings with one of the other ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    connected = dist.FileStore(f"{directory}/connected", ranks)
    connected.set(str(rank), "")
    connected.wait([str(each) for each in range(ranks)])
    dist.destroy_process_group()  # earlier, ranks that gloo still connects would fail
    if rank > 0:
        train_until_one_dies(f"{directory}/{rank}", 1)
    found = []
    for other in range(1, ranks):
        state, model = train_until_one_dies(f"{directory}/{other}", 0)
        while model() is not None:  # soon, and before the state is closed
            gc.collect()
        state.close()
        dist.destroy_process_group()
        found.append(census())  # while somebody refers to the state
    return found


@pytest.mark.nightly
def test_nothing_is_left_of_a_hook_whose_rank_was_lost(tmp_path: Path) -> None:
    others = tuple(range(1, 9))
    found = torch_ranks.run(9, count_what_is_left, str(tmp_path), dying=others)[0][1:]
    print(found)
    assert growth([each.threads for each in found]) < 1
    assert growth([each.descriptors.total() for each in found]) < 1
    assert growth([len(each.shared) for each in found]) < 1
    assert growth([each.mappings for each in found]) < 1

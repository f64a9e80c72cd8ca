"""Ranks: who trains together, and how long one waits for another."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TypeAlias

import torch.distributed as dist

from gradwire._base.arguments import seconds, wrong
from gradwire._communicator import Communicator
from gradwire._errors import InvalidArgument
from gradwire.torch._ranks.group import communicator_of, communicator_over


@dataclass(frozen=True)
class Ranks:
    """The ranks that train together, and how long one of them waits for another.

    `register`, `register_fsdp`, `elastic.session`, `DiLoCo` and the optimizers take one as
    `ranks=`, or the communicator or process group alone (`Downpour` and `Sandblaster` talk to
    servers)::

        register(ddp, "int8", ranks=Ranks(timeout=60))
        OneBitAdam(model.named_parameters(), warm_up=300, ranks=gradwire.init())

    `over` is a communicator, which stays the caller's to close, or a process group of
    torch.distributed: the communicator of one of the backend gradwire, or one that is made over its
    ranks and closed with the trainer. Such a group must be able to exchange CPU tensors, as gloo's
    can. None is the model's group for `register` and `register_fsdp`, `gradwire.init` for
    `elastic.session`, and torch's default group for all others.

    `timeout` is that of a communicator which is made, in seconds; None is the group's, and that of
    `gradwire.init` where there is no group. Raises InvalidArgument for what cannot be.
    """

    over: Communicator | dist.ProcessGroup | None = None
    _: KW_ONLY
    timeout: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.over, Communicator | dist.ProcessGroup | None):
            raise wrong(self.over, "ranks", "a gradwire.Communicator, a process group, or a Ranks")
        if self.timeout is None:
            return
        seconds(self.timeout)
        if isinstance(self.over, Communicator):
            raise InvalidArgument(
                f"timeout={self.timeout} is for a communicator that is made, and ranks= has one, "
                "with a timeout of its own: leave timeout= out"
            )

    def connect(
        self, default: dist.ProcessGroup | None = None, *, alone: bool = False
    ) -> tuple[Communicator, bool]:
        """Returns the ranks' communicator, and whether it was made for this; every rank calls it.

        `default` is the model's group, if it has one, whose ranks these must be. With `alone`
        nothing else travels over the communicator. Raises RendezvousError and InvalidArgument.
        """
        if default is not None and self.over is not None:
            _require_same_ranks(self.over, default)
        if isinstance(self.over, Communicator):
            return self.over, False
        group = default if self.over is None else self.over
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is None:
            raise InvalidArgument(
                "there is no process group: give ranks=gradwire.init(), or call "
                "torch.distributed.init_process_group() first"
            )
        if alone:
            return communicator_of(group, self.timeout), True
        return communicator_over(group, self.timeout)


RanksLike: TypeAlias = Ranks | Communicator | dist.ProcessGroup | None


def ranks_of(given: RanksLike) -> Ranks:
    """Makes a Ranks of what a trainer was given; raises InvalidArgument for anything else."""
    return given if isinstance(given, Ranks) else Ranks(given)


def _require_same_ranks(given: Communicator | dist.ProcessGroup, group: dist.ProcessGroup) -> None:
    want = (group.rank(), group.size())
    have = (given.rank, given.size)
    if isinstance(given, dist.ProcessGroup):
        have = (given.rank(), given.size())
    if have != want:
        raise InvalidArgument(
            f"ranks= says rank {have[0]} of {have[1]}, the model's process group says rank "
            f"{want[0]} of {want[1]}: they must consist of the same ranks in the same order"
        )

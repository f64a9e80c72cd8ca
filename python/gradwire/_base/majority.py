"""The majority: the part of a communicator's ranks that goes on where a network parts them.

Ranks that cannot reach each other take each other to be dead. More than half of the ranks are a
majority, and so is a half that has rank 0. Two parts without a rank in common are never both one,
so at most one goes on. Processes that join do not count: each part might find some.
"""

from __future__ import annotations

from collections.abc import Set

from gradwire._errors import RendezvousError


def is_majority(left: Set[int], size: int) -> bool:
    """Whether these of `size` ranks may go on."""
    return 2 * len(left) + (0 in left) > size


def no_majority(rank: int, left: Set[int], size: int) -> RendezvousError:
    """The error of a rank that is left with a minority."""
    without = " without rank 0" if 2 * len(left) == size else ""
    return RendezvousError(
        f"rank {rank}: {len(left)} of {size} ranks{without} {'are' if len(left) > 1 else 'is'} no "
        f"majority; pass min_ranks={len(left)} to go on all the same: the others have failed, or "
        "the network between them and this part of the ranks has, and then they may go on; start "
        "again from a checkpoint, or join the others"
    )

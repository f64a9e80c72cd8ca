"""RankReport: what the ranks tell each other when a round's first fragment is due."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gradwire._communicator import Communicator
from gradwire._errors import InvalidArgument


class RankReport(NamedTuple):
    """One rank's; all are integers, and travel as int64."""

    checksum: int  # of the values that all ranks share
    nanoseconds: int  # of one inner step
    steps: int  # inner steps since the report before
    finished: int  # 1: this rank makes no more of them
    refuses: int  # 1: this rank cannot go on

    def exchange(self, communicator: Communicator) -> list[RankReport]:
        """All ranks' reports; every rank calls it."""
        rows = communicator.all_gather(np.array([self], np.int64))
        return [RankReport(*map(int, row)) for row in rows]


def raise_on_all(
    communicator: Communicator, problem: str, otherwise: str = "", ending: str = ""
) -> None:
    """Raises InvalidArgument on all ranks with the problems of those that have one.

    Raises with `otherwise` where no rank has one; `ending` is what follows for all.
    """
    problems = communicator.all_gather_object(problem)
    told = [f"rank {rank}: {each}" for rank, each in enumerate(problems) if each]
    raise InvalidArgument(("; ".join(told) or otherwise) + ending)

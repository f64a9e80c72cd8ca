"""Report: what the ranks tell each other when a round's first fragment is due."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from gradwire._communicator import Communicator
from gradwire._errors import Error, InvalidArgument
from gradwire.torch._local.outer import digests


class Report(NamedTuple):
    """One rank's; all are integers, and travel as int64."""

    checksum: int  # of the values that all ranks share
    nanoseconds: int  # of one inner step
    steps: int  # inner steps since the report before
    finished: int  # 1: this rank makes no more of them
    refuses: int  # 1: this rank cannot go on

    def exchange(self, communicator: Communicator) -> list[Report]:
        """All ranks' reports; every rank calls it."""
        rows = communicator.all_gather(np.array([self], np.int64))
        return [Report(*map(int, row)) for row in rows]


def raise_on_all(
    communicator: Communicator, problem: str, otherwise: str = "", ending: str = ""
) -> None:
    """Raises InvalidArgument on all ranks with the problems of those that have one.

    Raises with `otherwise` where no rank has one; `ending` is what follows for all.
    """
    problems = communicator.all_gather_object(problem)
    told = [f"rank {rank}: {each}" for rank, each in enumerate(problems) if each]
    raise InvalidArgument(("; ".join(told) or otherwise) + ending)


def require_agreement(communicator: Communicator, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises Error on all ranks unless all have the same bits; every rank calls it."""
    every = communicator.all_gather_object(digests(tensors))
    for name in tensors:
        having = _ranks_by([each.get(name) for each in every])
        if len(having) > 1:
            groups = "; ".join(f"ranks {', '.join(map(str, each))}" for each in having)
            raise Error(
                f"the ranks' outer values of {name!r} differ, and these have the same: {groups}. "
                "Values must change on all ranks alike: do processors differ, or does the program "
                "change the model's parameters between steps? Load a checkpoint to go on"
            )


def _ranks_by(values: Sequence[object]) -> list[list[int]]:
    """The ranks that have each value."""
    found: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(rank)
    return list(found.values())

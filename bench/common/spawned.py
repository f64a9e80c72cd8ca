"""The ranks of a benchmark as processes of one function, of which rank 0 prints."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from typing import Any


def run(ranks: int, serve: Callable[[int, str, Any], None], options: Any) -> int:
    """Runs `serve(rank, store, options)` in a process for each rank; returns an exit status.

    `store` is the path of a file at which the ranks meet.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        processes = [
            context.Process(target=serve, args=(rank, f"{scratch}/store", options))
            for rank in range(ranks)
        ]
        for each in processes:
            each.start()
        for each in processes:
            each.join()
    return max(abs(each.exitcode or 0) for each in processes)

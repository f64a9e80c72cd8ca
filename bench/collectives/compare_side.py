"""One of the two trees that compare.py measures: ranks that wait for commands, by its gradwire.

    python -m bench.collectives.compare_side RANKS TRANSPORT

Reads lines of JSON, a case each, with how many calls of it to time; without, it checks the case's
results and answers how many calls to time.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

from gradwire.lab.tuning.measure import case_of_bytes

from bench.collectives.rank_pool import RankPool


def main() -> int:
    """Serves until the end of its input."""
    pool = RankPool(int(sys.argv[1]), sys.argv[2])
    # Not sys.stdin: ranks that are forked meanwhile close it, and would wait for its reader's lock.
    with contextlib.closing(pool), open(0, closefd=False) as commands:
        for line in commands:
            print(json.dumps(_answer(pool, **json.loads(line))), flush=True)
    return 0


def _answer(pool: RankPool, nbytes: int, calls: int | None = None, **case: Any) -> dict[str, Any]:
    chosen = case_of_bytes(nbytes, pool.ranks, **case)
    if calls is None:
        return {"calls": pool.fit(chosen)}
    return {"seconds": pool.seconds(chosen, calls)}


if __name__ == "__main__":
    sys.exit(main())

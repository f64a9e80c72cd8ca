"""Digests of the results and residuals of every collective, algorithm, dtype, operation and codec.

`python tests/python/support/recorded_bits.py` writes them to recorded_bits.json, with which
test_recorded_bits.py compares what the library computes now. Run it where a change of bits is
meant, and say so in CHANGELOG.md: replicas that run different releases would no longer agree.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))  # for the package bench

import gradwire
import numpy as np
import ranks

from tests.gpu.arrays import Cpu
from tests.gpu.calls import Found, run
from tests.gpu.loopback import CODECS, Extent, groups

_KEPT = ("residual", "tau", "calls")
FILE = Path(__file__).with_suffix(".json")
SIZES = (2, 3, 4, 5)
EXTENT = Extent(SIZES, (1, 1001), (3001,), (1,), CODECS, ((40, 60), (33,), (64, 25)))


def measured(p: int) -> dict[str, str]:
    """The digest of each group of calls on p ranks, all ranks' together."""
    made = {name: list(cases) for name, cases in groups(EXTENT, p, Cpu.dtypes)}

    def body(comm: gradwire.Communicator) -> dict[str, str]:
        return {name: _digest(run(comm, case, Cpu()) for case in made[name]) for name in made}

    told = ranks.run(p, body)
    return {name: _sha("".join(each[name] for each in told).encode()) for name in made}


def _digest(found: Iterable[Found]) -> str:
    parts = []
    for each in found:
        parts += [bool(each.refused).to_bytes(1, "little"), *each.results]
        parts += [np.asarray(kept[what]).tobytes() for kept in each.kept.values() for what in _KEPT]
    return _sha(b"|".join(parts))


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


if __name__ == "__main__":
    FILE.write_text(json.dumps({str(p): measured(p) for p in SIZES}, indent=1) + "\n")

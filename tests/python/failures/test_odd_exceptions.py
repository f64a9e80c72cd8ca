"""Exceptions whose texts cannot be encoded: names of files that are no UTF-8 have surrogates."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gradwire
import numpy as np
import pytest
from gradwire import Aborted, Communicator
from gradwire._bootstrap import rendezvous_exchange
from ranks import LIMIT, outcomes

ODD = "cannot read 'caf\udce9.txt'"


def test_a_block_that_raises_one_aborts_the_others() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            raise ValueError(ODD)
        comm.all_reduce(np.ones(3))

    first, second = outcomes(2, body, transport="shm", processes=True)
    assert isinstance(first.error, Aborted)
    assert first.error.peer == 1
    assert "ValueError" in str(first.error)
    assert isinstance(second.error, ValueError)


def test_a_reason_to_abort_may_have_them() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.abort(ODD)
        with pytest.raises(Aborted, match="cannot read 'caf") as raised:
            comm.all_reduce(np.ones(3))
        assert raised.value.peer == 1

    for each in outcomes(2, body, transport="shm", processes=True):
        assert each.error is None


def raise_odd(comm: Communicator) -> None:
    if comm.rank == 1:
        raise ValueError(ODD)
    comm.barrier()


def test_spawn_raises_it() -> None:
    with pytest.raises(ValueError, match="cannot read 'caf"):
        gradwire.spawn(raise_odd, 2)


PROGRAM = """
import gradwire

comm = gradwire.init()
if comm.rank == 1:
    raise ValueError("cannot read 'caf\\udce9.txt'")
comm.barrier()
"""


def test_run_tells_of_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "gradwire", "run", "-n", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 1
    assert "ValueError: cannot read 'caf\\udce9.txt'" in done.stderr
    assert "rank 1" in done.stderr.splitlines()[-1]


def test_a_rank_that_gives_up_as_the_ranks_meet_may_tell_it() -> None:
    packed = rendezvous_exchange._pack_failure(1, ODD)
    told = rendezvous_exchange._unpack_failure(packed, 2)
    assert "cannot read 'caf\\udce9.txt'" in str(told)

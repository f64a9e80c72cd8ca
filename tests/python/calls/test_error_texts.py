"""Error texts arrive on the other ranks, in any language."""

from __future__ import annotations

import pytest
from gradwire import Aborted, Communicator
from ranks import outcomes


@pytest.mark.parametrize("offset", range(4))
def test_a_long_reason_may_be_cut_in_the_middle_of_a_letter(offset: int) -> None:
    """A control frame has room for 232 bytes of it."""

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.abort("x" * offset + "ж語" * 200)
        comm.barrier()

    for each in outcomes(2, body):
        assert isinstance(each.error, Aborted)
        assert str(each.error).startswith("rank 0: " + "x" * offset + "ж語ж語")

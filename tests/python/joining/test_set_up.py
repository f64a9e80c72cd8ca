"""While the links are made: whoever is missing is named, on all ranks."""

from __future__ import annotations

import select
import signal
import threading

import pytest
from gradwire import Aborted, Error, Timeout, TransportError
from gradwire._bootstrap.mesh import Mesh
from gradwire._communicator import from_mesh
from ranks import LIMIT, meshes, over_all

P, MISSING = 4, 1


def errors(made: list[Mesh], timeout: float) -> list[Error]:
    """The errors of all ranks but the missing one."""
    raised: list[Error] = []

    def make(mesh: Mesh) -> None:
        try:
            from_mesh(mesh, timeout=timeout).close()
        except Error as error:
            raised.append(error)

    threads = [
        threading.Thread(target=make, args=(mesh,), daemon=True)
        for mesh in made
        if mesh.rank != MISSING
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert len(raised) == P - 1
    return raised


@over_all
def test_a_rank_that_does_not_come_is_named(transport: str) -> None:
    made = meshes(P, transport)
    for error in errors(made, timeout=0.5):
        assert isinstance(error, Timeout)
        assert error.peer == MISSING, error
    made[MISSING].close()


@over_all
def test_a_rank_that_died_is_named(transport: str) -> None:
    made = meshes(P, transport)
    made[MISSING].close()
    for error in errors(made, timeout=30):
        assert isinstance(error, TransportError)
        assert error.peer == MISSING, error


@over_all
def test_ctrl_c_ends_the_wait_for_a_link(transport: str) -> None:
    one, other = meshes(2, transport)

    def interrupt() -> None:
        """Once the greeting says that rank 0 waits for rank 1's."""
        greeted = select.select([other.peers[0].links["p2p"].sock], [], [], LIMIT)[0]
        assert greeted
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        from_mesh(one, timeout=2 * LIMIT)
    thread.join(LIMIT)
    with pytest.raises(Aborted, match="rank 0 was interrupted"):  # there, or in its first call
        from_mesh(other, timeout=2 * LIMIT).barrier()

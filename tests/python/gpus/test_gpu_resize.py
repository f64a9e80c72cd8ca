"""Ranks with GPUs, which are simulated, leave and join a communicator."""

from __future__ import annotations

from simulated_gpu import needed, run

pytestmark = needed

_STEP = """
    import pytest

    def agree(comm):
        on_gpu, on_cpu = Array(values(comm.rank)), values(comm.rank)
        for codec in ("none", "int8"):
            comm.all_reduce(on_gpu, codec=codec)
            comm.all_reduce(on_cpu, codec=codec)
        assert on_gpu.get().tobytes() == on_cpu.tobytes()
        return comm.rank, comm.size, comm._gpu.links

    def leave(comm):
        for other in range(comm.size):  # is over with its calls before
            if other != comm.rank:
                comm.recv(np.empty(1), other)
        comm.abort("it leaves")
        comm.close()

    def lose(comm, rank):
        x = Array(values(comm.rank))
        with pytest.raises(gradwire.Error):
            comm.send(np.zeros(1), rank)
            while True:
                comm.all_reduce(x)
                x.get()
"""

_ELASTIC = """
if __name__ == "__main__":
    from elastic_job import elastic_job

    with elastic_job() as job:
        print(json.dumps([each.value() for each in job.start({ranks}, body)]))
"""


def test_the_others_go_on_and_a_rank_joins_again() -> None:
    """The others are in the middle of a call when rank 0, which has the join listener, leaves."""
    found = run(
        _STEP
        + """
    from elastic_job import SECRET

    def body(comm):
        found = [agree(comm)]
        if comm.rank == 0:
            leave(comm)
            comm = gradwire.join(timeout=60, secret=SECRET)
        else:
            lose(comm, 0)
            comm = comm.resize(min_ranks=3, wait=60)
        found.append(agree(comm))
        comm = comm.resize()  # also where nobody has left or joined
        found.append(agree(comm))
        comm.close()
        return found
        """,
        3,
        end=_ELASTIC,
        GRADWIRE_GPU_LINKS="host",
    )
    assert [rank for rank, *_ in (each[1] for each in found)] == [2, 0, 1]
    assert {(size, way) for each in found for _, size, way in each} == {(3, "host")}


def test_ranks_that_are_threads_resize() -> None:
    found = run(
        _STEP
        + """
    def body(comm):
        x = Array(values(comm.rank))
        work = comm.all_reduce(x, async_op=True)  # nobody waits for it
        agree(comm)
        if comm.rank == 1:
            leave(comm)
            return None
        lose(comm, 1)
        comm = comm.resize(timeout=30)
        return agree(comm)
        """,
        3,
        threads=True,
    )
    assert found == [[0, 2, "loopback"], None, [1, 2, "loopback"]]

"""Ranks that are processes and map each other's memory on a simulated GPU.

Messages and calls between threads are tested in tests/cpp/cuda/.
"""

from __future__ import annotations

import os
import signal

import gradwire
import numpy as np
import pytest
import ranks
from simulated_gpu import Array, needed, path, run

pytestmark = needed

IPC = {"GRADWIRE_GPU_LINKS": "ipc"}


def test_results_and_residuals_are_those_of_the_cpu() -> None:
    told = run(
        """
        def body(comm):
            found, wrong = [], []
            for again in range(2):  # the second communicator takes the staging of the first
                part = comm.split(0)
                for codec in ("none", "fp16", "int8", "onebit", "topk"):
                    on_cpu, on_gpu = values(comm.rank, 3000), Array(values(comm.rank, 3000))
                    ef_cpu, ef_gpu = gradwire.ErrorFeedback(), gradwire.ErrorFeedback()
                    wish = dict(op="avg", algorithm="direct", codec=codec, key="k")
                    for x, ef in ((on_cpu, ef_cpu), (on_gpu, ef_gpu)):
                        part.all_reduce(x, **wish, feedback=ef)
                        part.all_reduce(x, algorithm="direct")
                        part.all_reduce(x, algorithm="ring")
                        part.all_reduce(x, **wish, feedback=ef)
                    if on_gpu.get().tobytes() != on_cpu.tobytes():
                        wrong.append(codec)
                    if ef_gpu.residual("k").tobytes() != ef_cpu.residual("k").tobytes():
                        wrong.append(f"residual of {codec}")
                found.append(part._gpu.links)
                part.close()
            return found, wrong
        """,
        3,
        **IPC,
    )
    assert told == [[["ipc", "ipc"], []]] * 3


def test_other_collectives() -> None:
    run(
        """
        def body(comm):
            r, p = comm.rank, comm.size
            x = Array(np.arange(4, dtype=np.int64) + 10 * r)
            gathered = np.concatenate([np.arange(4) + 10 * i for i in range(p)])
            out = Array(np.zeros(4 * p, np.int64))
            comm.all_gather(x, out=out)
            assert (out.get() == gathered).all()
            part = Array(np.zeros(4, np.int64))
            comm.reduce_scatter(out, out=part)
            assert (part.get() == p * (np.arange(4) + 10 * r)).all()
            total = Array(np.full(70_000, r, np.float32))
            comm.all_reduce(total)  # by "auto"
            assert (total.get() == p * (p - 1) / 2).all()
            comm.close()
        """,
        2,
        **IPC,
    )


@pytest.mark.parametrize("harm", ["killed", "stopped"])
def test_a_rank_that_kernels_wait_for_is_named(harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 ends, or stops, while the others' kernels wait for it."""
    monkeypatch.setenv("GRADWIRE_CUDA_SO", str(path()))
    monkeypatch.setenv("GRADWIRE_GPU_LINKS", "ipc")

    def body(comm: gradwire.Communicator) -> tuple[str, int | None]:
        x = Array(np.ones(1000, np.float32))
        process = int(comm.all_gather(np.array([os.getpid()]))[1])
        comm.all_reduce(x)
        assert comm._gpu is not None
        comm._gpu._core.finish(30)
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL if harm == "killed" else signal.SIGSTOP)
        try:
            comm.all_reduce(x, timeout=2)
            comm._gpu._core.finish(30)
        except gradwire.Error as error:
            return type(error).__name__, getattr(error, "peer", None)
        finally:
            if comm.rank == 0 and harm == "stopped":
                ended.wait(30)
                os.kill(process, signal.SIGKILL)
            elif harm == "stopped":
                ended.set()
        return "nothing", None

    ended = ranks.multiprocessing.get_context("fork").Event()
    told = ranks.outcomes(3, body, transport="tcp", processes=True, timeout=30)
    expected = ("TransportError" if harm == "killed" else "Timeout", 1)
    assert [told[0].value, told[2].value] == [expected] * 2, told


def test_a_rank_ends_only_once_all_have_read_its_memory() -> None:
    """Rank 0 has nothing left to do while rank 1's device has not read its broadcast yet."""
    told = run(
        """
        import multiprocessing, threading
        goes_on = multiprocessing.get_context("fork").Event()

        def let_go():
            goes_on.set()
            library().simulated_cuda_hang(0)

        def body(comm):
            x = Array(values(comm.rank))
            comm.broadcast(x)
            x.get()
            comm.barrier()
            if comm.rank == 1:
                library().simulated_cuda_hang(1)
                threading.Timer(0.3, let_go).start()
            comm.broadcast(x)
            comm.close()
            return goes_on.is_set()
        """,
        2,
        **IPC,
    )
    assert told == [True, True]


def test_hosts_of_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped memory within hosts of two ranks and of one, and the CPU transports between them."""
    monkeypatch.setenv("GRADWIRE_CUDA_SO", str(path()))
    monkeypatch.setenv("GRADWIRE_GPU_LINKS", "ipc+host")

    def body(comm: gradwire.Communicator) -> tuple[str, list[str]]:
        wrong = []
        for codec in ("none", "onebit"):
            for algorithm in ("ring", "hierarchical(direct,direct)"):
                x = np.random.default_rng(comm.rank).standard_normal(3000).astype(np.float32)
                y = Array(x)
                for each in (x, y):
                    comm.all_reduce(each, codec=codec, algorithm=algorithm, feedback=False)
                if y.get().tobytes() != x.tobytes():
                    wrong.append(f"{codec} by {algorithm}")
        assert comm._gpu is not None
        links = comm._gpu.links
        comm.close()
        return links, wrong

    for hosts in (((0, 1), (2, 3)), ((0,), (1, 2))):
        size = sum(map(len, hosts))
        told = ranks.run(size, body, transport="tcp", processes=True, timeout=30, hosts=hosts)
        assert told == [("host+ipc", [])] * size


def test_a_gpu_that_exports_no_memory_is_refused_on_all_ranks() -> None:
    found = run(
        """
        import os
        def body(comm):
            if comm.rank == 1:
                os.environ["SIMULATED_CUDA_IPC"] = "0"
            try:
                comm.all_reduce(Array(values(comm.rank)))
            except gradwire.InvalidArgument as error:
                return str(error)
        """,
        3,
        **IPC,
    )
    assert len(set(found)) == 1
    assert (
        "GRADWIRE_GPU_LINKS has ipc: rank 0: the memory of rank 1's GPU can't be mapped" in found[0]
    )

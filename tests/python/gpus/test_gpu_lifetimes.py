"""Streams, arrays and residuals on a GPU, which is simulated: in whose order, and for how long."""

from __future__ import annotations

import pytest
from gradwire import InvalidArgument
from gradwire._calls.gpus import _choose_links, _GpuInfo
from simulated_gpu import needed, run

pytestmark = needed


def test_streams_outlive_communicators_and_are_taken_again() -> None:
    """An allocator that was told of one records an event there when the array is freed."""
    run(
        """
        def body(comm):
            found = set()
            for _ in range(3):
                other = comm.split(0)
                x = Array(values(0))
                other.all_reduce(x, async_op=True).wait()
                x.get()
                found.add(other._gpu.stream)
                other.close()
                del other
            assert len(found) == 1
            gradwire._core.CudaEvent(0).record(found.pop())
        """,
        1,
    )


def test_the_first_calls_of_two_threads_set_up_one_gpu() -> None:
    run(
        """
        import threading

        def body(comm):
            arrays = [Array(values(i)) for i in range(4)]
            begin = threading.Barrier(len(arrays))
            found = []
            def call(x):
                begin.wait()
                comm.all_reduce(x, async_op=True).wait()
                found.append((comm._gpu, comm._gpu.stream))
            threads = [threading.Thread(target=call, args=(x,)) for x in arrays]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
            assert len(found) == len(arrays) and len(set(found)) == 1
        """,
        1,
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_array_of_a_call_is_used_in_the_order_of_its_stream(asynchronous: bool) -> None:
    run(
        f"""
        def body(comm):
            streams = [gradwire._core.CudaStream(0) for _ in range(3)]
            arrays = [Array(values(0), each.handle) for each in streams]
            for turn in range(5):
                for i, each in enumerate(arrays):
                    for _ in range(50 * i):
                        each.put(values(99))
                    each.put(values(turn + i))  # for which nobody waits
                work = comm.all_reduce(arrays, async_op={asynchronous})
                if {asynchronous}:
                    work.wait()
                for i, each in reversed(list(enumerate(arrays))):
                    assert (each.get() == 2 * values(turn + i)).all(), (turn, i)
        """,
        threads=True,
    )


def test_a_call_on_each_threads_default_stream_runs_on_a_stream_of_gradwires() -> None:
    """The handle 2 means another stream on another thread."""
    run(
        """
        def body(comm):
            x = Array(values(0), 2)
            for turn in range(20):
                x.put(values(turn))
                assert comm.all_reduce(x) is x
                assert (x.get() == 2 * values(turn)).all(), turn
            assert comm._gpu.stream is not None
        """,
        threads=True,
    )


def test_an_array_is_kept_until_the_gpu_has_used_it() -> None:
    run(
        """
        import weakref

        def body(comm):
            first, x = Array(values(0)), Array(values(0))
            comm.all_reduce(first, async_op=True).wait()
            still = weakref.ref(x)
            library().simulated_cuda_hang(1)
            work = comm.all_reduce(x, async_op=True)
            del work, x
            kept = still() is not None
            library().simulated_cuda_hang(0)
            assert kept
            while still() is not None:
                y = Array(values(0))
                comm.all_reduce(y, async_op=True).wait()
                y.get()
        """,
        1,
    )


def test_other_threads_run_while_the_end_of_residuals_waits_for_the_gpu() -> None:
    run(
        """
        import threading

        def body(comm):
            ef = gradwire.ErrorFeedback()
            x = Array(values(0))
            comm.all_reduce(x, codec="int8", feedback=ef, key="k")
            x.get()
            gpu = library()
            gpu.simulated_cuda_hang(1)
            comm.all_reduce(x, codec="int8", feedback=ef, key="k")
            threading.Timer(0.2, gpu.simulated_cuda_hang, [0]).start()
            del ef
        """,
        1,
    )


def test_a_call_may_be_under_way_when_its_communicator_closes() -> None:
    """The call ends with an error."""
    found = run(
        """
        import contextlib, threading

        def body(comm):
            comm.all_reduce(Array(values(0)))
            comm.barrier()
            if comm.rank == 1:
                with contextlib.suppress(gradwire.Error):
                    comm.barrier()
                return "nothing"
            said = []
            def call():
                try:
                    comm.all_reduce(Array(values(0)), timeout=2)
                except gradwire.Error as error:
                    said.append(type(error).__name__)
            thread = threading.Thread(target=call)
            thread.start()
            time.sleep(0.5)
            comm._gpu._core.close()
            for _ in range(3):
                comm._gpu.abort("again")
            thread.join()
            comm.abort()
            return said[0]
        """,
        threads=True,
    )
    assert found[0] in ("Timeout", "Aborted")


def test_a_forked_child_leaves_the_gpu_alone() -> None:
    """Calls of the child would hang there, as those to a real GPU may."""
    found = run(
        """
        import gc, multiprocessing

        def child(comm, ef, kept, said):
            for call in (
                lambda: comm.all_reduce(kept[0]),
                lambda: ef.residual("k"),
                lambda: kept[1].wait(),
                lambda: kept[1].done(),
                lambda: gradwire._core.CudaStream(0),
            ):
                try:
                    call()
                except gradwire.Aborted as error:
                    said.send(str(error))
            del comm._gpu, ef._gpu
            kept.clear()
            gc.collect()
            sys.exit(7)

        def body(comm):
            ef = gradwire.ErrorFeedback()
            x = Array(values(0))
            comm.all_reduce(x, codec="int8", feedback=ef, key="k")
            kept = [x, comm.all_reduce(x, async_op=True), gradwire._core.CudaStream(0)]
            library().simulated_cuda_hang(1)
            heard, said = multiprocessing.Pipe(False)
            fork = multiprocessing.get_context("fork")
            process = fork.Process(target=child, args=(comm, ef, kept, said))
            process.start()
            process.join(20)
            if process.exitcode is None:
                process.kill()
            library().simulated_cuda_hang(0)
            texts = []
            while heard.poll():
                texts.append(heard.recv())
            return [process.exitcode, *texts]
        """,
        1,
        GRADWIRE_GPU_LINKS="host",
    )
    assert found[0][0] == 7
    assert len(found[0]) == 6
    assert all("fork" in each for each in found[0][1:])


def _infos(
    processes: str,
    devices: str,
    *,
    nccl: str = "2.27",
    requested: str = "auto",
    hosts: str = "",
) -> list[_GpuInfo]:
    return [
        _GpuInfo(f"{host} {process}", device, "GPU", nccl, requested, "")
        for host, process, device in zip(
            hosts or "h" * len(processes), processes, devices, strict=True
        )
    ]


def test_links_where_all_ranks_have_what_they_need() -> None:
    assert _choose_links(_infos("ab", "01")) == "nccl"
    assert _choose_links(_infos("aabb", "0123")) == "nccl"
    assert _choose_links(_infos("aa", "00")) == "loopback"
    assert _choose_links(_infos("ab", "00")) == "host"
    assert _choose_links(_infos("ab", "01", nccl="")) == "host"
    assert _choose_links(_infos("a", "0", requested="host")) == "host"


@pytest.mark.parametrize(
    "infos",
    [
        _infos("abb", "012", requested="host"),
        _infos("aab", "012", requested="nccl+host"),
        _infos("aa", "01", requested="host"),
        _infos("abcb", "0120"),
        _infos("abb", "012", nccl=""),
    ],
)
def test_ranks_that_share_a_process_do_not_go_by_way_of_the_host(infos: list[_GpuInfo]) -> None:
    with pytest.raises(InvalidArgument, match=r"ranks \d and \d are threads of one process"):
        _choose_links(infos)

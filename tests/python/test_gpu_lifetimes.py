"""Streams, arrays and residuals on a GPU, which is simulated: in whose order, and for how long."""

from __future__ import annotations

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
    """It ends with an error, of what it still has."""
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
    """Whose calls would hang there, as those of a real one may."""
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

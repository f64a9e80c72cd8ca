"""Collectives on arrays on a GPU, which is simulated: the whole way from Python but for the device.

The bits of every schedule and codec are compared in tests/cpp/cuda/.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated_gpu import needed, run

pytestmark = needed


@pytest.mark.parametrize("threads", [True, False], ids=["loopback", "host"])
def test_results_are_those_of_the_cpu(threads: bool) -> None:
    """Threads exchange messages on the device, processes by way of the CPU transports."""
    same = run(
        """
        def body(comm):
            same = {"links": comm.all_reduce(Array(values(0, 3))) is not None and comm._gpu.links}
            for codec in ("none", "fp16", "int8", "onebit", "threshold", "topk"):
                on_cpu, on_gpu = values(comm.rank), Array(values(comm.rank))
                ef_cpu, ef_gpu = gradwire.ErrorFeedback(), gradwire.ErrorFeedback()
                for _ in range(2):
                    wish = dict(op="avg", codec=codec, key="k", algorithm="ring")
                    comm.all_reduce(on_cpu, feedback=ef_cpu, **wish)
                    comm.all_reduce(on_gpu, feedback=ef_gpu, **wish)
                results = on_gpu.get().tobytes() == on_cpu.tobytes()
                residuals = ef_gpu.residual("k").tobytes() == ef_cpu.residual("k").tobytes()
                same[codec] = results and residuals
            return same
        """,
        threads=threads,
    )
    for each in same:
        assert each.pop("links") == ("loopback" if threads else "host")
        assert all(each.values()), each


def test_a_codec_between_sites_encodes_nothing_at_one() -> None:
    run(
        """
        def body(comm):
            plain, coded = Array(values(comm.rank)), Array(values(comm.rank))
            comm.all_reduce(plain)
            feedback = gradwire.ErrorFeedback()
            wish = dict(codec="int8:between=sites", feedback=feedback, key="x")
            for _ in range(2):
                coded.put(values(comm.rank))
                comm.all_reduce(coded, **wish)
            assert coded.get().tobytes() == plain.get().tobytes()
            assert not feedback.residual("x").any()
        """
    )


def test_a_codec_between_sites_is_refused_where_there_are_several() -> None:
    run(
        """
        import pytest

        def body(comm):
            assert len(comm.sites) == 2
            given, feedback = values(comm.rank), gradwire.ErrorFeedback()
            x = Array(given)
            with pytest.raises(gradwire.InvalidArgument, match="copy them there, or leave out"):
                comm.all_reduce(x, codec="int8:between=sites", feedback=feedback, key="x")
            assert (x.get() == given).all()
            comm.all_reduce(x)
            assert np.allclose(x.get(), values(0) + values(1))
        """,
        end="import ranks; ranks.run(2, body, sites=('north', 'south')); print('{{}}')",
    )


def test_every_collective_and_its_results() -> None:
    run(
        """
        def body(comm):
            r, p = comm.rank, comm.size
            x = Array(np.arange(4, dtype=np.int64) + 10 * r)
            out = Array(np.zeros(4 * p, np.int64))
            gathered = np.concatenate([np.arange(4) + 10 * i for i in range(p)])
            assert comm.all_gather(x, out=out) is out
            assert (out.get() == gathered).all()
            part = Array(np.zeros(4, np.int64))
            comm.reduce_scatter(out, out=part)
            assert (part.get() == p * (np.arange(4) + 10 * r)).all()
            comm.broadcast(x, root=1)
            assert (x.get() == np.arange(4) + 10).all()
            back = Array(np.zeros(4 * p, np.int64))
            comm.all_to_all(out, out=back)
            assert (back.get() == np.tile(np.arange(4) + 10 * r, p)).all()
            comm.reduce(part, root=0)
            comm.scatter(out if r == 0 else None, root=0, out=part)
            assert (part.get() == np.arange(4) + 10 * r).all()
            comm.gather(part, root=0, out=back if r == 0 else None)
            if r == 0:
                assert (back.get() == gathered).all()
        """,
        3,
        threads=True,
    )


def test_a_work_orders_streams_and_the_host_does_not_wait() -> None:
    run(
        """
        def body(comm):
            stream = gradwire._core.CudaStream(0)  # ranks that are threads need one each
            x = Array(values(comm.rank), stream.handle)
            comm.all_reduce(x, async_op=True).wait()
            comm.barrier()
            gpu = library()
            waits, allocations = gpu.simulated_cuda_waits(), gpu.simulated_cuda_allocations()
            works = [comm.all_reduce(x, op="avg", async_op=True) for _ in range(3)]
            for each in works:
                assert each.wait() is x
            comm.barrier()
            assert gpu.simulated_cuda_waits() == waits
            assert gpu.simulated_cuda_allocations() == allocations
            comm.barrier()
            total = sum(values(r).astype(float) for r in range(comm.size))
            assert np.allclose(x.get(), total, atol=1e-4)
            assert all(each.done() for each in works)
            comm.close()
        """,
        3,
        threads=True,
    )


@pytest.mark.parametrize("threads", [True, False], ids=["loopback", "host"])
def test_a_request_to_stop_counts_from_the_call_that_follows_it(threads: bool) -> None:
    found = run(
        """
        def body(comm):
            x, found = Array(values(comm.rank)), []
            for call in (1, 2, 3, 4, 5):
                if (comm.rank, call) == (1, 4):
                    comm.request_stop()
                comm.all_reduce(x, async_op=True)
                found.append(comm.should_stop())
            return found
        """,
        3,
        threads=threads,
    )
    assert found == [[False, False, False, True, True]] * 3


def test_who_asks_whether_to_stop_can_be_interrupted() -> None:
    run(
        """
        def body(comm):
            import signal
            import pytest
            x = Array(values(comm.rank))
            comm.all_reduce(x)
            assert not comm.should_stop()
            if comm.rank == 1:
                with pytest.raises(gradwire.Aborted):
                    comm.recv(np.empty(1, np.float32), 0)
                return
            def interrupt(*_):
                raise KeyboardInterrupt
            comm.all_reduce(x, async_op=True)  # which rank 1 does not make
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                comm.should_stop()
            comm.abort("interrupted")
        """,
        2,
    )


def test_residuals_are_saved_loaded_and_scaled() -> None:
    run(
        """
        def body(comm):
            def step(feedback):
                x = Array(values(comm.rank))
                comm.all_reduce(x, codec="onebit", feedback=feedback, key="k")
                return x.get().tobytes()
            ef = gradwire.ErrorFeedback()
            step(ef)
            saved = ef.state_dict()
            after = [step(ef), step(ef)]
            again = gradwire.ErrorFeedback()
            again.load_state_dict(saved)
            assert [step(again), step(again)] == after
            before = again.residual("k")
            import pytest
            gpu = library()
            waits = gpu.simulated_cuda_waits()
            again.scale(2)
            again.scale(4)
            assert gpu.simulated_cuda_waits() == waits  # nothing waits for the device
            assert (again.residual("k") == 8 * before).all()
            with pytest.raises(gradwire.InvalidArgument, match="scale by inf"):
                again.scale(float("inf"))
            step(again)
            again.scale(1e38)
            again.scale(1e38)
            assert np.isfinite(again.residual("k")).all()
            again.load_state_dict(saved | {"k": saved["k"] | {"calls": 3}})
            on_cpu = values(comm.rank)
            comm.all_reduce(on_cpu, codec="onebit", feedback=again, key="k")
            assert again.state_dict()["k"]["calls"] == 4
        """
    )


def test_residuals_follow_a_loss_scale_on_the_gpu() -> None:
    """A GradScaler's scale is read on the device, behind what changes it."""
    run(
        """
        def body(comm):
            gpu, ef = library(), gradwire.ErrorFeedback()
            scale = Array(np.array([128], np.float32))
            address = scale.__cuda_array_interface__["data"][0]
            def step(last=0.0):
                ef._follow(0, address, 0, last)
                comm.all_reduce(x, codec="onebit", feedback=ef, key="k")
            x = Array(values(comm.rank))
            step()
            before = ef.residual("k")
            waits = gpu.simulated_cuda_waits()
            scale.put(np.array([256], np.float32))
            ef._follow(0, address, 0, 0.0)
            ef._follow(0, address, 0, 0.0)  # it is as it was
            assert gpu.simulated_cuda_waits() == waits
            assert (ef.residual("k") == 2 * before).all()
            ef._follow(0, address, 0, 1024.0)  # of a checkpoint
            assert (ef.residual("k") == before / 2).all()
            step()
        """
    )


def test_residuals_in_bfloat16_are_for_the_cpu() -> None:
    run(
        """
        import pytest

        def body(comm):
            ef = gradwire.ErrorFeedback("bfloat16")
            with pytest.raises(gradwire.InvalidArgument, match="bfloat16.*arrays on the CPU"):
                comm.all_reduce(Array(values(comm.rank)), codec="onebit", feedback=ef, key="k")
            comm.all_reduce(values(comm.rank), codec="onebit", feedback=ef, key="k")
        """
    )


def test_a_step_with_nan_is_not_kept() -> None:
    run(
        """
        def body(comm):
            ef = gradwire.ErrorFeedback()
            x = Array(values(comm.rank))
            comm.all_reduce(x, codec="int8", feedback=ef, key="a")
            kept = ef.residual("a")
            bad = values(comm.rank)
            bad[7] = np.nan if comm.rank == 1 else 1
            ef.begin_step()
            comm.all_reduce(Array(values(comm.rank)), codec="int8", feedback=ef, key="a")
            comm.all_reduce(Array(bad), codec="int8", feedback=ef, key="b")
            ef.end_step()
            assert (ef.residual("a") == kept).all()
            assert ef.keys().get("b") is None or not ef.residual("b").any()
        """
    )


def test_a_different_call_names_who_called_what() -> None:
    found = run(
        """
        def body(comm):
            x = Array(values(comm.rank))
            comm.all_reduce(x)
            try:
                for _ in range(100):
                    comm.all_reduce(x, op="sum" if comm.rank else "avg", timeout=20)
                    time.sleep(0.05)
            except gradwire.InvalidArgument as error:
                comm.abort()
                return str(error)
        """
    )
    for text in found:
        assert "rank 0 called" in text
        assert "on GPUs" in text


def test_a_rank_that_does_not_call_is_a_timeout_that_names_it(tmp_path: Path) -> None:
    found = run(
        """
        import os

        def body(comm):
            raised = os.environ["RAISED"]
            x = Array(values(comm.rank))
            comm.all_reduce(x)
            if comm.rank == 1:
                while len(os.listdir(raised)) < 2:
                    time.sleep(0.05)
                return None
            try:
                while True:
                    comm.all_reduce(x, timeout=2)
                    time.sleep(0.05)
            except gradwire.Timeout as error:
                open(f"{raised}/{comm.rank}", "w").close()
                return error.peer
        """,
        3,
        RAISED=str(tmp_path),
    )
    assert found == [1, None, 1]


def test_abort_ends_calls_on_all_ranks() -> None:
    found = run(
        """
        def body(comm):
            x = Array(values(comm.rank))
            comm.all_reduce(x)
            try:
                comm.barrier()
                if comm.rank == 1:
                    comm.abort("enough")
                for _ in range(200):
                    comm.all_reduce(x, timeout=20)
                    time.sleep(0.05)
            except gradwire.Aborted as error:
                return error.peer
        """
    )
    assert found == [1, 1]


def test_what_does_not_go_together_is_refused() -> None:
    run(
        """
        import pytest

        class Sign(gradwire.codec.Codec):
            biased = True
            def encode(self, x): return np.packbits(x < 0).tobytes()
            def decode(self, b, n): return np.ones(n, np.float32)

        def body(comm):
            x = Array(values(comm.rank))
            def refused(match, *args, **options):
                with pytest.raises(gradwire.InvalidArgument, match=match):
                    comm.all_reduce(*args, **options)
            refused("on the CPU", x, out=values(0))
            refused("written in Python", x, codec=Sign(), feedback=False)
            with pytest.raises(gradwire.InvalidArgument, match="give out="):
                comm.all_gather(x)
            with pytest.raises(gradwire.InvalidArgument, match="CPU memory"):
                comm.send(x, 1 - comm.rank)
        """
    )


def test_a_wish_that_cannot_be_is_refused_on_all_ranks() -> None:
    found = run(
        """
        def body(comm):
            try:
                comm.all_reduce(Array(values(comm.rank)))
            except gradwire.InvalidArgument as error:
                return str(error)
        """,
        GRADWIRE_GPU_LINKS="loopback",
    )
    assert all("one process" in each for each in found)


def test_without_the_cuda_part_arrays_on_gpus_say_why() -> None:
    found = run(
        """
        class OnGpu:
            __cuda_array_interface__ = {
                "shape": (4,), "typestr": "<f4", "data": (64, False), "version": 3
            }

        def body(comm):
            try:
                comm.all_reduce(OnGpu())
            except gradwire.InvalidArgument as error:
                return str(error)
        """,
        1,
        GRADWIRE_CUDA_SO="/nowhere/libgradwire_cuda.so",
    )
    assert "GRADWIRE_CUDA_SO" in found[0]

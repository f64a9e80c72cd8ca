"""Calls that differ between ranks raise on all of them: there, at a later call, or when they close.

Who only sends has finished such a call before it can know: it learns of it in close(), or when its
program ends.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire import Communicator, InvalidArgument, Timeout
from ranks import LIMIT, Outcome, eventually, on_ranks, outcomes, over_processes, run

Call = Callable[[Communicator], Any]


def parts(*sizes: int) -> list[np.ndarray]:
    return [np.zeros(size, np.float32) for size in sizes]


def broadcast(comm: Communicator) -> None:
    comm.broadcast(*parts(4 if comm.rank == 0 else 3))


def reduce(comm: Communicator) -> None:
    comm.reduce(*parts(3 if comm.rank == 0 else 4))


def gather(comm: Communicator) -> None:
    comm.gather(*parts(4), out=parts(*[4] + [3] * (comm.size - 1)) if comm.rank == 0 else None)


def scatter(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.scatter(parts(*[4] * comm.size))
    else:
        comm.scatter(out=parts(3)[0])


def all_to_all(comm: Communicator) -> None:
    """Rank 0 gets what it expects; rank 1 does not."""
    sends = parts(*[4 if comm.rank == 0 else 5] * comm.size)
    comm.all_to_all(
        sends, out=parts(*([4] + [5] * (comm.size - 1) if comm.rank == 0 else [3] * 9)[: comm.size])
    )


CALLS = {each.__name__: each for each in (broadcast, reduce, gather, scatter)}


def check_refused(ended: list[Outcome], *said: str) -> None:
    for rank, each in enumerate(ended):
        assert isinstance(each.error, InvalidArgument), (rank, each)
        assert all(word in str(each.error) for word in said), each.error


@over_processes
@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("name", CALLS)
def test_the_last_call_differs_and_who_is_done_is_told_by_close(
    name: str, p: int, transport: str
) -> None:
    """The ranks that notice come to the call only when the others have been closing for a while."""
    left = multiprocessing.get_context("fork").Event()
    first = (0,) if name in ("broadcast", "scatter") else range(1, p)

    def body(comm: Communicator) -> None:
        if comm.rank not in first:
            assert not left.wait(1)  # who closes waits for them
        CALLS[name](comm)
        try:
            comm.close()
        finally:
            left.set()

    check_refused(outcomes(p, body, transport=transport, processes=True), name)


@over_processes
@pytest.mark.parametrize("name", CALLS)
def test_a_differing_call_is_an_error_of_the_next_at_the_latest(name: str, transport: str) -> None:
    def body(comm: Communicator) -> None:
        CALLS[name](comm)
        comm.barrier()
        raise AssertionError("the barrier passed")

    check_refused(outcomes(3, body, transport=transport, processes=True), name)


@over_processes
def test_close_waits_for_nobody_who_has_finished_the_same_calls(transport: str) -> None:
    """Rank 1 is busy elsewhere, and rank 0 cannot see in the data that it came."""
    closed = multiprocessing.get_context("fork").Event()

    def body(comm: Communicator) -> None:
        comm.broadcast(*parts(4))
        if comm.rank == 0:
            comm.close()
            closed.set()
        assert closed.wait(20)

    assert [each.error for each in outcomes(3, body, transport=transport, processes=True)] == [
        None
    ] * 3


@over_processes
def test_close_names_a_rank_that_does_not_come(transport: str) -> None:
    closed = multiprocessing.get_context("fork").Event()

    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            assert closed.wait(20)
            comm.abort("it was never coming")
            return
        comm.broadcast(*parts(4))
        try:
            comm.close(0.5)
        finally:
            closed.set()

    error = outcomes(2, body, transport=transport, processes=True)[0].error
    assert isinstance(error, Timeout)
    assert error.peer == 1
    assert "timed out before rank 1" in str(error)
    assert "broadcast" in str(error)


@over_processes
def test_close_does_not_wait_for_the_dead(transport: str) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            os._exit(3)
        comm.broadcast(*parts(4))
        comm.close(60)

    ended = outcomes(2, body, transport=transport, processes=True)[0]
    assert ended.error is None or isinstance(ended.error, gradwire.TransportError)


SCRIPT = """
import sys
from pathlib import Path
import gradwire, numpy as np

def main():
    comm = gradwire.init()
    if comm.rank == 1:
        ended = Path(sys.argv[1])
        for _ in range(100):  # rank 0's program ends first, or would
            if ended.exists():
                break
            comm.{hear}
    comm.broadcast(np.zeros(4 - comm.rank, np.float32))
    return comm

{call}
"""
UNDER_DDP = """
{imports}
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group("gloo")
ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
state = gradwire.torch.register(ddp)
ddp(torch.ones(1, 4)).sum().backward()
if torch.distributed.get_rank() == 0:
    state.communicator.broadcast(torch.ones(3))
"""
WRAPPER = """
import os, subprocess, sys
from pathlib import Path
status = subprocess.run([sys.executable, *sys.argv[1:3]]).returncode
if os.environ["RANK"] == "0":
    Path(sys.argv[2]).touch()
Path(sys.argv[3] + os.environ["RANK"]).write_text(str(status))
sys.exit(status)
"""


@pytest.mark.parametrize("call", ["kept = main()", "main()"], ids=["kept", "dropped"])
def test_a_program_that_ends_after_a_differing_call_fails(tmp_path: Path, call: str) -> None:
    script, wrapper = tmp_path / "script.py", tmp_path / "wrapper.py"
    script.write_text(SCRIPT.format(call=call, hear="_core.check_failure(0.01)"))
    wrapper.write_text(WRAPPER)
    arguments = [script, tmp_path / "ended", tmp_path / "status"]
    ended = subprocess.run(
        [sys.executable, "-m", "gradwire", "run", "-n", "2", wrapper, *arguments],
        capture_output=True,
        timeout=60,
        check=False,
    )
    said = ended.stderr.decode()
    assert ended.returncode == 1, said
    assert [(tmp_path / f"status{rank}").read_text() for rank in range(2)] == ["1", "1"], said
    assert said.count("gradwire.InvalidArgument: ranks disagree in call 0") == 2, said


@pytest.mark.parametrize(
    "imports", ["import gradwire.torch, torch", "import torch, gradwire.torch"]
)
def test_a_training_that_ends_after_a_differing_call_fails(tmp_path: Path, imports: str) -> None:
    """The order of imports decides whether torch's objects end before gradwire does, or after."""
    script = tmp_path / "script.py"
    script.write_text(UNDER_DDP.format(imports=imports))
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script],
        capture_output=True,
        timeout=LIMIT,
        check=False,
    )
    said = ended.stderr.decode()
    assert ended.returncode == 1, said
    assert "gradwire.InvalidArgument: rank" in said


@over_processes
def test_a_program_that_goes_on_without_its_communicator_is_told(
    transport: str, tmp_path: Path
) -> None:
    """A line on standard error tells it, as no call and no close() will raise it."""
    errors, dropped = tmp_path / "errors", multiprocessing.get_context("fork").Event()

    def body(comm: Communicator) -> None:
        used = comm.split(0)
        assert used is not None
        if comm.rank == 1:
            assert dropped.wait(LIMIT)
            with pytest.raises(InvalidArgument):
                used.broadcast(np.zeros(3, np.float32))
            return
        with errors.open("wb") as file:
            os.dup2(file.fileno(), 2)
        used.broadcast(np.zeros(4, np.float32))
        del used
        dropped.set()
        eventually(lambda: b"gradwire: ranks disagree in call 0" in errors.read_bytes())

    ended = outcomes(2, body, transport=transport, processes=True)
    assert [each.error for each in ended] == [None, None]
    assert errors.read_bytes().count(b"\n") == 1


@over_processes
def test_close_is_told_by_a_rank_that_transfers_without_end(transport: str) -> None:
    """The rank never rests: there is always a message on its way to it."""
    left = multiprocessing.get_context("fork").Event()

    def body(comm: Communicator) -> None:
        comm.broadcast(np.zeros(4, np.float32))
        if comm.rank == 0:
            comm.close(timeout=LIMIT / 4)
            left.set()
            return
        x = np.zeros(1)
        if comm.rank == 1:
            while not left.is_set():
                comm.send(np.zeros(1), 2)
                comm.recv(x, 2)
            comm.send(np.full(1, -1.0), 2)
            return
        waiting = comm.recv(x, 1, async_op=True)
        while waiting.wait() is not None and x[0] == 0:
            waiting = comm.recv(x, 1, async_op=True)
            comm.send(np.zeros(1), 1)

    run(3, body, transport=transport, processes=True)


@over_processes
@pytest.mark.parametrize("size", [1, 100_000], ids=["one frame", "many frames"])
def test_blocks_of_wrong_sizes_are_named_with_their_ranks(size: int, transport: str) -> None:
    def wrong_scatter(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.scatter(parts(4 * size, 4 * size))
        else:
            comm.scatter(out=parts(3 * size)[0])

    def wrong_gather(comm: Communicator) -> None:
        comm.gather(*parts(4 * size), out=parts(4 * size, 3 * size) if comm.rank == 0 else None)

    def wrong_all_to_all(comm: Communicator) -> None:
        given = [parts(size, 4 * size), parts(2 * size, size)][comm.rank]
        comm.all_to_all(given, out=[parts(size, 2 * size), parts(3 * size, size)][comm.rank])

    for call, sender in ((wrong_scatter, 0), (wrong_gather, 1), (wrong_all_to_all, 0)):

        def body(comm: Communicator, call: Call = call) -> None:
            comm.barrier()
            call(comm)
            comm.close()

        said = (
            f"rank {sender} sends rank {1 - sender}",
            f"{16 * size} bytes ({4 * size} of float32)",
            f"rank {1 - sender} expects {12 * size} bytes",
        )
        check_refused(outcomes(2, body, transport=transport, processes=True), *said)


@over_processes
def test_sizes_count_though_the_scatter_root_has_gone(transport: str) -> None:
    """The root has waited for as long as it would."""
    left = multiprocessing.get_context("fork").Event()

    def body(comm: Communicator) -> None:
        comm.barrier()
        if comm.rank == 0:
            comm.scatter(parts(4, 4))
            with pytest.raises(Timeout):
                comm.close(0.3)
            left.set()
            return
        assert left.wait(20)
        comm.scatter(out=parts(3)[0])

    error = outcomes(2, body, transport=transport, processes=True)[1].error
    assert isinstance(error, InvalidArgument)
    assert "rank 0 sends a block of 16 bytes" in str(error)
    assert "rank 1 expects one of 12 bytes" in str(error)


@pytest.mark.parametrize("pair", [("int16", "uint16"), ("M8[s]", "m8[s]"), ("complex64", "int64")])
def test_dtypes_are_compared_where_data_only_moves(pair: tuple[str, str]) -> None:
    def body(comm: Communicator) -> None:
        comm.all_gather(np.zeros(4, pair[comm.rank]))

    check_refused(outcomes(2, body), "all_gather", np.dtype(pair[0]).name, np.dtype(pair[1]).name)


SHAPED: dict[str, Callable[[Communicator, np.ndarray], Any]] = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "reduce": lambda comm, x: comm.reduce(x),
    "broadcast": lambda comm, x: comm.broadcast(x),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "all_gather": lambda comm, x: comm.all_gather(x, check="shape"),
}


@pytest.mark.parametrize("name", SHAPED)
def test_shapes_are_compared_in_their_first_call(name: str) -> None:
    def body(comm: Communicator) -> None:
        SHAPED[name](comm, np.zeros((4, 6), np.float32))
        SHAPED[name](comm, np.zeros((2, 12) if comm.rank else (4, 6), np.float32))
        comm.close()

    check_refused(outcomes(2, body), name, "of shape", "12")


def test_shapes_are_compared_as_the_caller_wants() -> None:
    def body(comm: Communicator, check: Any) -> None:
        for _ in range(2):  # both ranks know both shapes
            for shape in ((2, 3), (3, 2)):
                comm.all_reduce(np.zeros(shape, np.float32), check=check)
        comm.all_reduce(np.zeros((2, 3) if comm.rank else (3, 2), np.float32), check=check)
        comm.barrier()

    for check in (None, "size"):
        run(2, body, check)
    check_refused(outcomes(2, body, "shape"), "of shape (2, 3)", "of shape (3, 2)")

    def wrong(comm: Communicator) -> None:
        with pytest.raises(InvalidArgument, match="check='dtype'"):
            comm.all_reduce(np.zeros(3), check="dtype")  # type: ignore[arg-type]

    run(1, wrong)


@on_ranks(2)
def test_dimensions_of_size_one_do_not_count(comm: Communicator) -> None:
    comm.all_reduce(np.zeros((1, 6) if comm.rank else (6, 1), np.float32))
    comm.all_reduce(np.zeros(() if comm.rank else (1,), np.float32))


def test_a_shape_that_one_rank_knows_is_new_to_the_other() -> None:
    """Arrays like earlier ones take the shortcut all the same."""

    def body(comm: Communicator) -> None:
        for _ in range(3):
            comm.all_reduce(np.zeros((2, 3), np.float32))
        comm.all_reduce(np.zeros((3, 2) if comm.rank else (2, 3), np.float32))

    check_refused(outcomes(2, body), "of shape (3, 2)")


@pytest.mark.parametrize(
    ("name", "codec", "algorithm"),
    [
        ("reduce", "int8", "auto"),
        ("reduce", "topk", "gather"),
        ("reduce_scatter", "bf16", "auto"),
        ("reduce_scatter", "none", "auto"),
        ("all_reduce", "lowrank", "auto"),
    ],
)
def test_ranks_that_feed_back_beside_others_are_told(name: str, codec: str, algorithm: str) -> None:
    """Rank 0 makes no other call, and would not come to the vote of rank 1."""

    def body(comm: Communicator) -> None:
        feedback: dict[str, Any] = {"feedback": False}
        if comm.rank == 1:
            feedback = {"feedback": gradwire.ErrorFeedback(), "key": "w"}
        x = np.ones((32, 64), np.float32)
        getattr(comm, name)(x, codec=codec, algorithm=algorithm, **feedback)
        comm.recv(np.empty(1), 1)

    check_refused(
        outcomes(2, body), "call 0", f"codec={codec} with error feedback", "rank 0 called"
    )


@on_ranks(2)
def test_all_reduce_feeds_back_where_a_rank_wants_it(comm: Communicator) -> None:
    """Each rank's residual is its own affair there."""
    feedback: dict[str, Any] = {"feedback": False}
    if comm.rank == 1:
        feedback = {"feedback": gradwire.ErrorFeedback(), "key": "w"}
    x = np.linspace(0, 1, 100, dtype=np.float32)
    for _ in range(2):
        y = comm.all_reduce(x.copy(), codec="onebit", **feedback)
    first, second = comm.all_gather_object(float(y.sum()))
    assert first == second

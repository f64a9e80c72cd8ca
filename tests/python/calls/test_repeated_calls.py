"""Blocking all_reduces like an earlier one, which take the fast path: same results, same errors."""

from __future__ import annotations

import inspect
import os
import threading
from typing import Any, NoReturn
from unittest import mock

import gradwire
import numpy as np
import pytest
from gradwire import Aborted, Communicator, InvalidArgument, Timeout, TransportError
from ranks import on_ranks, outcomes, over_all, over_processes, run

# Small enough to be begun with the interpreter's lock held, and not.
LENGTHS = (0, 1, 1000, 1025, 70_000)
# Which no earlier call had.
OTHERS: tuple[dict[str, Any], ...] = (
    {"op": "max"},
    {"algorithm": "ring"},
    {"schedule": object()},
    {"codec": "fp16"},
    {"key": "key"},
    {"keys": []},
    {"feedback": 0},
    {"out": np.zeros(6, np.float32)},
    {"async_op": True},
    {"timeout": 5},
)


class NotTaken(Exception):
    """Python was asked."""


def takes_shortcut(comm: Communicator, x: Any, **options: Any) -> bool:
    """All ranks ask, or none: it is a call where it does."""

    def refuse(*_: object) -> NoReturn:
        raise NotTaken

    with mock.patch.object(comm, "_call", refuse):
        try:
            comm.all_reduce(x, **options)
        except (NotTaken, InvalidArgument):
            return False
    return True


@over_all
@on_ranks(3)
def test_a_repeated_call_takes_it_and_finds_the_same(comm: Communicator, transport: str) -> None:
    for n in LENGTHS:
        given = np.arange(n, dtype=np.float32) + comm.rank
        first = comm.all_reduce(given.copy())
        for _ in range(3):  # other arrays of the form
            again = given.copy()
            assert takes_shortcut(comm, again)
            assert again.tobytes() == first.tobytes()
            result = comm.all_reduce(given.copy())
            assert result.tobytes() == first.tobytes()
            assert comm.all_reduce(again) is again


@on_ranks(2)
def test_another_form_or_option_does_not_take_it(comm: Communicator) -> None:
    x = np.full(6, comm.rank + 1, np.float32)
    assert not takes_shortcut(comm, x)
    comm.all_reduce(x.copy())
    others = [
        np.zeros(5, np.float32),
        np.zeros(6, np.int32),
        np.zeros(6, ">f4"),
        np.zeros(12, np.float32)[::2],
        np.zeros(6, np.float32).view(np.recarray),
        [x],
        memoryview(x),
        None,
    ]
    assert not any(takes_shortcut(comm, each) for each in others)
    read_only = x.copy()
    read_only.flags.writeable = False
    assert not takes_shortcut(comm, read_only)
    for option in OTHERS:
        assert not takes_shortcut(comm, x, **option)
    with pytest.raises(TypeError, match="positional"):
        comm.all_reduce(x, "max")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unheard"):
        takes_shortcut(comm, x, unheard=1)
    assert not takes_shortcut(comm, x.reshape(2, 3))  # shapes are compared first
    assert takes_shortcut(comm, x)
    assert x.tolist() == [3] * 6
    assert comm.all_reduce(np.float32([1, comm.rank]), op="max").tolist() == [1, 1]
    assert comm.all_reduce(np.float32([1, comm.rank])).tolist() == [2, 1]
    assert comm.all_reduce(np.float32([1, comm.rank]), op="max").tolist() == [1, 1]


@on_ranks(2)
def test_out_that_is_the_array_itself_takes_it(comm: Communicator) -> None:
    x, other = np.ones(8, np.float32), np.empty(8, np.float32)
    assert not takes_shortcut(comm, x, out=x)
    assert comm.all_reduce(x, out=x) is x
    assert takes_shortcut(comm, x)
    assert takes_shortcut(comm, x, out=x)
    assert x.tolist() == [8] * 8
    assert comm.all_reduce(x, out=x) is x
    for option in ({"out": other}, {"key": x}, {"schedule": x}):
        assert not takes_shortcut(comm, x, **option)


@on_ranks(2)
def test_what_can_change_between_calls_is_not_learnt(comm: Communicator) -> None:
    x, out, feedback = np.ones(8, np.float32), np.empty(8, np.float32), gradwire.ErrorFeedback()
    comm.all_reduce(x, out=out)
    comm.all_reduce(x, async_op=True).wait()
    comm.all_reduce(x, codec="onebit", key="x", feedback=feedback)
    comm.all_reduce(x, codec="lowrank", feedback=False)
    comm.all_reduce(x, codec=gradwire.codec.FP16())
    comm.reduce(x)
    options: list[dict[str, Any]] = [
        {},
        {"out": out},
        {"async_op": True},
        {"codec": "onebit", "key": "x", "feedback": feedback},
        {"codec": "lowrank", "feedback": False},
    ]
    assert not any(takes_shortcut(comm, x, **each) for each in options)


@on_ranks(2)
def test_timeouts_that_are_computed_push_out_no_other_call(comm: Communicator) -> None:
    x = np.ones(8, np.float32)
    comm.all_reduce(x.copy())
    for i in range(40):
        comm.all_reduce(x.copy(), timeout=20 + i / 8)
    assert takes_shortcut(comm, x)


@on_ranks(2)
def test_work_that_nobody_waited_for_comes_first(comm: Communicator) -> None:
    x = np.ones(8, np.float32)
    comm.all_reduce(x.copy())
    with mock.patch.object(comm._calls, "finish_dropped"):
        comm._calls.dropped.append(mock.Mock())
        assert not takes_shortcut(comm, x)
        comm._calls.dropped.clear()
    assert takes_shortcut(comm, x)


def test_the_method_is_a_method() -> None:
    class Doubling(Communicator):
        def all_reduce(self, x: Any, **options: Any) -> Any:
            return super().all_reduce(2 * x, **options)

    with gradwire.init(rank=0, ranks=1) as comm:
        x = np.ones(3, np.float32)
        for _ in range(2):
            assert Communicator.all_reduce(comm, x) is x
            assert comm.all_reduce(x=x) is x
        assert list(inspect.signature(comm.all_reduce).parameters)[:2] == ["x", "op"]
        assert comm.barrier.__doc__ == Communicator.barrier.__doc__
        comm.__class__ = Doubling
        for _ in range(2):
            assert comm.all_reduce(x).tolist() == [2] * 3
        comm.__class__ = Communicator
        with mock.patch.object(Communicator, "all_reduce", Communicator.all_reduce.__wrapped__):
            assert comm.all_reduce(np.ones(5, np.float32)).tolist() == [1] * 5


@pytest.mark.parametrize("codec", ["fp16", "int8", "onebit", "threshold:density=0.5"])
@on_ranks(2)
def test_codecs_take_it(comm: Communicator, codec: str) -> None:
    given = np.random.default_rng(comm.rank).standard_normal(5000).astype(np.float32)
    first = comm.all_reduce(given.copy(), codec=codec, feedback=False)
    again = given.copy()
    assert takes_shortcut(comm, again, codec=codec, feedback=False)
    assert again.tobytes() == first.tobytes()


@on_ranks(2)
def test_more_forms_than_it_remembers(comm: Communicator) -> None:
    for _ in range(2):
        for n in range(1, 40):
            assert comm.all_reduce(np.ones(n, np.float32)).tolist() == [2] * n
    assert takes_shortcut(comm, np.ones(39, np.float32))
    assert not takes_shortcut(comm, np.ones(1, np.float32))


def test_a_barrier_takes_it_and_orders() -> None:
    arrived: list[int] = []

    def body(comm: Communicator) -> None:
        for turn in range(50):
            arrived.append(turn)
            comm.barrier()
            assert arrived.count(turn) == 3
        with mock.patch.object(comm, "_call", None):
            comm.barrier()

    run(3, body)


@pytest.mark.parametrize("n", [1, 70_000])
@on_ranks(2)
def test_threads_of_a_rank_share_it(comm: Communicator, n: int) -> None:
    """Calls of the threads are equal, so any order of them is one order on all ranks."""
    sums: list[float] = []

    def repeat() -> None:
        for _ in range(30):
            sums.append(float(comm.all_reduce(np.ones(n, np.float32))[-1]))

    threads = [threading.Thread(target=repeat) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sums == [2.0] * 90


@over_processes
@pytest.mark.parametrize("n", [1, 70_000])
def test_errors_are_the_same(transport: str, n: int) -> None:
    def body(comm: Communicator, how: str) -> None:
        x = np.zeros(n, np.float32)
        comm.all_reduce(x)
        if comm.rank == 1:
            if how == "dies":
                os._exit(3)
            if how == "aborts":
                comm.abort("enough")
            if how == "disagrees":
                comm.all_reduce(x, op="max")
            return
        while True:
            comm.all_reduce(x)

    expected = {"dies": TransportError, "aborts": Aborted, "disagrees": InvalidArgument}
    for how, kind in expected.items():
        ended = outcomes(2, body, how, transport=transport, processes=True)[0]
        assert isinstance(ended.error, kind), (how, ended)
        assert how == "disagrees" or ended.error.peer == 1  # type: ignore[union-attr]


def test_its_timeout_is_the_calls() -> None:
    def body(comm: Communicator) -> None:
        x = np.zeros(1, np.float32)
        comm.all_reduce(x, timeout=0.5)
        if comm.rank == 1:
            stop.wait(20)
            return
        try:
            comm.all_reduce(x, timeout=0.5)
        finally:
            stop.set()

    stop = threading.Event()
    first, _ = outcomes(2, body)
    assert isinstance(first.error, Timeout)
    assert first.error.peer == 1


def test_a_forked_child_is_refused() -> None:
    comm = gradwire.init(rank=0, ranks=1)
    x = np.zeros(1, np.float32)
    comm.all_reduce(x)
    child = os.fork()
    if child == 0:
        try:
            takes_shortcut(comm, x)
        except Aborted as error:
            os._exit(7 if "is a fork" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    comm.close()
    with pytest.raises(Aborted, match="closed"):
        comm.all_reduce(x)


def test_it_keeps_no_communicator_alive_nor_memory() -> None:
    import gc
    import weakref

    comm = gradwire.init(rank=0, ranks=1)
    x = np.zeros(4, np.float32)
    comm.all_reduce(x)
    seen = weakref.ref(comm), weakref.ref(x)
    comm.close()
    del comm, x
    gc.collect()
    assert [each() for each in seen] == [None, None]


def tensors_of(x: np.ndarray) -> dict[str, Any]:
    """Tensors of the same elements that a call must not go past the checks for."""
    torch = pytest.importorskip("torch")
    t = torch.from_numpy(x.copy())

    class Subclass(torch.Tensor):  # type: ignore[misc]
        pass

    return {
        "another dtype": t.double(),
        "another shape": t.reshape(2, -1),
        "a subclass": t.clone().as_subclass(Subclass),
        "a list": [t],
        "not contiguous": torch.stack([t, t], 1)[:, 0],
        "negated": torch.complex(t, t).conj().imag,
        "meta": t.to("meta"),
        "sparse": t.to_sparse(),
    }


@on_ranks(2)
def test_a_tensor_takes_it_as_an_array_does(comm: Communicator) -> None:
    torch = pytest.importorskip("torch")

    first = torch.full((6,), float(comm.rank))
    comm.all_reduce(first)
    x = torch.full((6,), comm.rank + 1.0)
    assert takes_shortcut(comm, x)
    assert x.tolist() == [3] * 6
    assert not takes_shortcut(comm, np.ones(6, np.float32))
    for name, each in tensors_of(np.ones(6, np.float32)).items():
        assert not takes_shortcut(comm, each), name
    assert not takes_shortcut(comm, torch.nn.Parameter(torch.ones(6)))  # not seen before
    for _ in range(2):
        comm.all_reduce(parameter := torch.nn.Parameter(torch.ones(6)))
    assert takes_shortcut(comm, parameter)
    assert parameter.detach().tolist() == [4] * 6
    assert parameter.requires_grad


@on_ranks(1)
def test_autograd_notices_a_write_that_takes_it(comm: Communicator) -> None:
    torch = pytest.importorskip("torch")

    comm.all_reduce(torch.ones(3))
    with torch.inference_mode():  # there are no versions to count
        assert takes_shortcut(comm, torch.ones(3))
    x = torch.ones(3, requires_grad=True)
    y = x * 1
    z = y * y  # saves y
    assert takes_shortcut(comm, y.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@on_ranks(1)
def test_a_tensor_of_a_transform_is_left_to_the_checks(comm: Communicator) -> None:
    """Such a tensor is a torch.Tensor, and has no memory of its own."""
    torch = pytest.importorskip("torch")

    comm.all_reduce(torch.ones(3))

    def inside(x: Any) -> Any:
        with pytest.raises(RuntimeError, match="data pointer"):
            comm.all_reduce(x)
        return x.sum()

    torch.func.grad(inside)(torch.ones(3))

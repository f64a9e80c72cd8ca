"""Every argument of the wrong type, of everything public, is InvalidArgument that names it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import gradwire
import numpy as np
import pytest
import torch
from gradwire import (
    Communicator,
    CostModel,
    ErrorFeedback,
    InvalidArgument,
    Schedule,
    ScheduleBuilder,
    Work,
)
from gradwire._bootstrap.mesh import inproc_meshes
from gradwire._communicator import from_mesh
from ranks import on_ranks

NO_WHOLE: list[Any] = ["0", 1.5, [], object(), b"0", True, np.bool_(True), 10**30]
NO_NUMBER: list[Any] = ["3", [], object(), b"3", 1j, True, np.ones(2)]
NO_SECONDS = [*NO_NUMBER, 0, -1, math.nan]
NO_TEXT: list[Any] = [1, b"sum", ["sum"], object(), str]
NO_FLAG: list[Any] = ["yes", 1, 0.0, [], object()]

# By parameter: what none of the methods takes. The others are for methods that have it.
WRONG: dict[str, list[Any]] = {
    "x": [3, "x", object(), [1.0], [[np.ones(2)]], np.array([object()]), np.ndarray],
    "out": [3, "x", object(), [1.0]],
    "op": [None, *NO_TEXT, "median"],
    "algorithm": [None, *NO_TEXT],
    "schedule": ["ring", 1, object(), Schedule],
    "codec": [None, 1, b"none", object(), gradwire.codec.FP16, "zip", "topk:density=2"],
    "key": NO_TEXT,
    "keys": ["abcd", 5, [1], [("a",)], [(1, 4)], [("a", "4")], [("a", -4)], {"a": 4}, [(b"a", 4)]],
    "feedback": [True, "x", 1, object(), ErrorFeedback],
    "async_op": [None, *NO_FLAG],
    "prescale": [None, *NO_NUMBER, math.nan, math.inf],
    "postscale": [None, *NO_NUMBER, math.nan, math.inf],
    "check": [*NO_TEXT, "shapes"],
    "timeout": NO_SECONDS,
    "root": [None, *NO_WHOLE, 1, -1],
    "dst": [None, *NO_WHOLE, 1, -1],
    "src": [*NO_WHOLE, 1, -1],
    "color": ["red", 1.5, [], object(), -1, 10**30],
    "split key": ["first", 1.5, [], object(), 10**30],
    "seconds": [None, *NO_SECONDS],
    "objs": [None, 3, "a", {0: 1}, [], [1, 2]],
    "store": [1, [], object(), b"tcp://127.0.0.1:1", "127.0.0.1:1", "ftp://127.0.0.1:1"],
    "wait": [None, *NO_NUMBER, -1, math.nan],
    "min_ranks": [*NO_WHOLE, 0, -1],
}
FREE = {"obj", "reason", "self"}  # of any type

X = np.ones(4, np.float32)
GIVEN: dict[str, dict[str, Any]] = {
    "send": {"dst": 0, "x": X},
    "recv": {"src": 0, "x": X},
    "broadcast_object": {"obj": 1},
    "all_gather_object": {"obj": 1},
    "gather_object": {"obj": 1},
    "scatter_object": {"objs": [1]},
    "all_to_all_v": {"x": [X]},
    **{key: {} for key in ["barrier", "tune", "shrink", "resize", "close"]},
    "split": {"color": 0},
}
LEFT_OUT = {"abort": "takes any reason", "allreduce": "is all_reduce"}


def methods() -> Iterator[str]:
    for name, _member in inspect.getmembers(Communicator, callable):
        if not name.startswith("_") and name not in LEFT_OUT:
            yield name


def cases() -> Iterator[Any]:
    for method in methods():
        for parameter in inspect.signature(getattr(Communicator, method)).parameters:
            if parameter in FREE:
                continue
            wrong = WRONG["split key" if (method, parameter) == ("split", "key") else parameter]
            for value in wrong:
                yield pytest.param(
                    method, parameter, value, id=f"{method}-{parameter}-{value!r:.20}"
                )


@pytest.fixture
def comm() -> Iterator[Communicator]:
    with from_mesh(inproc_meshes(1)[0], timeout=5) as made:
        yield made


@pytest.mark.parametrize(("method", "parameter", "value"), list(cases()))
def test_methods_of_a_communicator(
    comm: Communicator, method: str, parameter: str, value: Any
) -> None:
    given = {**GIVEN.get(method, {"x": X}), parameter: value}
    if parameter in ("key", "keys") and method != "split":
        given["feedback"] = ErrorFeedback()
    with pytest.raises(InvalidArgument, match=rf"\b{parameter}\b|^codec|^unknown {parameter}"):
        getattr(comm, method)(**given)
    assert comm.all_reduce(np.ones(2)).tolist() == [1, 1]


def build(**given: Any) -> Callable[..., Any]:
    """A call with these arguments, of which one is replaced."""
    return lambda function, name, value: function(**{**given, name: value})


FEEDBACK = ErrorFeedback()
NO_ITEMS: list[Any] = [5, "tcp", [5], object()]
NO_COUNT = [None, *NO_WHOLE, 0, -1]
FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, list[Any]]]] = {
    "init": (
        gradwire.init,
        {"rank": 0, "ranks": 1},
        {
            "rank": NO_WHOLE,
            "ranks": NO_WHOLE,
            "elastic": NO_FLAG,
            "stops": NO_FLAG,
            "store": NO_TEXT,
            "transports": NO_ITEMS,
            "timeout": [None, *NO_SECONDS],
            "secret": [5, ["x"], object()],
        },
    ),
    "spawn": (
        gradwire.spawn,
        {"fn": lambda comm: 0, "ranks": 1},
        {
            "fn": [None, 5, "f"],
            "ranks": NO_COUNT,
            "args": [None, 5, "abc", object()],
            "threads": NO_FLAG,
            "transports": NO_ITEMS,
            "timeout": [None, *NO_SECONDS],
        },
    ),
    "algorithms": (gradwire.algorithms, {}, {"collective": [None, *NO_TEXT, "all_sum"]}),
    "codecs": (gradwire.codecs, {}, {}),
    "CostModel": (CostModel, {}, {"parameters": [5, "x", ["x"], {"gamma": "x"}, {5: 5}]}),
    "predict": (
        CostModel().predict,
        {"algorithm": "ring", "nbytes": 100, "ranks": 2},
        {
            "algorithm": [None, *NO_TEXT],
            "nbytes": [None, *NO_NUMBER, -1, math.nan],
            "ranks": NO_COUNT,
            "collective": [None, *NO_TEXT],
            "per_host": [*NO_WHOLE, 0, -1],
            "codec": [None, *NO_TEXT],
        },
    ),
    "choose": (
        CostModel().choose,
        {"nbytes": 100, "ranks": 2},
        {
            "nbytes": [None, *NO_NUMBER, -1, math.nan],
            "ranks": NO_COUNT,
            "collective": [None, *NO_TEXT],
            "per_host": [*NO_WHOLE, 0, -1],
            "codec": [None, *NO_TEXT],
        },
    ),
    "generate": (
        Schedule.generate,
        {"algorithm": "ring", "ranks": 2},
        {
            "algorithm": [None, *NO_TEXT],
            "ranks": [None, *NO_WHOLE],
            "collective": [None, *NO_TEXT, "all_sum"],
            "root": [None, *NO_WHOLE],
            "groups": [5, "01", [0, 1], [["0"]], [[0.5, 1]], object()],
        },
    ),
    "parse": (Schedule.parse, {}, {"text": [None, *NO_TEXT]}),
    "builder": (
        Schedule.builder,
        {"ranks": 2, "chunks": 1, "name": "mine"},
        {
            "collective": [None, *NO_TEXT],
            "ranks": [None, *NO_WHOLE],
            "chunks": [None, *NO_WHOLE],
            "name": [None, *NO_TEXT],
            "root": [None, *NO_WHOLE],
        },
    ),
    **{
        name: (
            getattr(Schedule.builder(ranks=2, chunks=1, name="mine"), name),
            {"round": 0, "src": 0, "dst": 1, "chunks": 0},
            {
                **{key: [None, *NO_WHOLE] for key in ["round", "src", "dst"]},
                "chunks": [None, "0", 1.5, [0], object(), slice("a", "b"), range(0, 4, 2)],
            },
        )
        for name in ("copy", "reduce")
    },
    "ErrorFeedback": (ErrorFeedback, {}, {"dtype": [None, 5, "float16", "x", np.float64, bool]}),
    "residual": (FEEDBACK.residual, {}, {"key": [None, *NO_TEXT]}),
    **{
        method.__name__: (
            method,
            {"key": "x", values: np.ones(2)},
            {"key": [None, *NO_TEXT], values: [None, "abc", "1.5", object(), [1j], [[1], [1, 2]]]},
        )
        for method, values in (
            (FEEDBACK.add, "values"),
            (FEEDBACK.set, "values"),
            (FEEDBACK.multiply, "factors"),
        )
    },
    "scale": (FEEDBACK.scale, {}, {"factor": [None, *NO_NUMBER, math.nan, math.inf]}),
    "end_step": (FEEDBACK.end_step, {}, {"keep": [None, *NO_FLAG]}),
    "load_state_dict": (
        FEEDBACK.load_state_dict,
        {},
        {"state": [None, 5, "x", ["x"], {"x": 5}, {5: {}}]},
    ),
}


@pytest.mark.parametrize(
    ("name", "parameter", "value"),
    [
        pytest.param(name, parameter, value, id=f"{name}-{parameter}-{value!r:.20}")
        for name, (_, _, wrong) in FUNCTIONS.items()
        for parameter, values in wrong.items()
        for value in values
    ],
)
def test_functions_and_methods_of_values(name: str, parameter: str, value: Any) -> None:
    function, given, _ = FUNCTIONS[name]
    with pytest.raises(InvalidArgument, match=rf"\b{parameter}\b|error feedback|cost model"):
        function(**{**given, parameter: value})


def test_the_table_has_every_parameter() -> None:
    for name, (function, _, wrong) in FUNCTIONS.items():
        assert set(inspect.signature(function).parameters) == set(wrong), name
    tested = set(FUNCTIONS) | {"begin_step", "keys", "clear", "state_dict", "build"}
    for kind in (ErrorFeedback, CostModel, Schedule, ScheduleBuilder):
        for name, member in inspect.getmembers(kind, inspect.isroutine):
            if not name.startswith("_") and len(inspect.signature(member).parameters) > 1:
                assert name in tested, name


@pytest.mark.parametrize("value", NO_SECONDS)
def test_wait_of_a_work(comm: Communicator, value: Any) -> None:
    work = comm.all_reduce(np.ones(4), async_op=True)
    assert isinstance(work, Work)
    with pytest.raises(InvalidArgument, match="timeout"):
        work.wait(value)
    assert work.wait().tolist() == [1] * 4


def test_an_abort_is_never_refused(comm: Communicator) -> None:
    comm.abort(ValueError("what happened"))
    with pytest.raises(gradwire.Aborted, match="what happened"):
        comm.barrier()


NAMES = {"SUM": "sum", "AVG": "avg", "MIN": "min", "MAX": "max", "PRODUCT": "prod"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrapped", [False, True])
@on_ranks(2)
def test_torchs_names_of_operations(comm: Communicator, name: str, wrapped: bool) -> None:
    kind = torch.distributed.ReduceOp
    op = kind(getattr(kind, name)) if wrapped else getattr(kind, name)

    def x() -> np.ndarray:
        return np.arange(1, 5, dtype=np.float32) + comm.rank

    found = []
    for each in (op, NAMES[name]):
        part = comm.reduce_scatter(x(), op=each)
        found.append([comm.all_reduce(x(), op=each), comm.reduce(x(), op=each), part])
    np.testing.assert_equal(found[0], found[1])
    first, second = comm.all_gather_object(found[0])
    assert first[0].tolist() == second[0].tolist()


def test_torchs_premultiplied_sum_has_a_name_of_ours(comm: Communicator) -> None:
    op = torch.distributed._make_nccl_premul_sum(0.5)
    with pytest.raises(InvalidArgument, match="PREMUL_SUM"):
        comm.all_reduce(np.ones(4), op=op)
    with pytest.raises(InvalidArgument, match="op="):
        comm.all_reduce(np.ones(4), op=torch.distributed.ReduceOp)

"""Arrays that are taken and arrays that are refused; nothing is ever silently wrong."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
from gradwire import Communicator, InvalidArgument
from ranks import on_ranks, run


def total(comm: Communicator, x: Any) -> Any:
    return comm.all_reduce(x)


def on_two_ranks(make: Any) -> Any:
    """The sum of what `make(rank)` returns, as rank 0 sees it."""
    return run(2, lambda comm: comm.all_reduce(make(comm.rank)))[0]


def alone(call: Any) -> None:
    run(1, call)


class DLPackOnly:
    """An array of a library that we know nothing about."""

    def __init__(self, array: Any, versioned: bool = True) -> None:
        self.array, self.versioned = array, versioned

    def __dlpack__(self, **options: Any) -> Any:
        if not self.versioned and options:
            raise TypeError("unexpected keyword")
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


@on_ranks(2)
def test_numpy_in_place(comm: Communicator) -> None:
    x = np.arange(10, dtype=np.float32)
    y = comm.all_reduce(x)
    np.testing.assert_array_equal(x, np.arange(10) * 2)
    assert y is x


@pytest.mark.parametrize(
    "dtype",
    [
        *("float32", "float64", "float16", "bfloat16", "complex64", "complex128"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    ],
)
def test_torch_tensors_in_place(dtype: str) -> None:
    x = on_two_ranks(lambda rank: torch.full((5, 3), rank + 1, dtype=getattr(torch, dtype)))
    assert torch.equal(x, torch.full((5, 3), 3, dtype=getattr(torch, dtype)))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16])
def test_torch_ops_on_bits(dtype: torch.dtype) -> None:
    given = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]]).to(dtype)
    for op, expected in (("BAND", [0, 0, 0, 1]), ("BOR", [0, 1, 1, 1]), ("BXOR", [0, 1, 1, 0])):

        def body(comm: Communicator, op: str = op) -> torch.Tensor:
            return comm.all_reduce(given[comm.rank].clone(), op=getattr(dist.ReduceOp, op))

        for found in run(2, body):
            assert torch.equal(found, torch.tensor(expected).to(dtype))


def test_ml_dtypes_bfloat16() -> None:
    x = on_two_ranks(lambda rank: np.full(7, rank + 0.5, ml_dtypes.bfloat16))
    assert x.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(x.astype(np.float32), np.full(7, 2.0))


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@on_ranks(2)
def test_other_dlpack_objects_share_memory(comm: Communicator, dtype: Any, versioned: bool) -> None:
    x = torch.full((4, 2), comm.rank + 1, dtype=dtype)
    given = DLPackOnly(x, versioned)
    assert comm.all_reduce(given) is given
    assert torch.equal(x, torch.full((4, 2), 3, dtype=dtype))


def test_dlpack_results_are_numpy() -> None:
    gathered = run(2, lambda comm: comm.all_gather(DLPackOnly(np.array([comm.rank]))))
    for each in gathered:
        assert isinstance(each, np.ndarray)
        assert each.tolist() == [0, 1]


def test_a_type_that_numpy_lacks_needs_out() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(InvalidArgument, match="give out="):
            comm.all_gather(Handmade(code=3))  # opaque

    alone(body)


class DLTensor(ctypes.Structure):
    """The struct of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Handmade:
    """A capsule as a library may make it, sound or not: 4 float32, but for `other`.

    The capsule has no destructor, and is alive as long as the array.
    """

    def __init__(self, **other: Any) -> None:
        self.memory = np.ones(4, np.float32)
        self.shape = (ctypes.c_int64 * 1)(4)
        said = {"data": self.memory.ctypes.data, "device_type": 1, "ndim": 1, "code": 2, "bits": 32}
        self.tensor = DLTensor(**{**said, "lanes": 1, "shape": self.shape, **other})

    def __dlpack__(self, **options: Any) -> Any:
        if options:
            raise TypeError("unexpected keyword")
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = (
            ctypes.py_object,
            [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
        )
        return make(ctypes.addressof(self.tensor), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


@on_ranks(2)
def test_a_capsule_made_by_hand(comm: Communicator) -> None:
    x = Handmade()
    comm.all_reduce(x)
    assert x.memory.tolist() == [2] * 4


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"lanes": 2, "shape": (ctypes.c_int64 * 1)(2)}, "x: a DLPack array .* 2 lanes"),
        ({"lanes": 0}, "0 lanes"),
        ({"bits": 4}, "no whole bytes"),
        ({"bits": 0}, "no whole bytes"),
        ({"code": 6}, "bools of 32 bits"),
        ({"ndim": -1}, "-1 dimensions"),
        ({"ndim": 1 << 30}, "dimensions"),
        ({"shape": None}, "no shape"),
        ({"shape": (ctypes.c_int64 * 1)(-4)}, "size -4"),
        ({"ndim": 2, "shape": (ctypes.c_int64 * 2)(1 << 40, 1 << 40)}, "larger than any memory"),
        ({"data": None}, "no memory"),
        ({"byte_offset": (1 << 64) - 1}, "beyond the end of memory"),
        ({"device_type": 2}, "device"),
    ],
    ids=lambda each: "" if isinstance(each, str) else "-".join(each),
)
def test_a_capsule_that_is_not_sound_is_refused(said: dict[str, Any], message: str) -> None:
    def body(comm: Communicator) -> None:
        x = Handmade(**said)
        for call in (comm.all_reduce, comm.broadcast):
            with pytest.raises(InvalidArgument, match=message):
                call(x)
        assert x.memory.tolist() == [1] * 4

    alone(body)


def test_read_only_dlpack_is_refused() -> None:
    x = np.zeros(3)
    x.flags.writeable = False

    def body(comm: Communicator) -> None:
        with pytest.raises(InvalidArgument, match="read-only"):
            comm.all_reduce(DLPackOnly(x))

    alone(body)


def test_several_arrays_are_one_operation() -> None:
    def body(comm: Communicator) -> int:
        before = comm.traffic.frames_sent
        xs = [np.full(n, comm.rank, np.float32) for n in (3, 0, 5, 1)]
        mixed = [*xs, torch.full((2, 2), float(comm.rank))]
        assert comm.all_reduce(mixed) is mixed
        for each in mixed:
            assert np.all(np.asarray(each) == 1)
        return comm.traffic.frames_sent - before

    alone_sends = run(2, lambda comm: (total(comm, np.ones(13, np.float32)), comm.traffic)[1])
    assert run(2, body) == [each.frames_sent for each in alone_sends]


@on_ranks(2)
def test_tensors_that_require_grad(comm: Communicator) -> None:
    p = torch.nn.Parameter(torch.ones(3))
    comm.all_reduce(p)
    assert torch.equal(p.detach(), torch.full((3,), 2.0))
    assert p.requires_grad


def test_autograd_notices_the_write() -> None:
    def body(comm: Communicator) -> None:
        x = torch.ones(3, requires_grad=True)
        y = x * 1
        z = y * y  # saves y
        comm.all_reduce(y.detach())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()

    alone(body)


def strided_views() -> dict[str, Any]:
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    t = torch.arange(96, dtype=torch.float32).reshape(2, 3, 4, 4)
    return {
        "transpose": x.transpose(2, 0, 1),
        "step": x[..., ::2],
        "reversed": x.ravel()[::-1],
        "column": x[0, :, 1],
        "stride 0": np.lib.stride_tricks.as_strided(x, (5,), (0,)),
        "torch expand": torch.zeros(1).expand(5),
        "torch transpose": t.transpose(0, 1),
        "torch slice": t[:, 1:2],
        "channels_last": t.to(memory_format=torch.channels_last),
        "dlpack": DLPackOnly(x[..., ::2]),
    }


def values_of(x: Any) -> np.ndarray:
    x = getattr(x, "array", x)
    return (x.numpy() if isinstance(x, torch.Tensor) else x).copy()


@pytest.mark.parametrize("kind", strided_views())
def test_not_contiguous_is_refused_and_left_alone(kind: str) -> None:
    x = strided_views()[kind]
    before = values_of(x)

    def body(comm: Communicator) -> None:
        with pytest.raises(InvalidArgument, match="not C-contiguous"):
            comm.all_reduce(x)
        with pytest.raises(InvalidArgument, match="not C-contiguous"):
            comm.all_gather(x)
        with pytest.raises(InvalidArgument, match="out is not C-contiguous"):
            comm.all_reduce(np.zeros(before.size, np.float32), out=x)
        assert not comm.closed

    alone(body)
    np.testing.assert_array_equal(values_of(x), before)


@pytest.mark.parametrize(
    "x",
    [
        np.ones((3, 4), np.float32)[1:],
        np.ones((1, 5), np.float32).T,
        np.ones((3, 0, 2), np.float32).transpose(2, 0, 1),
        torch.ones(4, 5)[2:],
        torch.ones(1, 5).t(),
    ],
    ids=["rows", "one column", "empty", "torch rows", "torch column"],
)
def test_contiguous_views_are_taken(x: Any) -> None:
    alone(lambda comm: comm.all_reduce(x))


def test_what_is_written_must_be_writable() -> None:
    x = np.ones(4, np.float32)
    x.flags.writeable = False

    def body(comm: Communicator) -> None:
        for call in (comm.all_reduce, comm.broadcast, lambda x: comm.recv(x, 1 - comm.rank)):
            with pytest.raises(InvalidArgument, match="read-only"):
                call(x)
        assert comm.all_reduce(x, out=np.empty(4, np.float32)).tolist() == [2] * 4
        assert comm.all_gather(x).tolist() == [1] * 8

    run(2, body)


def test_dtypes_that_differ_are_named() -> None:
    def body(comm: Communicator) -> None:
        a, b = np.zeros(3, np.float32), np.zeros(3, np.float64)
        with pytest.raises(InvalidArgument, match=r"x\[0\] is float32 and x\[1\] is float64"):
            comm.all_reduce([a, b])
        with pytest.raises(InvalidArgument, match="x is float32 and out is float64"):
            comm.all_reduce(a, out=b)
        with pytest.raises(InvalidArgument, match=r"x is float32 and .*out is float64"):
            comm.all_gather(a, out=b)

    alone(body)


@on_ranks(2)
def test_lengths_that_differ_are_named(comm: Communicator) -> None:
    with pytest.raises(InvalidArgument, match="x has 3 elements and out has 4"):
        comm.all_reduce(np.zeros(3), out=np.zeros(4))
    with pytest.raises(InvalidArgument, match="x has 1 arrays and out has 2"):
        comm.all_reduce([np.zeros(3)], out=[np.zeros(3), np.zeros(3)])
    with pytest.raises(InvalidArgument, match="cannot be cut into 2 equal blocks"):
        comm.reduce_scatter(np.zeros(3))
    with pytest.raises(InvalidArgument, match="3 arrays: give one for each of 2 ranks"):
        comm.reduce_scatter([np.zeros(1)] * 3)
    with pytest.raises(InvalidArgument, match=r"has 4 elements.* 3$"):
        comm.all_gather(np.zeros(3), out=np.zeros(8))
    assert not comm.closed


@pytest.mark.parametrize(
    ("dtype", "named"),
    [(np.clongdouble, "complex256"), ("M8[s]", "datetime64"), (">f4", ">f4")],
)
def test_what_cannot_be_added_is_refused_with_the_list(dtype: Any, named: str) -> None:
    def body(comm: Communicator) -> None:
        x = np.zeros(4, dtype)
        for call in (comm.all_reduce, comm.reduce, comm.reduce_scatter):
            with pytest.raises(InvalidArgument, match=f"{named}.*float32, float64.*uint8"):
                call(x)

    alone(body)


@pytest.mark.parametrize(
    "dtype", [np.complex128, np.bool_, ">f4", "U3", [("a", np.int16), ("b", np.float64)], "M8[s]"]
)
@on_ranks(3)
def test_any_dtype_can_be_moved(comm: Communicator, dtype: Any) -> None:
    values = np.frombuffer(bytes(range(97, 97 + 120)), np.uint8)

    def make(rank: int) -> np.ndarray:
        itemsize = np.dtype(dtype).itemsize
        if np.dtype(dtype).kind == "U":
            return np.array([f"{rank}{i}" for i in range(5)], dtype)
        if np.dtype(dtype).kind == "b":
            return np.array([True, False, bool(rank), True])
        return np.roll(values, rank)[: 5 * itemsize].copy().view(dtype)

    gathered = comm.all_gather(make(comm.rank))
    assert gathered.dtype == np.dtype(dtype)
    assert gathered.tobytes() == b"".join(make(rank).tobytes() for rank in range(comm.size))
    x = make(comm.rank)
    assert comm.broadcast(x, root=1).tobytes() == make(1).tobytes()


@on_ranks(2)
def test_torch_bool_and_complex_can_be_moved(comm: Communicator) -> None:
    x = torch.tensor([True, bool(comm.rank)])
    assert comm.all_gather(x).tolist() == [True, False, True, True]
    z = torch.tensor([complex(1, comm.rank)])
    assert torch.equal(comm.all_gather(z), torch.tensor([1 + 0j, 1 + 1j]))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(3, device="meta"), "on meta"),
        (torch.zeros(3, 3).to_sparse(), "layout"),
        (torch.zeros(3, dtype=torch.complex64).conj(), "conj"),
        (torch.complex(torch.zeros(2), torch.ones(2)).conj().imag, "not C-contiguous|neg"),
        (np.array([object()]), "Python objects"),
        (3.5, "is a float"),
        (b"bytes", "is a bytes"),
        ([], "empty list"),
        ([1.0, 2.0], r"x\[0\] is a float"),
        (None, "is a NoneType"),
    ],
    ids=["meta", "sparse", "conj", "neg", "objects", "float", "bytes", "empty", "floats", "none"],
)
def test_what_is_no_array_in_memory_is_refused(x: Any, message: str) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(InvalidArgument, match=message):
            comm.broadcast(x)

    alone(body)


@pytest.mark.parametrize(("kind", "said"), [(8, "device"), (2, "GPU|CUDA")])
def test_a_device_is_refused_by_its_dlpack_type(kind: int, said: str) -> None:
    """Metal's is unknown; what says that it is CUDA's must be a GPU's memory."""

    class Elsewhere(DLPackOnly):
        def __dlpack__(self, **options: Any) -> Any:
            options.pop("stream", None)
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return kind, 0

    def body(comm: Communicator) -> None:
        with pytest.raises(InvalidArgument, match=said):
            comm.all_reduce(Elsewhere(np.zeros(3)))

    alone(body)


@on_ranks(2)
def test_overlap_of_what_is_written_is_refused(comm: Communicator) -> None:
    x = np.zeros(8, np.float32)

    calls = [
        lambda: comm.all_reduce([x[:5], x[4:]]),
        lambda: comm.all_reduce([x, x]),
        lambda: comm.all_reduce(x[:4], out=x[2:6]),
        lambda: comm.all_gather(x[1:5], out=x),
        lambda: comm.all_to_all(x, out=x),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument, match="overlap"):
            call()
    assert not comm.closed


@on_ranks(3)
def test_a_block_may_be_gathered_in_its_place(comm: Communicator) -> None:
    out = np.zeros(6, np.int64)
    own = out[2 * comm.rank : 2 * comm.rank + 2]
    own[:] = comm.rank + 1
    assert comm.all_gather(own, out=out).tolist() == [1, 1, 2, 2, 3, 3]

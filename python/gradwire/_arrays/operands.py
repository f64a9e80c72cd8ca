"""Operands: the memory of the caller's arrays, from NumPy, torch, CuPy or any library with DLPack.

Nothing is copied, and one rule holds for every array: it is C-contiguous (row after row without
gaps), and writable if the call writes it; all arrays of one call are on the CPU or on one GPU.
Anything else is refused, and the error names the remedy. A silent copy would lose the result of a
call that works in place, and ranks with different strides would add elements that do not belong
together.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from gradwire import _core
from gradwire._arrays import cuda_arrays
from gradwire._errors import InvalidArgument

REDUCIBLE = (
    *("float32", "float64", "float16", "bfloat16"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("bool", "complex64", "complex128"),
)

_NUMPY = {np.dtype(name): name for name in REDUCIBLE if name != "bfloat16"}
_DLPACK_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
# 8-bit floats, in the names of torch and ml_dtypes.
_DLPACK_FLOAT8 = (
    "e3m4",
    "e4m3",
    "e4m3b11fnuz",
    "e4m3fn",
    "e4m3fnuz",
    "e5m2",
    "e5m2fnuz",
    "e8m0fnu",
)
_DLPACK_NAMES = {7 + i: f"float8_{name}" for i, name in enumerate(_DLPACK_FLOAT8)} | {6: "bool"}
_DLPACK_CPU = (1, 3, 11)  # plain, and pinned by CUDA and ROCm


class Operand(NamedTuple):
    """The memory of an array, or of a run of its elements."""

    what: str  # name in messages: "x", "out[2]"
    address: int
    elements: int
    itemsize: int  # bytes
    dtype: str  # in the words of its library
    shape: tuple[int, ...]
    writable: bool
    array: Any  # keeps the memory alive
    device: int | None = None  # number of a GPU; None for the CPU

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.elements * self.itemsize

    @property
    def reducible(self) -> bool:
        """Whether the elements can be added; those of other types can only be moved."""
        return self.dtype in REDUCIBLE

    def run(self, index: int, runs: int) -> Operand:
        """The `index`-th of `runs` equal parts."""
        elements = self.elements // runs
        return self._replace(
            what=f"block {index} of {self.what}",
            address=self.address + index * elements * self.itemsize,
            elements=elements,
        )


def is_list(x: object) -> bool:
    """Whether `x` is a list or tuple of arrays."""
    return isinstance(x, list | tuple)


def operands(x: Any, what: str) -> list[Operand]:
    """The operands of an array or a list of arrays; raises InvalidArgument for anything else."""
    if not is_list(x):
        return [operand(x, what)]
    if not x:
        raise InvalidArgument(f"{what} is an empty list")
    return [operand(each, f"{what}[{i}]") for i, each in enumerate(x)]


def on_cpu(x: Any, name: str) -> Operand:
    """The operand of a message; raises InvalidArgument for an array on a GPU."""
    found = operand(x, "x")
    if found.device is not None:
        raise InvalidArgument(
            f"{name}: x is on cuda:{found.device}; messages are of CPU memory: use x.cpu()"
        )
    return found


def operand(x: Any, what: str) -> Operand:
    """The operand of an array; raises InvalidArgument for one that cannot be used in place."""
    torch = sys.modules.get("torch")
    if isinstance(x, np.ndarray):
        return _of_numpy(x, what)
    if torch is not None and isinstance(x, torch.Tensor):
        return _of_torch(x, what, torch)
    if not isinstance(x, type) and cuda_arrays.is_interface(x):
        return _of_interface(x, what)
    if not isinstance(x, type) and hasattr(x, "__dlpack__"):
        return _of_dlpack(x, what)
    raise InvalidArgument(
        f"{what} is a {type(x).__name__}: give a NumPy array, a torch tensor, another array with "
        "DLPack or __cuda_array_interface__, or a list of such"
    )


def writable(given: Sequence[Operand]) -> Sequence[Operand]:
    """Checks that operands may be written to; returns them."""
    for each in given:
        if not each.writable:
            raise InvalidArgument(
                f"{each.what} is read-only and would be written to: pass a copy, or a writable out="
            )
    return given


def written(given: Sequence[Operand]) -> None:
    """Tells torch that its tensors are written: autograd must notice, or gradients are wrong."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for each in given:
        if isinstance(each.array, torch.Tensor) and not each.array.is_inference():
            torch.autograd.graph.increment_version(each.array)


def device_of(given: Sequence[Operand]) -> int | None:
    """The device of all operands; raises InvalidArgument for several devices."""
    for each in given:
        if each.device != given[0].device:
            raise InvalidArgument(
                f"{given[0].what} is on {_place(given[0])} and {each.what} on {_place(each)}: "
                "one operation has one device"
            )
    return given[0].device if given else None


def _place(operand: Operand) -> str:
    return "the CPU" if operand.device is None else f"cuda:{operand.device}"


def same_dtype(given: Sequence[Operand]) -> None:
    """Raises InvalidArgument, which names both, when two dtypes differ."""
    for each in given:
        if each.dtype != given[0].dtype:
            raise InvalidArgument(
                f"{given[0].what} is {given[0].dtype} and {each.what} is {each.dtype}: "
                "one operation has one dtype"
            )


def empty(like: Operand, shape: tuple[int, ...]) -> Any:
    """A new array of the same library and dtype; a NumPy array for a DLPack object."""
    array = like.array
    torch = sys.modules.get("torch")
    if isinstance(array, np.ndarray):
        return np.empty(shape, array.dtype)
    if torch is not None and isinstance(array, torch.Tensor):
        return array.new_empty(shape)
    if like.device is not None:
        made = cuda_arrays.empty_like(array, shape)
        if made is None:
            raise InvalidArgument(
                f"{like.what} is a {type(array).__name__} on a GPU, of which gradwire cannot make "
                "another one for the result: give out="
            )
        return made
    try:
        return np.empty(shape, like.dtype)
    except TypeError:
        raise InvalidArgument(
            f"NumPy has no {like.dtype} to put the result in: give out="
        ) from None


def _of_numpy(x: np.ndarray[Any, Any], what: str) -> Operand:
    if x.dtype.hasobject:
        raise InvalidArgument(f"{what} holds Python objects, which have no bytes to send")
    if not x.flags.c_contiguous:
        raise _not_contiguous(what, x.shape, x.strides, "numpy.ascontiguousarray(x)")
    dtype = _NUMPY.get(x.dtype) or (x.dtype.name if x.dtype.isnative else str(x.dtype))
    writes = x.flags.writeable
    return Operand(
        what, x.__array_interface__["data"][0], x.size, x.itemsize, dtype, x.shape, writes, x
    )


def _of_torch(x: Any, what: str, torch: Any) -> Operand:
    if x.device.type not in ("cpu", "cuda"):
        raise InvalidArgument(
            f"{what} is on {x.device}, and gradwire works on the CPU and on CUDA: use x.cpu()"
        )
    if x.layout is not torch.strided:
        raise InvalidArgument(f"{what} has the layout {x.layout}: use x.to_dense()")
    if not x.is_contiguous():
        raise _not_contiguous(what, tuple(x.shape), x.stride(), "x.contiguous()")
    if x.is_neg() or x.is_conj():
        raise InvalidArgument(
            f"{what} is a lazily negated or conjugated view: use x.resolve_neg().resolve_conj()"
        )
    address, count = x.data_ptr(), x.numel()
    if count and not address:
        raise InvalidArgument(f"{what} is a {type(x).__name__} without memory of its own")
    dtype = str(x.dtype).removeprefix("torch.")
    device = x.device.index if x.device.type == "cuda" else None
    return Operand(what, address, count, x.element_size(), dtype, tuple(x.shape), True, x, device)


def _of_interface(x: Any, what: str) -> Operand:
    found = cuda_arrays.of_interface(x)
    if not found["contiguous"]:
        raise _not_contiguous(what, found["shape"], None, "a contiguous copy")
    if found["device"] < 0:
        raise InvalidArgument(f"{what} has a __cuda_array_interface__ of no GPU's memory")
    return Operand(
        what,
        found["address"],
        prod(found["shape"]),
        found["itemsize"],
        found["dtype"],
        found["shape"],
        found["writable"],
        x,
        found["device"],
    )


def _of_dlpack(x: Any, what: str) -> Operand:
    kind, index = map(int, x.__dlpack_device__())
    on_gpu = kind in cuda_arrays.DLPACK_CUDA
    if kind not in _DLPACK_CPU and not on_gpu:
        raise InvalidArgument(
            f"{what} is on a device (DLPack type {kind}), and gradwire works on the CPU and on CUDA"
        )
    capsule = _capsule(x, what, on_gpu)
    found = _read_dlpack(capsule, what)
    if not on_gpu and found["device_type"] not in _DLPACK_CPU:
        raise InvalidArgument(
            f"{what} says that it is on the CPU, and its capsule that it is on a device of "
            f"DLPack's type {found['device_type']}"
        )
    if not found["contiguous"]:
        raise _not_contiguous(what, found["shape"], None, "a contiguous copy")
    itemsize, shape = found["itemsize"], found["shape"]
    kind_of = _DLPACK_KINDS.get(found["code"], f"dlpack{found['code']}_")
    dtype = _DLPACK_NAMES.get(found["code"], f"{kind_of}{8 * itemsize}")
    count = prod(shape)
    if on_gpu and count and _core.cuda_device_of(found["address"]) < 0:
        raise InvalidArgument(f"{what} says that it is on CUDA, and is in no GPU's memory")
    return Operand(
        what,
        found["address"],
        count,
        itemsize,
        dtype,
        shape,
        found["writable"],
        (x, capsule),
        index if on_gpu else None,
    )


def _read_dlpack(capsule: object, what: str) -> _core._DLPack:
    try:
        return _core.read_dlpack(capsule)
    except InvalidArgument as error:
        raise InvalidArgument(f"{what}: {error}") from None


def _capsule(x: Any, what: str, on_gpu: bool) -> object:
    """A DLPack capsule, versioned if the library has that, since it knows what is read-only.

    For an array on a GPU the capsule is ordered by the default stream.
    """
    stream = {"stream": 1} if on_gpu else {}
    try:
        return x.__dlpack__(max_version=(1, 0), **stream)
    except TypeError:
        return x.__dlpack__(**stream)
    except BufferError as error:
        raise InvalidArgument(f"{what} has no DLPack capsule to give: {error}") from error


def _not_contiguous(
    what: str, shape: tuple[int, ...], strides: tuple[int, ...] | None, remedy: str
) -> InvalidArgument:
    of = f"shape {shape}" + (f", strides {strides}" if strides is not None else "")
    return InvalidArgument(
        f"{what} is not C-contiguous ({of}): work on {remedy}, and copy the result back where it "
        "is needed"
    )

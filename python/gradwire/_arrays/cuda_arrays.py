"""Arrays in a GPU's memory: their device, and the stream that orders the caller's work on them.

For torch and CuPy that is their current stream. For any other library it is the one that its
``__cuda_array_interface__`` names, or the default stream, which DLPack is told of.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from gradwire import _core

_DEFAULT_STREAM = 0
_LEGACY_STREAM = 1  # the default one, in __cuda_array_interface__ and DLPack
PER_THREAD_STREAM = 2  # the default stream of the thread that uses it
_TYPES = {"f": "float", "i": "int", "u": "uint", "b": "bool", "c": "complex", "V": "void"}

DLPACK_CUDA = (2, 13)  # plain and managed


def is_interface(x: Any) -> bool:
    """Whether `x` has a ``__cuda_array_interface__``."""
    return hasattr(x, "__cuda_array_interface__")


def of_interface(x: Any) -> dict[str, Any]:
    """Address, shape, dtype, itemsize, device, contiguity and writability of an array."""
    found = x.__cuda_array_interface__
    address, read_only = found["data"]
    shape, typestr = tuple(found["shape"]), found["typestr"]
    itemsize = int(typestr[2:])
    kind = _TYPES.get(typestr[1], typestr)
    return {
        "address": address or 0,
        "shape": shape,
        "dtype": "bool" if kind == "bool" else f"{kind}{8 * itemsize}",
        "itemsize": itemsize,
        "contiguous": _row_major(shape, found.get("strides"), itemsize),
        "writable": not read_only,
        "device": _core.cuda_device_of(address) if address else 0,
    }


def _row_major(shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int) -> bool:
    if strides is None or 0 in shape:
        return True
    step = itemsize
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True


def streams_of(arrays: Iterable[Any], device: int) -> list[int]:
    """The handles of the streams on which the caller works with the arrays, without duplicates.

    The first array's comes first.
    """
    found: dict[int, None] = {}
    asked = set()
    for array in arrays:
        library = _library(array)
        if library is None or library not in asked:
            found[_stream_of(array, library, device)] = None
            asked.add(library)
    return list(found)


def _library(array: Any) -> str | None:
    """The name of a library with a current stream, "torch" or "cupy"; None for any other array."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return "torch"
    cupy = sys.modules.get("cupy")
    return "cupy" if cupy is not None and isinstance(array, cupy.ndarray) else None


def _stream_of(array: Any, library: str | None, device: int) -> int:
    if library == "torch":
        handle = int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)
    elif library == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(device):
            handle = int(cupy.cuda.get_current_stream().ptr)
    else:
        named = getattr(array, "__cuda_array_interface__", {}).get("stream")
        handle = _DEFAULT_STREAM if named is None else int(named)
    return _DEFAULT_STREAM if handle == _LEGACY_STREAM else handle


def keep_for(array: Any, stream: int) -> bool:
    """Tells the array's library that `stream` uses its memory, so that it is not reused too early.

    Returns whether the library could be told: only torch can.
    """
    if _library(array) != "torch":
        return False
    torch = sys.modules["torch"]
    array.record_stream(torch.cuda.ExternalStream(stream, device=array.device))
    return True


def empty_like(array: Any, shape: tuple[int, ...]) -> Any:
    """A new array of the same library, dtype and device; None for an unknown library."""
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        with cupy.cuda.Device(array.device.id):
            return cupy.empty(shape, array.dtype)
    return None

"""Arrays in a GPU's memory: which device they are on, and in the order of which stream.

torch's and CuPy's current stream is theirs. Any other library's is the one that its
``__cuda_array_interface__`` names, or the default stream, which DLPack is told of.
"""

from __future__ import annotations

import sys
from typing import Any

from gradwire import _core

_DEFAULT_STREAM = 0
_LEGACY_STREAM = 1  # the default one, in __cuda_array_interface__ and DLPack
_TYPES = {"f": "float", "i": "int", "u": "uint", "b": "bool", "c": "complex", "V": "void"}

DLPACK_CUDA = (2, 13)  # plain and managed


def is_interface(x: Any) -> bool:
    """Whether `x` has a ``__cuda_array_interface__``."""
    return hasattr(x, "__cuda_array_interface__")


def of_interface(x: Any) -> dict[str, Any]:
    """Its address, shape, dtype, itemsize and device; whether it is contiguous and writable."""
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


def current_stream(array: Any, device: int) -> int:
    """The handle of the stream in whose order the caller works with the array."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return int(torch.cuda.current_stream(device).cuda_stream)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        with cupy.cuda.Device(device):
            return int(cupy.cuda.get_current_stream().ptr)
    named = getattr(array, "__cuda_array_interface__", {}).get("stream")
    return _DEFAULT_STREAM if named in (None, _LEGACY_STREAM) else int(named)


def keep_for(array: Any, stream: Any) -> None:
    """Tells the array's library that `stream` uses its memory, so that it is not given away."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        array.record_stream(torch.cuda.ExternalStream(stream, device=array.device))


def empty_like(array: Any, shape: tuple[int, ...]) -> Any:
    """A new array of the same library, dtype and device; None where that is not known how."""
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        with cupy.cuda.Device(array.device.id):
            return cupy.empty(shape, array.dtype)
    return None

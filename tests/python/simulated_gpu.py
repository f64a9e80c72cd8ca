"""Arrays on a simulated GPU (tests/simulated_cuda), for where there is none."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "build/release/tests/simulated_cuda/libsimulated_cuda.so"


@functools.cache
def library() -> ctypes.CDLL:
    found = ctypes.CDLL(str(path()))
    found.simulated_cuda_allocate.restype = ctypes.c_void_p
    found.simulated_cuda_allocate.argtypes = [ctypes.c_size_t]
    found.simulated_cuda_release.argtypes = [ctypes.c_void_p]
    found.simulated_cuda_copy.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_void_p,
    ]
    found.simulated_cuda_hang.argtypes = [ctypes.c_int]
    found.simulated_cuda_waits.restype = ctypes.c_uint64
    found.simulated_cuda_allocations.restype = ctypes.c_uint64
    return found


def path() -> Path:
    return Path(os.environ.get("GRADWIRE_CUDA_SO") or LIBRARY)


class Array:
    """One with a __cuda_array_interface__, and nothing else."""

    def __init__(self, values: np.ndarray, stream: int | None = None) -> None:
        """`stream`: its handle; None for the default one."""
        values = np.ascontiguousarray(values)
        self.stream = stream
        self.shape, self.dtype = values.shape, values.dtype
        self.nbytes = values.nbytes
        self._address = library().simulated_cuda_allocate(max(1, values.nbytes))
        library().simulated_cuda_copy(self._address, values.ctypes.data, values.nbytes, stream)

    @property
    def __cuda_array_interface__(self) -> dict:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self._address, False),
            "version": 3,
            "stream": self.stream or 1,
        }

    def get(self) -> np.ndarray:
        values = np.empty(self.shape, self.dtype)
        library().simulated_cuda_copy(values.ctypes.data, self._address, self.nbytes, self.stream)
        return values

    def __del__(self) -> None:
        library().simulated_cuda_release(self._address)

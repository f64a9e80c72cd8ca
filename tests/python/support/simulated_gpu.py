"""Arrays on a simulated GPU (tests/simulated_cuda), for where there is none."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from ranks import LIMIT

ROOT = Path(__file__).parents[3]
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
    found.simulated_cuda_put.argtypes = found.simulated_cuda_copy.argtypes
    found.simulated_cuda_enqueue_copy.argtypes = found.simulated_cuda_copy.argtypes
    found.simulated_cuda_hang.argtypes = [ctypes.c_int]
    found.simulated_cuda_waits.restype = ctypes.c_uint64
    found.simulated_cuda_allocations.restype = ctypes.c_uint64
    return found


def path() -> Path:
    return Path(os.environ.get("GRADWIRE_CUDA_SO") or LIBRARY)


needed = pytest.mark.skipif(
    not path().exists(), reason="libsimulated_cuda.so was not built (make test-python)"
)

_HEAD = """
import json, sys, time
import numpy as np
import gradwire
from simulated_gpu import Array, library

def values(rank, n=1000):
    return np.random.default_rng(rank).standard_normal(n).astype(np.float32)
"""

_RUN = """
if __name__ == "__main__":
    print(json.dumps(gradwire.spawn(body, {ranks}, threads={threads}, timeout=60)))
"""


def run(
    body: str, ranks: int = 2, *, threads: bool = False, end: str = _RUN, **environment: str
) -> list:
    """The result of `body(comm)` on every rank, of a program of its own, which prints it."""
    program = _HEAD + textwrap.dedent(body) + end.format(ranks=ranks, threads=threads)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ
        | {
            "GRADWIRE_CUDA_SO": str(path()),
            "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}",
        }
        | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Array:
    """One with a __cuda_array_interface__, and nothing else."""

    def __init__(self, values: np.ndarray, stream: int | None = None) -> None:
        """`stream`: its handle; None for the default one."""
        values = np.ascontiguousarray(values)
        self.stream = stream
        self._process = os.getpid()
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

    def put(self, values: np.ndarray) -> None:
        """Copies in the order of its stream, for which nobody waits."""
        library().simulated_cuda_put(self._address, values.ctypes.data, self.nbytes, self.stream)

    def get(self) -> np.ndarray:
        values = np.empty(self.shape, self.dtype)
        library().simulated_cuda_copy(values.ctypes.data, self._address, self.nbytes, self.stream)
        return values

    def __del__(self) -> None:
        if os.getpid() == self._process:  # as torch's does, it leaves the memory alone in a fork
            library().simulated_cuda_release(self._address)

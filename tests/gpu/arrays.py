"""Arrays: NumPy's, torch's on a GPU, or of the simulated GPU of the tests."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

SUPPORT = Path(__file__).parents[1] / "python/support"


class Place(Protocol):
    """Where a call's arrays are."""

    dtypes: tuple[str, ...]

    def put(self, values: np.ndarray, shift: int = 0) -> Any:
        """A copy, that many elements behind where its memory begins."""
        ...

    def get(self, array: Any) -> np.ndarray:
        """A copy, of what it is when all that this thread enqueued is done."""
        ...

    def fill(self, array: Any, values: np.ndarray) -> None:
        """Changes what an array holds."""
        ...

    def on_stream(self) -> contextlib.AbstractContextManager[None]:
        """A stream of this thread's own."""
        ...

    @property
    def stream(self) -> int:
        """Its handle."""
        ...

    def wait(self) -> None:
        """Until all that this thread enqueued is done."""
        ...


_PLAIN = ("float32", "float64", "float16", "int8", "int32", "int64", "uint8")


class Cpu:
    """In NumPy's arrays."""

    stream = 0

    dtypes = (*_PLAIN, "bfloat16")

    def put(self, values: np.ndarray, shift: int = 0) -> np.ndarray:
        """See Place."""
        room = np.empty(values.size + shift, values.dtype)
        room[shift:] = values.ravel()
        return room[shift:].reshape(values.shape)

    def get(self, array: np.ndarray) -> np.ndarray:
        """See Place."""
        return array.copy()

    def fill(self, array: np.ndarray, values: np.ndarray) -> None:
        """See Place."""
        array[:] = values

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """See Place."""
        yield

    def wait(self) -> None:
        """See Place."""


class Cuda:
    """In torch's tensors on the first GPU."""

    dtypes = (*_PLAIN, "bfloat16")

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self.device = torch.device("cuda:0")

    def put(self, values: np.ndarray, shift: int = 0) -> Any:
        """See Place."""
        torch = self._torch
        flat = np.ascontiguousarray(values).ravel()
        if values.dtype.name == "bfloat16":
            host = torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16)
        else:
            host = torch.from_numpy(flat)
        room = torch.empty(values.size + shift, dtype=host.dtype, device=self.device)
        room[shift:].copy_(host)
        return room[shift:].view(values.shape)

    def get(self, array: Any) -> np.ndarray:
        """See Place."""
        host = array.detach().cpu()
        if host.dtype == self._torch.bfloat16:
            import ml_dtypes

            return host.view(self._torch.int16).numpy().view(ml_dtypes.bfloat16)
        return host.numpy()

    def fill(self, array: Any, values: np.ndarray) -> None:
        """See Place."""
        array.copy_(self._torch.from_numpy(values))

    @property
    def stream(self) -> int:
        """See Place."""
        return int(self._torch.cuda.current_stream(self.device).cuda_stream)

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """See Place."""
        torch = self._torch
        torch.cuda.set_device(self.device)
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            yield
            self.wait()

    def wait(self) -> None:
        """See Place."""
        self._torch.cuda.current_stream(self.device).synchronize()


class Cupy:
    """In CuPy's arrays on the first GPU."""

    dtypes = _PLAIN

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy

    def put(self, values: np.ndarray, shift: int = 0) -> Any:
        """See Place."""
        room = self._cupy.empty(values.size + shift, values.dtype)
        room[shift:] = self._cupy.asarray(np.ascontiguousarray(values).ravel())
        return room[shift:].reshape(values.shape)

    def get(self, array: Any) -> np.ndarray:
        """See Place."""
        found: np.ndarray = self._cupy.asnumpy(array)
        return found

    def fill(self, array: Any, values: np.ndarray) -> None:
        """See Place."""
        array.set(values)

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """See Place."""
        with self._cupy.cuda.Device(0), self._cupy.cuda.Stream(non_blocking=True):
            yield
            self.wait()

    @property
    def stream(self) -> int:
        """See Place."""
        return int(self._cupy.cuda.get_current_stream().ptr)

    def wait(self) -> None:
        """See Place."""
        self._cupy.cuda.get_current_stream().synchronize()


class Simulated:
    """In arrays of tests/python/support/simulated_gpu.py; GRADWIRE_CUDA_SO names its library."""

    dtypes = _PLAIN

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def put(self, values: np.ndarray, shift: int = 0) -> Any:
        """See Place."""
        return _simulated_array()(values, shift, getattr(self._of_thread, "stream", None))

    def get(self, array: Any) -> np.ndarray:
        """See Place."""
        found: np.ndarray = array.get()
        return found

    def fill(self, array: Any, values: np.ndarray) -> None:
        """See Place."""
        array.set(values)

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """See Place."""
        from gradwire import _core

        self._of_thread.stream = _core.CudaStream(0)
        try:
            yield
            self.wait()
        finally:
            del self._of_thread.stream

    def wait(self) -> None:
        """See Place."""
        from gradwire import _core

        stream = getattr(self._of_thread, "stream", None)
        if stream is None:
            return
        event = _core.CudaEvent(0)
        event.record(stream.handle)
        while not event.done():
            pass

    @property
    def stream(self) -> int:
        """See Place."""
        handle: int = self._of_thread.stream.handle
        return handle


@functools.cache
def _simulated_array() -> Any:
    sys.path.append(str(SUPPORT))
    import simulated_gpu

    class ShiftedArray(simulated_gpu.Array):
        """One that begins some elements behind its memory."""

        def __init__(self, values: np.ndarray, shift: int, stream: Any) -> None:
            room = np.zeros(shift + values.size + 1, values.dtype)
            room[shift:-1] = values.ravel()
            super().__init__(room, None if stream is None else stream.handle)
            self._keeps, self._shift = stream, shift
            self.shape, self.nbytes = values.shape, values.nbytes

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {**super().__cuda_array_interface__, "data": (self._first, False)}

        @property
        def _first(self) -> int:
            address: int = self._address
            return address + self._shift * self.dtype.itemsize

        def get(self) -> np.ndarray:
            values = np.empty(self.shape, self.dtype)
            self._copy(values.ctypes.data, self._first)
            return values

        def set(self, values: np.ndarray) -> None:
            assert (values.shape, values.dtype) == (self.shape, self.dtype)
            self._copy(self._first, values.ctypes.data)

        def _copy(self, to: int, from_: int) -> None:
            simulated_gpu.library().simulated_cuda_copy(to, from_, self.nbytes, self.stream)

    return ShiftedArray


def simulated_library() -> ctypes.CDLL:
    """The simulated device's, for what no GPU could tell."""
    _simulated_array()
    import simulated_gpu

    return simulated_gpu.library()


def place(simulated: bool) -> Cuda | Simulated:
    """The GPU, or the simulated one."""
    return Simulated() if simulated else Cuda()

"""CUDA tensors, streams and events of torch over a simulated GPU, for torch's CPU build.

`install()` puts them in the place of torch.cuda's own, in a process that is to end soon. Tensors
have views, copies and memory; what a copy does waits in its stream, as on a GPU. After
`compute()` they have torch's arithmetic, too: the CPU does it, once the current stream, and that
one alone, has done what was given to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import threading
from collections.abc import Iterator
from typing import Any

import simulated_gpu
import torch
from gradwire import _core
from gradwire.torch.backend import cuda_staging, operations
from gradwire.torch.ddp import double_counting
from simulated_gpu import library
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda", 0)
recorded: list[tuple[int, int]] = []  # addresses of tensors and the streams they were told of
reads = 0  # times that the host waited for a tensor's values
capturing = False  # what torch says of the current stream
_BYTE = ctypes.c_char
_tensor_to = torch.Tensor.to
_pinned: list[torch.Tensor] = []  # kept: copies of a stream may still read and write it


class Event:
    def __init__(self) -> None:
        self._core = _core.CudaEvent(0)

    def record(self, stream: Stream) -> None:
        self._core.record(stream.cuda_stream)

    def wait(self, stream: Stream) -> None:
        self._core.wait(stream.cuda_stream)

    def query(self) -> bool:
        return self._core.done()


class Stream:
    """A stream of its own, or that of a handle."""

    device = DEVICE

    def __init__(self, handle: int | None = None, device: Any = None) -> None:
        self._owner = _core.CudaStream(0) if handle is None else None
        self.cuda_stream = handle if self._owner is None else self._owner.handle

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        library().simulated_cuda_copy(None, None, 0, self.cuda_stream)


class _Current(threading.local):
    stream = None


_current = _Current()
_default = None


def current_stream(device: Any = None) -> Stream:
    return _current.stream or _default


@contextlib.contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    before, _current.stream = _current.stream, stream
    try:
        yield
    finally:
        _current.stream = before


class Future:
    """A future of torch with devices: it holds its value for the streams on which it was set."""

    def __init__(self, *, devices: Any = None) -> None:
        self._over, self._lock = threading.Event(), threading.Lock()
        self._calls: list[Any] = []
        self.devices, self._value, self._error = devices, None, None

    def set_result(self, value: Any) -> None:
        assert self.devices == [DEVICE]
        self._end, self._value = current_stream().record_event(), value
        self._call_back()

    def set_exception(self, error: Exception) -> None:
        self._error = error
        self._call_back()

    def then(self, call: Any) -> Future:
        child = Future(devices=self.devices)

        def run() -> None:
            try:
                with on_stream(Stream()):  # as torch's, a callback has a stream of its own
                    if self._error is None:
                        current_stream().wait_event(self._end)
                    child.set_result(call(self))
            except Exception as error:
                child.set_exception(error)

        with self._lock:
            if not self._over.is_set():
                self._calls.append(run)
                return child
        run()
        return child

    def value(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    def wait(self) -> Any:
        self._over.wait()
        if self._error is None:
            current_stream().wait_event(self._end)
        return self.value()

    def done(self) -> bool:
        return self._over.is_set()

    def _call_back(self) -> None:
        with self._lock:
            self._over.set()
            calls, self._calls = self._calls, []
        for each in calls:
            each()


class CudaTensor(torch.Tensor):
    """A tensor on the simulated GPU; `memory` is a view of it for the CPU."""

    @staticmethod
    def __new__(cls, memory: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            memory.shape,
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=DEVICE,
        )

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    def record_stream(self, stream: Stream) -> None:
        recorded.append((self.data_ptr(), stream.cuda_stream))

    def copy_(self, given: torch.Tensor, non_blocking: bool = False) -> CudaTensor:
        # Torch's own would ask for a device that its CPU build has not. It waits for what the CPU
        # may change next.
        _copy(self, given, wait=not given.is_cuda and not non_blocking)
        return self

    def __getitem__(self, index: slice | tuple[slice, ...]) -> CudaTensor:  # as copy_
        found = self
        for dim, each in enumerate(index if isinstance(index, tuple) else (index,)):
            found = torch.ops.aten.slice.Tensor(found, dim, each.start, each.stop)
        return found

    def __int__(self) -> int:
        return int(cpu(self))

    def __bool__(self) -> bool:
        return bool(cpu(self))

    def __float__(self) -> float:
        return float(cpu(self))

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        if name == "copy_":
            _copy(args[0], args[1], wait=args[2:] != (True,))  # to the CPU
            return args[0]
        if name == "new_empty":
            return _empty(args[1], kwargs.get("dtype") or args[0].dtype)
        if name == "clone":
            made = _empty(args[0].shape, args[0].dtype)
            _copy(made, args[0])
            return made
        if _computes and name not in _VIEWS:
            return _computed(func, args, kwargs)
        assert name in _VIEWS, name
        found = func(args[0].memory, *args[1:], **kwargs)
        return [cls(each) for each in found] if isinstance(found, list) else cls(found)


_VIEWS = (
    "view",
    "detach",
    "alias",
    "split",
    "split_with_sizes",
    "slice",
    "select",
    "t",
    "transpose",
    "unsqueeze",
    "as_strided",
)
_computes = False


def compute() -> None:
    """Gives tensors torch's arithmetic, from now on."""
    global _computes
    _computes = True
    torch.cuda.synchronize = lambda device=None: current_stream(device).synchronize()


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """What a function of torch returns, computed by the CPU."""
    if func._schema.name in ("aten::_local_scalar_dense", "aten::equal"):
        _note_read()
    current_stream().synchronize()
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, CudaTensor)]
    memory, kwargs = tree_map(_memory_of, (args, kwargs))
    to = kwargs.pop("device", DEVICE)
    owners = {each.memory.untyped_storage().data_ptr(): each for each in given}

    def wrapped(found: Any) -> Any:
        if not isinstance(found, torch.Tensor) or torch.device(to).type == "cpu":
            return found
        owner = owners.get(found.untyped_storage().data_ptr())
        if owner is None:
            made = _empty(found.shape, found.dtype)
            made.memory.copy_(found)
            return made
        return owner if found is owner.memory else CudaTensor(found)

    return tree_map(wrapped, func(*memory, **kwargs))


def _memory_of(value: Any) -> Any:
    return value.memory if isinstance(value, CudaTensor) else value


def cuda(values: torch.Tensor) -> CudaTensor:
    """A copy of a CPU tensor on the GPU, which the current stream makes."""
    made = _empty(values.shape, values.dtype)
    given = values.contiguous()
    library().simulated_cuda_put(
        made.data_ptr(), given.data_ptr(), given.nbytes, current_stream().cuda_stream
    )
    return made


def cpu(tensor: CudaTensor) -> torch.Tensor:
    """A copy of a tensor on the CPU, for which the current stream was waited for."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype)
    _copy(made, tensor, wait=True)
    return made


def install() -> None:
    """Has torch's CUDA be this, and gradwire's CUDA part that of the simulated GPU."""
    global _default
    os.environ["GRADWIRE_CUDA_SO"] = str(simulated_gpu.path())
    _default = Stream()  # not the default stream of the device, which waits for others
    torch.cuda.current_stream, torch.cuda.stream = current_stream, on_stream
    torch.cuda.Stream = torch.cuda.ExternalStream = Stream
    torch.cuda.Event, torch.cuda.get_device_capability = Event, lambda device=None: (9, 0)
    torch.cuda.is_current_stream_capturing = lambda: capturing
    operations.Future = lambda *, devices=None: (
        torch.futures.Future() if devices is None else Future(devices=devices)
    )
    cuda_staging.host_memory = double_counting.pinned = _host_memory
    torch.Tensor.to = _to


def _to(self: torch.Tensor, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
    """`Tensor.to`, also from the CPU to the GPU where `device=` says so."""
    if device == DEVICE and not self.is_cuda:
        return cuda(_tensor_to(self, *args, **kwargs))
    return _tensor_to(self, *args, **kwargs, **({} if device is None else {"device": device}))


def _host_memory(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype)
    _pinned.append(made)
    return made


def _empty(shape: Any, dtype: torch.dtype) -> CudaTensor:
    count = torch.Size(shape).numel()
    address = library().simulated_cuda_allocate(max(1, count * dtype.itemsize))
    memory = (_BYTE * max(dtype.itemsize, count * dtype.itemsize)).from_address(address)
    return CudaTensor(torch.frombuffer(memory, dtype=dtype)[:count].view(shape))


def _copy(to: torch.Tensor, given: torch.Tensor, wait: bool = False) -> None:
    """Enqueues copies of runs of bytes on the current stream."""
    assert to.shape == given.shape
    assert to.dtype == given.dtype
    target, source = (getattr(each, "memory", each) for each in (to, given))
    for a, b, count in _runs(target, source):
        library().simulated_cuda_enqueue_copy(a, b, count, current_stream().cuda_stream)
    if wait:
        _note_read()
        current_stream().synchronize()


def _note_read() -> None:
    global reads
    reads += 1


def _runs(to: torch.Tensor, given: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    if to.is_contiguous() and given.is_contiguous():
        yield to.data_ptr(), given.data_ptr(), to.nbytes
        return
    for index in itertools.product(*map(range, to.shape)):
        yield to[index].data_ptr(), given[index].data_ptr(), to.element_size()

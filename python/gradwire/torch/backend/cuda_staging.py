"""Staging of CUDA tensors: on the GPU for calls that run there, in host memory for the others."""

from __future__ import annotations

from typing import Any

import torch

from gradwire._communicator import Communicator
from gradwire.torch.backend.operations import Done, Finished, ResultStream, Waited
from gradwire.torch.backend.staging import Staging, is_plain, several_devices


class _CudaStaging(Staging):
    """The tensors of one call, all on one GPU."""

    __slots__ = ("_callers", "_device")

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._callers = torch.cuda.current_stream(device)

    def _require_here(self, tensor: torch.Tensor) -> None:
        if tensor.device != self._device:
            raise several_devices(tensor.device, self._device)


class OnGpu(_CudaStaging):
    """The tensors of a call that runs on the GPU; copies are made there, in the order of streams.

    The call is enqueued on the caller's stream if it is blocking, otherwise on gradwire's.
    """

    __slots__ = ("_communicator",)

    def __init__(self, device: torch.device, communicator: Communicator) -> None:
        super().__init__(device)
        self._communicator = communicator

    def finished(self, work: Waited) -> Waited:
        """The work of the call, followed by the copies, which are enqueued behind it."""
        if not self.late:
            return work
        own = self.stream(work).stream
        with torch.cuda.stream(own):
            for tensor, _ in self._copies:
                tensor.record_stream(own)
            self.finish()
            return _Enqueued(work, own.record_event(), self._device)

    def stream(self, work: Waited) -> ResultStream:
        """The stream on which the call was enqueued."""
        if isinstance(work, Done):
            return ResultStream(self._callers, enqueued=True)
        handle = self._communicator._gpu_stream
        return ResultStream(torch.cuda.ExternalStream(handle, device=self._device), enqueued=True)

    def _in_place(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> bool:
        self._require_here(tensor)
        return is_plain(tensor, dtype)


class ByHost(_CudaStaging):
    """The tensors of a call that runs on the CPU, copied to host memory and back.

    The host waits until the caller's stream has what is sent. What has come is copied on the same
    stream.
    """

    __slots__ = ()

    def finished(self, work: Waited) -> Waited:
        """The work of the call, with the copies to the GPU at its end."""
        return _BroughtBack(work, self) if self.late else work

    def stream(self, work: Waited) -> ResultStream:  # noqa: ARG002
        """The caller's stream."""
        return ResultStream(self._callers, enqueued=False)

    def _in_place(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> bool:  # noqa: ARG002
        self._require_here(tensor)
        return False

    def _copy(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        with torch.no_grad():
            return self._memory(tensor, dtype).copy_(tensor)

    def _memory(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        return host_memory(tensor.shape, dtype or tensor.dtype)


class _Enqueued:
    """A call on a GPU and the copies behind it."""

    def __init__(self, work: Waited, end: torch.cuda.Event, device: torch.device) -> None:
        self._work, self._end, self._device = work, end, device

    def done(self) -> bool:
        """Whether the GPU has finished the copies."""
        return bool(self._end.query())

    def wait(self, timeout: float | None = None) -> Any:
        """Makes the current stream wait; raises the communicator's failure if that is known."""
        result = self._work.wait(timeout)
        torch.cuda.current_stream(self._device).wait_event(self._end)
        return result


class _BroughtBack(Finished):
    """A work of the CPU whose results are then copied to a GPU."""

    def __init__(self, work: Waited, staging: ByHost) -> None:
        super().__init__(work, self._bring_back)
        self._staging = staging
        self._end: torch.cuda.Event | None = None

    def wait(self, timeout: float | None = None) -> Any:
        """Blocks until the work is over; makes the current stream wait for the copies."""
        result = super().wait(timeout)
        assert self._end is not None
        torch.cuda.current_stream(self._staging._device).wait_event(self._end)
        return result

    def _bring_back(self) -> None:
        stream = self._staging._callers
        with torch.cuda.stream(stream):
            self._staging.finish()
            self._end = stream.record_event()


def host_memory(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Pinned memory, which torch reuses when the copies of its streams are over."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

"""Endpoint: the communicator behind one process group, and the threads that work for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.profiler import record_function

from gradwire._communicator import Communicator
from gradwire._errors import Error, InvalidArgument
from gradwire._launch import at_exit
from gradwire.torch.backend import cpp_holders
from gradwire.torch.backend.devices import Devices
from gradwire.torch.backend.mailbox import Mailbox
from gradwire.torch.backend.operations import Done, Operation, Several, Waited
from gradwire.torch.backend.staging import Staging
from gradwire.torch.exchange.completions import Completions

_THREAD_SECONDS = 2.0  # for a thread to end that nothing keeps any more
_STRAY_SECONDS = 1.0  # for receives that nobody sent for, when the group is destroyed

_DISAGREE = "all ranks must make the same calls in the same order"

_NONE: Mapping[str, Any] = {}


class _Batch(threading.local):
    works: list[Waited] | None = None  # since `start_batch`


class Endpoint:
    """One rank's end of a process group."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.mailbox = Mailbox(communicator)
        self._devices = Devices(communicator)
        self.timeout: float | None = None  # seconds; the communicator's if None
        self._completions: dict[str, Completions] = {}
        self._lock = threading.Lock()
        self.calls = 0  # collectives that were begun
        self._threads: dict[int, str] = {}  # that began them, by name
        self._batch = _Batch()
        at_exit.close_first(self)

    def staging(
        self,
        name: str,
        tensor: torch.Tensor,
        options: Mapping[str, Any] = _NONE,
        *,
        on_host: bool = False,
    ) -> Staging:
        """The staging of a call of the communicator whose tensors are on this one's device.

        `options` are those keywords of the call that decide whether GPUs take it; `on_host` says
        that they do not.
        """
        if tensor.is_cpu:
            return Staging()
        return self._devices.staging(name, tensor, options, on_host)

    def run(
        self,
        call: Callable[..., Any],
        options: Any,
        results: Sequence[torch.Tensor],
        staging: Staging | None = None,
    ) -> Operation:
        """Makes a collective call with torch's options: waits for it, unless they say async.

        torch's profiler shows the call, which for blocking ones includes the wait.
        """
        self.calls += 1
        if (ident := threading.get_ident()) not in self._threads:
            self._threads[ident] = threading.current_thread().name
        try:
            if not torch.autograd._profiler_enabled():
                return self._run(call, options, results, staging)
            with record_function(f"gradwire:{getattr(call, 'func', call).__name__}"):
                return self._run(call, options, results, staging)
        except InvalidArgument as error:
            raise self.explained(error) from None

    def _run(
        self,
        call: Callable[..., Any],
        options: Any,
        results: Sequence[torch.Tensor],
        staging: Staging | None,
    ) -> Operation:
        timeout = self.seconds(options)
        if getattr(options, "asyncOp", True):
            return self.operation(call(async_op=True, timeout=timeout), results, staging)
        call(timeout=timeout)
        over = Done()
        if staging is None:
            return Operation(over, results, self)
        if staging.late:
            staging.finish()
        return Operation(over, results, self, staging.stream(over))

    def operation(
        self,
        work: Waited,
        results: Sequence[torch.Tensor],
        staging: Staging | None = None,
    ) -> Operation:
        """The operation of a work."""
        whole, stream = work, None
        if staging is not None:
            whole, stream = staging.finished(work), staging.stream(work)
        self.begun(whole)
        return Operation(whole, results, self, stream)

    def begun(self, work: Waited) -> None:
        """Adds a work to the batch of this thread, if there is one."""
        if self._batch.works is not None:
            self._batch.works.append(work)

    def seconds(self, options: Any) -> float | None:
        """The timeout of a call: that of torch's options, or the group's."""
        given = getattr(options, "timeout", None)
        if given is None or given.days < 0:  # torch's "unset" is -1 ms
            return self.timeout
        return float(given.total_seconds())

    def explained(self, error: Exception) -> Exception:
        """The error; if ranks made different calls, with the threads from which they may come."""
        if len(self._threads) < 2 or _DISAGREE not in str(error):
            return error
        return InvalidArgument(
            f"{error}; {len(self._threads)} threads of rank {self.communicator.rank} have called "
            f"this process group ({', '.join(sorted(self._threads.values()))}), and at once they "
            "do so in another order on each rank: give each thread a group of its own, by "
            "new_group(); for checkpoints, gradwire.torch.async_save() has one"
        )

    def completions(self, purpose: str = "group") -> Completions:
        """The threads that complete futures, in turn for each purpose."""
        with self._lock:
            if purpose not in self._completions:
                name = f"gradwire-{purpose}-{self.communicator.rank}"
                self._completions[purpose] = Completions(name)
            return self._completions[purpose]

    def start_batch(self) -> None:
        """Remembers the works that this thread begins until `end_batch`."""
        self._batch.works = []

    def end_batch(self) -> Operation:
        """The works since `start_batch`, as one operation."""
        works, self._batch.works = self._batch.works or [], None
        return self.operation(Several(works), [])

    def together(self, operations: Sequence[Operation]) -> Operation:
        """Several operations as one."""
        results = [tensor for each in operations for tensor in each.results]
        whole = Several([each.work for each in operations])
        self.begun(whole)
        streams = [each.stream for each in operations if each.stream is not None]
        if not streams:
            return Operation(whole, results, self)
        all_enqueued = all(each.enqueued for each in streams)
        return Operation(whole, results, self, streams[0]._replace(enqueued=all_enqueued))

    def abort(self) -> None:
        """Ends every call of this group, here and on all ranks."""
        self.communicator.abort("the process group was aborted")

    def shut_down(self) -> None:
        """Finishes calls in flight, says goodbye and releases everything."""
        try:
            if self.communicator.closed:
                return
            if not self.mailbox.waits:
                self.communicator.close(self.timeout)
                return
            stray = not self.mailbox.posted
            try:
                self.communicator.close(_STRAY_SECONDS)
            except Error:
                if not stray:
                    raise
        finally:
            self._end_threads()

    def close(self, with_communicator: bool) -> None:
        """Ends the threads at the end of the program; aborts what they still wait for."""
        pending = any(each.pending for each in self._completions.values())
        if pending or self.mailbox.waits:
            self.communicator._core.abort(
                f"rank {self.communicator.rank}: the program ended with operations of a process "
                "group in flight",
                alone=False,
            )
        self._end_threads()
        if with_communicator:
            self.communicator.close()

    def _end_threads(self) -> None:
        cpp_holders.release()
        self.mailbox.close(_THREAD_SECONDS)
        with self._lock:
            ended, self._completions = list(self._completions.values()), {}
        for each in ended:
            each.close(_THREAD_SECONDS)


def endpoint_of(group: Any) -> Any:
    """The caller's end of a group of the backend gradwire; None for other groups."""
    for device in getattr(group, "_device_types", ()):
        endpoint = getattr(group._get_backend(device), "_endpoint", None)
        if endpoint is not None:
            return endpoint
    return None

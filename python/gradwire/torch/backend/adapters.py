"""Adapters: the classes that torch accepts as a process group written in Python.

Up to torch 2.13 that is a subclass of ProcessGroup, which replaces the whole group. Later versions
take a subclass of Backend, one for each device of a group, and make the group themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradwire._base.backend import BACKEND, DEVICES
from gradwire._communicator import Communicator
from gradwire._errors import InvalidArgument
from gradwire.torch.backend import dispatcher, torch_functions, versions
from gradwire.torch.backend.activation_codec import ActivationCodec
from gradwire.torch.backend.coalesced import CoalescedCollectives
from gradwire.torch.backend.collectives import Collectives, Tensors
from gradwire.torch.backend.endpoint import Endpoint
from gradwire.torch.backend.operations import Operation
from gradwire.torch.backend.options import Options
from gradwire.torch.backend.point_to_point import PointToPoint
from gradwire.torch.backend.rendezvous import connect
from gradwire.torch.backend.tracing import hide_from_dynamo


class Methods(Collectives, CoalescedCollectives, PointToPoint):
    """Methods of both adapters."""

    def __init__(self, communicator: Communicator, options: Options) -> None:
        """Takes the group's communicator, and the options that the program gave."""
        super().__init__(communicator.rank, communicator.size)  # type: ignore[call-arg]
        self._endpoint, self._codec = Endpoint(communicator), ActivationCodec(options)
        self._options = options

    def getBackendName(self) -> str:
        """The backend's name."""
        return BACKEND

    def shutdown(self) -> None:
        """Finishes calls in flight and closes the connections; `destroy_process_group` calls it."""
        self._endpoint.shut_down()

    def abort(self) -> None:
        """Ends every call with Aborted, here and on all ranks."""
        self._endpoint.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of later calls."""
        self._endpoint.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def monitored_barrier(self, opts: Any = None, wait_all_ranks: bool = False) -> None:  # noqa: ARG002
        """Returns when every rank has called it; raises Timeout, which names a rank that has not.

        Every barrier of this backend does that, so `wait_all_ranks` changes nothing.
        """
        self._endpoint.communicator.barrier(timeout=self._endpoint.seconds(opts))


class BackendGroup(Methods, dist.ProcessGroup):  # type: ignore[misc]
    """One rank's process group, up to torch 2.13."""

    supports_splitting = False

    def __init__(
        self, communicator: Communicator, options: Options, torchs: Any, devices: Sequence[str]
    ) -> None:
        """Takes communicator, options and devices of the group, and torch's description of it."""
        super().__init__(communicator, options)
        self._name, self._description = str(torchs.group_id), "undefined"
        self._store, self._devices = torchs.store, devices

    @property
    def group_name(self) -> str:
        """The name by which torch knows the group."""
        return self._name

    def getGroupName(self) -> str:
        """The name by which torch knows the group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """The description that the program gave the group."""
        return self._description

    def getGroupDesc(self) -> str:
        """The description that the program gave the group."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors the group takes."""
        return [torch.device(each) for each in self._devices]

    def _get_backend(self, _: torch.device) -> BackendGroup:
        """The group itself: it is its own backend."""
        return self

    def get_group_store(self) -> Any:
        """The store through which the ranks met."""
        return self._store


class _Part(NamedTuple):
    """A group of some ranks of another one, as torch describes new groups."""

    store: Any
    group_rank: int
    group_size: int
    timeout: timedelta
    global_ranks_in_group: Sequence[int]


# With TORCH_DISTRIBUTED_DEBUG=DETAIL torch keeps only the C++ half of a backend.
_kept: set[DeviceMethods] = set()


class DeviceMethods(Methods):
    """Methods of a backend for one device of a group, from torch 2.14 on: some have other names."""

    # Torch's own properties would ask this object again, without end.
    supports_splitting = True
    supports_coalescing = _supports_time_estimate = False
    supports_shrinking = supports_reconfigure = supports_window = False

    @property
    def options(self) -> Any:
        """The name and the timeout of the group, as torch's own backends tell them."""
        seconds = self._endpoint.timeout or self._endpoint.communicator._timeout
        made = torch._C._distributed_c10d.Backend.Options
        return made(BACKEND, timedelta(seconds=seconds))

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: the first call has the number 1 on all ranks."""

    def _get_sequence_number_for_group(self) -> int:
        """The number of the latest collective call, of which torch's detailed errors speak."""
        return self._endpoint.calls

    def shutdown(self) -> None:
        """Finishes calls in flight and closes the connections; `destroy_process_group` calls it."""
        try:
            super().shutdown()
        finally:
            _kept.discard(self)

    def split(self, store: Any, ranks: Sequence[int], options: Any) -> Any:
        """Makes this rank's end of a group of these ranks, in this order, for `split_group`.

        Its options are this group's. Raises InvalidArgument on a rank that is in no new group.
        """
        communicator = self._endpoint.communicator
        if communicator.rank not in ranks:  # torch would read the None that it documents as a group
            raise InvalidArgument(
                f"split_group: rank {communicator.rank} is in none of split_ranks=, which torch "
                "cannot tell a backend in Python: give it a group of its own, or call new_group()"
            )
        job_ranks = [communicator._mesh.job_rank(each) for each in ranks]
        rank = ranks.index(communicator.rank)
        part = _Part(store, rank, len(ranks), options._timeout, job_ranks)
        return make(connect(part, repr(self._options)), self._options, part)

    def perform_nocolor_split(self, _: Any) -> None:
        """Does nothing: ranks outside of a new group take no part in making it."""

    def allreduce_sparse(self, tensors: Tensors, opts: Any = None) -> Operation:
        """Reduces a sparse tensor of all ranks, on all ranks, in place."""
        return self.allreduce(tensors, opts)

    def start_coalescing(self) -> None:
        """Begins to collect operations for `end_coalescing`; each still begins at once."""
        self._endpoint.start_batch()

    def end_coalescing(self) -> Operation:
        """All operations since `start_coalescing`, as one."""
        return self._endpoint.end_batch()


def make(
    communicator: Communicator, options: Options, torchs: Any, devices: Sequence[str] = DEVICES
) -> Any:
    """Makes what this version of torch takes as a group of the communicator's ranks."""
    if versions.parse(torch.__version__) < versions.FIRST_WITH_BACKENDS:
        return BackendGroup(communicator, options, torchs, devices)
    # Older versions have the class too, and cannot construct it.
    base = torch._C._distributed_c10d.Backend
    made = type("DeviceBackend", (DeviceMethods, base), {})(communicator, options)
    _kept.add(made)
    return made


if versions.parse(torch.__version__) < versions.FIRST_WITH_BACKENDS:
    dispatcher.show_calls(BackendGroup)
    dispatcher.call_methods()
torch_functions.replace()
hide_from_dynamo(DeviceMethods, BackendGroup)

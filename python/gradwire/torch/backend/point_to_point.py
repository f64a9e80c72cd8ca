"""Sends and receives of a process group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire._base.arguments import whole
from gradwire._errors import InvalidArgument
from gradwire.torch.backend.activation_codec import ActivationCodec
from gradwire.torch.backend.endpoint import Endpoint
from gradwire.torch.backend.mailbox import Receive
from gradwire.torch.backend.operations import Operation, Received


class PointToPoint:
    """Methods that torch calls on two ranks: messages of one tag match in the order they were sent.

    Tags are non-negative, as MPI's.
    """

    _endpoint: Endpoint
    _codec: ActivationCodec

    def send(self, tensors: Sequence[torch.Tensor], dstRank: int, tag: int = 0) -> Operation:
        """Begins to send a tensor to a rank of the group."""
        endpoint, (tensor,) = self._endpoint, tensors
        staging = endpoint.staging("send", tensor)
        memory = staging.read_bytes(tensor.detach(), self._codec.payloads(tensor))
        work = endpoint.mailbox.send(memory, _rank(endpoint, dstRank), _tag(tag), endpoint.timeout)
        endpoint.begun(work)
        # Futures complete in turn, and a receiver may be late.
        return Operation(work, [tensor], endpoint, staging.stream(work), f"to-{dstRank}")

    def recv(self, tensors: Sequence[torch.Tensor], srcRank: int, tag: int = 0) -> Operation:
        """Begins to receive a tensor from a rank of the group."""
        return self._receive(tensors, _rank(self._endpoint, srcRank), tag)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> Operation:
        """Begins to receive a tensor from whichever rank of the group sends first."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Sequence[torch.Tensor], source: int | None, tag: int) -> Operation:
        endpoint, (tensor,) = self._endpoint, tensors
        staging = endpoint.staging("recv", tensor)
        memory = staging.write_bytes(tensor.detach(), self._codec.payloads(tensor))
        timeout = endpoint.timeout or endpoint.communicator._timeout
        job_source = None if source is None else endpoint.communicator._mesh.job_rank(source)
        receive = Receive(memory, source, _tag(tag), timeout, job_source)
        endpoint.mailbox.receive(receive)
        work = staging.finished(receive)
        endpoint.begun(work)
        return Received(receive, work, [tensor], endpoint, staging.stream(work))


def _rank(endpoint: Endpoint, rank: int) -> int:
    if not 0 <= rank < endpoint.communicator.size:
        raise InvalidArgument(f"{rank} is not a rank of {endpoint.communicator!r}")
    return rank


def _tag(tag: int) -> int:
    return whole(tag, "tag", least=0, bits=64)

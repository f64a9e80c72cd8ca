"""Source: what one communicator of this process has counted."""

from __future__ import annotations

import socket
import weakref
from collections.abc import Iterator
from typing import Any

from gradwire import _core
from gradwire._bootstrap.mesh import Mesh
from gradwire._host.tcp_sockets import TcpInfo, TcpSocket
from gradwire._metrics.text import Key, key, total

# What a ring sends for each byte of a rank's input, with p ranks.
_RING = {
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "reduce_scatter": lambda p: (p - 1) / p,
    "all_gather": lambda p: p - 1,
}


def link_to(peer: int, mesh: Mesh) -> str:
    """What lies between this rank and another, as the label of bytes says it."""
    if mesh.hosts[peer] == mesh.hosts[mesh.rank]:
        return "within host"
    apart = mesh.sites and not any({peer, mesh.rank} <= {*each} for each in mesh.sites)
    return "between sites" if apart else "between hosts"


class Source:
    """Counters of a communicator, which this does not keep open."""

    def __init__(self, core: _core.Communicator, mesh: Mesh, owner: Any) -> None:
        """`owner` is the Communicator."""
        self.totals = _core.Totals(mesh.size)
        self._core, self._mesh, self._owner = core, mesh, weakref.ref(owner)
        self._last: dict[TcpSocket, TcpInfo] = {}  # of sockets that have been open at a reading
        self._gpu_bytes = 0

    @property
    def job_rank(self) -> int:
        """The number in the job of this rank."""
        return self._mesh.job_rank(self._mesh.rank)

    @property
    def failed(self) -> bool:
        """Whether an error has ended the communicator."""
        return self.totals.failure() is not None

    def info(self, version: str) -> dict[Key, float]:
        """The sample that says what this rank is."""
        host, job = socket.gethostname(), self._mesh.job.name
        return {key("gradwire_info", rank=self.job_rank, host=host, job=job, version=version): 1}

    def samples(self, *, ended: bool = False) -> dict[Key, float]:
        """All samples; what is true only of an open communicator is left out of an `ended` one."""
        tcp = self._tcp(gauges=not ended)
        parts = (self._calls(), self._peers(), self._rank(), tcp)
        return total({each: value} for part in parts for each, value in part)

    def _calls(self) -> Iterator[tuple[Key, float]]:
        for collective, codec, *counts in self.totals.calls():
            labels = {"rank": self.job_rank, "collective": collective, "codec": codec}
            calls, failed, seconds, input_bytes, sent_bytes = counts
            yield key("gradwire_calls_total", **labels), calls
            yield key("gradwire_failed_calls_total", **labels), failed
            yield key("gradwire_call_seconds_total", **labels), seconds
            yield key("gradwire_call_input_bytes_total", **labels), input_bytes
            yield key("gradwire_call_sent_bytes_total", **labels), sent_bytes
            if collective in _RING:
                ring = input_bytes * _RING[collective](self._mesh.size)
                yield key("gradwire_call_ring_bytes_total", **labels), ring

    def _peers(self) -> Iterator[tuple[Key, float]]:
        for peer, counts in enumerate(self.totals.peers()):
            if not any(counts):
                continue
            sent_bytes, received_bytes, sends, receives, late, full = counts
            labels = {"rank": self.job_rank, "peer": self._mesh.job_rank(peer)}
            where = {**labels, "link": link_to(peer, self._mesh)}
            yield key("gradwire_sent_bytes_total", **where), sent_bytes
            yield key("gradwire_received_bytes_total", **where), received_bytes
            yield key("gradwire_sent_messages_total", **labels), sends
            yield key("gradwire_received_messages_total", **labels), receives
            yield key("gradwire_wait_seconds_total", **labels, reason="data"), late
            yield key("gradwire_wait_seconds_total", **labels, reason="reader"), full

    def _rank(self) -> Iterator[tuple[Key, float]]:
        _, _, encode, decode = self._core.traffic
        gpu = getattr(self._owner(), "_gpu", None)
        if gpu is not None:
            self._gpu_bytes = gpu.bytes_sent
        yield key("gradwire_encode_seconds_total", rank=self.job_rank), encode
        yield key("gradwire_decode_seconds_total", rank=self.job_rank), decode
        yield key("gradwire_gpu_sent_bytes_total", rank=self.job_rank), self._gpu_bytes
        if (failure := self.totals.failure()) is not None:
            labels = {"rank": self.job_rank, "error": failure[0], "peer": failure[1]}
            yield key("gradwire_failures_total", **labels), 1

    def _tcp(self, gauges: bool) -> Iterator[tuple[Key, float]]:
        for each in list(self._mesh.tcp_sockets):  # which others change
            now = each.info()
            if now is not None:
                self._last[each] = now
            elif each not in self._last:
                continue
            labels = {"rank": self.job_rank, "peer": self._mesh.job_rank(each.peer)}
            yield key("gradwire_tcp_retransmits_total", **labels), self._last[each].retransmits
            if now is not None and gauges:
                yield key("gradwire_tcp_round_trip_seconds", **labels), now.round_trip
                yield key("gradwire_tcp_rate_bytes_per_second", **labels), now.rate

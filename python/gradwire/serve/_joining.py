"""Joining: how a client joins all shards, the first time and again."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradwire import _core
from gradwire._base.deadline import Deadline
from gradwire._errors import InvalidArgument
from gradwire.serve import _channels, _directory
from gradwire.serve._channels import Introduction
from gradwire.serve._histories import Versions
from gradwire.serve._reconnect import Dialled

GOODBYE_SECONDS = 1.0  # for a client that could not join


@dataclass(frozen=True)
class Joining:
    """Everything that a client needs to join, at any time."""

    service: _directory.Service
    table: str  # the core's text
    shards: int
    name: str
    label: str  # the name, with host and process, for messages
    transports: tuple[str, ...]
    coordinator: bool = False

    def join(
        self, directory: _directory.Directory, deadline: Deadline, previous: int = 0
    ) -> Dialled:
        """Connects to all shards and joins them; `previous` is this client's former number."""
        job = directory.job(deadline)
        number = directory.number(self.name, previous)

        def introduce(transport: str) -> Introduction:
            return Introduction(number, self.label, transport)

        found = [
            _channels.connect(directory, job, shard, introduce, self.transports, deadline)
            for shard in range(self.shards)
        ]
        core = _core.ServeClient(self.table, number, [channel for channel, _ in found])
        try:
            joined = core.join(deadline.left, self.coordinator)
            core.wait(joined, math.inf)
        except BaseException:
            core.close(GOODBYE_SECONDS)
            raise
        return Dialled(core, number, Versions(joined.versions(), [each for _, each in found]))

    def join_again(self, deadline: Deadline, previous: int) -> Dialled:
        """Joins where a server has ended; all shards must have values."""
        with _directory.opened(self.service, deadline) as directory:
            dialled = self.join(directory, deadline, previous)
        for shard, version in enumerate(dialled.versions):
            if version == _core.SERVE_NO_VERSION:
                dialled.core.close(GOODBYE_SECONDS)
                raise InvalidArgument(
                    f"shard {shard} was started again without values, as it had no snapshot: "
                    "connect anew to give it yours"
                )
        return dialled

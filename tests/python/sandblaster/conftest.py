"""Servers for coordinators and replicas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from gradwire import serve
from sandblaster_team import Team


@pytest.fixture
def team(bare_environment: None) -> Iterator[Team]:
    """Two shards, and whoever joins; replicas end with the coordinator."""
    with serve.Server(2) as server:
        with ExitStack() as stack:
            yield (team := Team(stack, server.store))
        for each in team.replicas:
            each.join()

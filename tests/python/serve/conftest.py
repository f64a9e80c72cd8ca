"""Servers and clients of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from gradwire import serve

Connect = Callable[..., serve.ParameterServer]


@pytest.fixture(autouse=True)
def _no_launcher(bare_environment: None) -> None:
    """No variable of a launcher: every test has a store of its own."""


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    """A transport between clients and shards."""
    return str(request.param)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what a test opens, the last one first."""
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def server(stack: ExitStack) -> serve.Server:
    """Two shards."""
    return stack.enter_context(serve.Server(2))


@pytest.fixture
def connect(stack: ExitStack, server: serve.Server) -> Connect:
    """Makes a client of `server`."""

    def make(like: Any, rule: serve.Rule, **options: Any) -> serve.ParameterServer:
        options = {"store": server.store, "timeout": 30, **options}
        return stack.enter_context(serve.connect(like, rule, **options))

    return make

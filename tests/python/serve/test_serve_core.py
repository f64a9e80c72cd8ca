"""The parameter server's native core from Python: its rules beside torch's, and its life cycle."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gradwire import _core
from numpy.typing import NDArray

_SECONDS = 60.0
_Arrays = list[NDArray[np.float32]]
_SHAPES = {"a": (301, 211), "b": (17,), "c": ()}


def _addresses(arrays: _Arrays) -> list[tuple[int, int]]:
    return [(each.ctypes.data, each.size) for each in arrays]


def _table(rule: str, shards: int = 1, **options: Any) -> str:
    settings: dict[str, Any] = {"atomic_push": False, "divide": False, "max_staleness": None}
    settings.update(options)
    return _core.serve_table(list(_SHAPES.items()), rule, ["onebit", "int8"], shards, **settings)


def _arrays(seed: int) -> _Arrays:
    random = np.random.default_rng(seed)
    return [np.asarray(random.normal(size=shape), np.float32) for shape in _SHAPES.values()]


class _Job:
    """Servers, and clients of theirs, in this process."""

    def __init__(self, servers: list[_core.ServeServer]) -> None:
        self.servers = servers
        self.clients: list[_core.ServeClient] = []

    def connect(self, table: str, client: int = 1 << 16) -> _core.ServeClient:
        ends = [self._channel(server, client, i) for i, server in enumerate(self.servers)]
        made = _core.ServeClient(table, client, ends)
        self.clients.append(made)
        made.wait(made.join(_SECONDS), _SECONDS)
        return made

    @staticmethod
    def _channel(server: _core.ServeServer, client: int, shard: int) -> _core.ServeChannel:
        near, far = socket.socketpair()
        name = f"replica {client >> 16}"
        admission = threading.Thread(
            target=server.admit, args=("shm", None, near.detach(), None, name, client, _SECONDS)
        )
        admission.start()
        made = _core.ServeChannel("shm", None, far.detach(), None, f"shard {shard}", _SECONDS)
        admission.join()
        return made


@pytest.fixture
def serve() -> Iterator[Callable[[int], _Job]]:
    """Starts servers, and ends all that was started."""
    jobs: list[_Job] = []

    def start(shards: int) -> _Job:
        jobs.append(_Job([_core.ServeServer(i, shards, log=False) for i in range(shards)]))
        return jobs[-1]

    yield start
    for job in jobs:
        for client in job.clients:
            client.close(1.0)
        for server in job.servers:
            server.stop()


def _set(client: _core.ServeClient, values: _Arrays) -> None:
    client.wait(client.set(_addresses(values), _SECONDS, values), _SECONDS)


def _push(client: _core.ServeClient, gradients: _Arrays, codec: str = "none") -> None:
    client.wait(
        client.push(_addresses(gradients), [codec], None, 0.0, False, _SECONDS, gradients), _SECONDS
    )


def _pull(client: _core.ServeClient, codec: str = "none") -> _Arrays:
    values = [np.empty(shape, np.float32) for shape in _SHAPES.values()]
    client.wait(client.pull(_addresses(values), codec, _SECONDS, values), _SECONDS)
    return values


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("sgd:rate=0.1", {}),
        ("momentum:rate=0.1", {"momentum": 0.9}),
        ("momentum:rate=0.1,nesterov=yes", {"momentum": 0.9, "nesterov": True}),
    ],
)
def test_sgd_is_torchs_bit_for_bit(
    serve: Callable[[int], _Job], rule: str, options: dict[str, Any]
) -> None:
    if "AVX" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("torch does not fuse multiply-adds on this processor")
    client = serve(2).connect(_table(rule, 2))
    initial = _arrays(0)
    _set(client, initial)
    parameters = [torch.nn.Parameter(torch.from_numpy(each.copy())) for each in initial]
    optimizer = torch.optim.SGD(parameters, lr=0.1, **options)
    for step in range(1, 5):
        gradients = _arrays(step)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
        _push(client, gradients)
        for mine, theirs in zip(_pull(client), parameters, strict=True):
            assert mine.tobytes() == theirs.detach().numpy().tobytes()


def test_adagrad_is_torchs_but_for_its_square_roots(serve: Callable[[int], _Job]) -> None:
    """Torch's roots are up to an ulp off; with right ones its operations give the same bits."""
    client = serve(1).connect(_table("adagrad:rate=0.05,epsilon=0.001"))
    initial, gradients = _arrays(0), _arrays(1)
    _set(client, initial)
    _push(client, gradients)
    parameters = [torch.nn.Parameter(torch.from_numpy(each.copy())) for each in initial]
    optimizer = torch.optim.Adagrad(parameters, lr=0.05, initial_accumulator_value=0.001, eps=0)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.from_numpy(gradient)
    optimizer.step()
    for before, gradient, mine, parameter in zip(
        initial, gradients, _pull(client), parameters, strict=True
    ):
        theirs = parameter.detach().numpy()
        root = torch.from_numpy(np.asarray(np.sqrt(optimizer.state[parameter]["sum"].numpy())))
        exact = torch.from_numpy(before).addcdiv(torch.from_numpy(gradient), root, value=-0.05)
        assert mine.tobytes() == exact.numpy().tobytes()
        ulp = np.spacing(np.abs(before) + np.abs(theirs))
        assert np.all(np.abs(mine - theirs) <= 2 * ulp)


def test_a_snapshot_restores_a_shard(serve: Callable[[int], _Job]) -> None:
    job = serve(1)
    table = _table("adagrad:rate=0.05")
    client = job.connect(table)
    _set(client, _arrays(0))
    _push(client, _arrays(1))
    asked = client.ask("snapshot", 0, _SECONDS)
    ticket = job.servers[0].snapshot_wanted(_SECONDS)
    assert ticket is not None
    saved = job.servers[0].snapshot(_SECONDS)
    job.servers[0].snapshot_written(ticket, "")
    client.wait(asked, _SECONDS)
    assert saved["version"] == 1
    assert saved["table"] == table
    assert set(saved["slots"]) == {"w", "squares"}
    other = _Job(
        [
            _core.ServeServer.restored(
                table, 0, 1, saved["steps"], list(saved["slots"].items()), log=False
            )
        ]
    )
    again = other.connect(table)
    for each in (client, again):
        _push(each, _arrays(2), "onebit")
    for mine, theirs in zip(_pull(client), _pull(again), strict=True):
        assert mine.tobytes() == theirs.tobytes()
    again.close(1.0)
    other.servers[0].stop()


def test_errors_name_the_shard_and_the_parameter(serve: Callable[[int], _Job]) -> None:
    job = serve(2)
    client = job.connect(_table("sgd", 2))
    _set(client, _arrays(0))
    bad = _arrays(1)
    bad[1][3] = np.nan
    with pytest.raises(_core.InvalidArgument, match="shard 1 refused push: it holds NaN"):
        _push(client, bad)
    with pytest.raises(_core.InvalidArgument, match="rule 'adagrad', not 'sgd'"):
        job.connect(_table("adagrad", 2), 2 << 16)
    statistics = json.loads(job.servers[1].statistics(_SECONDS))
    assert statistics["not_finite"] == 1
    assert statistics["clients"] == ["replica 1"]
    assert job.servers[0].census(_SECONDS) == (2, 2, True)
    job.servers[1].stop()
    with pytest.raises(_core.TransportError, match=r"^shard 1: "):
        client.wait(client.ask("wait", 99, _SECONDS), _SECONDS)

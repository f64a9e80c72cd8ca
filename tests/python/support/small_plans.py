"""Small networks and clusters to plan for."""

from __future__ import annotations

from typing import Any

from gradwire import CostModel
from gradwire.lab.planner import steps
from gradwire.lab.planner.exchanges import Cluster
from gradwire.lab.planner.tables.network import LINEAR, Layer, Network
from gradwire.lab.simulation.topology import flat


def cluster(ranks: int = 4, per_host: int = 1, **options: Any) -> Cluster:
    return Cluster(ranks, flat("1gbit,50us", per_host), CostModel(), **options)


def layer(rows: int, columns: int, /, weights: int | None = None, **options: Any) -> Layer:
    size = rows * columns
    kind = options.pop("kind", LINEAR)
    given = size if weights is None else weights
    return Layer("x", kind, given, size + rows, columns, rows, 2.0 * size, **options)


def matrix(rows: int, columns: int, /, **options: Any) -> Layer:
    return layer(rows, columns, matrices=((rows, columns),), **options)


def net(*layers: Layer) -> Network:
    return Network("net", "a vector", layers)


PARTS = steps.buckets(net(*(matrix(600, 600) for _ in range(6))), most=1 << 21)

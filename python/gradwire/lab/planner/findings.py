"""Results of `advise`, as values."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.lab.planner.exchanges import Cluster
from gradwire.lab.planner.steps import Prediction
from gradwire.lab.planner.tables.network import Network
from gradwire.lab.planner.volumes import Volume, total


@dataclass(frozen=True)
class Findings:
    """All that `advise` finds, as `Advice` describes it."""

    network: Network
    ranks: int
    batch: int
    compute: float
    cluster: Cluster
    volumes: tuple[Volume, ...]
    predictions: tuple[Prediction, ...]
    best: Prediction
    second: Prediction
    sentences: tuple[str, ...]
    weak: tuple[tuple[int, float, float], ...]
    strong: tuple[tuple[int, float, float], ...]
    least_batch: int | None
    assumptions: tuple[str, ...]

    @property
    def all_data(self) -> float:
        """Bytes that a rank sends in a step if all layers are data-parallel."""
        return total(self.volumes, "data")

    @property
    def all_model(self) -> float:
        """Bytes that a rank sends in a step if all layers are model-parallel."""
        return total(self.volumes, "model")

    @property
    def hybrid(self) -> float:
        """Bytes that a rank sends in a step if each layer goes the advised way."""
        return total(self.volumes)

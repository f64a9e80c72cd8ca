"""Bytes that each layer exchanges in a step, and which parallelism needs the fewest.

Data parallelism averages |W| gradients. Model parallelism exchanges the layer's inputs and outputs
of all ranks' batches, forward, and their gradients, backward (Krizhevsky 2014, "One weird trick";
Iandola et al. 2016, "FireCaffe", sec. 3; docs/hybrid.md). Each float32 that a ring averages, or
gathers and reduces, costs a rank 2 (p - 1) / p · 4 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gradwire.lab.planner.tables.network import EMBEDDING, LINEAR, Layer, Network

DATA, MODEL, SPARSE = "data", "model", "sparse"
FLOAT = 4  # bytes of a parameter, a gradient, an activation
_INDEX = 8  # bytes of a row's number
_LARGE = 1 << 20  # elements from which gradwire.torch.hybrid_plan splits a linear layer


@dataclass(frozen=True)
class Volume:
    """One layer's elements, the bytes that a rank sends in a step, and the advice.

    `activations` is |D| for the batch of one rank. `sent` has the bytes of each way that the layer
    can take: "data" always, "model" for linear layers, "sparse" for embeddings.
    """

    layer: Layer
    activations: int
    sent: dict[str, float]
    advice: str


def volumes(network: Network, ranks: int, batch: int) -> list[Volume]:
    """The volume of each layer that has parameters, for `batch` samples on each rank."""
    return [_volume(layer, ranks, batch) for layer in network.layers if layer.parameters]


def total(found: Iterable[Volume], way: str | None = None) -> float:
    """The bytes that a rank sends in a step.

    All layers go the way "data" or "model", convolutions too; with None each goes as advised.
    """
    return sum(each.sent[each.advice if way is None else way] for each in found)


def _volume(layer: Layer, ranks: int, batch: int) -> Volume:
    of_ring = 2 * (ranks - 1) / ranks * FLOAT
    sent = {
        DATA: of_ring * layer.parameters,
        MODEL: of_ring * (layer.inputs + layer.outputs) * batch * ranks,
    }
    if layer.kind == EMBEDDING:
        sent[SPARSE] = _sparse(layer, ranks, batch)
    return Volume(layer, layer.inputs * batch, sent, _advice(layer, sent, ranks))


def _sparse(layer: Layer, ranks: int, batch: int) -> float:
    """Every rank gathers the rows that the others have read, with their numbers."""
    rows, width = layer.matrices[0]
    read = min(rows, layer.rows * batch)
    return (ranks - 1) * read * (width * FLOAT + _INDEX)


def _advice(layer: Layer, sent: dict[str, float], ranks: int) -> str:
    if layer.kind == EMBEDDING:  # the gradient of a tied table is dense
        return SPARSE if not layer.tied and sent[SPARSE] < sent[DATA] else DATA
    large = layer.kind == LINEAR and layer.weights >= _LARGE
    splits = large and not layer.tied and layer.matrices[0][0] % ranks == 0
    return MODEL if splits and sent[MODEL] < sent[DATA] else DATA

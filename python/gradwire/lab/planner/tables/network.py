"""Networks as lists of layers with sizes, as far as planning needs them."""

from __future__ import annotations

from dataclasses import dataclass

CONV, LINEAR, EMBEDDING, OTHER = "conv", "linear", "embedding", "other"


@dataclass(frozen=True)
class Layer:
    """One layer; elements and operations are per sample.

    `weights` counts the elements of the weight, |W| (Iandola et al. 2016, "FireCaffe", sec. 3), and
    `parameters` also those of bias and norm. `inputs` is |D| of one sample. `matrices` are the
    shapes that lowrank compresses. `rows` is the number of rows of an embedding that one sample
    reads, and `tied` says that another layer computes with the same weight.
    """

    name: str
    kind: str
    weights: int
    parameters: int
    inputs: int
    outputs: int
    flops: float  # of the forward pass
    matrices: tuple[tuple[int, int], ...] = ()
    rows: int = 0
    tied: bool = False


@dataclass(frozen=True)
class Network:
    """Layers in the order of the forward pass, and what one sample is."""

    name: str
    sample: str
    layers: tuple[Layer, ...]

    @property
    def parameters(self) -> int:
        """The number of parameters of all layers."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def inputs(self) -> int:
        """The elements that enter layers with weights, for one sample: FireCaffe's |D|."""
        return sum(layer.inputs for layer in self.layers if layer.weights)

    @property
    def flops(self) -> float:
        """The operations of one sample's forward pass; a multiplication and addition count two."""
        return sum(layer.flops for layer in self.layers)

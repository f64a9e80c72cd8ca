"""Published speed-ups, and what the planner predicts for them from stated assumptions.

Compute times are those that the papers give for one GPU; where they give none, an assumption says
so. Nothing was fitted to the speed-ups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire._base.tables import table
from gradwire._model import CostModel
from gradwire.lab.planner import devices
from gradwire.lab.planner.exchanges import Cluster
from gradwire.lab.planner.steps import buckets, synchronous
from gradwire.lab.planner.tables import catalogue
from gradwire.lab.planner.tables.network import LINEAR, Layer, Network
from gradwire.lab.simulation.topology import flat

_IMAGES = 1_281_167  # of ImageNet's training set
_DAY = 86400.0


@dataclass(frozen=True)
class Claim:
    """A published speed-up over one GPU, and the setting in which it is predicted."""

    source: str
    network: Network
    gpus: int
    per_host: int
    speed_up: float
    batch: int  # of each GPU
    compute: float  # seconds of a step of one GPU
    link: str
    inside: str
    algorithm: str
    overlaps: bool
    assumptions: tuple[str, ...]

    def predicted(self) -> float:
        """The speed-up by the planner."""
        topology = flat(self.link, self.per_host, self.inside)
        cluster = Cluster(self.gpus, topology, _gpu_model())
        if self.overlaps:
            parts = buckets(self.network)
            step = synchronous(parts, self.compute, cluster, self.algorithm, "none").step
        else:
            nbytes = 4.0 * self.network.parameters
            step = self.compute + cluster.seconds(self.algorithm, nbytes, "none")
        return self.gpus * self.compute / step

    @property
    def error(self) -> float:
        """Predicted over published, less one."""
        return self.predicted() / self.speed_up - 1


def claims() -> list[Claim]:
    """FireCaffe, Baidu's ring, and ImageNet in an hour."""
    titan = (
        "Cray Gemini at 24 Gbit/s and 5 µs for messages in host memory (assumed)",
        "whole gradients climb and descend a tree, nothing overlaps, GPUs are as fast "
        "with 8 images as with 32",
    )
    return [
        _firecaffe("googlenet", 47.0, 20.3 * _DAY / (64 * _IMAGES), titan),
        _firecaffe("nin", 39.0, 5.8 * _DAY / (47 * _IMAGES), titan),
        Claim(
            "Gibiansky 2017 (Baidu)",
            _language_model(300_000_000),
            40,
            8,
            31.0,
            1,
            1.0,
            "56gbit,2us",
            "96gbit",
            "ring",
            False,
            (
                "a language model of 300 M parameters; a step of one GPU takes 1 s (assumed: not "
                "published)",
                "hosts of 8 GPUs, InfiniBand FDR, PCI Express at 96 Gbit/s (assumed); nothing "
                "overlaps",
            ),
        ),
        Claim(
            "Goyal et al. 2017 (ImageNet in 1 hour)",
            catalogue.network("resnet50"),
            256,
            8,
            0.9 * 256,
            32,
            0.120 * 3 / 2,
            "50gbit,5us",
            "160gbit",
            "hierarchical(direct,halving_doubling)",
            True,
            (
                "backward takes 120 ms (sec. 4), forward half of that",
                "hosts of 8 P100 with NVLink at 160 Gbit/s; averaging overlaps with backward",
                "no variance between ranks, no time for input",
            ),
        ),
    ]


def _firecaffe(name: str, speed_up: float, image: float, assumptions: Sequence[str]) -> Claim:
    return Claim(
        "Iandola et al. 2016 (FireCaffe)",
        catalogue.network(name),
        128,
        1,
        speed_up,
        8,
        8 * image,
        "24gbit,5us",
        "24gbit",
        "binomial_tree",
        False,
        (f"{image * 1e3:.1f} ms an image on one K20, from table 3's days", *assumptions),
    )


def _language_model(parameters: int) -> Network:
    layer = Layer("all", LINEAR, parameters, parameters, 1, 1, 2.0 * parameters)
    return Network("language model", "a sequence", (layer,))


def _gpu_model() -> CostModel:
    """A GPU's cost model with tcp's processor costs: messages went through host memory."""
    return devices.cost_model(devices.device("a100"))


def text() -> str:
    """The table of predicted and published speed-ups, and what was assumed."""
    found = [(each, each.predicted()) for each in claims()]
    rows = [["source", "model", "GPUs", "published", "predicted", "error"]]
    rows += [
        [
            each.source,
            each.network.name,
            str(each.gpus),
            f"{each.speed_up:.0f}",
            f"{predicted:.0f}",
            f"{predicted / each.speed_up - 1:+.0%}",
        ]
        for each, predicted in found
    ]
    notes = [
        f"{each.source}, {each.network.name}: {'; '.join(each.assumptions)}" for each, _ in found
    ]
    return "\n".join([table(rows), "", "Assumed:", *(f"- {note}" for note in notes)])


def rows() -> list[dict[str, object]]:
    """The same as plain values, for JSON."""
    return [
        {
            "source": each.source,
            "model": each.network.name,
            "gpus": each.gpus,
            "published": each.speed_up,
            "predicted": each.predicted(),
            "assumptions": list(each.assumptions),
        }
        for each in claims()
    ]

"""Devices that compute, and what is assumed of them where no step was measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradwire import _core
from gradwire._errors import InvalidArgument
from gradwire._model import CostModel


@dataclass(frozen=True)
class Device:
    """A device by its data sheet, and the share of its peak that training reaches: an assumption.

    `peak` is in operations per second of matrix products, `memory` in bytes per second, and
    `inside` is the rate of its links within a host, in bits per second each way; None for CPUs.
    """

    name: str
    peak: float
    share: float
    memory: float
    inside: float | None

    def seconds(self, flops: float) -> float:
        """The seconds of so many operations."""
        return flops / (self.peak * self.share)

    def assumption(self) -> str:
        """A sentence for the report."""
        return (
            f"{self.name}: computing reaches {self.share:.0%} of {self.peak / 1e12:g} Tflop/s; "
            "give --compute where you know the time of a step"
        )


DEVICES = {
    "h200": Device("h200", 989e12, 0.3, 4.8e12, 3.6e12),
    "h100": Device("h100", 989e12, 0.3, 3.35e12, 3.6e12),
    "a100": Device("a100", 312e12, 0.35, 2.0e12, 2.4e12),
    "cpu": Device("cpu", 0.1e12, 0.5, 2e10, None),
}
_PASSES = 3.0  # over memory, of a codec's kernel: an assumption, nothing was measured on a GPU
_KERNEL = 5e-6  # seconds of a launch
_ISSUE = 5e-7  # seconds of a processor for a message of one group: an assumption too


def device(name: str) -> Device:
    """A device by name; raises InvalidArgument with the list for other names."""
    found = DEVICES.get(name.lower())
    if found is None:
        raise InvalidArgument(f"there is no device {name!r:.80}: give one of {', '.join(DEVICES)}")
    return found


def here() -> Device:
    """This machine's device: its first GPU, or its CPUs; of an unknown GPU, an A100's figures."""
    gpus = _core.cuda_info()["devices"]
    if not gpus:
        return DEVICES["cpu"]
    name = gpus[0]["name"]
    known = next((each for key, each in DEVICES.items() if key in name.lower()), None)
    return known or replace(DEVICES["a100"], name=f"{name}, taken for an a100")


def cost_model(of: Device) -> CostModel:
    """The built-in cost model, with a GPU's memory and launches where the device is one."""
    if of.inside is None:
        return CostModel()
    byte = 1 / of.memory
    parameters = {
        name: _PASSES * byte
        for name in CostModel().parameters
        if name.endswith((".encode", ".decode"))
    }
    parameters |= {"move": 2 * byte, "gamma": 3 * byte, "call": _KERNEL}
    parameters |= {name: 1.0 for name in CostModel().parameters if name.startswith("far.")}
    for where in ("within", "between"):
        parameters |= {f"{where}.alpha": _ISSUE, f"{where}.copy": 0.0}
    return CostModel(parameters | {"within.latency": _KERNEL, "between.latency": 2 * _KERNEL})

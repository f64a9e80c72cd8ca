"""CUDA in this process: GPUs, as gradwire's CUDA part finds them, and NCCL."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from gradwire import _core
from gradwire._errors import InvalidArgument

_IN_WHEEL = Path("nvidia", "nccl", "lib", "libnccl.so.2")


def devices() -> tuple[bool, str]:
    """Whether there are GPUs, and which, with versions, or why not."""
    found = _core.cuda_info()
    if found["why_not"]:
        return False, f"because {found['why_not']}"
    versions = f"CUDA {found['runtime']}, driver for {found['driver']}"
    return True, f"{_names(found['devices'])}; {versions}; {found['library']}"


def nccl() -> tuple[bool, str]:
    """Whether NCCL loads, and which version from where, or why not."""
    try:
        found = _core.nccl_info(nccl_wheels())
    except InvalidArgument as error:
        return False, f"because {error}"
    return True, f"{found['version']}, {found['library']} ({found['origin']})"


def nccl_version() -> str:
    """NCCL's version; empty if none loads (nccl() says why)."""
    try:
        return _core.nccl_info(nccl_wheels())["version"]
    except InvalidArgument:
        return ""


def nccl_wheels() -> list[str]:
    """The files of NCCL that pip has installed on Python's path, torch's own among them."""
    places = (Path(entry or ".", _IN_WHEEL).absolute() for entry in sys.path)
    return [str(place) for place in dict.fromkeys(places) if place.is_file()]


def _names(devices: list[_core.CudaDevice]) -> str:
    """Names like "8 x NVIDIA H200 (9.0, 139.8 GiB)"."""
    counted = Counter(map(_name, devices))
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counted.items())


def _name(device: _core.CudaDevice) -> str:
    major, minor = device["capability"]
    return f"{device['name']} ({major}.{minor}, {device['memory'] / 2**30:.1f} GiB)"

"""The RDMA ports that this process may use: found by libibverbs, selected by GRADWIRE_IB_*.

They are opened when they are first asked for, and all communicators of the process share them.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

from gradwire import _core
from gradwire._base import environment
from gradwire._errors import InvalidArgument

NAME = "rdma"
_MTUS = ("256", "512", "1024", "2048", "4096")

_log = logging.getLogger("gradwire")


class _Settings(NamedTuple):
    """The settings of the environment, as `_core.RdmaDevices` takes them."""

    hca: str
    link_layer: str
    gid_index: int
    mtu: int
    traffic_class: int
    service_level: int
    timeout: int


def of_this_rank() -> _core.RdmaDevices:
    """The ports; raises InvalidArgument, which says why there are none and what to do."""
    found = _opened()
    if isinstance(found, str):
        raise InvalidArgument(f"transport rdma is not usable here: {found}")
    return found


def why_not() -> str | None:
    """The reason why there are no ports; None if there are some."""
    found = _opened()
    return found if isinstance(found, str) else None


def networks(transports: Sequence[str]) -> tuple[str, ...]:
    """Names of the networks of the ports: two hosts with a name in common reach each other by RDMA.

    Empty without ports, or without rdma among the transports. Without tcp to fall back to, all
    networks of one link layer count as the same.
    """
    devices = _opened() if NAME in transports else ""
    if isinstance(devices, str):
        if devices and (hca := environment.text("GRADWIRE_IB_HCA")):
            _log.warning("GRADWIRE_IB_HCA=%s, and RDMA is not used: %s", hca, devices)
        return ()
    _log.info("RDMA ports: %s", "; ".join(devices.ports))
    found = {name for name in devices.networks if name}
    if "tcp" not in transports:
        found |= {f"{layer}, any network" for layer in devices.link_layers}
    return tuple(sorted(found))


def _opened() -> _core.RdmaDevices | str:
    """The ports, or why there are none; a forked child opens its own."""
    return _open(os.getpid(), _settings())


def _settings() -> _Settings:
    """Reads the settings from the environment; raises InvalidArgument."""
    return _Settings(
        hca=environment.text("GRADWIRE_IB_HCA") or "",
        link_layer=environment.choice("GRADWIRE_IB_LINK_LAYER", ("ethernet", "infiniband")),
        gid_index=environment.integer("GRADWIRE_IB_GID_INDEX", 0, 255, unset=-1),
        mtu=int(environment.choice("GRADWIRE_IB_MTU", _MTUS) or 0),
        traffic_class=environment.integer("GRADWIRE_IB_TC", 0, 255, unset=0),
        service_level=environment.integer("GRADWIRE_IB_SL", 0, 15, unset=0),
        timeout=environment.integer("GRADWIRE_IB_TIMEOUT", 1, 31, unset=18),
    )


@functools.lru_cache(maxsize=1)
def _open(_process: int, settings: _Settings) -> _core.RdmaDevices | str:
    try:
        return _core.RdmaDevices(**settings._asdict())
    except InvalidArgument as error:
        return str(error)

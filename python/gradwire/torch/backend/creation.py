"""Creation of process groups, and the refusal of what torch or this backend cannot do."""

from __future__ import annotations

import re
import sys
from typing import Any

import torch

from gradwire._autoload import BACKEND, DEVICES
from gradwire._errors import InvalidArgument
from gradwire.torch.backend.meeting import connect

_OLDEST = (2, 7)  # before, torch's C++ side drops the Python half of a Work
_HELPER = "_new_process_group_helper"  # torch's caller of `create`


def create(options: Any, backend_options: Any) -> Any:
    """Makes this rank's end of a process group; every rank of the group calls it.

    Raises RendezvousError, which names the ranks that are missing after the group's timeout, and
    InvalidArgument for a torch or a choice of devices that cannot work.
    """
    require_version(torch.__version__)
    if backend_options is not None:
        raise InvalidArgument(f"pg_options={backend_options!r}: the backend gradwire has none")
    _require_devices(_devices_of_caller())
    # The adapter derives from a class that older versions of torch do not have.
    from gradwire.torch.backend.adapters import make

    return make(connect(options), options)


def require_version(version: str) -> None:
    """Raises InvalidArgument for a version of torch that cannot hold works written in Python."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < _OLDEST:
        raise InvalidArgument(
            f"the backend gradwire needs torch {_OLDEST[0]}.{_OLDEST[1]} or later, and this is "
            f"{version}: use another backend, such as gloo, with gradwire's hook for "
            "DistributedDataParallel, gradwire.torch.register(ddp)"
        )


def _devices_of_caller() -> dict[str, str] | None:
    """The backend of each device, which torch tells nobody but its own function that calls here."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != _HELPER:
        frame = frame.f_back  # type: ignore[assignment]
    config = None if frame is None else frame.f_locals.get("backend_config")
    if config is None:
        return None
    return {device: str(name) for device, name in config.get_device_backend_map().items()}


def _require_devices(chosen: dict[str, str] | None) -> None:
    """Raises InvalidArgument for several backends, of which torch would silently keep this one."""
    if chosen is None:
        return
    text = ",".join(f"{device}:{name}" for device, name in chosen.items())
    others = sorted({name for name in chosen.values() if name != BACKEND})
    if others:
        raise InvalidArgument(
            f"backend='{text}': up to torch 2.13 a group with gradwire has no other backend, and "
            f"{others[0]} would be left out without a word: give 'gradwire', or make a second "
            "group with new_group()"
        )
    wrong = [device for device in chosen if device not in DEVICES]
    if wrong:
        raise InvalidArgument(
            f"backend='{text}': the backend gradwire works on {', '.join(DEVICES)}, not on "
            f"{wrong[0]}: give 'gradwire'"
        )

"""Creation of process groups, and the refusal of what torch or this backend cannot do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from gradwire._base.arguments import wrong
from gradwire._base.backend import BACKEND, DEVICES
from gradwire._errors import InvalidArgument
from gradwire.torch.backend import versions
from gradwire.torch.backend.options import Options
from gradwire.torch.backend.rendezvous import connect

_HELPER = "_new_process_group_helper"  # torch's caller of `create`


def create(options: Any, backend_options: Any) -> Any:
    """Makes this rank's end of a process group; every rank of the group calls it.

    Raises RendezvousError, which names the ranks that are missing after the group's timeout, and
    InvalidArgument for a torch or a choice of devices that cannot work.
    """
    require_version(torch.__version__)
    chosen = Options() if backend_options is None else backend_options
    if not isinstance(chosen, Options):
        raise wrong(chosen, "pg_options", "gradwire.torch.Options(codec=...)")
    devices = _own_devices(_devices_of_caller())
    # The adapter derives from a class that older versions of torch do not have.
    from gradwire.torch.backend.adapters import make

    return make(connect(options, repr(chosen)), chosen, options, devices)


def require_version(version: str) -> None:
    """Raises InvalidArgument for a version of torch that cannot hold works written in Python."""
    if versions.parse(version) < versions.OLDEST:
        oldest = ".".join(map(str, versions.OLDEST))
        raise InvalidArgument(
            f"the backend gradwire needs torch {oldest} or later, and this is "
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


def _own_devices(chosen: dict[str, str] | None) -> Sequence[str]:
    """The devices of this backend in the caller's choice; all that it takes where that is unknown.

    Raises InvalidArgument for a device of other kinds, and for several backends up to 2.13.
    """
    if chosen is None:
        return DEVICES
    text = ",".join(f"{device}:{name}" for device, name in chosen.items())
    others = sorted({name for name in chosen.values() if name != BACKEND})
    if others and versions.parse(torch.__version__) < versions.FIRST_WITH_BACKENDS:
        raise InvalidArgument(
            f"backend='{text}': up to torch 2.13 a group with gradwire has no other backend, and "
            f"{others[0]} would be left out without a word: give 'gradwire', or make a second "
            "group with new_group()"
        )
    ours = [device for device, name in chosen.items() if name == BACKEND]
    wrong = [device for device in ours if device not in DEVICES]
    if wrong:
        raise InvalidArgument(
            f"backend='{text}': the backend gradwire works on {', '.join(DEVICES)}, not on "
            f"{wrong[0]}: give 'gradwire'"
        )
    return ours

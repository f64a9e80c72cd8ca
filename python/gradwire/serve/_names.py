"""Names of clients: what tells them from each other, and what messages call them."""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import weakref
from typing import NamedTuple

from gradwire._base import arguments
from gradwire._errors import InvalidArgument
from gradwire._host.identity import host_identity, process_name
from gradwire.serve._channels import MAX_NAME
from gradwire.serve._directory import Directory, Service

_LOCAL = ("localhost", "127.0.0.1", "::1")
_NO_RUN = "none"  # torchrun's id where it was given none


class ClientSlot:
    """One of this process's clients without a name of their own, for as long as it is kept."""


class Identity(NamedTuple):
    """The name that tells a client from others, the one in messages, and its place if it has one.

    A later client of one name replaces the former, so that a process that was started again does.
    """

    name: str
    label: str
    place: ClientSlot | None = None


_places: dict[str, weakref.ref[ClientSlot]] = {}  # by name; guarded by the lock
_lock = threading.Lock()


def identity(directory: Directory, service: Service, replica: str | None) -> Identity:
    """The identity of a client of the name `replica`, or of a launcher's rank; InvalidArgument.

    Clients of one rank that are open at a time, and ranks of several launches, are told apart.
    """
    if replica is None and "RANK" not in os.environ:  # a new store counts from 1, shards go on
        number = directory.count_client()
        return Identity(secrets.token_hex(8), f"client {number} ({process_name()})")
    known = f"replica {os.environ['RANK']}" if replica is None else replica
    label = f"{arguments.text(known, 'replica')} ({process_name()})"
    if len(label) > MAX_NAME or not label.isprintable():
        raise InvalidArgument(f"replica={known[:MAX_NAME]!r} is too long, or not printable")
    if replica is not None:
        return Identity(replica, label)
    name, place = _take(f"{known} of {_launch()} at {service.store}/{service.name}")
    return Identity(name, label, place)


def _launch() -> str:
    """Name of the launch of this process, which stays when it is started again."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", _NO_RUN)
    if run != _NO_RUN:
        return run
    host, port = (os.environ.get(each, "") for each in ("MASTER_ADDR", "MASTER_PORT"))
    return f"{host_identity() if host in _LOCAL else host}:{port}"


def _take(name: str) -> tuple[str, ClientSlot]:
    """The first of name, name/2, name/3, ... that no open client of this process has."""
    with _lock:
        for i in itertools.count(1):
            found = name if i == 1 else f"{name}/{i}"
            if found not in _places or _places[found]() is None:
                place = ClientSlot()
                _places[found] = weakref.ref(place)
                return found, place
    raise AssertionError

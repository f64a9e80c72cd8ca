"""The transports: which ranks each joins, and what its links share in this process.

The core lists them, best first, with the environment variables that each reads. What the links of
a transport share (its context) is opened when it is first asked for.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

from gradwire import _core
from gradwire._base import environment
from gradwire._errors import InvalidArgument

EMULATED = "emulated"  # see `emulated_link`

_log = logging.getLogger("gradwire")


class Kind(NamedTuple):
    """A transport as the core describes it."""

    name: str
    reach: str  # "process", "host", "network" (ranks on one of its networks) or "all"
    local: bool  # made over Unix sockets; else over TCP
    by_default: bool  # offered to peers where the user names no transports
    # Variables: name, meaning, what holds without it. The first one of a network's names devices.
    settings: Sequence[tuple[str, str, str]]


KINDS = {kind.name: kind for kind in (Kind(*fields) for fields in _core.transport_kinds())}
DEFAULTS = tuple(name for name, kind in KINDS.items() if kind.by_default)


class _Unusable(Exception):
    """An error of a transport of which there can be no link here; says why."""


def context(name: str) -> _core.TransportContext | None:
    """The context that the transport's links share; None where they share nothing.

    Raises InvalidArgument, which says why there can be no such link here and what to do.
    """
    try:
        return _open(name)
    except _Unusable as error:
        raise InvalidArgument(f"transport {name} is not usable here: {error}") from None


def why_not(name: str) -> str | None:
    """The reason why there can be no link of this transport here; None if there can."""
    try:
        _open(name)
    except _Unusable as error:
        return str(error)
    return None


def networks_of(names: Sequence[str]) -> tuple[str, ...]:
    """Names of the networks of these transports: two hosts with one in common reach each other.

    Without a transport that reaches all, networks that may be the same count as the same.
    """
    only = not any(KINDS[name].reach == "all" for name in names)
    found = {
        f"{name} {network}"
        for name in names
        if KINDS[name].reach == "network" and _is_usable(name)
        for network in _networks(name, only)
    }
    return tuple(sorted(found))


def _is_usable(name: str) -> bool:
    """Whether there can be such links; warns where devices were named and there can be none."""
    reason = why_not(name)
    for variable, *_ in KINDS[name].settings[:1]:
        if reason and (devices := environment.text(variable)):
            _log.warning("%s=%s, and %s is not used: %s", variable, devices, name, reason)
    return reason is None


def _networks(name: str, only: bool) -> Sequence[str]:
    opened = context(name)
    if opened is None:
        return ()
    _log.info("transport %s: %s", name, "; ".join(opened.describe()))
    return opened.networks(only)


def _open(name: str) -> _core.TransportContext | None:
    """Opens a transport once a process and its settings; raises _Unusable, each time anew."""
    read = ((variable, environment.text(variable)) for variable, *_ in KINDS[name].settings)
    settings = {variable: value for variable, value in read if value is not None}
    asked = os.getpid(), settings  # a forked child opens its own
    if name not in _opened or _opened[name][0] != asked:
        found, reason = _core.open_transport(name, settings)
        if reason:
            raise _Unusable(reason)
        _opened[name] = asked, found
    return _opened[name][1]


# By transport: the process and the settings that asked for it, and its context.
_opened: dict[str, tuple[tuple[int, dict[str, str]], _core.TransportContext | None]] = {}

"""GRADWIRE_LINK: every rank behaves as if it had one network card of a given rate and latency.

Its own two clocks (`csrc/gradwire/transport/emulated_link.h`) are all that a rank needs, so the
job's ranks are on one host, and their links are emulated over tcp.
"""

from __future__ import annotations

import functools

from gradwire import _core
from gradwire._base import environment
from gradwire._errors import InvalidArgument


def spec() -> str | None:
    """What GRADWIRE_LINK says; None without one."""
    return environment.text("GRADWIRE_LINK")


def check(given: str) -> str:
    """The link as given; raises InvalidArgument for what is no rate and latency."""
    _core.EmulatedLink(given)
    return given


def of_this_rank() -> _core.EmulatedLink | None:
    """The card that all communicators of this process share; None where links are as they are."""
    given = spec()
    return None if given is None else _card(given)


def require_none(what: str) -> None:
    """Raises InvalidArgument where links are emulated, which `what` cannot be part of."""
    if (given := spec()) is not None:
        raise InvalidArgument(
            f"GRADWIRE_LINK={given} emulates links between processes, over tcp, and {what}: "
            "unset one of them"
        )


@functools.cache
def _card(given: str) -> _core.EmulatedLink:
    return _core.EmulatedLink(given)

"""GRADWIRE_LINK: every rank behaves as if it had one NIC of a given rate and latency.

A rank needs only two clocks for that (`csrc/gradwire/transport/emulated_link.h`), which all ranks
must share: the job's ranks are on one host, and their links are emulated over tcp.
"""

from __future__ import annotations

from gradwire import _core
from gradwire._base import environment
from gradwire._errors import InvalidArgument


def spec() -> str | None:
    """The value of GRADWIRE_LINK; None when it is unset."""
    return environment.text("GRADWIRE_LINK")


def check(given: str) -> str:
    """Checks a rate and latency and returns them; raises InvalidArgument."""
    _core.link_costs(given)
    return given


def require_none(what: str) -> None:
    """Raises InvalidArgument when GRADWIRE_LINK is set; `what` says what it cannot go with."""
    if (given := spec()) is not None:
        raise InvalidArgument(
            f"GRADWIRE_LINK={given} emulates links between processes, over tcp, and {what}: "
            "unset one of them"
        )

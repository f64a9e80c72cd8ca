"""The shortage of file descriptors, which waiting does not cure, and the texts that tell of it."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator
from functools import cache

from gradwire._errors import Error, RendezvousError

_NO_THREAD = "can't start new thread"  # a RuntimeError of Python's


def describe_shortage(error: OSError) -> str | None:
    """Says what is short, and what to do, if that is why a call failed; else None."""
    if error.errno == errno.EMFILE:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"this process has no file descriptor left, and may have {limit}: raise the limit "
            "(ulimit -n), or close some"
        )
    if error.errno == errno.ENFILE:
        return "this host has no file descriptor left: raise its limit (sysctl fs.file-max)"
    return None


@cache
def raise_limit() -> None:
    """Lets this process have as many descriptors as it may, once: the usual 1024 are soon used."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextlib.contextmanager
def told(who: str) -> Iterator[None]:
    """Raises RendezvousError, with its cause, for what the system refuses `who` in the block.

    Before, it raises the limit of descriptors.
    """
    raise_limit()
    try:
        yield
    except Error:  # Timeout is an OSError too
        raise
    except OSError as error:
        why = describe_shortage(error) or str(error)
        raise RendezvousError(f"{who} cannot connect: {why}") from error
    except RuntimeError as error:
        if _NO_THREAD not in str(error):
            raise
        raise RendezvousError(
            f"{who} cannot connect: {error}: raise the limit of processes (ulimit -u, and pids.max "
            "of its control group)"
        ) from error

"""The shortage of file descriptors, which waiting does not cure, and the texts that tell of it."""

from __future__ import annotations

import errno
import resource


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

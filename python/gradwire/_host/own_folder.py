"""A folder of this user's own, for sockets whose names others know or can guess.

In the abstract namespace any user of the host could take such a name first.
"""

from __future__ import annotations

import contextlib
import os
import stat

from gradwire._errors import RendezvousError

_SHARED = "/tmp"  # the same for all processes of a host, whatever their environment
_LONGEST = 64  # characters, so that there is room for a name within the 107 of a socket's path


def own_folder() -> str:
    """The path of a folder of mode 0700: XDG_RUNTIME_DIR, or /tmp/gradwire-UID, which it makes.

    Raises RendezvousError where another user has taken that name.
    """
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(given) and len(given) <= _LONGEST and not _fault_of(given):
        return given
    path = f"{_SHARED}/gradwire-{os.getuid()}"
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
    except OSError as error:
        raise _useless(path, f"cannot be made ({error})") from error
    if fault := _fault_of(path):
        raise _useless(path, fault)
    return path


def _useless(path: str, fault: str) -> RendezvousError:
    return RendezvousError(
        f"the ranks of this host meet in {path}, which {fault}: remove it, or set XDG_RUNTIME_DIR "
        "to a folder of mode 0700 of this user, or GRADWIRE_STORE, on all ranks"
    )


def _fault_of(path: str) -> str:
    """The reason to put no socket there; empty for a folder that is this user's alone."""
    try:
        found = os.lstat(path)  # never through a link
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if not stat.S_ISDIR(found.st_mode):
        return "is no folder"
    if found.st_uid != os.getuid():
        return f"belongs to user {found.st_uid}, and this is user {os.getuid()}"
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return f"others may use (mode {stat.S_IMODE(found.st_mode):04o})"
    return ""

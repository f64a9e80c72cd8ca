"""The job's secret, as every entry point finds and checks it; and where a store may do without.

A Unix socket serves processes of its own user alone, so that a store there needs no secret. A TCP
socket is open to every user of the host, on loopback too.
"""

from __future__ import annotations

import logging
import os
import stat

from gradwire._base import environment
from gradwire._bootstrap.store import Address
from gradwire._errors import InvalidArgument, RendezvousError

MIN_SECRET = 16  # bytes
HOW_TO_MAKE = "export GRADWIRE_SECRET=$(openssl rand -hex 32)"  # once, for all ranks
_MAX_SECRET = 1 << 16
_OPEN = b""  # what takes the place of a secret where everybody may join

_log = logging.getLogger("gradwire")
_warned: set[Address] = set()


def find_secret(given: bytes | str | None) -> bytes | None:
    """The job's secret: the argument, GRADWIRE_SECRET or GRADWIRE_SECRET_FILE; None without one.

    An empty one is refused like any short one, since it was meant to be a secret. Raises
    RendezvousError.
    """
    found = _environment_secret() if given is None else given
    if found is None:
        return None
    if not isinstance(found, bytes | str):
        raise InvalidArgument(f"secret= is of type {type(found).__name__}: give bytes, or a str")
    secret = found.encode() if isinstance(found, str) else found
    if len(secret) < MIN_SECRET:
        raise RendezvousError(
            f"the secret has {len(secret)} bytes, fewer than {MIN_SECRET}: make one with "
            f"`{HOW_TO_MAKE}`, or unset it to have none"
        )
    return secret


def secret_of_store(address: Address, secret: bytes | None) -> bytes:
    """The secret that a store's clients must know: the job's, or an empty one where it has none.

    Raises RendezvousError for a TCP socket with neither a secret nor GRADWIRE_INSECURE=1, of which
    it warns; of a host that is unknown it says that.
    """
    if secret is not None or address.local:
        return secret or _OPEN
    _require_known(address)
    if not environment.flag("GRADWIRE_INSECURE"):
        raise RendezvousError(
            f"there is no secret, and every user of every host that reaches the store at {address} "
            f"could join and run code in the ranks: make one, `{HOW_TO_MAKE}`, and give it to all "
            "ranks, or set GRADWIRE_INSECURE=1 where all of these may join"
        )
    if address not in _warned:
        _warned.add(address)
        _log.warning(
            "GRADWIRE_INSECURE=1 and no secret: whoever reaches the store at %s can join and run "
            "code in the ranks; `%s` keeps them out",
            *(address, HOW_TO_MAKE),
        )
    return _OPEN


def _require_known(address: Address) -> None:
    try:
        address.resolve()
    except OSError as error:
        raise RendezvousError(
            f"the host of the store at {address} is unknown here ({error}): give rank 0's host by "
            "its address, or by a name that all hosts know"
        ) from error


def _environment_secret() -> bytes | str | None:
    if environment.is_set("GRADWIRE_SECRET"):
        return environment.text("GRADWIRE_SECRET") or ""
    if environment.is_set("GRADWIRE_SECRET_FILE"):
        return _read_secret(environment.text("GRADWIRE_SECRET_FILE") or "")
    return None


def _read_secret(name: str) -> bytes:
    try:
        with open(name, "rb", opener=_open_at_once) as file:
            info = os.fstat(file.fileno())
            if info.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or info.st_uid != os.geteuid():
                raise RendezvousError(
                    f"GRADWIRE_SECRET_FILE={name} can be read by others, or is another user's: "
                    f"chown it to this one, and chmod 600 {name}"
                )
            return file.read(_MAX_SECRET).strip()
    except OSError as error:
        raise RendezvousError(f"cannot read GRADWIRE_SECRET_FILE: {error}") from error


def _open_at_once(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NONBLOCK)  # a FIFO would wait for its writer

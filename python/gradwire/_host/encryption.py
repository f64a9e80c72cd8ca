"""The choice of which sockets are sealed: what both ends say of themselves, and what follows."""

from __future__ import annotations

import enum
import logging
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire import _core
from gradwire._base import environment
from gradwire._errors import Error, InvalidArgument
from gradwire._host.transport_kinds import KINDS

_log = logging.getLogger("gradwire")
_SIDE = struct.Struct("<BB?x8s")


class Setting(enum.IntEnum):
    """The value of GRADWIRE_ENCRYPTION."""

    OFF = 0
    AUTO = 1  # sockets between hosts are sealed
    ON = 2  # every TCP socket is


class Path(enum.IntEnum):
    """The way to the other end, as far as a socket tells."""

    UNIX = 0
    LOCAL = 1  # TCP between two addresses of one host
    NETWORK = 2


class Mismatch(Exception):
    """Two ends cannot agree; says why, as the one sees the other."""


def setting() -> Setting:
    """Reads GRADWIRE_ENCRYPTION; raises InvalidArgument for another value than its three."""
    return Setting[environment.choice("GRADWIRE_ENCRYPTION").upper()]


@dataclass(frozen=True)
class Side:
    """One end of a socket; both are told in the handshake, and covered by it."""

    setting: Setting
    path: Path
    host: bytes  # 8 bytes that tell hosts apart
    fast_aes: bool

    def pack(self) -> bytes:
        """Encodes all fields, in SIDE_BYTES bytes."""
        return _SIDE.pack(self.setting, self.path, self.fast_aes, self.host)


SIDE_BYTES = _SIDE.size


def unpack_side(data: bytes) -> Side:
    """Decodes what the other end said; raises Mismatch for anything else."""
    if len(data) != SIDE_BYTES:
        raise Mismatch("it says nothing of encryption: another gradwire version?")
    try:
        known, path, fast_aes, host = _SIDE.unpack(data)
        return Side(Setting(known), Path(path), host, fast_aes)
    except ValueError:
        raise Mismatch("it speaks of unknown settings: another gradwire version?") from None


def side_of(sock: socket.socket, host: str) -> Side:
    """Describes this end of a connected socket, on a host of this identity, in 16 digits."""
    return Side(setting(), _path_of(sock), bytes.fromhex(host), _core.has_aes())


def _path_of(sock: socket.socket) -> Path:
    if sock.family == socket.AF_UNIX:
        return Path.UNIX
    # Two hosts never see one address at both ends. Nor does loopback lead out of one; and where a
    # program relays it to another host, the two ends have other hosts' identities.
    here, there = sock.getsockname()[0], sock.getpeername()[0]
    return Path.LOCAL if here == there else Path.NETWORK


def agree(mine: Side, theirs: Side) -> _core.Cipher | None:
    """The cipher for a socket, the same at both ends; None where it stays plain.

    Raises Mismatch where one end must encrypt and the other must not.
    """
    if (mine.path is Path.UNIX) != (theirs.path is Path.UNIX):
        raise Mismatch("one end is a Unix socket and the other is not: a program is in between")
    if mine.path is Path.UNIX:
        return None
    near = mine.path is theirs.path is Path.LOCAL and mine.host == theirs.host
    wishes = {_wish(mine, near), _wish(theirs, near)}
    if wishes >= {True, False}:
        raise Mismatch(
            f"it has GRADWIRE_ENCRYPTION={theirs.setting.name.lower()} and this process "
            f"{mine.setting.name.lower()}: set it alike on all ranks"
        )
    if True not in wishes:
        return None
    fast = mine.fast_aes and theirs.fast_aes
    return _core.Cipher.AES_128_GCM if fast else _core.Cipher.CHACHA20_POLY1305


def _wish(side: Side, near: bool) -> bool | None:
    """Whether an end must encrypt (True), must not (False), or does as the other (None)."""
    if side.setting is Setting.AUTO:
        return None if near else True
    return side.setting is Setting.ON


def can_be_sealed(transport: str) -> bool:
    """Whether its messages go over sockets, or never leave the host; others are RDMA."""
    return KINDS[transport].reach != "network"


def allowed(transports: Sequence[str]) -> tuple[str, ...]:
    """Leaves out the transports that GRADWIRE_ENCRYPTION lets no ranks use."""
    return tuple(each for each in transports if setting() is not Setting.ON or can_be_sealed(each))


def require_allowed(what: str, remedy: str) -> None:
    """Raises InvalidArgument for something that cannot be encrypted where all must be."""
    if setting() is Setting.ON:
        raise InvalidArgument(
            f"GRADWIRE_ENCRYPTION=on, and what goes over {what} cannot be encrypted: {remedy}, or "
            "set GRADWIRE_ENCRYPTION=auto"
        )


_told: set[str] = set()


def tell_unsealed(what: str, rank: int) -> None:
    """Logs once a process that what goes over this is not encrypted; on rank 0 as a warning."""
    if setting() is Setting.AUTO and what not in _told:
        _told.add(what)
        level = logging.WARNING if rank == 0 else logging.INFO
        text = (
            "what goes over %s between hosts is not encrypted, and cannot be (GRADWIRE_ENCRYPTION"
        )
        _log.log(level, text + "=off says that this is known, =on does without it)", what)


def describe_here() -> tuple[bool, str]:
    """Whether sockets can be sealed here; and how, or why not."""
    try:
        known, library = setting(), _core.libcrypto_version()
    except Error as error:
        return False, f"because {error}"
    cipher = "AES-128-GCM" if _core.has_aes() else "ChaCha20-Poly1305"
    which = {
        Setting.OFF: "off: handshakes only",
        Setting.AUTO: f"auto: TCP between hosts, by {cipher}; not RDMA, not NCCL",
        Setting.ON: f"on: all TCP, by {cipher}; RDMA and NCCL are not used",
    }
    return True, f"{which[known]} ({library})"

"""The sign of a door: the entry in a store that says where to join, signed with the job's secret.

    HMAC-SHA256(secret, "gradwire/1 sign " ‖ job ‖ fields), in hexadecimal; a blank; fields as JSON

Whoever can write into the store may replace a sign, and nobody follows what he wrote: those who
join take a sign with another signature for none, and the door writes its own over it.
"""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass, field
from typing import Any

from gradwire import _core
from gradwire._bootstrap.handshake import job_digest
from gradwire._bootstrap.mesh import AddressInfo, unpack_address_info
from gradwire._errors import RendezvousError

_LABEL = b"gradwire/1 sign "
_DIGITS = 64  # of a signature


@dataclass(frozen=True)
class Sign:
    """The door's entry in its store: how to knock."""

    job: str
    secret: bytes = field(repr=False)  # of the job; it signs, and is not in the entry
    address: AddressInfo
    epoch: int  # of the job: the random number of its start
    membership: int  # the epoch of the communicator
    over: bool = False  # the communicator was closed, and nobody is left to join

    def pack(self) -> bytes:
        """Encodes and signs all fields but the secret."""
        fields = {
            "address": self.address.pack().decode(),
            "epoch": self.epoch,
            "membership": self.membership,
            "over": self.over,
        }
        body = json.dumps(fields).encode()
        return _signature(self.job, self.secret, body) + b" " + body


def unpack_sign(data: bytes, job: str, secret: bytes) -> Sign:
    """Decodes a sign of the job; raises RendezvousError for anything that it has not signed."""
    body = data[_DIGITS + 1 :]
    if not hmac.compare_digest(data[: _DIGITS + 1], _signature(job, secret, body) + b" "):
        raise RendezvousError(
            "what the store says of where to join is not signed with the job's secret: another "
            "secret here, or a stranger writes into the store"
        )
    try:
        found: Any = json.loads(body)
        epoch, membership, over = found["epoch"], found["membership"], found["over"]
        if type(epoch) is not int or type(membership) is not int or type(over) is not bool:
            raise TypeError
        address = unpack_address_info(found["address"].encode(), 0)
        return Sign(job, secret, address, epoch, membership, over)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise RendezvousError(
            "the store does not say where to join: another gradwire version?"
        ) from None


def key_of(job: str) -> str:
    """The key of a job's sign in its store."""
    return f"gradwire/{job}/door"


def secret_key_of(job: str) -> str:
    """The key of a job's secret in a store on a Unix socket, where the ranks were given none."""
    return f"gradwire/{job}/secret"


def _signature(job: str, secret: bytes, body: bytes) -> bytes:
    return _core.hmac_sha256(secret, _LABEL + job_digest(job) + body).hex().encode()

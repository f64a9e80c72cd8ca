"""The messages between a sponsor and its guests in a resize, as JSON in those of `shrink`.

    sponsor  INVITE   Invitation                        guest  ADDRESS  Addresses: its own
    sponsor  ADDRESS  Addresses: those of all members   guest  READY    once it is connected
    sponsor  DONE     it is in                          guest  DONE     it knows

Each has the view of the attempt that it is about. A new INVITE begins another attempt, and the end
of the link ends all: then the guest knocks again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gradwire._bootstrap.waiting_room import Guest

_LARGEST = 1 << 31


@dataclass(frozen=True)
class Invitation:
    """A guest's place in the next communicator."""

    rank: int
    size: int
    communicator: int
    epoch: int
    joined: int
    seconds: float  # for connecting
    model: str | None  # the packed cost model

    def pack(self) -> bytes:
        """Encodes all fields as JSON."""
        return json.dumps(asdict(self)).encode()


def unpack_invitation(data: bytes) -> Invitation:
    """Decodes a sponsor's invitation; raises ValueError for anything else."""
    fields = _object(data)
    numbers = [fields.get(name) for name in ("rank", "size", "communicator", "epoch", "joined")]
    if not all(type(each) is int and 0 <= each < 1 << 32 for each in numbers):
        raise ValueError("a number in it is missing or out of range")
    if not 0 <= fields["rank"] < fields["size"] < _LARGEST:
        raise ValueError("its rank is not within its size")
    if not isinstance(fields.get("seconds"), float | int) or not 0 < fields["seconds"] < 1e6:
        raise ValueError("its time is missing or out of range")
    if not isinstance(fields.get("model"), str | None):
        raise ValueError("its model is no text")
    try:
        return Invitation(**fields)
    except TypeError as error:
        raise ValueError(str(error)) from None


@dataclass(frozen=True)
class Addresses:
    """Packed AddressInfos, and numbers in the job: of guests from a sponsor, of all to a guest."""

    addresses: list[bytes]
    job_ranks: list[int] = field(default_factory=list)

    def pack(self) -> bytes:
        """Encodes both as JSON."""
        texts = [each.decode() for each in self.addresses]
        return json.dumps({"addresses": texts, "job_ranks": self.job_ranks}).encode()


def unpack_addresses(data: bytes, addresses: int, job_ranks: int) -> Addresses:
    """Decodes so many addresses and numbers; raises ValueError for anything else."""
    found = _object(data)
    texts, numbers = found.get("addresses"), found.get("job_ranks")
    if not isinstance(texts, list) or not isinstance(numbers, list):
        raise ValueError("a list in it is missing")
    if len(texts) != addresses or len(numbers) != job_ranks:
        raise ValueError("it has another number of members")
    if not all(isinstance(each, str) for each in texts):
        raise ValueError("an address is no text")
    if not all(type(each) is int and 0 <= each < _LARGEST for each in numbers):
        raise ValueError("a rank of the job is out of range")
    return Addresses([each.encode() for each in texts], numbers)


def with_guests(ranks: Sequence[int], guests: Sequence[Guest]) -> list[int]:
    """Numbers in the job, with guests': those that their launcher gave them, if free, or others."""
    numbers = list(ranks)
    for guest in guests:
        free = guest.number >= 0 and guest.number not in numbers
        numbers.append(guest.number if free else max(numbers) + 1)
    return numbers


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except RecursionError:
        found = None
    if not isinstance(found, dict):
        raise ValueError("it is no object")
    return found

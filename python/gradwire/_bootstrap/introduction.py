"""What the ranks of a process group tell each other first: hosts, the job, perhaps its secret."""

from __future__ import annotations

import json
import secrets
from typing import Any

from gradwire._bootstrap.mesh import host_identity
from gradwire._errors import RendezvousError

_BYTES = 32  # of a secret


def introduction(rank: int, known: bytes | None, reached: str) -> bytes:
    """As JSON. `known` is the secret that this rank was given, `reached` where it reaches torch's
    own meeting place. Rank 0 names the job, and makes a secret where it was given none.
    """
    said: dict[str, Any] = {"host": host_identity(), "has_secret": known is not None}
    said["reached"] = reached
    if rank == 0:
        said["job"] = f"process-group-{secrets.token_hex(8)}"
        if known is None:
            said["secret"] = secrets.token_hex(_BYTES)
    return json.dumps(said).encode()


def read_introduction(data: bytes, rank: int) -> dict[str, Any]:
    """What a rank says of itself; raises RendezvousError for anything else."""
    wanted: dict[str, type] = {"host": str, "has_secret": bool, "reached": str}
    try:
        said: dict[str, Any] = json.loads(data)
        if rank == 0:
            wanted["job"] = str
        if rank == 0 and not said["has_secret"]:
            wanted["secret"] = str
            if len(bytes.fromhex(said["secret"])) != _BYTES:
                raise ValueError
        if {key: type(said[key]) for key in said} == wanted:
            return said
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    raise RendezvousError(f"rank {rank} did not introduce itself: another gradwire version?")

"""What the ranks of a process group tell each other about their hosts."""

from __future__ import annotations

import json
import secrets
from types import NoneType
from typing import Any

from gradwire._base.texts import read_fields
from gradwire._bootstrap.through_torch.open_exchange import QUESTION_BYTES
from gradwire._errors import RendezvousError
from gradwire._host.identity import host_identity


def pack_host_info(rank: int, question: bytes | None, reached: str) -> bytes:
    """Encodes this rank's host as JSON; rank 0 adds a job name.

    `question` is what rank 0 is to answer with a secret; None: this rank was given one.
    `reached` is the address at which it reaches torch's own store.
    """
    info: dict[str, Any] = {"host": host_identity(), "reached": reached}
    info["question"] = None if question is None else question.hex()
    if rank == 0:
        info["job"] = f"process-group-{secrets.token_hex(8)}"
    return json.dumps(info).encode()


def unpack_host_info(data: bytes, rank: int) -> dict[str, Any]:
    """Decodes a rank's host information; raises RendezvousError for anything else."""
    job: dict[str, type] = {"job": str} if rank == 0 else {}
    try:
        info = read_fields(data, host=str, reached=str, question=(str, NoneType), **job)
        if info["question"] is not None:
            info["question"] = bytes.fromhex(info["question"])
            if len(info["question"]) != QUESTION_BYTES:
                raise ValueError("its question is of another length")
    except ValueError:
        raise RendezvousError(
            f"rank {rank} sent no host information: another gradwire version?"
        ) from None
    return info

"""Identity of this host and process, and what the ranks of a process group tell about theirs."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
from pathlib import Path
from types import NoneType
from typing import Any

from gradwire._base.texts import read_fields
from gradwire._bootstrap.through_torch.open_exchange import QUESTION_BYTES
from gradwire._errors import RendezvousError

_DIGITS = 8  # of a digest


def host_identity() -> str:
    """A name that is equal exactly for processes that share a kernel and a network namespace.

    Abstract Unix sockets, over which shared memory is passed, reach just as far: containers on one
    machine may or may not share the namespace. Boot ids tell cloned machines apart. The first half
    is the machine's name alone.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = Path("/proc/self/ns/net").stat().st_ino
    return _digest(boot) + _digest(f"{boot} {namespace}")


def machine_of(host: str) -> str:
    """The part of a host's identity that is equal for the hosts of one kernel."""
    return host[:_DIGITS]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def process_name() -> str:
    """Host name and process id, by which messages tell ranks apart."""
    return f"{socket.gethostname()}:{os.getpid()}"


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

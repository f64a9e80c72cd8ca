"""The GRADWIRE_* environment variables, in one table; no other module reads one itself.

Exceptions are GRADWIRE_SIMD, GRADWIRE_CUDA_SO and GRADWIRE_NCCL_SO, which the core reads.
"""

from __future__ import annotations

import math
import os

from gradwire import _core
from gradwire._errors import InvalidArgument

# name -> (meaning, value when unset); `gradwire doctor` and the documentation print this. Those of
# the transports are in the core.
VARIABLES: dict[str, tuple[str, str]] = {
    "GRADWIRE_STORE": (
        "where the ranks meet: tcp://HOST:PORT (rank 0 listens there), unix://NAME or unix:///PATH",
        "found from the launcher's environment",
    ),
    "GRADWIRE_JOB": ("name of the job; ranks of different names refuse each other", "launcher's"),
    "GRADWIRE_SECRET": ("shared secret of the job's ranks, at least 16 bytes", "made by rank 0"),
    "GRADWIRE_SECRET_FILE": ("file (mode 0600) that holds the secret", "none"),
    "GRADWIRE_INSECURE": ("1: allow a store beyond loopback without a secret", "0"),
    "GRADWIRE_TRANSPORT": (
        "transports to use, best first, with commas",
        ",".join(name for name, _, _, by_default, _ in _core.transport_kinds() if by_default),
    ),
    **{
        name: (meaning, unset)
        for *_, settings in _core.transport_kinds()
        for name, meaning, unset in settings
    },
    "GRADWIRE_SOCKET_IFNAME": (
        "network interface, as in NCCL: prefix[,prefix], =exact, ^excluded",
        "the one that reaches the store",
    ),
    "GRADWIRE_EXIT_FILE": (
        "where each rank notes how its program ended; `gradwire run` sets and reads it",
        "nowhere",
    ),
    "GRADWIRE_SERVERS": (
        "number of shards of the parameter server that `gradwire run --servers` has started",
        "none",
    ),
    "GRADWIRE_JOIN": (
        "1: this process joins a job that runs, by init(elastic=True); `gradwire run --min` sets "
        "it where it replaces one that failed",
        "0",
    ),
    "GRADWIRE_MAX_RANKS": (
        "how many ranks a communicator has at most after `resize()`; `gradwire run --max` sets it",
        "no limit",
    ),
    "GRADWIRE_MIN_RANKS": (
        "with how many ranks `resize()` goes on at least where min_ranks= is not given; "
        "`gradwire run --min` sets it",
        "a majority of the ranks before",
    ),
    "GRADWIRE_SLOT_ENDS": (
        "when the job's time slot ends, in seconds since 1970, where Slurm's SLURM_JOB_END_TIME is "
        "not earlier; `gradwire run --slot` sets it",
        "at SLURM_JOB_END_TIME, if that is set",
    ),
    "GRADWIRE_SLOT_MARGIN": (
        "seconds before that end in which `should_stop()` tells ranks to stop",
        "60",
    ),
    "GRADWIRE_TCP_TIMEOUT_SECONDS": (
        "seconds of silence after which a peer's host counts as dead",
        "15",
    ),
    "GRADWIRE_STALL_SECONDS": (
        "seconds without progress after which a rank logs whom it waits for; 0: never",
        "30",
    ),
    "GRADWIRE_MODEL": (
        'rank 0: the file of the cost model that algorithm="auto" uses, or default',
        "what `gradwire tune` has saved for these hosts",
    ),
    "GRADWIRE_CUDA_SO": (
        "file of gradwire's CUDA part",
        "libgradwire_cuda.so beside the core, if it was built",
    ),
    "GRADWIRE_GPU_LINKS": (
        "how GPUs exchange messages: nccl, ipc, host, nccl+host or ipc+host (in a host, and "
        "between), loopback",
        "nccl where each rank has a GPU of its own, else host; loopback between threads",
    ),
    "GRADWIRE_NCCL_SO": (
        "file of NCCL",
        "what torch has loaded, pip's wheel, or the system's libnccl.so.2",
    ),
    "GRADWIRE_NCCL_BLOCKING": (
        "1, experimental: NCCL's calls block, on one thread of gradwire's for each communicator, "
        "in place of a thread of NCCL's for each group; a rank that fails may crash the others",
        "0",
    ),
    "GRADWIRE_TRACE": (
        "folder into which each process writes what it records of its communicators' calls",
        "nothing is recorded",
    ),
    "GRADWIRE_SIMD": ("instruction set of the core: scalar, avx2 or avx512", "the best there is"),
}


def text(name: str) -> str | None:
    """A variable's value without surrounding blanks; None when unset or empty."""
    if name not in VARIABLES:
        raise KeyError(name)
    return os.environ.get(name, "").strip() or None


def is_set(name: str) -> bool:
    """Whether a variable is set, even to an empty value."""
    if name not in VARIABLES:
        raise KeyError(name)
    return name in os.environ


def flag(name: str) -> bool:
    """Whether a variable is 1, true, yes or on; raises InvalidArgument for no boolean."""
    value = (text(name) or "0").lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("0", "false", "no", "off"):
        return False
    raise InvalidArgument(f"{name}={value!r} is not a boolean: use 1 or 0")


def seconds(name: str, least: float, most: float) -> float:
    """A variable in seconds, or its default; raises InvalidArgument outside the range."""
    given = text(name) or VARIABLES[name][1]
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise InvalidArgument(f"{name}={given!r} is not a time: use {least:g} to {most:g} seconds")
    return value


def items(name: str) -> tuple[str, ...]:
    """A variable as a comma-separated list; empty when unset."""
    return tuple(item.strip() for item in (text(name) or "").split(",") if item.strip())

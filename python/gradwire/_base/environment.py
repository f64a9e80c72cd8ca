"""The GRADWIRE_* environment variables, in one table; no other module reads one itself.

Exceptions are GRADWIRE_SIMD, GRADWIRE_CUDA_SO and GRADWIRE_NCCL_SO, which the core reads.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import socket
import stat
from collections.abc import Callable
from functools import cache
from urllib.parse import urlsplit

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
    "GRADWIRE_SECRET": (
        "shared secret of the job's ranks, at least 16 bytes; tcp:// and joins under torchrun need "
        "one",
        "made by `gradwire run` or rank 0",
    ),
    "GRADWIRE_SECRET_FILE": ("file (mode 0600) that holds the secret", "none"),
    "GRADWIRE_INSECURE": (
        "1: allow a tcp:// store without a secret, where every user of every host may join",
        "0",
    ),
    "GRADWIRE_ENCRYPTION": (
        "on: encrypt every TCP socket, and use neither RDMA nor NCCL; auto: TCP between hosts; off",
        "auto",
    ),
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
        "network interfaces, as in NCCL: prefix[,prefix], =exact, ^excluded",
        "the one that reaches the store",
    ),
    "GRADWIRE_PORT": (
        "the TCP port at which all ranks of this host are reached from other hosts",
        "a free one for each",
    ),
    "GRADWIRE_ADVERTISE": (
        "HOST[:PORT] at which other hosts reach this one's ranks, where a router forwards to it; "
        "none: they cannot, so that these ranks connect to theirs",
        "the interface's address, and GRADWIRE_PORT",
    ),
    "GRADWIRE_RELAY": (
        "HOST:PORT of the rank's host that relays between ranks of which neither reaches the other",
        "the first host that has a GRADWIRE_PORT",
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
    "GRADWIRE_SITE": (
        "this host's site: all ranks name theirs, and between sites each element goes once",
        "found by round trips: hosts 5 ms or more apart are at different ones",
    ),
    "GRADWIRE_TCP_STREAMS": (
        "TCP streams between two ranks, 1 to 16, or auto: as many as their round trip needs; the "
        "higher rank's setting counts",
        "auto",
    ),
    "GRADWIRE_TCP_TIMEOUT_SECONDS": (
        "seconds of silence after which a peer's host counts as dead",
        "5",
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
        "how GPUs exchange messages: nccl, host, nccl+host (in a host, and between), loopback",
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
    "GRADWIRE_METRICS": (
        "PORT or HOST:PORT at which a rank shows what it counts to Prometheus, with its local rank "
        "added to the port, on 127.0.0.1 without HOST; or a folder for a file a rank, with a slash",
        "nothing is counted",
    ),
    "GRADWIRE_SIMD": ("instruction set of the core: scalar, avx2 or avx512", "the best there is"),
}


MOST_STREAMS = 16  # between two ranks
_MOST_PORT = 65535
MOST_OF_SITE = 64  # characters of its name


# A value is read, or refused by a ValueError that says what it is not, and what to use.
_Parser = Callable[[str], object]


def _limited(what: str, least: float, most: float, unit: str) -> str:
    """The text about a value that is not `what`, or outside its limits."""
    if math.isinf(most):
        return f"is not {what}: use {least:g}{unit} or more"
    return f"is not {what}: use {least:g} to {most:g}{unit}"


def _whole(what: str, least: int, most: float = math.inf) -> _Parser:
    def parse(given: str) -> float:
        if not given.isdecimal() or not least <= int(given) <= most:
            raise ValueError(_limited(what, least, most, ""))
        return float(given)

    return parse


def _whole_or_auto(what: str, least: int, most: float) -> _Parser:
    number = _whole(what, least, most)
    return lambda given: None if given == "auto" else number(given)


def _seconds(least: float, most: float = math.inf, what: str = "a time") -> _Parser:
    def parse(given: str) -> float:
        try:
            value = float(given)
        except ValueError:
            value = math.nan
        if not least <= value <= most or math.isinf(value):
            raise ValueError(_limited(what, least, most, " seconds"))
        return value

    return parse


def _flag(given: str) -> bool:
    if given.lower() in ("1", "true", "yes", "on"):
        return True
    if given.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("is not a boolean: use 1 or 0")


def _one_of(*choices: str) -> _Parser:
    def parse(given: str) -> str:
        if given not in choices:
            raise ValueError(f"is none of {', '.join(choices)}")
        return given

    return parse


def _anything(given: str) -> str:
    return given


def _printable(given: str) -> str:
    if not given.isprintable():
        raise ValueError("is not printable")
    return given


def _site(given: str) -> str:
    if not given.isascii() or not given.isprintable() or len(given) > MOST_OF_SITE:
        raise ValueError(f"is no name of a site: use up to {MOST_OF_SITE} ASCII characters")
    return given


def _names(given: str) -> tuple[str, ...]:
    found = tuple(item.strip() for item in given.split(",") if item.strip())
    if not found:
        raise ValueError("names nothing: unset it, or give names with commas")
    return found


def _pattern(given: str) -> tuple[str, ...]:
    return _names(given.removeprefix("^").removeprefix("="))


def _address(given: str) -> str:
    try:
        parts = urlsplit(given)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    on_host = parts.scheme in ("tcp", "torch") and parts.hostname and port
    if not on_host and not (parts.scheme == "unix" and (parts.netloc or len(parts.path) > 1)):
        raise ValueError(
            "is none of tcp://HOST:PORT, torch://HOST:PORT, unix://NAME and unix:///PATH"
        )
    return given


def _place(given: str) -> tuple[str, int]:
    """A host and its port; 0 where none is given."""
    try:
        parts = urlsplit(f"//{given}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or parts.netloc != given or "@" in given or port == 0 or given.endswith(":"):
        raise ValueError("is no HOST[:PORT], such as node7:29400, 192.0.2.1 or [2001:db8::1]:29400")
    return host, port or 0


def _place_with_port(given: str) -> tuple[str, int]:
    host, port = _place(given)
    if not port:
        raise ValueError("has no port: use HOST:PORT")
    return host, port


def _file(given: str) -> str:
    """A file that is none, or not there on this host, is found by whoever reads or writes it."""
    try:
        kind = os.stat(given).st_mode
    except (OSError, ValueError):
        return given
    if not stat.S_ISREG(kind):
        raise ValueError("is no regular file")
    return given


def _folder(given: str) -> str:
    if os.path.exists(given) and not os.path.isdir(given):
        raise ValueError("is no folder")
    return given


def _endpoint(given: str) -> tuple[str, int] | str:
    """A folder, if it has a slash; else where to listen."""
    if "/" in given:
        return _folder(given)
    host, _, port = given.rpartition(":")
    if not port.isdecimal() or int(port) > _MOST_PORT:
        raise ValueError("is none of PORT, HOST:PORT and a folder with a slash, as ./metrics")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def _link(given: str) -> str:
    try:
        _core.link_costs(given)
    except InvalidArgument as error:
        raise ValueError(f"is no link: {error}") from None
    return given


def _rate(given: str) -> str:
    try:
        _core.rate_now(given)
    except InvalidArgument as error:
        raise ValueError(f"is no rate: {error}") from None
    return given


def _congestion(given: str) -> str:
    """A congestion control that the kernel lets this process use."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, given.encode())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"is refused by the kernel ({error}): it has {_kernel_congestion('available')}, and "
            f"without CAP_NET_ADMIN {_kernel_congestion('allowed')}; `modprobe tcp_NAME` adds one, "
            "`sysctl net.ipv4.tcp_allowed_congestion_control` allows it"
        ) from None
    return given


def _kernel_congestion(which: str) -> str:
    try:
        with open(f"/proc/sys/net/ipv4/tcp_{which}_congestion_control", encoding="ascii") as file:
            return ", ".join(file.read().split())
    except OSError:
        return "unknown ones"


# How each variable is read; all are checked before ranks meet. Secrets are checked where they are
# found, since an error must not print one.
_PARSERS: dict[str, _Parser] = {
    "GRADWIRE_STORE": _address,
    "GRADWIRE_JOB": _printable,
    "GRADWIRE_SECRET": _anything,
    "GRADWIRE_SECRET_FILE": _anything,
    "GRADWIRE_INSECURE": _flag,
    "GRADWIRE_ENCRYPTION": _one_of("auto", "on", "off"),
    "GRADWIRE_TRANSPORT": _names,
    "GRADWIRE_IB_HCA": _pattern,
    "GRADWIRE_IB_LINK_LAYER": _one_of("ethernet", "infiniband"),
    "GRADWIRE_IB_GID_INDEX": _whole("an index", 0, 255),
    "GRADWIRE_IB_MTU": _one_of("256", "512", "1024", "2048", "4096"),
    "GRADWIRE_TRAFFIC_CLASS": _whole("a traffic class", 0, 255),
    "GRADWIRE_RATE": _rate,
    "GRADWIRE_TCP_CONGESTION": _congestion,
    "GRADWIRE_IB_SL": _whole("a service level", 0, 15),
    "GRADWIRE_IB_TIMEOUT": _whole("an exponent", 1, 31),
    "GRADWIRE_LINK": _link,
    "GRADWIRE_SOCKET_IFNAME": _pattern,
    "GRADWIRE_PORT": _whole("a port", 1, 65535),
    "GRADWIRE_ADVERTISE": _place,
    "GRADWIRE_RELAY": _place_with_port,
    "GRADWIRE_EXIT_FILE": _anything,  # one that cannot be written does no harm
    "GRADWIRE_SERVERS": _whole("a number of shards", 1),
    "GRADWIRE_JOIN": _flag,
    "GRADWIRE_MAX_RANKS": _whole("a number of ranks", 1),
    "GRADWIRE_MIN_RANKS": _whole("a number of ranks", 1),
    "GRADWIRE_SLOT_ENDS": _seconds(0, what="a time since 1970"),
    "GRADWIRE_SLOT_MARGIN": _seconds(0, 1e6),
    "GRADWIRE_SITE": _site,
    "GRADWIRE_TCP_STREAMS": _whole_or_auto("a number of streams", 1, MOST_STREAMS),
    "GRADWIRE_TCP_TIMEOUT_SECONDS": _seconds(1, 3600),
    "GRADWIRE_STALL_SECONDS": _seconds(0, 1e6),
    "GRADWIRE_MODEL": _file,
    "GRADWIRE_CUDA_SO": _file,
    "GRADWIRE_GPU_LINKS": _one_of("auto", "nccl", "host", "nccl+host", "loopback"),
    "GRADWIRE_NCCL_SO": _file,
    "GRADWIRE_NCCL_BLOCKING": _flag,
    "GRADWIRE_TRACE": _folder,
    "GRADWIRE_METRICS": _endpoint,
    "GRADWIRE_SIMD": _one_of("scalar", "avx2", "avx512"),
}


_PREFIX = "GRADWIRE"
# By which launchers number the ranks of a host, so that one of them warns.
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")

_log = logging.getLogger("gradwire")


def check(*names: str) -> None:
    """Raises InvalidArgument for the first of these variables, or of all, that has a wrong value.

    All are checked before ranks meet, so that none fails later while others wait for it. Then the
    first rank of a host also warns, once, of variables that nothing reads.
    """
    if not names and not any(os.environ.get(each, "0") != "0" for each in _LOCAL_RANKS):
        for name, why in unknown().items():
            _warn_of(name, why)
    for name in names or _PARSERS:
        _parsed(name, text(name))


def unknown() -> dict[str, str]:
    """The variables that look like gradwire's and are none: what is said of each by its name."""
    found = sorted(each for each in os.environ if each.upper().startswith(_PREFIX))
    return {each: _what_is_meant(each) for each in found if each not in VARIABLES}


def _what_is_meant(name: str) -> str:
    rest = {each.removeprefix(_PREFIX): each for each in VARIABLES}
    near = difflib.get_close_matches(name.upper().removeprefix(_PREFIX), rest, 1)
    meant = f": is {rest[near[0]]} meant?" if near else ""
    return f"is no variable of gradwire, and changes nothing{meant}"


@cache
def _warn_of(name: str, why: str) -> None:
    _log.warning("%s %s (`gradwire doctor` lists all)", name, why)


def _parsed(name: str, given: str | None) -> object:
    """The variable's value as its parser reads it; None when unset."""
    if given is None:
        return None
    try:
        return _PARSERS[name](given)
    except ValueError as error:
        raise InvalidArgument(f"{name}={given!r:.200} {error}") from None


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
    return bool(_parsed(name, text(name)))


def choice(name: str) -> str:
    """A variable's value, or its default; raises InvalidArgument unless it is one of its words."""
    value = _parsed(name, text(name) or VARIABLES[name][1])
    assert isinstance(value, str)
    return value


def number(name: str) -> float | None:
    """A variable as a number; None when unset. Raises InvalidArgument outside its limits."""
    value = _parsed(name, text(name))
    assert value is None or isinstance(value, float)
    return value


def place(name: str) -> tuple[str, int]:
    """A variable as a host and a port; "" and 0 for what is not given."""
    value = _parsed(name, text(name)) or ("", 0)
    assert isinstance(value, tuple)
    return value


def seconds(name: str) -> float:
    """A variable in seconds, or its default; raises InvalidArgument outside its limits."""
    value = number(name)
    return float(VARIABLES[name][1]) if value is None else value


def endpoint(name: str) -> tuple[str, int] | str:
    """A variable that is set, as host and port, or a folder; raises InvalidArgument for neither."""
    value = _parsed(name, text(name))
    assert isinstance(value, tuple | str)
    return value


def local_rank() -> int | None:
    """This process's number among those of its host, by its launcher; None when that is unknown."""
    given = (os.environ.get(each, "") for each in _LOCAL_RANKS)
    return next((int(each) for each in given if each.isdecimal()), None)


def items(name: str) -> tuple[str, ...]:
    """A variable as a comma-separated list, empty when unset; raises InvalidArgument for none."""
    return tuple(_names(given)) if (given := text(name)) and _parsed(name, given) else ()

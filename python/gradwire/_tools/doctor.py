"""`gradwire doctor`: the facilities of this machine, each with yes, or no and why."""

from __future__ import annotations

import json
import os
import platform
import resource
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from urllib.parse import urlsplit

from gradwire import _core, _model
from gradwire._base import environment
from gradwire._base.packages import installed as _installed
from gradwire._bootstrap import launch_info
from gradwire._bootstrap.job_secret import HOW_TO_MAKE, find_secret
from gradwire._errors import Error, InvalidArgument, RendezvousError
from gradwire._host import cuda, emulated_link, encryption, interfaces, transport_kinds
from gradwire._tools import tcp_limits
from gradwire.lab.tuning import saving

_TORCH_AT_LEAST = (2, 4)
_VERBS_LIMIT = 64 << 20  # bytes; registered staging of a small job


@dataclass(frozen=True)
class Check:
    """One line of the table; `ok` is None for a line that only informs."""

    section: str
    name: str
    ok: bool | None
    detail: str


def checks(link: str | None = None) -> list[Check]:
    """Makes all checks; imports no torch, and opens no connection but to the `link`'s host.

    Raises InvalidArgument for a `link` that is none (`tcp_limits.way_of`).
    """
    way = None if link is None else tcp_limits.way_of(link)
    machine = (_system, _transports, _cost_models, _instruction_sets, _network)
    others = (_joins, _memory, _torch, _devices, _variables)
    long_link = [Check("tcp", *found) for found in tcp_limits.checks(way)]
    before, after = ([each for part in parts for each in part()] for parts in (machine, others))
    return [*before, *long_link, *after]


def as_json(found: Iterable[Check]) -> str:
    """Formats the checks as one JSON object."""
    return json.dumps({"version": version(), "checks": [asdict(each) for each in found]}, indent=2)


def as_table(found: Iterable[Check]) -> str:
    """Formats the checks as lines for people."""
    lines = [f"gradwire {version()}"]
    for section, members in groupby(found, key=lambda check: check.section):
        lines.append(f"\n{section}")
        lines.extend(map(_line, members))
    return "\n".join(lines)


def version() -> str:
    """The installed package's version; "(not installed)" when run from a source tree."""
    return _installed("gradwire") or "(not installed)"


def _line(check: Check) -> str:
    mark = {True: "yes", False: "no ", None: "   "}[check.ok]
    return f"  {mark}  {check.name:<22} {check.detail}".rstrip()


def _system() -> Iterator[Check]:
    libraries = f"Python {platform.python_version()}, numpy {_installed('numpy') or 'absent'}"
    yield Check("system", "platform", None, f"{platform.platform()}; {libraries}")
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = _cpu_quota()
    limit = f"; a control group allows {quota:g}" if quota is not None else ""
    yield Check("system", "cores", None, f"{usable} of {present} usable{limit}")


def _cpu_quota() -> float | None:
    """The cores that control group v2 allows; None without a limit."""
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _transports() -> Iterator[Check]:
    for name in transport_kinds.KINDS:
        yield Check("transports", name, *_usable(name))


def _usable(transport: str) -> tuple[bool, str]:
    try:
        why_not = transport_kinds.why_not(transport)
    except Error as error:
        return False, f"because {error}"
    if why_not is not None:
        return False, f"because {why_not}"
    context = transport_kinds.context(transport)
    devices = "" if context is None else "; ".join(context.describe())
    return True, devices + _choice(transport)


def _choice(transport: str) -> str:
    """A note on whether GRADWIRE_LINK makes ranks use a transport or not."""
    link = emulated_link.spec()
    if transport == transport_kinds.EMULATED:
        return f"holds tcp to {link}" if link else "holds tcp to a rate: `gradwire run --link`"
    return f"not chosen: GRADWIRE_LINK={link} emulates links" if link else ""


def _cost_models() -> Iterator[Check]:
    """The cost models that algorithm="auto" may use here."""
    given = environment.text(_model.VARIABLE)
    if given is not None:
        yield Check("cost models", _model.VARIABLE, None, given)
        return
    try:
        saved = saving.saved()
    except OSError as error:
        yield Check("cost models", "cache", False, f"because {error}: built-in values are used")
        return
    for path in saved:
        name, ok, detail = saving.describe(path)
        yield Check("cost models", name, ok, detail)
    if not saved:
        yield Check("cost models", "none saved", None, "built-in values; `gradwire tune` measures")


def _instruction_sets() -> Iterator[Check]:
    active = _core.active_instruction_set()
    for name in _core.instruction_sets():
        yield Check("instruction sets", name, True, "active" if name == active else "")


def _network() -> Iterator[Check]:
    for each in interfaces.interfaces():
        yield Check("network", each.name, True, each.address)
    yield Check("network", "ranks on one host", True, f"use {interfaces.loopback()}")
    yield Check("network", "ranks on several hosts", *_several_hosts())


def _several_hosts() -> tuple[bool, str]:
    """The interface that ranks on several hosts would use here, and why."""
    try:
        choice = interfaces.choose(_towards_store(), several_hosts=True)
    except RendezvousError as error:
        return False, f"because {error}"
    return True, f"use {choice}"


def _towards_store() -> str | None:
    """The own address that reaches the store of the environment; None without a store."""
    place = urlsplit(_store_of_environment())
    if place.hostname is None or place.port is None:
        return None
    return interfaces.address_towards(place.hostname, place.port)


def _store_of_environment() -> str:
    """The store's URL; empty without one, or if init() would refuse the environment."""
    try:
        return launch_info.from_environment().store or environment.text("GRADWIRE_STORE") or ""
    except RendezvousError:
        return ""


def _joins() -> Iterator[Check]:
    yield Check("joins", "who may join", *_who_may_join())
    yield Check("joins", "encryption", *encryption.describe_here())


def _who_may_join() -> tuple[bool | None, str]:
    try:
        if find_secret(None) is not None:
            return True, "whoever has the secret that GRADWIRE_SECRET or its file gives"
        insecure = environment.flag("GRADWIRE_INSECURE")
    except Error as error:
        return False, f"because {error}"
    store = _store_of_environment()
    if store.startswith("torch:"):
        where = store.removeprefix("torch://")
        return None, (
            f"no secret is set: nobody joins by torch's store at {where}, and on several hosts "
            f"who changes what is in it becomes a rank; `{HOW_TO_MAKE}` keeps him out"
        )
    if insecure:
        return None, "no secret is set, and GRADWIRE_INSECURE: everybody who reaches the store"
    return None, (
        "no secret is set: `gradwire run` makes one; at unix:// this user's processes; a tcp:// "
        f"store is refused, on loopback too; `{HOW_TO_MAKE}` makes one"
    )


def _memory() -> Iterator[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    enough = soft == resource.RLIM_INFINITY or soft >= _VERBS_LIMIT
    found = f"soft {_size(soft)}, hard {_size(hard)}"
    remedy = "" if enough else f"; registering memory for verbs wants {_size(_VERBS_LIMIT)}: "
    how = "" if enough else "raise `ulimit -l`"
    yield Check("memory", "memory-lock limit", enough, found + remedy + how)


def _size(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / (1 << 20):g} MiB"


def _torch() -> Iterator[Check]:
    found = _installed("torch")
    if found is None:
        why = "because it is not installed: pip install torch"
        yield Check("torch", "DDP hook", False, why)
        return
    recent = tuple(int(part) for part in found.split("+")[0].split(".")[:2]) >= _TORCH_AT_LEAST
    least = ".".join(map(str, _TORCH_AT_LEAST))
    yield Check(
        "torch", "DDP hook", recent, f"torch {found}" + ("" if recent else f": needs {least}")
    )


def _devices() -> Iterator[Check]:
    yield Check("devices", "CUDA", *cuda.devices())
    yield Check("devices", "NCCL", *cuda.nccl())


def _variables() -> Iterator[Check]:
    for name, (meaning, unset) in environment.VARIABLES.items():
        value, good = environment.text(name), None
        if value is None:
            detail = f"unset: {unset}"
        else:
            detail = "set" if name == "GRADWIRE_SECRET" else f"{value} ({meaning})"
        try:
            environment.check(name)
        except InvalidArgument as error:
            good, detail = False, str(error)
        yield Check("environment", name, good, detail)
    for name, why in environment.unknown().items():
        yield Check("environment", name, False, why)

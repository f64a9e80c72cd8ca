"""The cost model behind algorithm="auto", and where it is found.

Rank 0's model counts. It is the file that GRADWIRE_MODEL names, or the one that `gradwire tune` has
saved for these hosts, or the built-in values; rank 0 sends it to the others when they connect.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from gradwire import _core
from gradwire._base import arguments, environment
from gradwire._errors import InvalidArgument, RendezvousError
from gradwire._host import emulated_link
from gradwire._schedules.schedule import (
    BUTTERFLY,
    OF_LARGE,
    OF_SMALL,
    Schedule,
    gathering,
    groups_of,
)

VARIABLE = "GRADWIRE_MODEL"
BUILT_IN = "default"  # as a value of the variable

FORMAT = 4  # in earlier formats parameters had other meanings
_MOST_BYTES = 1 << 16  # of a file
_log = logging.getLogger("gradwire")


class CostModel:
    """Predicts how long a collective takes from the costs of messages, bytes and additions.

    Parameters have flat names and are in seconds. ``within.`` is for pairs of ranks on one host,
    ``between.`` for other pairs; both have ``alpha`` (processor time per message and end),
    ``latency``, ``beta`` (of a NIC, per byte on the wire), ``mixed`` (what a message takes longer
    per byte after one of another sender), ``burst`` (bytes that pass an idle NIC at once) and
    ``copy`` (processor time per byte on the wire and end). ``call``, ``round``, ``move`` and
    ``gamma`` are processor time per call, per round of messages (0 on CPUs), and per byte copied or
    added; ``turn`` is the time until another rank has the core; ``far.*`` say how much slower bytes
    are in large calls where no cache holds them; ``CODEC.encode`` and ``CODEC.decode`` are per byte
    of the array. ``cores`` is the number of cores that the ranks of a host share, and ``sharing``
    how many hosts share these, as containers of one machine do.
    """

    __slots__ = ("_core",)

    def __init__(self, parameters: Mapping[str, float] | None = None) -> None:
        """Starts from the built-in values for shared memory and tcp; `parameters` override some.

        Raises InvalidArgument for an unknown name or an impossible value.
        """
        self._core = _core.CostModel("shm", "tcp", usable_cores())
        set_parameters(self._core, parameters or {})

    @property
    def parameters(self) -> dict[str, float]:
        """All parameters by name; `CostModel` says in which units."""
        return self._core.parameters

    def predict(
        self,
        algorithm: str | Schedule,
        nbytes: float,
        ranks: int,
        *,
        collective: str = "all_reduce",
        per_host: int | None = None,
        codec: str = "none",
    ) -> float:
        """Predicts the seconds of one call over `nbytes`, the blocks of all ranks together.

        The ranks are on one host, or `per_host` on each. Without codec, an all_reduce may also be
        ``gather(direct)``, or by another all_gather. Raises as `Schedule.generate` does.
        """
        ranks, hosts = _hosts(ranks, per_host)
        bytes_, codec = _size(nbytes), arguments.text(codec, "codec")
        arguments.text(collective, "collective")
        if not isinstance(algorithm, Schedule):
            arguments.text(algorithm, "algorithm")
            by = gathering(algorithm) if (collective, codec) == ("all_reduce", "none") else None
            if by is not None:
                by = by or self.choose(ranks * bytes_, ranks, collective="all_gather")[0]
                gather = Schedule.generate(by, ranks, collective="all_gather")
                return self._core.predict_gathered(gather._core, bytes_, hosts)
            if algorithm == BUTTERFLY and (collective, codec) == ("all_reduce", "none"):
                small = self.predict(OF_SMALL, nbytes, ranks, per_host=per_host)
                return min(small, self.predict(OF_LARGE, nbytes, ranks, per_host=per_host))
            algorithm = Schedule.generate(algorithm, ranks, collective=collective, groups=hosts)
        return self._core.predict(algorithm._core, bytes_, hosts, _core.Codec(codec))

    def choose(
        self,
        nbytes: float,
        ranks: int,
        *,
        collective: str = "all_reduce",
        per_host: int | None = None,
        codec: str = "none",
    ) -> tuple[str, float]:
        """The algorithm that ``auto`` chooses for such a call, and its predicted seconds."""
        ranks, hosts = _hosts(ranks, per_host)
        by = _core.Codec(arguments.text(codec, "codec"))
        collective = arguments.text(collective, "collective")
        name, _, seconds = self._core.choose(collective, ranks, _size(nbytes), hosts, by)
        return name, seconds

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CostModel) and self.parameters == other.parameters

    def __hash__(self) -> int:
        return self._core.digest

    def __repr__(self) -> str:
        return f"<CostModel #{self._core.digest % 10000}>"


def _hosts(ranks: int, per_host: int | None) -> tuple[int, list[list[int]]]:
    """The number of ranks, checked, and the ranks of each host."""
    count = arguments.whole(ranks, "ranks", least=1)
    each = count if per_host is None else arguments.whole(per_host, "per_host", least=1)
    return count, groups_of(count, each)


def _size(nbytes: float) -> float:
    if not (given := arguments.number(nbytes, "nbytes")) >= 0:
        raise InvalidArgument(f"nbytes={nbytes} is no number of bytes")
    return given


def wrap(core: _core.CostModel) -> CostModel:
    """Makes the public object of a core model."""
    made = CostModel.__new__(CostModel)
    made._core = core
    return made


class HostSet(NamedTuple):
    """The hosts that a model is for, with their ranks and transports."""

    hosts: tuple[tuple[str, int], ...]  # names and ranks, sorted
    within: str  # transport of pairs on one host
    between: str
    link: str | None = None  # what GRADWIRE_LINK emulates
    sharing: int = 1  # hosts on each machine: containers, or network namespaces

    @property
    def path(self) -> Path:
        """The model's file in the user's cache, named by a digest of all fields."""
        named = json.dumps(self._asdict(), sort_keys=True).encode()
        return directory() / f"{hashlib.sha256(named).hexdigest()[:16]}.json"

    def __str__(self) -> str:
        hosts = ", ".join(f"{ranks} on {name}" for name, ranks in self.hosts)
        links = self.within if len(self.hosts) == 1 else f"{self.within} and {self.between}"
        held = f" held to {self.link}" if self.link else ""
        return f"{hosts} over {links}{held}" + (f", {self.sharing} a machine" * (self.sharing > 1))


def directory() -> Path:
    """The folder of saved models; raises OSError for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError(f"HOME is not set, and user {os.getuid()} has none") from error
    return root / "gradwire" / "models"


def saved_for(hosts: HostSet) -> Path | None:
    """The file that is saved for these hosts; None without one.

    Where the cache cannot be read, it warns, once, and there is none.
    """
    try:
        hosts.path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_of_cache(f"the cache of cost models cannot be read ({error})")
        return None
    return hosts.path


@cache
def _warn_of_cache(why: str) -> None:
    """Says once what is wrong with the cache, and what that means."""
    _log.warning("%s: using built-in values; `gradwire tune` makes them anew", why)


def usable_cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def built_in(hosts: HostSet) -> _core.CostModel:
    """The model that is used without a measurement."""
    model = _core.CostModel(hosts.within, hosts.between, usable_cores())
    model.set("sharing", hosts.sharing)
    if hosts.link is not None and (link := emulated_link.spec()) is not None:
        beta, latency = _core.link_costs(link)
        set_parameters(model, {"within.beta": beta, "within.latency": latency})
    return model


def find(hosts: HostSet) -> tuple[_core.CostModel, str]:
    """Finds the model for these hosts; returns it and its source.

    Raises InvalidArgument if GRADWIRE_MODEL names a file that is no model. A broken file in the
    cache, or a cache that cannot be read, only causes a warning, and the built-in values are used.
    """
    given = environment.text(VARIABLE)
    if given == BUILT_IN:
        return built_in(hosts), "built-in values"
    if given is not None:
        return read(Path(given), hosts), given
    if (path := saved_for(hosts)) is not None:
        try:
            return read(path, hosts, exact=True), str(path)
        except InvalidArgument as error:
            _warn_of_cache(str(error))
    return built_in(hosts), "built-in values"


def read(path: Path, hosts: HostSet, *, exact: bool = False) -> _core.CostModel:
    """Reads a model from a file; with `exact` it must be for these hosts.

    Raises InvalidArgument, which names the file, if it cannot be read or is no model.
    """
    try:
        found = contents(path)
        if exact and found.get("hosts") != str(hosts):
            raise ValueError(f"it is of other hosts: {found.get('hosts')!r:.200}")
        model = built_in(hosts)
        set_parameters(model, found.get("parameters"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} holds no cost model: {error}") from error
    return model


def find_for_gpus(hosts: HostSet, links: str) -> _core.CostModel | None:
    """Finds the model of these hosts' GPUs, for a way of messages; None where none was measured.

    Raises InvalidArgument as `find` does.
    """
    given = environment.text(VARIABLE)
    path = None if given == BUILT_IN else saved_for(hosts) if given is None else Path(given)
    if path is None:
        return None
    try:
        found = contents(path).get("gpus", {})
        if isinstance(found, dict) and links in found:
            return for_gpus(found[links])
        if given is not None:
            _warn_of_no_gpus(path, links)
        return None
    except (OSError, ValueError, RecursionError) as error:
        if given is not None:
            raise InvalidArgument(f"{path} holds no cost model of GPUs: {error}") from error
        _log.warning("%s: no cost model of GPUs (%s); `gradwire tune --gpus` makes it", path, error)
        return None


@cache
def _warn_of_no_gpus(path: Path, links: str) -> None:
    """Says once that a file which the user names has nothing about GPUs."""
    _log.warning(
        '%s=%s says nothing of GPUs that exchange messages over %s: algorithm="auto" uses guesses '
        "from data sheets for them, not measured costs; `gradwire tune --gpus` measures them",
        VARIABLE,
        path,
        links,
    )


def for_gpus(parameters: object) -> _core.CostModel:
    """The built-in model of GPUs with these parameters; raises InvalidArgument for others."""
    model = _core.gpu_model()
    set_parameters(model, parameters)
    return model


def pack(model: _core.CostModel) -> bytes:
    """Encodes a model for the other ranks, without loss of a bit."""
    return json.dumps(model.parameters).encode()


def unpack(data: bytes) -> _core.CostModel:
    """Decodes rank 0's model; raises RendezvousError for anything else."""
    try:
        model = _core.CostModel("shm", "tcp", 1)
        set_parameters(model, _object(data))
    except (ValueError, RecursionError) as error:
        raise RendezvousError(
            f"rank 0 sent no cost model ({error}): another gradwire version?"
        ) from None
    return model


def contents(path: Path) -> dict[str, Any]:
    """The fields of a file of models; raises OSError, ValueError or RecursionError for others."""
    with open(path, "rb", opener=_open_at_once) as file:
        found = _object(file.read(_MOST_BYTES + 1))
    if found.get("gradwire_cost_model") != FORMAT:
        raise ValueError("it is not of this version's format")
    return found


def _object(data: bytes) -> dict[str, Any]:
    if len(data) > _MOST_BYTES:
        raise ValueError("it is too long")
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


def set_parameters(model: _core.CostModel, parameters: object) -> None:
    """Sets parameters of a model by their names; raises InvalidArgument for what are none."""
    if not isinstance(parameters, Mapping):
        raise InvalidArgument("cost model: there are no parameters")
    for name, value in parameters.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidArgument(f"cost model: {name!r:.80} is no number")
        try:
            model.set(str(name), float(value))
        except OverflowError as error:
            raise InvalidArgument(f"cost model: {name!r:.80} is too large") from error


def _open_at_once(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NONBLOCK)  # a FIFO would wait for its writer

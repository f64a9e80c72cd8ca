"""Networks of hosts, racks and further groups, and the text that describes them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gradwire._base import units
from gradwire._errors import InvalidArgument
from gradwire._model import CostModel

_HEAD = re.compile(r"(\d{1,9})\s+(?:(\w+)\s+)?(?:per|an?)\s+(\w+)", re.ASCII)
_OVERSUBSCRIPTION = re.compile(
    r"(?:oversubscription|oversubscribed)\s+(\d{1,9}(?:\.\d+)?)|(\d{1,9}(?:\.\d+)?):1", re.ASCII
)
_UPLINKS = re.compile(r"(\d{1,6})\s+uplinks?", re.ASCII)
_PACKET = 1514 / 1448  # bytes on the wire for one of a TCP payload, as GRADWIRE_LINK counts


@dataclass(frozen=True)
class Level:
    """One kind of group, such as a host: its ranks, and the link that joins it to the rest.

    `rate` is in bits per second in each direction, and `latency` in seconds one way; None takes
    the cost model's. The link may consist of `uplinks` equal ones, which share that rate; the
    messages between two hosts all take the same of them.
    """

    name: str
    ranks: int
    rate: float
    latency: float | None = None
    uplinks: int = 1


@dataclass(frozen=True)
class Topology:
    """Levels from the inside out, each several of the one before; `inside` is a host's own rate.

    Without `inside`, ranks of one host exchange by memory, as the cost model has it.
    """

    levels: tuple[Level, ...]
    inside: float | None = None

    @property
    def per_host(self) -> int:
        """The number of ranks of one host."""
        return self.levels[0].ranks

    @property
    def narrow(self) -> bool:
        """Whether anything beyond the hosts limits what they send: uplinks, or more latency."""
        pairs = zip(self.levels, self.levels[1:], strict=False)
        return self.collides or any(
            outer.rate < inner.rate * (outer.ranks // inner.ranks) or bool(outer.latency)
            for inner, outer in pairs
        )

    @property
    def collides(self) -> bool:
        """Whether groups have several uplinks, on one of which messages may meet."""
        return any(each.uplinks > 1 for each in self.levels)

    def model(self, base: CostModel | None = None) -> CostModel:
        """The cost model of its hosts: `base`, or the built-in one, with the links' rates."""
        parameters = dict((base or CostModel()).parameters)
        host = self.levels[0]
        parameters["between.beta"] = seconds_of_byte(host.rate)
        if host.latency is not None:
            parameters["between.latency"] = host.latency
        if self.inside is not None:
            parameters["within.beta"] = 8 / self.inside
        parameters["cores"] = max(parameters["cores"], self.per_host)
        parameters["sharing"] = 1
        for scope in ("within", "between"):  # of the links that were measured, not of these
            parameters[f"{scope}.burst"] = parameters[f"{scope}.mixed"] = 0.0
        return CostModel(parameters)

    def slowed(self, factor: float) -> Topology:
        """The same network with slower hosts' links."""
        host = self.levels[0]
        inside = None if self.inside is None else self.inside / factor
        slower = Level(host.name, host.ranks, host.rate / factor, host.latency)
        return Topology((slower, *self.levels[1:]), inside)

    def __str__(self) -> str:
        return "; ".join(
            f"{each.ranks} ranks a {each.name}, {units.show_rate(each.rate)}"
            + (f" in {each.uplinks} uplinks" if each.uplinks > 1 else "")
            for each in self.levels
        )


def seconds_of_byte(rate: float) -> float:
    """The seconds of a byte of payload on a link of so many bits per second, headers included."""
    return 8 / rate * _PACKET


def flat(link: str, per_host: int = 1, inside: str | None = None) -> Topology:
    """Hosts of `per_host` ranks, each joined to all others by a link such as "10gbit,50us"."""
    rate, latency = units.link(link)
    host = Level("host", per_host, rate, latency or None)
    return Topology((host,), None if inside is None else units.rate(inside))


def parse(text: str) -> Topology:
    """Reads "8 per host, 400gbit, 10us; 32 hosts a rack, oversubscription 4, 1us".

    Each level says how many members its group has and, after commas, the rate of the link that
    joins the group to the rest, and its latency. Levels after the first may say an
    oversubscription instead (or 4:1): the members' rates together over the group's; and "4 uplinks"
    that share the rate. The first may say "inside 900gbit", the rate of each rank within its host.
    Raises InvalidArgument.
    """
    levels: list[Level] = []
    inside = None
    for level in text.split(";"):
        head, *attributes = (each.strip() for each in level.split(","))
        if not levels and (first := [each for each in attributes if each.startswith("inside ")]):
            inside = units.rate(first[0].removeprefix("inside "))
            attributes = [each for each in attributes if each not in first]
        levels.append(_level(head, attributes, levels))
    return Topology(tuple(levels), inside)


def _level(head: str, attributes: list[str], inner: list[Level]) -> Level:
    found = _HEAD.fullmatch(head)
    if found is None or (members := int(found[1])) < 1:
        raise InvalidArgument(
            f"{head!r:.80} is no level of a topology: write '8 per host, 400gbit; "
            "32 hosts a rack, oversubscription 4'"
        )
    ranks = members * (inner[-1].ranks if inner else 1)
    rate = members * inner[-1].rate if inner else None
    latency, uplinks = None, 1
    for text in attributes:
        if matched := _OVERSUBSCRIPTION.fullmatch(text):
            rate = _oversubscribed(text, rate, float(matched[1] or matched[2]))
        elif matched := _UPLINKS.fullmatch(text):
            uplinks = _several(text, int(matched[1]), inner)
        elif text.lower().endswith("bit"):
            rate = units.rate(text)
        else:
            latency = units.duration(text)
    if rate is None:
        raise InvalidArgument(
            f"{head!r:.80} lacks the rate of a host's link: '{head:.40}, 100gbit'"
        )
    return Level(found[3], ranks, rate, latency, uplinks)


def _several(text: str, uplinks: int, inner: list[Level]) -> int:
    if not inner or uplinks < 1:
        raise InvalidArgument(f"{text!r:.80}: a group of hosts has 1 uplink or more")
    return uplinks


def _oversubscribed(text: str, rate: float | None, factor: float) -> float:
    if rate is None or not factor >= 1:
        raise InvalidArgument(
            f"{text!r:.80}: an oversubscription is at least 1, and of a group of hosts"
        )
    return rate / factor

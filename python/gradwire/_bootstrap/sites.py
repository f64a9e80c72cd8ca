"""Sites: groups of hosts that are far apart, between which each byte counts.

GRADWIRE_SITE names them. Where no rank has a name, hosts are in one site if a chain of hosts joins
them, of which each is near the next. Ranks tell each other what they have measured, so all agree.
Two ranks are near each other if both say so: who is reached by a relay may see only the way to it.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Sequence, Set
from typing import NamedTuple

from gradwire import _core
from gradwire._bootstrap.mesh import Mesh
from gradwire._host.streams import RATE, round_trip

_BITS = 32  # of a word that says which ranks are near
APART = 0.005  # seconds: hosts with a shorter round trip are near each other

_log = logging.getLogger("gradwire")


class View(NamedTuple):
    """What a rank knows of sites: the ranks near it, and its way to ranks elsewhere."""

    near: frozenset[int]
    microseconds: int  # its shortest round trip to another site; 0: none


def view_of(mesh: Mesh) -> View:
    """This rank's view, by its control sockets."""
    named = any(mesh.site_names)
    ways = {peer: round_trip(each.control) for peer, each in mesh.peers.items()}

    def near(peer: int) -> bool:
        if named:
            return mesh.site_names[peer] == mesh.site_names[mesh.rank]
        return mesh.peers[peer].same_host or ways[peer] < APART

    beyond = [seconds for peer, seconds in ways.items() if not near(peer)]
    return View(frozenset(filter(near, ways)), math.ceil(1e6 * min(beyond, default=0)))


def agree_on_sites(core: _core.Communicator, mesh: Mesh, view: View, timeout: float) -> None:
    """Tells the core and the mesh which ranks are at which site; every rank calls it.

    Takes one call of some bytes, where ranks are on several hosts or have names of sites. Raises
    what that does.
    """
    if len(set(mesh.hosts)) < 2 and len(set(mesh.site_names)) < 2:
        return
    views = _all_views(core, mesh, view, timeout)
    mesh.sites = grouped([each.near for each in views])
    if len(mesh.sites) < 2:
        return
    seconds = rounded(max(each.microseconds for each in views) / 1e6)
    core.set_sites(mesh.sites, seconds / 2, 1 / RATE)
    if mesh.rank == 0:
        ranks = "; ".join(", ".join(map(str, each)) for each in mesh.sites)
        _log.info("%d sites, of ranks %s: %g ms apart", len(mesh.sites), ranks, 1e3 * seconds)


def _all_views(core: _core.Communicator, mesh: Mesh, view: View, timeout: float) -> list[View]:
    words = -(-mesh.size // _BITS) + 1  # near ranks as bits, and the microseconds
    own, found = array("q", bytes(8 * words)), array("q", bytes(8 * words * mesh.size))
    own[-1] = view.microseconds
    for peer in view.near:
        own[peer // _BITS] |= 1 << peer % _BITS
    places = [(found.buffer_info()[0] + 8 * words * rank, words) for rank in range(mesh.size)]
    sent = [(own.buffer_info()[0], words)]
    request = _core.Request("all_gather", "int64", "sum", 0, sent, places, "direct")
    core.run(request, timeout)
    return [_unpacked(found[words * rank : words * (rank + 1)]) for rank in range(mesh.size)]


def _unpacked(words: array[int]) -> View:
    *masks, microseconds = words
    bits = (_BITS * word + bit for word, mask in enumerate(masks) for bit in _bits_of(mask))
    return View(frozenset(bits), microseconds)


def _bits_of(mask: int) -> list[int]:
    return [bit for bit in range(_BITS) if mask >> bit & 1]


def grouped(near: Sequence[Set[int]]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each site, where each rank says which others are near."""
    site = list(range(len(near)))
    for rank, others in enumerate(near):
        for other in others:
            if rank in near[other]:
                one, two = site[rank], site[other]
                site = [min(one, two) if each in (one, two) else each for each in site]
    ranks = range(len(site))
    return tuple(tuple(rank for rank in ranks if site[rank] == each) for each in sorted(set(site)))


def rounded(seconds: float) -> float:
    """A power of two of milliseconds: jobs that measure nearly the same choose alike."""
    return math.ldexp(1e-3, math.ceil(math.log2(max(1.0, 1e3 * seconds))))

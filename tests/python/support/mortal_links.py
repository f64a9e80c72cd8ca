"""Ranks of a simulation that agree on the next communicator, and die between any two messages."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gradwire._bootstrap.mesh import AddressInfo, Job, Membership, Mesh
from gradwire._bootstrap.survivor_links import SurvivorLinks
from gradwire._host.interfaces import LOOPBACK

LIVES = 1000  # messages of one that does not die


class Crash(Exception):
    """Raised where a rank or a joiner of the simulation ends."""


class MortalLinks(SurvivorLinks):
    """Links that end when their owner has sent so many messages."""

    def __init__(self, size: int, words: int) -> None:
        super().__init__((), size)
        self._words = words

    def send(self, peer: int, *message: Any) -> None:
        if peer in self.peers:
            self.use_up()
        super().send(peer, *message)

    def use_up(self) -> None:
        self._words -= 1
        if self._words < 0:
            self.close()
            raise Crash


@dataclass(unsafe_hash=True)
class Made:
    """Stands for a mesh, and for the communicator that is made of it."""

    number: int
    size: int
    job_ranks: tuple[int, ...] = field(default=(), compare=False)
    membership: Membership = field(default=Membership(), compare=False)
    model: object = field(default=None, compare=False)

    def close(self) -> None: ...


HERE = AddressInfo("here", "vm:1", (), "", "127.0.0.1", 0)


def address_of(rank: int, size: int) -> bytes:
    return replace(HERE, name=f"{rank} of {size}").pack()


def connect(
    _: Any, exchange: Callable[..., list[bytes]], *, rank: int, size: int, **others: Any
) -> Made:
    addresses = exchange(address_of(rank, size), None)
    assert addresses == [address_of(each, size) for each in range(size)]
    others["raise_if_peer_failed"](0)
    return Made(others["communicator"], size)


def mesh_of(rank: int, size: int) -> Mesh:
    """The mesh of the communicator before."""
    return Mesh(Job("test", b""), rank, size, 1, ("here",) * size, {}, LOOPBACK)


def made_by(links: MortalLinks) -> Callable[..., Any]:
    def make(made: Made, _: float) -> Made:
        links.use_up()
        return made

    return make


def connected(lives: Sequence[int]) -> list[MortalLinks]:
    """The links of ranks that may send so many messages each."""
    links = [MortalLinks(len(lives), words) for words in lives]
    for low, high in itertools.combinations(range(len(lives)), 2):
        one, other = socket.socketpair()
        links[low].add(high, one)
        links[high].add(low, other)
    return links

"""The sockets that two ranks have made, as a Peer of the mesh: by lanes and by ways."""

from __future__ import annotations

import socket

from gradwire._base.environment import MOST_STREAMS
from gradwire._bootstrap.acceptor import LANES, Sockets
from gradwire._bootstrap.handshake import Purpose
from gradwire._bootstrap.mesh import Link, Peer, WaySocket
from gradwire._host.keepalive import outlive_outages
from gradwire._host.ways import name_of_way


def peer_of(sockets: Sockets, peer: int, transport: str, *, same_host: bool) -> Peer:
    """The peer with all of its sockets."""
    links = {lane: Link(transport, sockets[peer, purpose, 0]) for lane, purpose in LANES.items()}
    links["collective"] = links["collective"]._replace(streams=_streams(sockets, peer, 0))
    made = Peer(same_host, sockets[peer, Purpose.CONTROL, 0], links)
    if ways := further_ways(sockets, peer):
        _add_ways(made, sockets, peer, ways)
    return made


def further_ways(sockets: Sockets, peer: int) -> list[int]:
    """The further ways to a peer, as the rank has announced them that connected."""
    keys = (key for key in sockets if key[:2] == (peer, Purpose.P2P))
    return sorted(number // MOST_STREAMS for *_, number in keys if number)


def _streams(sockets: Sockets, peer: int, way: int) -> tuple[socket.socket, ...]:
    mine = [key for key in sorted(sockets) if key[:2] == (peer, Purpose.STREAM)]
    return tuple(sockets[key] for key in mine if key[2] // MOST_STREAMS == way)


def _add_ways(made: Peer, sockets: Sockets, peer: int, ways: list[int]) -> None:
    """Adds the sockets of further ways, which are numbered anew from 1."""
    for lane, (name, purpose) in enumerate(LANES.items()):
        all_ways = []
        for way, number in enumerate((0, *ways)):
            first = number * MOST_STREAMS
            if way:
                streams = _streams(sockets, peer, number) if lane == 0 else ()
                data = sockets[peer, purpose, first], *streams
                all_ways += [WaySocket(sock, way, False) for sock in data]
            ack = sockets[peer, Purpose.ACKNOWLEDGE, first + lane]
            all_ways.append(WaySocket(ack, way, True))
        made.links[name] = made.links[name]._replace(by_ways=tuple(all_ways))
    control = [sockets[peer, Purpose.CONTROL, way * MOST_STREAMS] for way in (0, *ways)]
    made.controls = tuple(control[1:])
    made.ways = tuple(map(name_of_way, control))
    for sock in made.sockets():
        outlive_outages(sock)

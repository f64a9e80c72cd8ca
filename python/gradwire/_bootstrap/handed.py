"""Sockets that one process of a host hands over to another: see `shared_port`.

A listener has a number, and a Unix socket of that name; each connection to it carries the socket of
one client, and the hello that was read from that.
"""

from __future__ import annotations

import errno
import os
import socket

from gradwire._bootstrap.handshake import HELLO_BYTES, HandshakeError, listener_in, peer_uid

# Connections that a listener queues. When the queue is full, the kernel drops attempts to connect,
# and clients repeat them after 1, 2, 4, ... 32 seconds.
BACKLOG = 1024
_HANDED_SECONDS = 1.0  # in which the port's process sends the socket that it has announced


def open_listener(number: int) -> socket.socket:
    """Listens for what comes in at this host's shared ports with this number; raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(_name_of(number))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def take_handed(listener: socket.socket) -> tuple[socket.socket, bytes]:
    """A socket that the port's process hands over, and the hello that it has read from it.

    Raises OSError.
    """
    carrier, _ = listener.accept()
    with carrier:
        if peer_uid(carrier) != os.geteuid():
            raise HandshakeError(f"user {peer_uid(carrier)} hands sockets over")
        carrier.settimeout(_HANDED_SECONDS)
        flags = socket.MSG_CMSG_CLOEXEC
        hello, descriptors, message, _ = socket.recv_fds(carrier, HELLO_BYTES, 1, flags)
    if message & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if not descriptors:
        raise ConnectionError("the port's process handed nothing over")
    return socket.socket(fileno=descriptors[0]), hello


def hand_to_listener(sock: socket.socket, hello: bytes) -> bool:
    """Hands a client's socket over to the listener that its hello wants; False where none is."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as carrier:
        carrier.setblocking(False)  # a listener whose queue is full is busy: the client comes again
        try:
            carrier.connect(_name_of(listener_in(hello)))
        except ConnectionRefusedError:
            return False
        if peer_uid(carrier) != os.geteuid():
            return False
        socket.send_fds(carrier, [hello], [sock.fileno()])
    return True


def _name_of(number: int) -> str:
    return f"\0gradwire-listener-{number:016x}"

"""Channels between clients and shards: how one is asked for, admitted and made.

After the handshake, which proves that both know the job's secret, a client introduces itself: two
bytes of length and a JSON object with its number, its name and the transport that it has chosen.
"""

from __future__ import annotations

import json
import logging
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from gradwire import _core
from gradwire._base.deadline import Deadline
from gradwire._base.loops import survive
from gradwire._base.shortage import describe_shortage
from gradwire._base.threads import AuthenticatingThread
from gradwire._bootstrap.authenticator import Admitted, Authenticator, refusals
from gradwire._bootstrap.endpoints import listen, open_socket
from gradwire._bootstrap.handshake import (
    HANDSHAKE_TIMEOUT,
    HandshakeError,
    Hello,
    Purpose,
    SettingsError,
    client_handshake,
    receive,
)
from gradwire._bootstrap.mesh import AddressInfo, Job, choose_transport
from gradwire._errors import Error, InvalidArgument, RendezvousError, describe
from gradwire._host import transport_kinds
from gradwire._host.identity import host_identity, process_name
from gradwire._host.interfaces import Choice
from gradwire._host.sealed_socket import hand_over
from gradwire._host.transport_kinds import KINDS, networks_of
from gradwire.serve._directory import Directory
from gradwire.serve._histories import History

_LENGTH = struct.Struct("<H")
MAX_NAME = 200  # characters
_POLL_SECONDS = 0.2
_RETRY_SECONDS = 0.05

_log = logging.getLogger("gradwire")


class Introduction(NamedTuple):
    """A client's description of itself; `number` has its incarnation in the low 16 bits."""

    number: int
    name: str  # for messages: "replica 3 (host:pid)"
    transport: str

    def pack(self) -> bytes:
        """Encodes it, with its length."""
        text = json.dumps(self._asdict()).encode()
        return _LENGTH.pack(len(text)) + text


def receive_introduction(sock: socket.socket, offered: Sequence[str]) -> Introduction:
    """Receives a client's introduction; raises OSError or InvalidArgument for anything else."""
    deadline = Deadline(HANDSHAKE_TIMEOUT)
    (length,) = _LENGTH.unpack(receive(sock, _LENGTH.size, deadline))
    text = receive(sock, length, deadline)
    sock.settimeout(None)
    try:
        found = json.loads(text)
        number, name, transport = found["number"], found["name"], found["transport"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidArgument(f"its introduction is none: {describe(error)}") from None
    if type(number) is not int or not 0 <= number < 1 << 64:
        raise InvalidArgument(f"its number is {number!r}")
    if not isinstance(name, str) or len(name) > MAX_NAME or not name.isprintable():
        raise InvalidArgument("its name is too long, or not printable")
    if transport not in offered or (KINDS[transport].local and sock.family != socket.AF_UNIX):
        raise InvalidArgument(f"it chose the transport {transport!r}, which was not offered")
    return Introduction(number, name, transport)


class ClientListener:
    """Listens for clients of this process's shards, for as long as these serve."""

    def __init__(
        self,
        job: Job,
        service: int,
        transports: tuple[str, ...],
        interface: Choice,
        shards: Mapping[int, _core.ServeServer],
    ) -> None:
        """Takes `Directory.service_id`, and this process's shards by their numbers."""
        self._job, self._service, self._shards = job, service, shards
        listeners, self.address = listen(transports, interface)
        self._authenticator = Authenticator(listeners, job.name, job.secret, self._check)
        self._stopped = False
        self._thread = AuthenticatingThread(target=self._run, name="gradwire-listener", daemon=True)

    def open(self) -> None:
        """Begins to admit clients."""
        self._thread.start()

    def use_secret(self, secret: bytes) -> None:
        """Admits those that know this secret of the job from now on."""
        self._authenticator.use_secret(secret)

    def close(self) -> None:
        """Stops listening."""
        self._stopped = True
        if self._thread.ident is not None:
            self._thread.join()
        self._authenticator.close()

    def _check(self, hello: Hello, _: socket.socket) -> None:
        if hello.purpose != Purpose.SERVE or hello.communicator != self._service:
            raise HandshakeError("it wants something else than this service's shards")
        if hello.target not in self._shards:
            raise HandshakeError(f"shard {hello.target} is not served here")

    def _run(self) -> None:
        while not self._stopped:
            survive(self._turn, partial(refusals.note, "the shards' listener"))

    def _turn(self) -> None:
        for admitted in self._authenticator.poll(_POLL_SECONDS):
            try:
                # Of its own, since the client may be slow to introduce itself.
                AuthenticatingThread(target=self._welcome, args=(admitted,), daemon=True).start()
            except (RuntimeError, MemoryError) as error:  # it tries again, until its time is over
                admitted.sock.close()
                refusals.note("a client", f"there is no thread for it ({describe(error)})")

    def _welcome(self, admitted: Admitted) -> None:
        sock, shard = admitted.sock, admitted.hello.target
        try:
            with sock:
                client = receive_introduction(sock, self.address.transports)
                context = transport_kinds.context(client.transport)
                self._shards[shard].admit(
                    client.transport,
                    context,
                    *hand_over(sock),
                    client.name,
                    client.number,
                    HANDSHAKE_TIMEOUT,
                )
        except (Error, OSError, ValueError) as error:
            _log.warning("shard %d: a client was not admitted: %s", shard, describe(error))


def connect(
    directory: Directory,
    job: Job,
    shard: int,
    client: Callable[[str], Introduction],
    transports: tuple[str, ...],
    deadline: Deadline,
) -> tuple[_core.ServeChannel, History]:
    """A channel to a shard, and the shard's history; raises RendezvousError that names it.

    `client` takes a transport.

    Tries again until the deadline: a shard that is started anew has another address.
    """
    pause = threading.Event()
    interface = directory.interface()
    while True:
        found = directory.find(shard, deadline).address
        where = f"shard {shard} ({found.name})"
        transport = _choose(found, transports, interface, where)
        try:
            plain = open_socket(found, transport, interface.interface, deadline)
            to = {"target": shard, "listener": found.listener}
            hello = Hello(job.name, Purpose.SERVE, directory.service_id, **to)
            with plain, client_handshake(plain, hello, job.secret, deadline) as sock:
                sock.sendall(client(transport).pack())
                context = transport_kinds.context(transport)
                channel = _core.ServeChannel(
                    transport, context, *hand_over(sock), where, deadline.left
                )
                # Read now: before, there may have been another server.
                return channel, directory.find(shard, deadline).history
        except SettingsError as error:
            raise RendezvousError(f"cannot connect to {where}: {error}") from error
        except (OSError, Error) as error:
            if isinstance(error, OSError) and (shortage := describe_shortage(error)):
                raise RendezvousError(f"cannot connect to {where}: {shortage}") from error
            if deadline.passed:
                raise RendezvousError(
                    f"could not reach {where} at {found.where(transport)} within "
                    f"{deadline.seconds:g} s ({describe(error)}): has its server ended?"
                ) from error
        pause.wait(min(_RETRY_SECONDS, deadline.remaining))


def _choose(server: AddressInfo, transports: tuple[str, ...], interface: Choice, where: str) -> str:
    own = AddressInfo(
        host_identity(),
        process_name(),
        transports,
        "",
        interface.interface.address,
        0,
        interface.interface.name,
        networks_of(transports),
    )
    transport = choose_transport(server, own)
    if transport is None:
        raise RendezvousError(
            f"{where} offers {','.join(server.transports)}, this process "
            f"{','.join(transports)}: none of them joins the two; see GRADWIRE_TRANSPORT"
        )
    return transport

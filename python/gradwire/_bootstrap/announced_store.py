"""A store that rank 0 opens for one meeting, where torch only carries the news of it.

Neither torch's store nor a process group tells whose connection ended; a store of ours does. What
travels is where rank 0 listens and, where the job has no secret, one for it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from functools import partial

from gradwire._base.deadline import Deadline
from gradwire._bootstrap.store import Address, StoreClient, parse_address
from gradwire._bootstrap.store_server import StoreServer
from gradwire._errors import RendezvousError, lost

_HEARING = 2.0  # seconds that the others get to hear why the host of the store gives up
_NOWHERE = "-"


@contextlib.contextmanager
def announced_store(
    job: str,
    secret: bytes | None,
    at: Address | None,
    carry: Callable[[bytes], bytes],
    deadline: Deadline,
) -> Iterator[StoreClient]:
    """A client of the store that rank 0, the only one that gives `at`, serves during the block.

    `carry` takes what rank 0 says, and nothing on the others, and returns it on all ranks. Raises
    RendezvousError, and TransportError where rank 0 is lost.
    """
    with contextlib.ExitStack() as stack:
        notice = b""
        if at is not None:
            made = secret or secrets.token_bytes(32)
            server = stack.enter_context(heard(StoreServer(at, job, made)))
            notice = f"{server.address} {'' if secret else made.hex()}".encode()
        address, made = unpack_notice(carry(notice), secret)
        client = StoreClient(address, job, made, deadline, partial(lost, 0), listens=True)
        stack.callback(client.close)
        yield client


def pack_failure(reason: str) -> bytes:
    """What rank 0 says instead to those who come when it has given up."""
    return f"{_NOWHERE} rank 0 gave up: {reason}".encode()


def unpack_notice(data: bytes, secret: bytes | None) -> tuple[Address, bytes]:
    """Where rank 0's store is, and the secret that opens it; raises RendezvousError."""
    where, _, rest = data.decode(errors="replace").partition(" ")
    if where == _NOWHERE:
        raise RendezvousError(rest)
    try:
        address, made = parse_address(where), bytes.fromhex(rest)
    except ValueError:
        raise RendezvousError("rank 0 announced no store: another gradwire version?") from None
    if not (secret or made):
        raise RendezvousError(
            "rank 0 has a GRADWIRE_SECRET and this rank has none: set the same one on all ranks, "
            "or none"
        )
    return address, secret or made


@contextlib.contextmanager
def heard(server: StoreServer) -> Iterator[StoreServer]:
    """Serves during the block; where the block fails, until the others have heard why.

    Ctrl-C does not wait: who is not listening right now finds rank 0 gone.
    """
    with server:
        try:
            yield server
        except KeyboardInterrupt:
            raise
        except BaseException:
            server.await_departures(_HEARING)
            raise

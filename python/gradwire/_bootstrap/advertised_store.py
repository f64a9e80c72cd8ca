"""A store that rank 0 opens for one rendezvous and advertises through torch.

Neither torch's store nor a process group tells whose connection ended; a store of ours does. So
torch only carries its endpoint: where rank 0 listens and, when the job has no secret, a new one.
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

_REPORT_SECONDS = 2.0  # that the others have to read why the host of the store gives up
_NOWHERE = "-"


@contextlib.contextmanager
def advertised_store(
    job: str,
    secret: bytes | None,
    at: Address | None,
    broadcast: Callable[[bytes], bytes],
    deadline: Deadline,
) -> Iterator[StoreClient]:
    """A client of the store that rank 0, the only rank to give `at`, serves during the block.

    `broadcast` takes rank 0's endpoint, and b"" on the other ranks, and returns rank 0's on all.
    Raises RendezvousError, and TransportError when rank 0 is lost.
    """
    with contextlib.ExitStack() as stack:
        endpoint = b""
        if at is not None:
            made = secret or secrets.token_bytes(32)
            server = stack.enter_context(serve_until_reported(StoreServer(at, job, made)))
            endpoint = f"{server.address} {'' if secret else made.hex()}".encode()
        address, made = unpack_endpoint(broadcast(endpoint), secret)
        client = StoreClient(address, job, made, deadline, partial(lost, 0), listens=True)
        stack.callback(client.close)
        yield client


def pack_failure(reason: str) -> bytes:
    """Encodes what rank 0 advertises instead of an endpoint when it has given up."""
    return f"{_NOWHERE} rank 0 gave up: {reason}".encode()


def unpack_endpoint(data: bytes, secret: bytes | None) -> tuple[Address, bytes]:
    """Decodes the address of rank 0's store and its secret; raises RendezvousError."""
    where, _, rest = data.decode(errors="replace").partition(" ")
    if where == _NOWHERE:
        raise RendezvousError(rest)
    try:
        address, made = parse_address(where), bytes.fromhex(rest)
    except ValueError:
        raise RendezvousError("rank 0 advertised no store: another gradwire version?") from None
    if not (secret or made):
        raise RendezvousError(
            "rank 0 has a GRADWIRE_SECRET and this rank has none: set the same one on all ranks, "
            "or none"
        )
    return address, secret or made


@contextlib.contextmanager
def serve_until_reported(server: StoreServer) -> Iterator[StoreServer]:
    """Serves during the block; when it fails, go on until the other ranks have read the reason.

    Ctrl-C does not wait: a rank that does not read at this moment finds rank 0 gone.
    """
    with server:
        try:
            yield server
        except KeyboardInterrupt:
            raise
        except BaseException:
            server.await_departures(_REPORT_SECONDS)
            raise

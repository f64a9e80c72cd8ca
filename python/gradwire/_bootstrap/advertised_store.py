"""A store that rank 0 opens for one rendezvous and advertises through torch.

Neither torch's store nor a process group tells whose connection ended; a store of ours does. So
torch only carries its endpoint: where rank 0 listens and, when the job has no secret, a new one in
an answer to each rank's question (`open_exchange`). Who only reads learns nothing of it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from gradwire._base.deadline import Deadline
from gradwire._bootstrap.open_exchange import ANSWER_OVERHEAD, Question, answer_to
from gradwire._bootstrap.store import Address, StoreClient, parse_address
from gradwire._bootstrap.store_server import StoreServer
from gradwire._errors import RendezvousError, lost

SECRET_BYTES = 32  # of one that rank 0 makes
ANSWER_BYTES = ANSWER_OVERHEAD + SECRET_BYTES

_REPORT_SECONDS = 2.0  # that the others have to read why the host of the store gives up
_NOWHERE = "-"


class Endpoint(NamedTuple):
    """Rank 0's store, and the job's secret; `made`: the ranks do not have that one yet."""

    job: str
    address: Address
    secret: bytes
    made: bool

    def answer_to(self, question: bytes) -> bytes:
        """The secret for who asked, if it was made; raises ValueError for no question."""
        if not self.made:
            return b""
        return answer_to(question, self.secret)

    def pack_for(self, question: bytes) -> bytes:
        """Encodes the address and the answer to a rank's question."""
        return f"{self.address} {self.answer_to(question).hex()}".encode()


@contextlib.contextmanager
def advertised_store(
    job: str,
    secret: bytes | None,
    at: Address | None,
    advertise: Callable[[Endpoint], None],
    find: Callable[[], Endpoint],
    deadline: Deadline,
) -> Iterator[tuple[StoreClient, bytes]]:
    """A client of the store that rank 0, the only rank to give `at`, serves; and the job's secret.

    Rank 0 calls `advertise`, the other ranks `find`. Raises RendezvousError, and TransportError
    when rank 0 is lost.
    """
    with contextlib.ExitStack() as stack:
        if at is not None:
            known = secret or secrets.token_bytes(SECRET_BYTES)
            server = stack.enter_context(serve_until_reported(StoreServer(at, job, known)))
            endpoint = Endpoint(job, server.address, known, made=not secret)
            advertise(endpoint)
        else:
            endpoint = find()
        client = StoreClient(
            endpoint.address, job, endpoint.secret, deadline, partial(lost, 0), listens=True
        )
        stack.callback(client.close)
        yield client, endpoint.secret


def pack_failure(reason: str) -> bytes:
    """Encodes what rank 0 advertises instead of an endpoint when it has given up."""
    return f"{_NOWHERE} rank 0 gave up: {reason}".encode()


def unpack_address(data: bytes) -> Address:
    """Decodes the address of rank 0's store; raises RendezvousError, with rank 0's reason."""
    where, _, rest = data.decode(errors="replace").partition(" ")
    if where == _NOWHERE:
        raise RendezvousError(rest)
    try:
        return parse_address(where)
    except ValueError:
        raise RendezvousError("rank 0 advertised no store: another gradwire version?") from None


def unpack_endpoint(
    data: bytes, job: str, secret: bytes | None, question: Question | None
) -> Endpoint:
    """Decodes rank 0's endpoint, with its secret where this rank has none; raises RendezvousError.

    The secret is in the answer to this rank's `question`.
    """
    address = unpack_address(data)
    try:
        answer = bytes.fromhex(data.decode().partition(" ")[2])
    except ValueError:
        raise RendezvousError("rank 0 advertised no store: another gradwire version?") from None
    return endpoint_at(address, answer, job, secret, question)


def endpoint_at(
    address: Address, answer: bytes, job: str, secret: bytes | None, question: Question | None
) -> Endpoint:
    """The endpoint at an address, with its secret: the given one, or that of the answer."""
    if secret is not None:
        return Endpoint(job, address, secret, made=False)
    assert question is not None
    if not answer:
        raise RendezvousError(
            "rank 0 has a GRADWIRE_SECRET and this rank has none: set the same one on all ranks, "
            "or none"
        )
    try:
        return Endpoint(job, address, question.read(answer), made=True)
    except ValueError:
        raise RendezvousError(
            "rank 0 sent a secret to another question than this rank's: somebody else writes into "
            "torch's store, or another job does; set GRADWIRE_SECRET on all ranks"
        ) from None


def require_here(address: Address) -> None:
    """Raises RendezvousError for a store beyond a Unix socket, where all ranks are on this host."""
    if not address.local:
        raise RendezvousError(
            f"all ranks are on this host, and the store that rank 0 advertised is at {address}: "
            "somebody else writes into torch's store; set GRADWIRE_SECRET on all ranks"
        )


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

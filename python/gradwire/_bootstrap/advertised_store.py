"""A store that rank 0 opens for one rendezvous and advertises through torch.

Neither torch's store nor a process group tells whose connection ended; a store of ours does. So
torch only carries its endpoint: where rank 0 listens. Where the user gave no secret, a store on a
Unix socket needs none, since only this user's processes reach it, and they agree on one there. For
another store rank 0 makes one, and answers each rank's question for it (`open_exchange`), so that
who only reads what torch carries learns nothing.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from gradwire._base.deadline import Deadline
from gradwire._base.texts import encodable
from gradwire._bootstrap.mesh import NOWHERE
from gradwire._bootstrap.shared_port import advertised_host, advertised_port, chosen_port
from gradwire._bootstrap.store import Address, StoreClient, parse_address
from gradwire._bootstrap.store_server import StoreServer
from gradwire._bootstrap.through_torch.open_exchange import ANSWER_OVERHEAD, Question, answer_to
from gradwire._errors import RendezvousError, lost

SECRET_BYTES = 32  # of one that rank 0 makes
ANSWER_BYTES = ANSWER_OVERHEAD + SECRET_BYTES

_REPORT_SECONDS = 2.0  # that the others have to read why the host of the store gives up
_MOST_REASON = 2000  # characters of one
_NOWHERE = "-"
_GIVEN, _NOT_GIVEN = "secret", "-"


@dataclass(frozen=True)
class Endpoint:
    """Rank 0's store, as a rank knows it."""

    address: Address
    given: bool  # whether the user gave rank 0 a secret
    secret: bytes = field(default=b"", repr=False)  # that its clients must know, once that is known

    @property
    def where(self) -> str:
        """The address, and whether ranks need a secret that the user gave."""
        return f"{self.address} {_GIVEN if self.given else _NOT_GIVEN}"

    def answer_to(self, question: bytes) -> bytes:
        """The secret for who asked, where it is to be asked for; raises ValueError for none."""
        if self.given or self.address.local:
            return b""
        return answer_to(question, self.secret)

    def pack_for(self, question: bytes) -> bytes:
        """Encodes all that a rank needs which has asked."""
        return f"{self.where} {self.answer_to(question).hex()}".encode()


@contextlib.contextmanager
def advertised_store(
    job: str,
    secret: bytes | None,
    at: Address | None,
    advertise: Callable[[Endpoint], None],
    find: Callable[[], Endpoint],
    deadline: Deadline,
    *,
    rank: int,
) -> Iterator[tuple[StoreClient, bytes | None]]:
    """A client of the store that rank 0, the only rank to give `at`, serves; and the job's secret.

    The secret is None where ranks are to agree on it in the store. Rank 0 calls `advertise`, the
    other ranks `find`. Raises RendezvousError, and TransportError when rank 0 is lost.
    """
    with contextlib.ExitStack() as stack:
        if at is not None:
            known = secret or (b"" if at.local else secrets.token_bytes(SECRET_BYTES))
            server = stack.enter_context(
                serve_until_reported(StoreServer(at, job, known, one_rendezvous=True))
            )
            endpoint = Endpoint(server.address, secret is not None, known)
            advertise(replace(endpoint, address=_advertised(server.address)))
        else:
            endpoint = find()
        where = (endpoint.address, job, endpoint.secret)
        client = StoreClient(*where, deadline, partial(lost, 0), listens=True, rank=rank)
        stack.callback(client.close)
        yield client, endpoint.secret or None


def _advertised(address: Address) -> Address:
    """The address at which other hosts reach rank 0's store."""
    host = advertised_host()
    if address.local or host in ("", NOWHERE) or address.port != chosen_port():
        return address
    return Address(address.scheme, host, advertised_port())


def pack_failure(reason: str) -> bytes:
    """Encodes what rank 0 advertises instead of an endpoint when it has given up."""
    return encodable(f"{_NOWHERE} rank 0 gave up: {reason}").encode()


def unpack_place(data: bytes) -> Endpoint:
    """Decodes `Endpoint.where`, which has no secret yet.

    Raises RendezvousError, with rank 0's reason if it gave up.
    """
    where, _, rest = data.decode(errors="replace").partition(" ")
    if where == _NOWHERE:  # whoever writes into torch's store may have written the reason
        raise RendezvousError(rest[:_MOST_REASON].encode("unicode_escape").decode())
    try:
        if rest not in (_GIVEN, _NOT_GIVEN):
            raise ValueError
        return Endpoint(parse_address(where), rest == _GIVEN)
    except ValueError:
        raise RendezvousError("rank 0 advertised no store: another gradwire version?") from None


def unpack_endpoint(data: bytes, secret: bytes | None, question: Question | None) -> Endpoint:
    """Decodes what `Endpoint.pack_for` made for this rank's question; raises RendezvousError."""
    where, _, answer = data.rpartition(b" ")
    place = unpack_place(data if data.startswith(_NOWHERE.encode()) else where)
    try:
        return endpoint_at(place, bytes.fromhex(answer.decode()), secret, question)
    except ValueError:
        raise RendezvousError("rank 0 advertised no store: another gradwire version?") from None


def endpoint_at(
    place: Endpoint, answer: bytes, secret: bytes | None, question: Question | None
) -> Endpoint:
    """The endpoint with its secret: this rank's given one, or else that of rank 0's answer."""
    if secret is not None:
        return replace(place, given=True, secret=secret)
    if place.given:
        raise RendezvousError(
            "rank 0 has a GRADWIRE_SECRET and this rank has none: set the same one on all ranks, "
            "or none"
        )
    if place.address.local:
        return place
    assert question is not None
    try:
        made = question.read(answer)
    except ValueError:
        raise RendezvousError(
            "rank 0 sent a secret to another question than this rank's: somebody else writes into "
            "torch's store, or another job does; set GRADWIRE_SECRET on all ranks"
        ) from None
    return replace(place, secret=made)


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

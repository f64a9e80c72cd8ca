"""SealedSocket: a socket whose bytes are encrypted, and whose other end's are checked."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from gradwire import _core
from gradwire._base.deadline import Deadline
from gradwire._errors import TransportError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_RECORD = 1 << 14  # bytes that a record has at most
_PARTIAL = _RECORD + 64  # bytes of an incomplete record at most
_MUCH = 1 << 16


def _none(name: str) -> Callable[..., NoReturn]:
    """The method of this name, which a SealedSocket has not: its bytes would be plain ones."""

    def method(*_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"a sealed socket has no {name}(): it has recv(), send() and sendall()")

    return method


class SealedSocket(socket.socket):
    """A connected socket that seals what it sends; takes over the descriptor of `sock`.

    Whoever sends without blocking must keep what send() did not take, and send it next, as with any
    socket. Whoever waits for the descriptor must recv() at least 64 KiB at a time, or until a whole
    answer is there: less would leave bytes here that no poll shows. Bytes that were changed on the
    way raise ConnectionError.
    """

    def __init__(self, sock: socket.socket, seal: _core.Seal) -> None:
        sock.settimeout(None)
        super().__init__(fileno=sock.detach())
        self.seal = seal
        self._opened = b""
        self._unsent = b""  # of the last record
        self._owed = 0  # plain bytes of that record, which send() has not counted yet

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """Receives up to `bufsize` bytes; those of a MSG_PEEK are the sealed ones."""
        if flags & socket.MSG_PEEK:
            return super().recv(bufsize, flags)
        if not self._opened:
            self._fill(bufsize, flags)
        part, self._opened = self._opened[:bufsize], self._opened[bufsize:]
        return part

    def _fill(self, bufsize: int, flags: int) -> None:
        """Receives until a record is whole, or to the end; one timeout is for all pieces."""
        timeout = self.gettimeout()
        limit = Deadline(timeout or 0.0)
        try:
            while self._receive(bufsize, flags) and not self._opened:
                if timeout is None:
                    continue
                if limit.passed:
                    raise TimeoutError("timed out") if timeout else BlockingIOError
                self.settimeout(limit.left)
        finally:
            if self.gettimeout() != timeout:
                self.settimeout(timeout)

    def _receive(self, bufsize: int, flags: int) -> bool:
        """Receives a piece, and opens the records that are whole; returns False at the end."""
        # No more than asked for: what follows may be for another reader.
        most = bufsize - _PARTIAL if bufsize >= _MUCH else self.seal.missing
        sealed = super().recv(most, flags)
        if not sealed:
            return False
        try:
            self._opened = self.seal.opened(sealed)
        except TransportError as error:
            raise ConnectionAbortedError(str(error)) from None
        return True

    def sendall(self, data: Buffer, flags: int = 0, /) -> None:
        """Sends all of it."""
        super().sendall(self.seal.records(bytes(data)), flags)

    def send(self, data: Buffer, flags: int = 0, /) -> int:
        """Sends what fits, in whole records; returns how many bytes that were."""
        plain, sent = bytes(data), 0
        while sent < len(plain) and self._push_out(plain[sent : sent + _RECORD], flags):
            sent += self._owed
            self._owed = 0
        if plain and not sent:
            raise BlockingIOError
        return sent

    def _push_out(self, record: bytes, flags: int) -> bool:
        """Sends the rest of a record that was begun, else this one; returns whether all is out."""
        if not self._owed:
            self._unsent, self._owed = self.seal.records(record), len(record)
        try:
            while self._unsent:
                self._unsent = self._unsent[super().send(self._unsent, flags) :]
        except BlockingIOError:
            return False
        return True


for _name in (
    *("recv_into", "recvfrom", "recvfrom_into", "recvmsg", "recvmsg_into"),
    *("sendfile", "sendmsg", "sendmsg_afalg", "sendto", "dup", "makefile"),
):
    setattr(SealedSocket, _name, _none(_name))


def hand_over(sock: socket.socket) -> tuple[int, _core.Seal | None]:
    """Detaches the descriptor for the core; returns it, and what seals its bytes."""
    seal = sock.seal if isinstance(sock, SealedSocket) else None
    return sock.detach(), seal


def take_over(descriptor: int, seal: _core.Seal | None) -> socket.socket:
    """The socket that the core has had."""
    sock = socket.socket(fileno=descriptor)
    return sock if seal is None else SealedSocket(sock, seal)

"""Where metrics are shown: at a port, or in a file that is written every few seconds."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import socketserver
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

SECONDS = 5.0  # between two writings of a file
_CLIENT_SECONDS = 5.0  # a client that is slower is left
_PAUSE = 1.0  # seconds, after a client that could not be accepted
_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_log = logging.getLogger("gradwire")

Text = Callable[[], str]


class Port(socketserver.TCPServer):
    """Answers `GET /metrics` on a thread of its own."""

    allow_reuse_address = True

    def __init__(self, host: str, port: int, text: Text) -> None:
        """Listens; port 0 is any that is free. Raises OSError."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.text = text
        super().__init__((host, port), _Handler)
        self._over = threading.Event()
        self._client: socket.socket | None = None  # the one that is answered
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{f'[{host!s}]' if ':' in str(host) else host!s}:{port}/metrics"

    def _run(self) -> None:
        while not self._over.is_set():
            self.handle_request()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accepts a client; one that cannot be accepted, for lack of descriptors, stays waiting."""
        try:
            return super().get_request()
        except OSError:
            self._over.wait(_PAUSE)
            raise

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answers a client, which has so many seconds for all of its request."""
        self._client = request
        if self._over.is_set():
            return
        limit = threading.Timer(_CLIENT_SECONDS, _shut, (request,))
        limit.daemon = True
        limit.start()
        try:
            super().finish_request(request, client_address)
        finally:
            limit.cancel()

    def end(self, _keep: bool, /) -> None:
        """Listens no more, and leaves the client that is answered."""
        self._over.set()
        _shut(self.socket)  # wakes the thread
        if (client := self._client) is not None:
            _shut(client)
        self._thread.join(_CLIENT_SECONDS)
        self.server_close()

    def forget(self) -> None:
        """Lets go of the port in a forked child, where no thread answers."""
        self.socket.close()

    def handle_error(self, _request: Any, client_address: Any) -> None:
        """Leaves a client that has gone away or is too slow."""
        _log.debug("metrics: the client at %s is left", client_address, exc_info=True)


def _shut(its: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed
        its.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: Port

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/", "/metrics"):
            self.send_error(404, "only /metrics is here")
            return
        body = self.server.text().encode()
        self.send_response(200)
        self.send_header("Content-Type", _TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing of each request."""


class File:
    """A file that is replaced as a whole, as node_exporter's textfile collector wants it."""

    def __init__(self, folder: Path, name: str, text: Text) -> None:
        """Makes the folder if it is not there, and writes. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._text = folder / re.sub(r"[^\w.-]", "_", name), text
        self._over = threading.Event()
        self.write()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        return str(self._path)

    def write(self) -> None:
        """Replaces the file."""
        fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        text = self._text()
        fresh.unlink(missing_ok=True)
        with fresh.open("x", encoding="utf-8") as file:  # follows no link
            file.write(text)
        os.replace(fresh, self._path)

    def _run(self) -> None:
        while not self._over.wait(SECONDS):
            try:
                self.write()
            except Exception as error:
                _log.warning("GRADWIRE_METRICS: %s is not written any more: %s", self, error)
                return

    def end(self, keep: bool, /) -> None:
        """Writes for the last time, or removes the file."""
        self._over.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            if keep:
                self.write()
            else:
                self._path.unlink()

    def forget(self) -> None:
        """Leaves the file to the parent, in a forked child."""

"""torch's TCPStore as a store to meet at: torchrun's MASTER_PORT belongs to it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from gradwire._deadline import Deadline
from gradwire._errors import RendezvousError

_TICK = timedelta(milliseconds=10)  # torch takes 0 for "no timeout"


class TorchStore:
    """A client of the store at host:port; rank 0 hosts it where torchrun's agent does not.

    The store is shared with torch itself (`multi_tenant`), so `init_process_group` works beside it.
    """

    def __init__(self, host: str, port: int, rank: int, size: int, deadline: Deadline) -> None:
        try:
            from torch.distributed import TCPStore
        except ImportError as error:
            raise RendezvousError(
                "RANK and WORLD_SIZE are set as by torchrun, whose store needs torch, which is not "
                "installed: install it, or set GRADWIRE_STORE=tcp://HOST:PORT with rank 0's host"
            ) from error
        agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._where = f"{host}:{port}"
        try:
            self._store: Any = TCPStore(
                host,
                port,
                size,
                is_master=rank == 0 and not agent_hosts,
                timeout=max(timedelta(seconds=deadline.remaining), _TICK),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except RuntimeError as error:
            raise RendezvousError(
                f"could not reach torch's store at {self._where} "
                f"within {deadline.seconds:g} s: {error}"
            ) from error

    def set(self, key: str, value: bytes) -> None:
        """Stores the value; a later one replaces it."""
        self._call(self._store.set, key, value)

    def get(self, key: str, timeout: float) -> bytes:
        """The value, once it is there; raises TimeoutError after `timeout` seconds."""
        self.wait([key], timeout)
        return bytes(self._call(self._store.get, key))

    def add(self, key: str, amount: int = 1) -> int:
        """Adds to a counter that starts at 0; returns the sum."""
        return int(self._call(self._store.add, key, amount))

    def wait(self, keys: Iterable[str], timeout: float) -> None:
        """Returns when all keys are there; raises TimeoutError after `timeout` seconds."""
        names = list(keys)
        limit = max(timedelta(seconds=timeout), _TICK)
        if not self._present(names, limit):
            raise TimeoutError(f"nobody set {', '.join(names)} within {timeout:g} s")

    def bequeath(self, key: str, value: bytes) -> None:
        """Does nothing: torch's store does not tell whose connection ended."""

    def _present(self, names: list[str], limit: timedelta) -> bool:
        try:
            self._store.wait(names, limit)
        except RuntimeError:  # the type for "too late" and for "connection lost" differs by version
            return bool(self._call(self._store.check, names))
        return True

    def _call(self, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except RuntimeError as error:
            raise RendezvousError(f"lost torch's store at {self._where}: {error}") from error

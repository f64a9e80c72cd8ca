"""Asks: how ranks find rank 0 in a store that outlives them, where torchrun's agents restart them.

An agent keeps torch's store from one start of the ranks to the next, and each agent counts restarts
on its own: when ranks of one host fail, or a host comes or goes, the counts differ. So nothing
tells whether an entry was left by ranks that have ended. Therefore each rank asks under a name that
nobody has used before, and rank 0 answers under that name:

    PREFIX/ask/RANK           a new name, the address at which the rank reaches the store, and its
                              question for the secret, if it has none
    PREFIX/answer/RANK/NAME   rank 0's endpoint, or why it gives up (`advertised_store`)

So each rank also gets what only it can read. What ended ranks have asked is answered too, and read
by nobody.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable

from gradwire._bootstrap.through_torch.torch_store import TorchStore
from gradwire._errors import RendezvousError

_PAUSE_SECONDS = 0.02  # between two looks for asks
_END_SECONDS = 2.0  # for a look that is under way at the end
_SHARE = 4  # the least pause, in units of the time that a look takes


def ask(store: TorchStore, prefix: str, rank: int, route: str, question: bytes = b"") -> str:
    """Asks for rank 0's endpoint; returns the key of the answer."""
    name = secrets.token_hex(8)
    store.set(_ask_key(prefix, rank), f"{name} {route} {question.hex()}".encode())
    return f"{prefix}/answer/{rank}/{name}"


def route_in(asked: bytes) -> str:
    """The address at which the rank that asked reaches the store."""
    return _fields(asked)[1]


def _fields(asked: bytes) -> tuple[str, str, str]:
    """The name, the address and the question of an ask; empty where they are missing."""
    name, route, question = (asked.decode(errors="replace").split(" ") + [""] * 3)[:3]
    return name, route, question


def _ask_key(prefix: str, rank: int) -> str:
    return f"{prefix}/ask/{rank}"


class Answers:
    """Rank 0's answers to the other ranks, by a thread that has the `store` to itself."""

    def __init__(
        self, store: TorchStore, prefix: str, size: int, answer: Callable[[bytes], bytes]
    ) -> None:
        """Begins to answer; `answer` takes a question, and raises ValueError for none."""
        self._store, self._prefix, self._peers = store, prefix, range(1, size)
        self._answer = answer
        self._answered: dict[int, bytes] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gradwire-answers", daemon=True)
        self._thread.start()

    def end(self, answer: bytes | None = None) -> None:
        """Ends; with an `answer`, gives that one to all that have asked."""
        self._stop.set()
        self._thread.join(_END_SECONDS)
        if answer is not None and not self._thread.is_alive():
            self._answer = lambda _: answer
            self._answered.clear()
            with contextlib.suppress(RendezvousError):
                self._look()

    def _run(self) -> None:
        pause = 0.0
        while not self._stop.wait(pause):
            began = time.monotonic()
            try:
                self._look()
            except RendezvousError:  # torch's store is gone, and the others cannot ask any more
                return
            pause = max(_PAUSE_SECONDS, _SHARE * (time.monotonic() - began))

    def _look(self) -> None:
        for peer in self._peers:
            asked = self._store.find(_ask_key(self._prefix, peer))
            if asked is not None and self._answered.get(peer) != asked:
                name, _, question = _fields(asked)
                self._answered[peer] = asked
                with contextlib.suppress(ValueError):  # no rank of ours asked so
                    answer = self._answer(bytes.fromhex(question))
                    self._store.set(f"{self._prefix}/answer/{peer}/{name}", answer)

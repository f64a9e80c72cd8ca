"""The faults that come from outside of a rank: signals, and what happens on a link."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from typing import Protocol

from tests.faults.cases import Case
from tests.faults.taps import (
    ArenaTap,
    BitTap,
    MessageTap,
    flip_header,
    flip_payload,
    foreign_bytes,
    foreign_frame,
    truncate,
)
from tests.faults.wires import Wire

_TRIES = 50  # for a frame that waits in shared memory
_RETRY_SECONDS = 0.002

_ALTER = {"header": flip_header, "payload": flip_payload, "truncate": truncate}
_ON_A_LINK = (*_ALTER, "delay", "silence", "cut", "garble")


class Stage(Protocol):
    """Everything that a fault can reach."""

    @property
    def case(self) -> Case:
        """The case that runs."""

    @property
    def wire(self) -> Wire:
        """The one that the fault asked for."""

    def signal(self, rank: int, number: int) -> None:
        """Sends a signal to the rank's process, if it is there."""

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Calls it then."""


class Outside:
    """A case's fault, if it comes from outside. `prepare` is before anything moves."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._fault = stage, stage.case.fault
        self._rng = random.Random(self._fault.seed)
        self._tap: MessageTap | None = None

    @staticmethod
    def needs_wire(case: Case) -> bool:
        """Whether it happens on a link."""
        return case.fault.kind in _ON_A_LINK

    def prepare(self) -> None:
        """Follows the frames of a stream from its start."""
        if self._fault.kind in _ALTER and self._is_tcp:
            self._tap = MessageTap(self._rng, _ALTER[self._fault.kind])
            self._stage.wire.sent.tap = self._tap

    def fire(self) -> None:
        """Does it; nothing where the rank does it itself."""
        action = getattr(self, f"_{self._fault.kind}", None)
        if action is not None:
            action()

    @property
    def _is_tcp(self) -> bool:
        return self._stage.case.link(self._fault.faulty, self._fault.peer) == "tcp"

    def _signal(self, number: int) -> None:
        self._stage.signal(self._fault.faulty, number)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _interrupt(self) -> None:
        self._signal(signal.SIGINT)

    def _stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def _pause(self) -> None:
        self._signal(signal.SIGSTOP)
        self._stage.after(self._fault.seconds, lambda: self._signal(signal.SIGCONT))

    def _silence(self) -> None:
        self._stage.wire.held = True

    def _delay(self) -> None:
        self._stage.wire.held = True
        self._stage.after(self._fault.seconds, self._release)

    def _release(self) -> None:
        self._stage.wire.held = False

    def _cut(self) -> None:
        if self._fault.detail == "in a frame":
            self._stage.wire.sent.tap = self._cut_in_frame
        else:
            self._stage.wire.cut(reset=self._fault.detail == "reset")

    def _cut_in_frame(self, data: bytes) -> bytes:
        self._stage.wire.sent.ended = True
        return data[: self._rng.randrange(len(data))] if data else data

    def _truncate(self) -> None:
        self._alter()

    def _payload(self) -> None:
        self._alter()

    def _header(self) -> None:
        if self._is_tcp:
            self._alter()
        else:
            self._flip_in_memory(_TRIES)

    def _alter(self) -> None:
        assert self._tap is not None
        self._tap.arm()

    def _flip_in_memory(self, tries: int) -> None:
        """While the reader stands still, so that a frame waits and is read afterwards."""
        self._stage.signal(self._fault.peer, signal.SIGSTOP)
        if self._flipped_one() or tries == 0:
            self._stage.signal(self._fault.peer, signal.SIGCONT)
        else:
            self._stage.after(_RETRY_SECONDS, lambda: self._flip_in_memory(tries - 1))

    def _flipped_one(self) -> bool:
        memory, case = self._stage.wire.sent.passed, self._stage.case
        if not memory:  # the link is gone
            return False
        tap = ArenaTap(
            memory[0],
            reader=self._fault.peer,
            ranks=case.ranks,
            max_message=case.tuning["max_message"],
        )
        try:
            return tap.flip(self._rng)
        finally:
            tap.close()

    def _garble(self) -> None:
        flow = self._stage.wire.sent
        if self._fault.detail == "bit":
            flow.tap = BitTap(self._rng)
        elif self._fault.detail == "bytes":
            flow.push(foreign_bytes(self._rng))
        else:
            flow.push(foreign_frame(self._rng, self._stage.case.ranks))

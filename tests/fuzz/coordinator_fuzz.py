"""What a coordinator of Sandblaster and its replicas tell each other: known fields, of their types.

input: one byte, of which the lowest bit says who speaks; then its stream of messages
"""

from __future__ import annotations

import contextlib
import sys

import atheris
from gradwire._errors import InvalidArgument
from gradwire.serve._sandblaster import messages, portions, worker
from instrument import cover

PORTIONS = 4


def tell_coordinator(found: list[messages.Message]) -> None:
    """Tells the portions of a batch what replica 0 has said, beside replica 1 that says nothing."""
    batch = portions.Portions()
    for replica in range(2):
        batch.join(replica, 0.0)
    batch.begin(1, PORTIONS, 0.0)
    for i, each in enumerate(found):
        now = float(i)
        match each["what"]:
            case "report":
                batch.report(0, each["ticket"], each["loss"], now)
            case "forgotten":
                batch.forgotten(0, each["ticket"], now)
            case "staged":
                batch.staged(0, each["batch"], each["sequence"], each["tickets"], now)
    assert batch.done == (sum(each.pushed for each in batch._portions) == PORTIONS)


def tell_replica(found: list[messages.Message]) -> None:
    """Tells a replica's tickets what a coordinator has said, and computes between."""
    total: list[int] = []
    tickets: worker.Worker[int] = worker.Worker(total.append, total.clear)
    for each in found:
        match each["what"]:
            case "work":
                tickets.work(each["batch"], each["ticket"], each["portion"])
            case "keep":
                tickets.keep(each["batch"], each["ticket"])
            case "drop":
                tickets.drop(each["batch"], each["ticket"])
            case "push":
                push = tickets.push()
                assert push is None or push.tickets
        if (task := tickets.next()) is not None:
            tickets.computed(0.0, task.ticket)
        assert tickets.kept == len(total)


def test_one_input(data: bytes) -> None:
    """Runs one input."""
    replica_speaks = data[:1] and data[0] & 1
    expected = messages.OF_REPLICAS if replica_speaks else messages.OF_COORDINATORS
    found: list[messages.Message] = []
    with contextlib.suppress(InvalidArgument):
        found = messages.Reader(expected).feed(data[1:])
    with contextlib.suppress(InvalidArgument):
        (tell_coordinator if replica_speaks else tell_replica)(found)


cover(messages, portions, worker)
atheris.Setup(sys.argv, test_one_input)
atheris.Fuzz()

"""What stands in errors that torch's store and its groups cause: a line, and no frames of C++."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from gradwire import RendezvousError
from gradwire._base.deadline import Deadline
from gradwire._bootstrap.advertised_store import pack_failure, unpack_place
from gradwire._bootstrap.through_torch.torch_store import TorchStore
from gradwire._errors import first_line
from ranks import LIMIT

dist = pytest.importorskip("torch.distributed")


@pytest.fixture
def refusing() -> Iterator[int]:
    """A port at which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def test_a_job_whose_store_is_not_there_ends_with_an_error_of_a_line(refusing: int) -> None:
    launched = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(refusing)}
    ended = subprocess.run(
        [sys.executable, "-c", "import gradwire; gradwire.init(timeout=0.2)"],
        env=os.environ | launched | where,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    last = ended.stderr.splitlines()[-1]
    assert "RendezvousError: could not reach torch's store at 127.0.0.1" in last, ended.stderr
    assert last.endswith("is rank 0 or its torchrun running at this address?")
    assert "frame #" not in ended.stderr
    assert "The above exception" not in ended.stderr


def server() -> Any:
    return dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=60), wait_for_workers=False)


def raised_by(call: Any, *args: Any) -> str:
    with pytest.raises(RendezvousError) as raised:
        call(*args)
    assert raised.value.__suppress_context__
    return str(raised.value)


def test_a_store_that_goes_is_lost_with_a_line() -> None:
    torchs = server()
    client = TorchStore("127.0.0.1", torchs.port, 1, 2, Deadline(60))
    client.set("key", b"value")
    del torchs
    said = raised_by(client.find, "key")
    assert said.startswith("lost torch's store at 127.0.0.1:")
    assert said.endswith("its process, rank 0 or torchrun, has probably ended")
    assert "\n" not in said


def test_the_store_of_a_group_that_goes_is_lost_with_a_line() -> None:
    from gradwire.torch.backend.rendezvous import _StoreExchange

    torchs = server()
    client = dist.TCPStore("127.0.0.1", torchs.port, 2, False, timedelta(seconds=60))
    exchange = _StoreExchange(dist.PrefixStore("group", client), 1, 2, Deadline(60))
    del torchs
    said = raised_by(exchange.all_gather, b"own")
    assert said.startswith("rank 1 lost the store of the process group: ")
    assert "\n" not in said


@pytest.mark.parametrize(
    ("text", "line"), [("a b\nframe #0: c\n", "a b"), ("\n\na", "a"), ("", "RuntimeError")]
)
def test_the_first_line(text: str, line: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "gradwire")
    assert first_line(RuntimeError(text)) == line
    assert ("frame #0: c" in caplog.text) == ("frame" in text)  # the rest, for who looks for it


def test_what_stands_in_the_place_of_rank_0s_reason_is_a_short_line() -> None:
    """Whoever reaches torch's store may have written it."""
    with pytest.raises(RendezvousError, match=r"^rank 0 gave up: no room$"):
        unpack_place(pack_failure("no room"))
    forged = b"- \x1b[2Jall is well\nRendezvousError: \xff" + bytes(1 << 20)
    with pytest.raises(RendezvousError) as raised:
        unpack_place(forged)
    text = str(raised.value)
    assert text.startswith(r"\x1b[2Jall is well\nRendezvousError: \ufffd\x00")
    assert text.isprintable()
    assert len(text) < 10_000

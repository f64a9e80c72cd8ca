"""Snapshots of a parameter server while clients push."""

from __future__ import annotations

import threading
from pathlib import Path

import gradwire
import numpy as np
from gradwire import serve
from gradwire.serve import _snapshot
from support.ranks import eventually


def test_the_last_snapshot_has_what_was_acknowledged(tmp_path: Path) -> None:
    start, ones = [np.zeros(1000, np.float32)], [np.ones(1000, np.float32)]
    server = serve.Server(1, snapshot=tmp_path)
    ps = serve.connect(start, serve.SGD(lr=1.0), store=server.store)
    acknowledged = 0

    def push() -> None:
        nonlocal acknowledged
        try:
            while True:
                ps.push(ones)
                acknowledged += 1
        except gradwire.TransportError:
            pass

    thread = threading.Thread(target=push)
    thread.start()
    eventually(lambda: acknowledged > 10)
    server.stop()
    thread.join()
    state = _snapshot.read(tmp_path / "shard-0-of-1.gradwire")
    assert acknowledged <= state.version <= acknowledged + 1
    assert (state.slots["w"] == -state.version).all()
    ps.close()

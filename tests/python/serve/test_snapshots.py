"""Snapshots of a parameter server while clients push."""

from __future__ import annotations

import errno
import struct
import threading
import zlib
from pathlib import Path

import gradwire
import numpy as np
import pytest
from gradwire import serve
from gradwire.serve import _snapshot
from ranks import eventually


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


def state_of(size: int) -> _snapshot.ShardState:
    slots = {"w": np.arange(size, dtype=np.float32), "sum": np.ones(size, np.float32)}
    return _snapshot.ShardState("a table", 1, 7, [3, 4], slots)


def test_a_snapshot_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    _snapshot.write(path, state_of(1000))
    found = _snapshot.read(path)
    assert found[:4] == state_of(1000)[:4]
    for name, values in state_of(1000).slots.items():
        np.testing.assert_array_equal(found.slots[name], values)


@pytest.mark.parametrize(
    ("text", "begin", "end"),
    [("no snapshot", 0, 0), ("no snapshot", 0, 9), ("damaged", 0, -1), ("damaged", 0, 40)],
)
def test_parts_of_a_snapshot_are_refused(tmp_path: Path, text: str, begin: int, end: int) -> None:
    path = tmp_path / "shard"
    _snapshot.write(path, state_of(10))
    path.write_bytes(path.read_bytes()[begin:end])
    with pytest.raises(gradwire.InvalidArgument, match=text):
        _snapshot.read(path)


@pytest.mark.parametrize("head", [b"{}", b"[]", b"x", b'{"frames": -1, "slots": {}}'])
def test_a_snapshot_of_another_version_is_refused(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "shard"
    body = b"GWSHARD1" + struct.pack("<Q", len(head)) + head + bytes(100)
    path.write_bytes(body + struct.pack("<I", zlib.crc32(body)))
    with pytest.raises(gradwire.InvalidArgument, match="another version"):
        _snapshot.read(path)


def test_a_full_disk_leaves_the_older_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [np.zeros(10, np.float32)]
    with serve.Server(1, snapshot=tmp_path) as server:
        path = _snapshot.path_of(tmp_path, 0, 1)
        with serve.connect(values, serve.SGD(lr=1.0), store=server.store) as ps:
            ps.checkpoint()
            before = path.read_bytes()
            ps.push([np.ones(10, np.float32)])

            def full(_: int) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            with monkeypatch.context() as broken:
                broken.setattr(_snapshot.os, "fsync", full)
                with pytest.raises(gradwire.InvalidArgument, match="No space left on device"):
                    ps.checkpoint()
            assert list(tmp_path.iterdir()) == [path]
            assert path.read_bytes() == before
            ps.push([np.ones(10, np.float32)])
            ps.pull(values)
            assert values[0].tolist() == [-2.0] * 10
            ps.checkpoint()
            assert _snapshot.read(path).version == 2

"""Snapshots of a parameter server while clients push."""

from __future__ import annotations

import errno
import json
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import gradwire
import numpy as np
import pytest
from gradwire import serve
from gradwire.serve import _snapshot
from ranks import LIMIT, eventually


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


@pytest.mark.parametrize("size", [0, 1, 2**20, 2**20 + 1])
@pytest.mark.parametrize("kind", ["any bits", "zeros", "weights"])
def test_packed_values_keep_their_bits(tmp_path: Path, size: int, kind: str) -> None:
    random, path = np.random.default_rng(size), tmp_path / "shard"
    values = {
        "any bits": random.integers(0, 2**32, size, np.uint32).view(np.float32),
        "zeros": np.zeros(size, np.float32),
        "weights": random.standard_normal(size, np.float32),
    }[kind]
    _snapshot.write(path, _snapshot.ShardState("t", 0, 1, [1], {"w": values}))
    assert _snapshot.read(path).slots["w"].tobytes() == values.tobytes()
    most = {"any bits": 1.01, "zeros": 0.01, "weights": 0.87}[kind]
    assert path.stat().st_size <= 4 * most * size + 200


def test_an_older_snapshot_of_plain_values_is_read(tmp_path: Path) -> None:
    values = np.arange(23, dtype=np.float32)
    body = np.ones(1, np.uint64).tobytes() + values.tobytes()
    snapshot_with(tmp_path / "shard", head_with(), body, magic=b"GWSHARD1")
    np.testing.assert_array_equal(_snapshot.read(tmp_path / "shard").slots["w"], values)


@pytest.mark.parametrize("cut", [*range(0, 20, 3), -1, 1])
def test_packed_values_that_do_not_fit_are_refused(tmp_path: Path, cut: int) -> None:
    """Their checksum does: lengths, and what the codec reads, are checked."""
    payload = gradwire.codec.Lossless().encode(np.arange(23, dtype=np.float32)).tobytes()
    whole = struct.pack("<I", len(payload)) + payload
    body = whole[:cut] if cut != 1 else whole + b"\0"
    path = tmp_path / "shard"
    snapshot_with(path, head_with(), bytes(8) + body)
    with pytest.raises(gradwire.InvalidArgument, match=f"{path} is a snapshot of another version"):
        _snapshot.read(path)
    snapshot_with(path, head_with(), bytes(8) + whole)
    assert _snapshot.read(path).slots["w"].tolist() == list(range(23))


@pytest.mark.parametrize("length", [0, 5, 2**32 - 1])
@pytest.mark.parametrize("size", [1, 22, 24, 1000, 2**40, 2**62])
def test_hostile_lengths_are_refused(tmp_path: Path, size: int, length: int) -> None:
    path = tmp_path / "shard"
    body = bytes(8) + struct.pack("<I", length) + b"\xff" * 90
    snapshot_with(path, head_with(slots={"w": size}), body)
    with pytest.raises(gradwire.InvalidArgument, match=f"{path} is a snapshot of another version"):
        _snapshot.read(path)


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


PACKED = bytes(8) + b"\x02\0\0\0" + b"\x70\0"  # an update number, and a block of zeros


def snapshot_with(
    path: Path, head: bytes, body: bytes = PACKED, magic: bytes = b"GWSHARD2"
) -> None:
    whole = magic + struct.pack("<Q", len(head)) + head + body
    path.write_bytes(whole + struct.pack("<I", zlib.crc32(whole)))


def head_with(**fields: object) -> bytes:
    about = {"table": "t", "shard": 0, "version": 1, "frames": 1, "slots": {"w": 23}}
    return json.dumps({**about, **fields}).encode()


@pytest.mark.parametrize(
    "head",
    [
        *(b"{}", b"[]", b"x", b'{"frames": -1, "slots": {}}', b"[" * 10**6),
        head_with(table=7),
        *(head_with(version=each) for each in (-1, "1", None, True, 1.5, 2**64, 2**64 - 1)),
        *(head_with(shard=each) for each in (-1, "0", 2**32)),
        *(head_with(frames=each) for each in (-1, "1", 1.0)),
        *(head_with(slots=each) for each in ([], {"w": -1}, {"w": "23"}, {"w": float("nan")})),
    ],
)
def test_a_snapshot_of_another_version_is_refused(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "shard"
    snapshot_with(path, head)
    with pytest.raises(gradwire.InvalidArgument, match=f"{path} is a snapshot of another version"):
        _snapshot.read(path)


def test_the_head_that_those_differ_from_is_read(tmp_path: Path) -> None:
    snapshot_with(tmp_path / "shard", head_with())
    assert _snapshot.read(tmp_path / "shard").version == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("slot", ["w", "squares"])
def test_a_server_refuses_a_snapshot_that_is_not_finite(
    tmp_path: Path, slot: str, value: float
) -> None:
    with (
        serve.Server(1, snapshot=tmp_path) as server,
        serve.connect([np.zeros(10, np.float32)], serve.Adagrad(lr=1.0), store=server.store) as ps,
    ):
        ps.checkpoint()
    path = _snapshot.path_of(tmp_path, 0, 1)
    state = _snapshot.read(path)
    state.slots[slot][3] = value
    _snapshot.write(path, state)
    with pytest.raises(gradwire.InvalidArgument, match=f"{path} .*'{slot}' holds NaN"):
        serve.Server(1, snapshot=tmp_path)


def test_a_link_at_the_new_files_name_is_not_followed(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "shard"
    victim.write_text("precious")
    path.with_suffix(".new").symlink_to(victim)
    _snapshot.write(path, state_of(10))
    assert victim.read_text() == "precious"
    assert _snapshot.read(path).version == 7
    assert not path.is_symlink()


def test_a_link_that_comes_back_at_once_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, path = tmp_path / "victim", tmp_path / "shard"
    path.with_suffix(".new").symlink_to(victim)
    monkeypatch.setattr(Path, "unlink", lambda _: None)
    with pytest.raises(FileExistsError):
        _snapshot.write(path, state_of(10))
    assert not victim.exists()


def test_a_last_snapshot_that_failed_is_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is where the folder was, so that nothing can be written."""
    folder = tmp_path / "snapshots"
    monkeypatch.setenv("GRADWIRE_SECRET", secrets.token_hex(16))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        store = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    argv = [sys.executable, "-m", "gradwire", "serve", "--store", store, "--snapshot", str(folder)]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as server:
        with serve.connect([np.zeros(10, np.float32)], serve.SGD(lr=1.0), store=store) as ps:
            ps.checkpoint()
            shutil.rmtree(folder)
            folder.write_text("")
        server.terminate()
        _, said = server.communicate(timeout=LIMIT)
    assert server.returncode == 1
    assert "gradwire serve: shard 0: no snapshot: " in said


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

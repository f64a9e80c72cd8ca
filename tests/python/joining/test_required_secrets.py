"""Secrets: every way into a job needs one over TCP, and refuses one that is short or readable."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gradwire
import numpy as np
import pytest
from elastic_job import SECRET
from gradwire import RendezvousError, serve
from gradwire._base.deadline import Deadline
from gradwire._bootstrap.authenticator import RefusalLog
from gradwire._bootstrap.groups.group_rendezvous import rendezvous_in_group
from gradwire._bootstrap.job_secret import find_secret
from gradwire._bootstrap.launch_info import explicit
from gradwire._bootstrap.rendezvous import rendezvous
from ranks import reserved_store


@pytest.fixture(autouse=True)
def alone(bare_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire._bootstrap.authenticator.refusals", RefusalLog())


def init_over_tcp(store: str) -> None:
    gradwire.init(rank=0, ranks=2, store=store, timeout=5)


def join_over_tcp(store: str) -> None:
    gradwire.join(store=store, timeout=5)


def serve_over_tcp(store: str) -> None:
    serve.Server(1, store=store)


def connect_over_tcp(store: str) -> None:
    serve.connect([np.zeros(1, np.float32)], serve.SGD(lr=1.0), store=store, timeout=5)


def serve_command(store: str) -> None:
    run_command("serve", "--store", store)


def listener_over_tcp(store: str) -> None:
    """The listener opens on a thread, and `resize` says what kept it from that."""
    with gradwire.init(rank=0, ranks=1) as comm:
        comm.resize(store=store, min_ranks=2, wait=0.2)


def run_command(*arguments: str) -> None:
    from gradwire._tools import cli

    errors: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "_say", lambda error, code: errors.append(str(error)) or code)
        code = cli.main(list(arguments))
    assert code == 1
    raise RendezvousError(errors[0])


@pytest.mark.parametrize(
    "entry",
    [
        init_over_tcp,
        join_over_tcp,
        serve_over_tcp,
        connect_over_tcp,
        serve_command,
        listener_over_tcp,
    ],
)
def test_over_tcp_a_secret_is_required_on_loopback_too(entry: Callable[[str], None]) -> None:
    with reserved_store() as store, pytest.raises(RendezvousError) as raised:
        entry(store)
    assert "`export GRADWIRE_SECRET=$(openssl rand -hex 32)`" in str(raised.value)


def test_insecure_is_said_and_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GRADWIRE_INSECURE", "1")

    def body(rank: int) -> int:
        with gradwire.init(rank=rank, ranks=2, store=store, timeout=30) as comm:
            return comm.size

    with reserved_store() as store, ThreadPoolExecutor(2) as pool:
        assert list(pool.map(body, range(2))) == [2, 2]
    assert f"whoever reaches the store at {store} can join" in caplog.text
    assert [each.levelno for each in caplog.records if "INSECURE" in each.msg] == [logging.WARNING]


def init_alone() -> None:
    gradwire.init()


def join_it() -> None:
    gradwire.join(store="unix://nowhere", timeout=5)


def serve_it() -> None:
    serve.Server(1)


def serve_by_command() -> None:
    run_command("serve", "--shards", "1")


def run_it() -> None:
    run_command("run", "-n", "1", "/nonexistent.py")


def group() -> None:
    rendezvous_in_group(0, 2, lambda own: [own, own], lambda mesh: None, Deadline(5))


ENTRIES = [init_alone, join_it, serve_it, serve_by_command, run_it, group]


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_refuses_a_short_secret(
    monkeypatch: pytest.MonkeyPatch, entry: Callable[[], None]
) -> None:
    monkeypatch.setenv("GRADWIRE_SECRET", "abc")
    with pytest.raises(RendezvousError, match="the secret has 3 bytes, fewer than 16"):
        entry()


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_every_entry_refuses_a_secret_that_others_can_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, entry: Callable[[], None], mode: int
) -> None:
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(mode)
    monkeypatch.setenv("GRADWIRE_SECRET_FILE", str(tmp_path / "secret"))
    with pytest.raises(RendezvousError, match="can be read by others"):
        entry()


def test_gradwire_run_gives_its_ranks_the_secret_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from gradwire._tools import cli

    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(0o600)
    monkeypatch.setenv("GRADWIRE_SECRET_FILE", str(tmp_path / "secret"))
    script = tmp_path / "rank.py"
    script.write_text(
        "import sys, gradwire\n"
        "with gradwire.init() as comm:\n"
        f"    sys.exit(comm._mesh.job.secret != {SECRET.encode()!r})\n"
    )
    assert cli.main(["run", "-n", "2", str(script)]) == 0


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(RendezvousError, match="15 bytes, fewer than 16"):
        find_secret("x" * 15)


def test_the_secret_comes_from_the_argument_the_variable_or_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_text("from-the-file-0123\n")
    file.chmod(0o600)
    assert find_secret(None) is None
    monkeypatch.setenv("GRADWIRE_SECRET_FILE", str(file))
    assert find_secret(None) == b"from-the-file-0123"
    monkeypatch.setenv("GRADWIRE_SECRET", "from-the-variable-0123")
    assert find_secret(None) == b"from-the-variable-0123"
    assert find_secret("from-the-argument-0123") == b"from-the-argument-0123"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_secret_file_that_others_can_touch_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: int
) -> None:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef")
    file.chmod(mode)
    monkeypatch.setenv("GRADWIRE_SECRET_FILE", str(file))
    with pytest.raises(RendezvousError, match="chmod 600"):
        find_secret(None)


@pytest.mark.skipif(os.getuid() != 0, reason="gives a file to another user, which root alone may")
def test_a_secret_file_of_another_user_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef")
    file.chmod(0o600)
    monkeypatch.setenv("GRADWIRE_SECRET_FILE", str(file))
    assert find_secret(None) == b"0123456789abcdef"
    os.chown(file, 12345, -1)
    with pytest.raises(RendezvousError, match="is another user's"):
        find_secret(None)


def test_a_secret_file_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_SECRET_FILE", "/nonexistent/secret")
    with pytest.raises(RendezvousError, match="cannot read GRADWIRE_SECRET_FILE"):
        find_secret(None)


@pytest.mark.parametrize("host", ["192.0.2.1", "127.0.0.1", "localhost", "[::1]"])
def test_over_tcp_a_secret_is_needed(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    place = explicit(1, 2, f"tcp://{host}:9")
    with pytest.raises(RendezvousError, match=r"there is no secret.*`export GRADWIRE_SECRET="):
        rendezvous(place, lambda mesh: mesh, timeout=0.1)
    monkeypatch.setenv("GRADWIRE_INSECURE", "1")
    with pytest.raises(RendezvousError, match="could not reach the store"):
        rendezvous(place, lambda mesh: mesh, timeout=0.1)

"""`gradwire run`: what ranks see, and that none outlives a failure, a signal or the launcher."""

from __future__ import annotations

import itertools
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gradwire._launch.launcher import _parse, run
from gradwire._launch.local_ranks import LocalRanks
from gradwire._launch.root_cause import Failure, Note, read_notes, root_cause
from gradwire._launch.slots import Slot
from gradwire._launch.watcher import Watcher
from ranks import LIMIT

MAIN = """
import sys
from gradwire._launch import launcher, local_ranks
local_ranks.SETTLE_SECONDS = 0.1
sys.exit(launcher.run(sys.argv[1:]))
"""

# Blocks until a signal comes; says first that it has come so far.
BLOCK = """
import os, signal, sys
def block():
    os.write(1, b"blocked %d\\n" % os.getpid())
    signal.pause()
"""

Launch = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(BLOCK + text)
        return str(path)

    return write


@pytest.fixture
def launch() -> Iterator[Launch]:
    started: list[subprocess.Popen[str]] = []

    def start(*argv: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", MAIN, *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out, err


def blocked(process: subprocess.Popen[str], ranks: int) -> list[int]:
    """The process ids of ranks that have said that they block."""
    assert process.stdout is not None
    return [int(process.stdout.readline().split()[-1]) for _ in range(ranks)]


def test_ranks_see_their_place(launch: Launch, script: Callable[[str], str]) -> None:
    path = script("""
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS"
sys.stdout.write(" ".join(os.environ[name] for name in names.split()) + "\\n")
assert int(os.environ["MASTER_PORT"]) > 0
""")
    code, out, err = finish(launch("-n", "3", path))
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"{rank} 3 {rank} 3 127.0.0.1 1" for rank in range(3)]


def test_each_run_has_a_secret_of_its_own(launch: Launch, script: Callable[[str], str]) -> None:
    path = script('os.write(1, os.environ["GRADWIRE_SECRET"].encode() + b"\\n")')
    runs = [set(finish(launch("-n", "2", path))[1].split()) for _ in range(2)]
    assert [len(found) for found in runs] == [1, 1]
    assert runs[0] != runs[1]
    assert all(len(bytes.fromhex(secret)) >= 16 for found in runs for secret in found)


def test_ranks_meet(launch: Launch, script: Callable[[str], str]) -> None:
    path = script("""
from gradwire._bootstrap.rendezvous import rendezvous
from gradwire._bootstrap.launch_info import from_environment
for turn in range(2):
    mesh = rendezvous(from_environment(), lambda mesh: mesh, timeout=30)
    os.write(1, f"{mesh.rank} {sorted(mesh.peers)} {mesh.communicator}\\n".encode())
    mesh.close()
""")
    code, out, err = finish(launch("-n", "3", path))
    assert (code, err) == (0, "")
    peers = {0: [1, 2], 1: [0, 2], 2: [0, 1]}
    expected = [f"{rank} {peers[rank]} {turn}" for rank in range(3) for turn in range(2)]
    assert sorted(out.splitlines()) == expected


def test_arguments_reach_the_program(launch: Launch, script: Callable[[str], str]) -> None:
    path = script("print(sys.argv[1:])")
    for dashes in ([], ["--"]):
        code, out, _ = finish(launch("-n", "1", *dashes, path, "-n", "7", "--", "x"))
        assert (code, out) == (0, "['-n', '7', '--', 'x']\n")


def test_a_module_can_be_run(launch: Launch) -> None:
    code, out, _ = finish(launch("-n", "2", "-m", "platform", "terse"))
    assert code == 0
    assert len(out.splitlines()) == 2


@pytest.fixture
def ignored_sigchld() -> Iterator[None]:
    """As a parent may leave it: programs inherit it."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("ignored_sigchld")
def test_ends_of_ranks_are_seen_where_sigchld_is_ignored(
    launch: Launch, script: Callable[[str], str]
) -> None:
    path = script("""
assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
if os.environ["RANK"] == "1":
    sys.exit(3)
block()
""")
    run = launch("-n", "2", path)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # for this process's own children
    code, _, err = finish(run)
    assert code == 3
    assert "exited with code 3" in err


@pytest.mark.usefixtures("ignored_sigchld")
def test_sigterm_ends_ranks_where_sigchld_is_ignored(
    launch: Launch, script: Callable[[str], str]
) -> None:
    run = launch("-n", "2", script("block()"))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    blocked(run, 2)
    run.terminate()
    assert finish(run)[0] == 128 + signal.SIGTERM


def test_output_can_be_tagged(launch: Launch, script: Callable[[str], str]) -> None:
    path = script('print("out"); print("err", file=sys.stderr); sys.stdout.write("no newline")')
    code, out, err = finish(launch("-n", "2", "--tag-output", path))
    assert code == 0
    assert sorted(out.splitlines()) == [
        f"[{rank}] {text}" for rank in range(2) for text in ("no newline", "out")
    ]
    assert sorted(err.splitlines()) == ["[0] err", "[1] err"]


def test_one_failure_ends_all_and_gives_the_code(
    launch: Launch, script: Callable[[str], str]
) -> None:
    path = script('sys.exit(7) if os.environ["RANK"] == "2" else block()')
    code, _, err = finish(launch("-n", "3", path))
    assert code == 7
    assert "rank 2 of 3" in err
    assert "exited with code 7; ending the other 2" in err


def test_others_have_a_moment_to_fail_by_themselves(
    script: Callable[[str], str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 fails when the launcher has seen that rank 0 did."""
    monkeypatch.setattr("gradwire._launch.local_ranks.SETTLE_SECONDS", 60)
    os.mkfifo(tmp_path / "process")
    fifo = f"open({str(tmp_path / 'process')!r}, "
    path = script(f"""
if os.environ["RANK"] == "0":
    {fifo}"w").write(str(os.getpid()))
    sys.exit(3)
other = {fifo}"r").read()
while os.path.exists("/proc/" + other):
    os.sched_yield()
sys.exit(4)
""")
    assert run(["-n", "2", path]) == 3
    assert "exited with code 3; rank 1 failed too\n" in capfd.readouterr().err


def note(process: int, at: float, *, is_consequence: bool = False) -> Note:
    return Note(process, at, "ValueError: x", is_consequence)


FAILURES = {
    "the only one": [Failure(1, 11, 1, 5.0)],
    "the first": [Failure(1, 11, 1, 5.0), Failure(0, 10, 1, 6.0)],
    "the first that began": [
        Failure(0, 10, 5, 5.0),
        Failure(1, 11, 7, 6.0, note(11, 4.0)),
        Failure(2, 12, 7, 6.0, note(12, 4.5)),
    ],
    "no consequence": [
        Failure(0, 10, 1, 5.0, note(10, 4.0, is_consequence=True)),
        Failure(1, 11, 1, 6.0),
    ],
    "killed": [Failure(0, 10, 1, 5.0, note(10, 4.0)), Failure(1, 11, -9, 5.1)],
    "not killed in its end": [
        Failure(1, 11, 1, 5.0, note(11, 4.0)),
        Failure(0, 10, -6, 5.1, note(10, 4.1)),
    ],
}


@pytest.mark.parametrize("kind", FAILURES)
def test_the_root_of_several_failures(kind: str) -> None:
    for order in itertools.permutations(FAILURES[kind]):
        assert root_cause(order).rank == 1


def test_notes_are_read_though_some_are_damaged() -> None:
    good = {"process": 7, "at": 1.5, "error": "", "is_consequence": False}
    later = {**good, "at": 2.5}
    lines = [json.dumps(each) for each in (good, later, [1], {"process": 3}, 5)]
    data = "\n".join(["", "{", *lines, json.dumps(good)[:20]]).encode() + b"\xff\x00\n"
    assert read_notes(data) == {7: Note(7, 1.5, "", False)}


def test_a_signal_that_kills_a_rank_is_named(launch: Launch, script: Callable[[str], str]) -> None:
    path = script("""
os.kill(os.getpid(), signal.SIGKILL) if os.environ["RANK"] == "0" else block()
""")
    code, _, err = finish(launch("-n", "2", path))
    assert code == 128 + signal.SIGKILL
    assert "rank 0 of 2" in err
    assert "was killed by SIGKILL" in err


STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
block()
"""


def test_ranks_that_ignore_the_request_to_end_are_killed(
    script: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradwire._launch.local_ranks.SETTLE_SECONDS", 0.1)
    monkeypatch.setattr("gradwire._launch.local_ranks.GRACE_SECONDS", 0.2)
    os.mkfifo(tmp_path / "ready")
    ready = f"open({str(tmp_path / 'ready')!r}, "
    path = script(f"""
if os.environ["RANK"] == "1":
    {ready}"r").read()
    sys.exit(3)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
{ready}"w").close()
block()
""")
    assert run(["-n", "2", path]) == 3


def test_what_a_failed_rank_started_ends_with_it(
    launch: Launch, script: Callable[[str], str]
) -> None:
    path = script("""
child = os.fork()
if child == 0:
    block()
sys.exit(5)
""")
    process = launch("-n", "1", path)
    code, _, _ = finish(process)  # the pipe closes only when the grandchild is gone too
    assert code == 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_ranks(
    launch: Launch, script: Callable[[str], str], number: signal.Signals
) -> None:
    path = script("""
def handler(number, frame):
    os.write(1, b"got %d\\n" % number)
    sys.exit(0)
signal.signal(signal.SIGINT, handler)
signal.signal(signal.SIGTERM, handler)
block()
""")
    process = launch("-n", "2", path)
    blocked(process, 2)
    process.send_signal(number)
    code, out, _ = finish(process)
    assert code == 128 + number
    assert out.splitlines() == [f"got {int(number)}"] * 2


def test_a_second_signal_kills(launch: Launch, script: Callable[[str], str]) -> None:
    process = launch(
        "-n",
        "2",
        script("""
def handler(number, frame):
    os.write(1, b"noted\\n")
signal.signal(signal.SIGINT, handler)
while True:
    block()
"""),
    )
    blocked(process, 2)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    noted = 0
    while noted < 2:
        noted += process.stdout.readline() == "noted\n"
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 128 + signal.SIGINT


def test_ranks_die_with_the_launcher(launch: Launch, script: Callable[[str], str]) -> None:
    process = launch("-n", "2", script(STUBBORN))
    pids = blocked(process, 2)
    descriptors = [os.pidfd_open(pid) for pid in pids]
    process.kill()
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], 30)[0], "a rank outlives the launcher"
        os.close(descriptor)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-n", "0", "x.py"], "at least one rank"),
        (["-n", "2"], "which program"),
        (["x.py"], "how many ranks?"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        run(argv)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_handlers_are_put_back(script: Callable[[str], str]) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert run(["-n", "1", script("")]) == 0
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_rank_that_is_reaped_already_is_watched_without_a_word() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    with Watcher() as watcher:
        options, slot = _parse(["-n", "1", "program"]), Slot(math.inf, 0)
        launch = LocalRanks([], options, slot, {}, notes=-1, watcher=watcher)
        launch._watch(0, process.pid)
        assert launch._events.empty()


def test_it_runs_beside_the_main_thread(script: Callable[[str], str]) -> None:
    codes: list[int] = []
    path = script("")
    thread = threading.Thread(target=lambda: codes.append(run(["-n", "1", path])))
    thread.start()
    thread.join()
    assert codes == [0]

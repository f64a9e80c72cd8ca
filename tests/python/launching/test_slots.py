"""`gradwire run --slot`: ranks that stop are run again, and runs that share a lock take turns."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gradwire._launch import slots
from gradwire._launch.launcher import run
from ranks import LIMIT, eventually

MAIN = """
import sys
from gradwire._launch import launcher, local_ranks
local_ranks.SETTLE_SECONDS = 0.1
local_ranks.GRACE_SECONDS = {grace}
sys.exit(launcher.run(sys.argv[1:]))
"""
HEAD = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
def say(text):
    os.write(1, text.encode() + b"\\n")
def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)
"""
LONG = ["--slot", "10000s", "--margin", "9000s"]  # nobody is asked, nor cut off
AT_ONCE = ["--slot", "9000.01s", "--margin", "9000s"]  # all are asked, and nobody is cut off

Start = Callable[..., "subprocess.Popen[str]"]
Script = Callable[[str], str]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(HEAD + text)
        return str(path)

    return write


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def launch(*argv: str, grace: float = 0.2) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", MAIN.format(grace=grace), *argv]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield launch
    for process in started:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out, err


def is_free(path: str) -> bool:
    """Whether nobody holds a file's lock."""
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--slot", "abc"], "'abc' is not a time: use 50us, 30s, 2h"),
        (["--slot=-5m"], "'-5m' is not positive"),
        (["--slot", "40m", "--pause", "x"], "argument --pause: 'x' is not a time"),
        (["--slot", "300y"], "'300y' is more than three years"),
        (["--slot", "40d", "--margin", "30d"], "2.592e+06 s are more than 1e+06"),
        (["--slot", "30s"], "30 s are no longer than the margin of 60 s"),
        (["--slot", "1m", "--margin", "2m"], "60 s are no longer than the margin of 120 s"),
        (["--pause", "1m"], "--pause and --lock go with --slot"),
        (["--lock", "x"], "--pause and --lock go with --slot"),
        (["--slot", "40m", "--lock", "/none/x"], "--lock: [Errno 2] No such file or directory"),
        (["--slot", "40m", "--servers", "2"], "neither --servers nor --keep-going"),
        (["--slot", "40m", "--keep-going"], "neither --servers nor --keep-going"),
    ],
)
def test_a_wrong_slot_is_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        run(["-n", "2", *argv, "script.py"])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_ranks_are_asked_and_run_again_until_they_are_done(
    start: Start, script: Script, tmp_path: Path
) -> None:
    path = script(f"""
ends, margin = float(os.environ["GRADWIRE_SLOT_ENDS"]), float(os.environ["GRADWIRE_SLOT_MARGIN"])
while time.time() < ends - margin:
    time.sleep(0.01)
mark = {str(tmp_path)!r} + "/%d.%d"
turn = sum(os.path.exists(mark % (rank, each)) for each in range(9))
open(mark % (rank, turn), "w").close()
say(f"{{rank}} {{turn}}")
sys.exit(0 if turn == 2 else os.EX_TEMPFAIL)
""")
    code, out, err = ended(start("-n", "2", *AT_ONCE, path))
    assert code == 0
    assert sorted(out.splitlines()) == [f"{rank} {turn}" for rank in range(2) for turn in range(3)]
    assert err.splitlines() == ["gradwire run: the slot is over; the next one begins in 0 s"] * 2


def test_ranks_that_were_not_asked_are_not_run_again(start: Start, script: Script) -> None:
    code, out, _ = ended(start("-n", "2", *LONG, script("say('once'); sys.exit(75)")))
    assert (code, out) == (75, "once\nonce\n")


def test_the_others_may_still_save(start: Start, script: Script, tmp_path: Path) -> None:
    path = script(f"""
if rank:
    open({str(tmp_path / "left")!r}, "w").close()
    sys.exit(75)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
wait_for({str(tmp_path / "left")!r})
say(str(signal.sigtimedwait([signal.SIGTERM], 0.5)))  # longer than ranks have after a failure
sys.exit(75)
""")
    code, out, err = ended(start("-n", "3", path))
    assert (code, out, err) == (75, "None\n", "")


def test_without_slots_ranks_that_wait_for_one_that_saved_are_ended(
    start: Start, script: Script
) -> None:
    path = script("""
if rank == 1:
    sys.exit(75)
time.sleep(1000)
""")
    code, _, err = ended(start("-n", "2", "--margin", "0.2s", path))
    assert code == 124
    assert "a rank ended with exit code 75, and 0.2 s later rank 0 had not" in err


@pytest.mark.parametrize(
    ("codes", "expected"), [("75, 0", 75), ("0, 75", 75), ("75, 3", 3), ("0, 0", 0)]
)
def test_a_failure_counts_more_than_a_stop(
    start: Start, script: Script, codes: str, expected: int
) -> None:
    assert ended(start("-n", "2", script(f"sys.exit([{codes}][rank])")))[0] == expected


STOPS = """
def stop(number, _):
    say(f"got {number}")
    os.kill(helper, 0)  # still there
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGUSR1, stop)
helper = os.fork()
if helper == 0:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    signal.pause()
say("ready")
while True:  # and not pause(), which would miss a signal that comes just before it
    time.sleep(0.01)
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize("argv", [[], LONG])
def test_a_signal_asks_the_ranks_and_not_their_helpers(
    start: Start, script: Script, number: signal.Signals, argv: list[str]
) -> None:
    process = start("-n", "2", *argv, script(STOPS), grace=LIMIT)  # ranks may end slowly
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(number)
    code, out, _ = ended(process)  # the pipes close only when the helpers are gone too
    assert (code, out.splitlines()) == (75, [f"got {int(number)}"] * 2)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_in_the_margin_of_a_slot_is_not_followed_by_another_slot(
    start: Start, script: Script, number: signal.Signals
) -> None:
    asked = """
while time.time() < float(os.environ["GRADWIRE_SLOT_ENDS"]) - 9000:
    time.sleep(0.01)
"""
    process = start("-n", "2", *AT_ONCE, script(asked + STOPS))
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(number)
    code, out, err = ended(process)
    assert (code, out.splitlines(), err) == (75, [f"got {int(number)}"] * 2, "")


def test_a_rank_that_does_not_stop_is_cut_off(start: Start, script: Script) -> None:
    path = script("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: signal.pause()")
    code, _, err = ended(start("-n", "2", "--slot", "0.3s", "--margin", "0.1s", path))
    assert code == slots.OVERRUN
    assert "the slot is over, and so is its margin of 0.1 s, but not rank 0, 1" in err


def test_whoever_waits_has_the_next_turn(tmp_path: Path) -> None:
    path, order = str(tmp_path / "lock"), list[str]()

    def take_turns(name: str, others_wait: Callable[[], object]) -> None:
        for _ in range(3):
            with slots._turn(path):
                order.append(name)
                eventually(others_wait)

    left = {"a", "b"}

    def other_waits(name: str) -> bool:
        return len(order) >= 5 or not is_free(f"{path}.next")

    threads = [
        threading.Thread(target=take_turns, args=(name, lambda name=name: other_waits(name)))
        for name in sorted(left)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join(LIMIT)
    assert order in (list("ababab"), list("bababa"))


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_signal_between_slots_ends_a_run_that_has_saved(
    start: Start, script: Script, tmp_path: Path, number: signal.Signals
) -> None:
    lock = str(tmp_path / "lock")
    with open(lock, "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = start("-n", "1", *LONG, "--lock", lock, script("say('ran')"))
        eventually(lambda: os.path.exists(f"{lock}.next") and not is_free(f"{lock}.next"))
        process.send_signal(number)
        code, out, err = ended(process)
    expected = 128 + number if number == signal.SIGINT else 75
    assert (code, out, err) == (expected, "", "")
    assert is_free(f"{lock}.next")


def test_a_killed_run_frees_its_lock(start: Start, script: Script, tmp_path: Path) -> None:
    lock = str(tmp_path / "lock")
    first = start("-n", "1", *LONG, "--lock", lock, script("say('ran'); signal.pause()"))
    assert first.stdout is not None
    assert first.stdout.readline() == "ran\n"
    assert not is_free(lock)
    first.kill()
    second = start("-n", "1", *LONG, "--lock", lock, script("say('ran')"))
    assert ended(second)[:2] == (0, "ran\n")


def test_a_slot_begins_when_the_lock_is_free() -> None:
    assert slots.Slot(time.time() + 100, 1).left > 0
    assert slots.Slot(float("inf"), 1).environment == {}

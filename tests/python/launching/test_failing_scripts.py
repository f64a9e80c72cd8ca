"""Programs that fail: every other rank raises who and why, and the launcher reports the first."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gradwire
import pytest
from ranks import LIMIT

RUN = "import sys; from gradwire._launch.launcher import run; sys.exit(run(sys.argv[1:]))"

# Rank 1 of 3 fails when all have met; the others wait for it, and say what they raise.
PROGRAM = """
import ctypes, os, resource, signal, sys, threading
import gradwire, numpy as np
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
comm = gradwire.init()
x = np.ones(1000, np.float32)
comm.all_reduce(x)
if comm.rank == 1:
    {failure}
try:
    while True:
        comm.all_reduce(x)
except gradwire.Error as error:
    what = type(error).__name__, getattr(error, "peer", None), str(error)
    os.write(1, (repr((comm.rank, *what)) + "\\n").encode())
    {handling}
"""


def python(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    package = str(Path(gradwire.__file__).parents[1])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        input=text,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


Told = list[tuple[int, str, int | None, str]]
Fail = Callable[..., tuple[int, Told, str]]


@pytest.fixture
def fail(tmp_path: Path) -> Fail:
    """Runs PROGRAM; returns the launcher's exit code, what ranks 0 and 2 raised, its last words."""

    def run(failure: str, handling: str = "raise") -> tuple[int, Told, str]:
        script = tmp_path / "script.py"
        script.write_text(PROGRAM.format(failure=failure, handling=handling))
        ended = python("-c", RUN, "-n", "3", str(script))
        told = sorted(eval(line) for line in ended.stdout.splitlines())
        verdict = [line for line in ended.stderr.splitlines() if line.startswith("gradwire run:")]
        assert [rank for rank, *_ in told] == [0, 2], ended.stderr
        assert len(verdict) == 1, ended.stderr
        return ended.returncode, told, verdict[0]

    return run


# How rank 1 fails: the launcher's exit code, what it says, and what all others raise.
EXCEPTIONS = {
    "an exception": ("raise ValueError('bad\\nbatch 7')", 1, "ValueError: bad batch 7"),
    "Ctrl-C": (
        "os.kill(os.getpid(), signal.SIGINT); signal.pause()",
        128 + signal.SIGINT,
        "KeyboardInterrupt",
    ),
    "an exception beside a thread that waits for another rank": (
        "t = threading.Thread(target=lambda: comm.recv(x, 0)); t.start(); raise OSError('full')",
        1,
        "OSError: full",
    ),
}


@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_an_exception_is_told_to_all_ranks(fail: Fail, kind: str) -> None:
    failure, expected, text = EXCEPTIONS[kind]
    code, told, verdict = fail(failure)
    assert [rest for _, *rest in told] == [["Aborted", 1, f"rank 1 raised {text}"]] * 2
    assert code == expected
    assert re.search(r"rank 1 of 3 \(process \d+\) .*; ranks 0, 2 failed because of it$", verdict)


ENDS = {
    "sys.exit": ("sys.exit(7)", 7, "exited with code 7"),
    "os._exit": ("os._exit(9)", 9, "exited with code 9"),
    "a segmentation fault": ("ctypes.string_at(0)", 128 + signal.SIGSEGV, "was killed by SIGSEGV"),
    "a kill": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        128 + signal.SIGKILL,
        "was killed by SIGKILL",
    ),
}
# What programs do with the error: let it end them, wrap it, or note it and leave.
HANDLINGS = {
    "raise": "raise",
    "wrap": "raise RuntimeError('step failed') from error",
    "leave": "sys.exit(5)",
}


@pytest.mark.parametrize(
    ("kind", "handling"),
    [*((kind, "raise") for kind in ENDS), ("sys.exit", "wrap"), ("a kill", "leave")],
)
def test_a_rank_that_ends_is_named_by_all(fail: Fail, kind: str, handling: str) -> None:
    failure, expected, how = ENDS[kind]
    code, told, verdict = fail(failure, HANDLINGS[handling])
    for _, name, peer, message in told:
        assert (name, peer) == ("TransportError", 1)
        assert "rank 1" in message
    assert code == expected
    follows = "failed too" if handling == "leave" else "failed because of it"
    assert re.search(rf"rank 1 of 3 \(process \d+\) {how}; ranks 0, 2 {follows}$", verdict)


def test_a_rank_that_leaves_in_peace_is_named_by_those_that_wait(fail: Fail) -> None:
    code, told, verdict = fail("sys.exit(0)")
    assert [(name, peer) for _, name, peer, _ in told] == [("TransportError", 1)] * 2
    assert code == 1
    assert re.search(r"rank [02] of 3 .*: gradwire.TransportError: rank [02]: rank 1 ", verdict)
    assert "failed too" in verdict


def test_an_exception_in_a_forked_child_is_its_own(fail: Fail) -> None:
    """The child of rank 1 dies of an exception, in a program that would abort; rank 1 goes on."""
    code, told, verdict = fail(
        "child = os.fork()\n"
        "    if child == 0:\n"
        "        raise ValueError('in the child')\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1\n"
        "    comm.all_reduce(x)\n"
        "    sys.exit(3)"
    )
    assert code == 3
    for _, name, peer, _ in told:
        assert (name, peer) == ("TransportError", 1)
    assert "exited with code 3" in verdict


ALONE = "import gradwire, sys\ncomm = gradwire.init()\n"


def test_an_interactive_program_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ALONE + "raise ValueError('in the script')\n")
    ended = python("-i", str(script), text="1/0\nprint('closed:', comm.closed)\n")
    assert "ValueError: in the script" in ended.stderr
    assert "ZeroDivisionError" in ended.stderr
    assert "closed: False" in ended.stdout


def test_a_hook_called_by_hand_ends_nothing() -> None:
    call = "try:\n    1/0\nexcept ZeroDivisionError:\n    sys.excepthook(*sys.exc_info())\n"
    ended = python("-c", ALONE + call + "print('closed:', comm.closed)")
    assert "ZeroDivisionError" in ended.stderr
    assert ended.stdout == "closed: False\n"


OWN_HOOK = """
def own(kind, error, trace):
    print("own hook:", error, comm.closed)
"""


@pytest.mark.parametrize(
    "program",
    [
        "import gradwire, sys\n" + OWN_HOOK + "sys.excepthook = own\ncomm = gradwire.init()\n",
        ALONE + OWN_HOOK + "sys.excepthook = own\ncomm = gradwire.init()\n",
    ],
    ids=["set before", "set between"],
)
def test_a_hook_of_the_program_is_called(program: str) -> None:
    ended = python("-c", program + "raise ValueError('lost')")
    assert ended.stdout == "own hook: lost True\n"
    assert (ended.returncode, ended.stderr) == (1, "")


def test_without_a_launcher_nothing_is_noted(tmp_path: Path) -> None:
    ended = python("-c", ALONE + "raise ValueError('lost')")
    assert ended.returncode == 1
    assert ended.stderr.rstrip().endswith("ValueError: lost")


@pytest.mark.parametrize("path", ["/nowhere/at/all", "/proc/self/mem", "/"])
def test_an_exit_file_that_cannot_be_written_does_no_harm(path: str) -> None:
    program = f"import os\nos.environ['GRADWIRE_EXIT_FILE'] = {path!r}\n" + ALONE
    ended = python("-c", program + "print('well')")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "well\n", "")

"""Trees: copies of the commit, each with one changed file at a time, in which tests run."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

ROOT = Path(__file__).parents[3]
_WARM = ("pytest", "numpy", "ml_dtypes", "torch", "torch._dynamo")
# The installed package's finder, in front of all paths, would find the code that is not mutated.
_SITE = """import sys
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in type(each).__module__]
"""


class Job(NamedTuple):
    """Tests to run, with a file of the package replaced."""

    tests: tuple[str, ...]
    seconds: float  # after which they are ended
    path: str = ""
    text: bytes = b""


class Tree:
    """One copy, which runs one job at a time in a process of its own."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.package = root / "python/gradwire"
        self._original: tuple[Path, bytes] | None = None
        self.job = Job((), 0)
        self.pid, self._began = 0, 0.0
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        commit = subprocess.run(
            ["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True
        )
        subprocess.run(["tar", "x"], cwd=root, input=commit.stdout, check=True)
        (root / "python/sitecustomize.py").write_text(_SITE)
        ask = "import gradwire._core; print(gradwire._core.__file__)"
        found = subprocess.run(
            [sys.executable, "-c", ask], check=True, capture_output=True, text=True
        )
        extension = Path(found.stdout.strip())
        (self.package / extension.name).symlink_to(extension)

    def start(self, job: Job) -> None:
        """Begins to run a job."""
        self.job, self._began = job, time.monotonic()
        if job.path:
            file = self.package / job.path
            self._original = file, file.read_bytes()
            _write(file, job.text)
        self.pid = os.fork()
        if not self.pid:
            self._test()

    @property
    def seconds(self) -> float:
        """The time that the job has taken so far."""
        return time.monotonic() - self._began

    @property
    def log(self) -> str:
        """What the tests have printed."""
        return (self._root / "log").read_text()

    def ended(self) -> str | None:
        """How the job has ended: "passed", "failed" or "timed out"; None while it goes on."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid and self.seconds < self.job.seconds:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if not pid:
            os.waitpid(self.pid, 0)
        if self._original is not None:
            _write(*self._original)
        self._original = None
        return ("failed" if status else "passed") if pid else "timed out"

    def _test(self) -> NoReturn:
        os.setsid()
        log = os.open(self._root / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(self._root / "tests/python")
        for name in [each for each in sys.modules if each.partition(".")[0] == "tests"]:
            del sys.modules[name]  # the tree has its own
        os.environ["PYTHONPATH"] = str(self._root / "python")
        sys.path.insert(0, os.environ["PYTHONPATH"])
        code = 3
        try:
            exec(_SITE)
            importlib.import_module("torch")._import_device_backends()  # this tree's, too
            options = ["-xq", "-p", "no:cacheprovider", "-m", "not nightly"]
            code = importlib.import_module("pytest").main([*options, *self.job.tests])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)


def run(trees: list[Tree], jobs: Iterable[Job]) -> Iterator[tuple[Job, str, Tree]]:
    """Runs all jobs, as many at a time as there are trees; yields each as it ends."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    for each in _WARM:  # what takes most of the time of a few tests
        importlib.import_module(each)
    del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
    waiting, free, busy = list(jobs)[::-1], [*trees], []
    while waiting or busy:
        while waiting and free:
            busy.append(free.pop())
            busy[-1].start(waiting.pop())
        for tree in [*busy]:
            if (how := tree.ended()) is not None:
                busy.remove(tree)
                yield tree.job, how, tree
                free.append(tree)
        time.sleep(0.1)


def _write(file: Path, text: bytes) -> None:
    """Replaces a file, and what was compiled of it within the same second."""
    for each in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        each.unlink()
    file.write_bytes(text)

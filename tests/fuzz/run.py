"""Runs libFuzzer targets, two at a time, for a time that they share; fails where one finds a bug.

    python tests/fuzz/run.py --seconds 60 build/address/tests/fuzz/*_fuzz tests/fuzz/*_fuzz.py

Each begins with its committed corpus. An input that breaks it lies in build/fuzz/work; it belongs
into the corpus once the bug is fixed (corpus.py). --keep puts what was new and useful there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import corpus

BUILD = Path(__file__).parents[2] / "build/fuzz"
WORK = BUILD / "work"
MAX_BYTES = 4096  # of an input
LIMITS = ["-timeout=10", "-rss_limit_mb=2048", f"-max_len={MAX_BYTES}", "-print_final_stats=1"]
LEAKS = "detect_leaks=1:allocator_may_return_null=1"


@dataclass
class Target:
    """A program, its committed corpus, and where it leaves what it finds."""

    path: Path

    @property
    def name(self) -> str:
        """As its corpus is called."""
        return self.path.stem.removesuffix("_fuzz")

    @property
    def archive(self) -> Path:
        """The committed inputs."""
        return corpus.ARCHIVES / f"{self.name}.zip"

    @property
    def corpus(self) -> Path:
        """The committed inputs, unpacked."""
        return BUILD / "corpus" / self.name

    @property
    def found(self) -> Path:
        """The inputs of this run that reached something new."""
        return WORK / self.name

    def command(self, *options: str) -> list[str]:
        """How to run it."""
        program = (
            [sys.executable, str(self.path)] if self.path.suffix == ".py" else [str(self.path)]
        )
        return [*program, *options, f"-artifact_prefix={self.found}-"]


def main() -> int:
    """Returns how many targets found a bug."""
    options = parse()
    targets = [Target(path) for path in options.targets]
    share = max(1, round(options.seconds * options.jobs / len(targets)))
    with ThreadPoolExecutor(options.jobs) as pool:
        codes = list(pool.map(lambda target: fuzz(target, share), targets))
    if options.keep:
        for target in targets:
            keep(target)
    failed = sum(code != 0 for code in codes)
    print(f"fuzz: {len(targets) - failed} passed, {failed} failed", flush=True)
    return failed


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="for all targets together")
    parser.add_argument("--jobs", type=int, default=2, help="targets that run at the same time")
    parser.add_argument("--keep", action="store_true", help="add what was found to the corpora")
    parser.add_argument("targets", nargs="+", type=Path)
    return parser.parse_args()


def fuzz(target: Target, seconds: int) -> int:
    """Runs one target; prints a line, and all that it says where it fails."""
    shutil.rmtree(target.found, ignore_errors=True)
    target.found.mkdir(parents=True)
    corpus.unpack(target.archive, target.corpus)
    command = target.command(*LIMITS, f"-max_total_time={seconds}", str(target.found))
    done = subprocess.run(
        [*command, str(target.corpus)],
        env={**os.environ, "ASAN_OPTIONS": LEAKS},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    says = done.stdout.decode(errors="replace")
    print(f"fuzz {target.name}: {summary(says)}, {seconds} s, exit {done.returncode}", flush=True)
    if done.returncode != 0:
        print(says[-6000:], flush=True)
    return done.returncode


def summary(says: str) -> str:
    """The number of runs, and the last line that tells how much was covered."""
    runs = [line.split()[-1] for line in says.splitlines() if "number_of_executed_units" in line]
    covered = [line for line in says.splitlines() if " cov: " in line]
    reach = covered[-1].split(" exec/s")[0].split("\t")[-1] if covered else "no coverage"
    return f"{''.join(runs) or 'unknown'} runs, {' '.join(reach.split())}"


def keep(target: Target) -> None:
    """Adds to the corpus the smallest of the found inputs that reach what it does not."""
    merge = target.command("-merge=1", str(target.corpus), str(target.found))
    subprocess.run(merge, capture_output=True, check=True)
    corpus.pack(target.corpus, target.archive)


if __name__ == "__main__":
    sys.exit(main())

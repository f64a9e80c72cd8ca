"""This tree's speed beside that of another commit, in pairs.

    python -m bench.collectives.compare     # the merge base with main, or the commit before
    python -m bench.collectives.compare --base HEAD~5 --fail-below 0.95

Builds both under build/compare (this one as it lies in the working tree), and lets them take turns
in every case; the one that has none sleeps. A ratio is the base's time over this tree's, of turns
of the same round: above 1, this tree is faster. Prints its median over rounds, with an interval
that holds the true median with 95 % confidence, whatever the distribution. With --fail-below, exits
with 1 where a whole interval lies below. The results of every case are checked, on both sides.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from bench.common.machine import OtherLoad, describe
from bench.common.report import ROOT

PLACE = ROOT / "build" / "compare"
_SOURCES = ("csrc", "cmake", "python", "CMakeLists.txt")  # of what is built
_CONFIDENCE = 0.95
_FEWEST_ROUNDS = 6  # that make an interval of such confidence

Case = Mapping[str, Any]


def main() -> int:
    """Builds, measures, and prints."""
    options = _parse()
    base = base_of(ROOT, options.base)
    packages = {"base": build_commit(base), "this": build(ROOT, PLACE / "this")}
    load, compared = OtherLoad(), list[Compared]()
    print(f"this tree against {base[:12]}; {describe()}", flush=True)
    for ranks, transport in itertools.product(options.ranks, options.transports):
        for each in _compare(options, packages, ranks, transport):
            compared.append(each)
            tqdm.write(each.line())
    slower = [each for each in compared if each.is_below(options.fail_below)]
    print(f"other work took about {load.share():.0%} of the machine")
    if options.json is not None:
        found = {
            "base": base,
            "machine": describe(),
            "cases": [each.as_json() for each in compared],
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    for each in slower:
        print(f"slower than {options.fail_below:g} times the base: {each.line()}")
    return 1 if slower else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--base", help="commit; default: the merge base with the upstream or main")
    add("--collectives", nargs="+", default=["all_reduce", "reduce_scatter", "all_gather"])
    add("--sizes", type=int, nargs="+", default=[4, 1 << 16, 1 << 20, 1 << 24], help="bytes")
    add("-n", "--ranks", type=int, nargs="+", default=[2, 4])
    add("--transports", nargs="+", default=["shm", "tcp"])
    add("--algorithm", default="auto")
    add("--codec", default="none")
    add("--rounds", type=int, default=15)
    add("--fail-below", type=float, default=0.0, metavar="RATIO", help="as 0.95; default: never")
    add("--json", type=Path, help="file for all ratios")
    options = parser.parse_args()
    if options.rounds < _FEWEST_ROUNDS:
        parser.error(f"--rounds is at least {_FEWEST_ROUNDS}: fewer make no interval")
    return options


class Compared(NamedTuple):
    """A case, and the ratio of each round."""

    case: Case
    ranks: int
    transport: str
    microseconds: float  # of this tree, median
    ratios: Sequence[float]

    @property
    def median(self) -> float:
        """Above 1, this tree is faster."""
        return statistics.median(self.ratios)

    def line(self) -> str:
        """Of the table."""
        low, high = interval(self.ratios)
        what = f"{self.case['collective']} {self.case['nbytes']} B, p={self.ranks} {self.transport}"
        return f"{what:42} {self.microseconds:12.1f} µs  {self.median:.3f} [{low:.3f}, {high:.3f}]"

    def is_below(self, ratio: float) -> bool:
        """With all of its interval."""
        return interval(self.ratios)[1] < ratio

    def as_json(self) -> dict[str, Any]:
        """With the interval."""
        return {**self._asdict(), "median": self.median, "interval": interval(self.ratios)}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Of the median, by order statistics: the narrowest that holds it with _CONFIDENCE."""
    count, outside, left_out = len(values), 0.0, 0
    while True:
        outside += 2 * math.comb(count, left_out) / 2**count
        if outside > 1 - _CONFIDENCE:
            break
        left_out += 1
    ordered = sorted(values)
    if left_out == 0:
        raise ValueError(f"{count} values make no interval: {_FEWEST_ROUNDS} do")
    return ordered[left_out - 1], ordered[count - left_out]


def base_of(root: Path, ref: str | None) -> str:
    """A commit's hash: of `ref`, else where this tree left upstream or main, else its parent's."""
    if ref is not None:
        return _git(root, "rev-parse", "--verify", f"{ref}^{{commit}}")
    head = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--", *_SOURCES) != ""
    for upstream in ("@{upstream}", "origin/main", "main"):
        with contextlib.suppress(subprocess.CalledProcessError):
            base = _git(root, "merge-base", "HEAD", upstream)
            if base != head or changed:
                return base
    return _git(root, "rev-parse", "HEAD~1")


def _git(root: Path, *words: str) -> str:
    ended = subprocess.run(
        ["git", "-C", str(root), *words], stdout=subprocess.PIPE, text=True, check=True
    )
    return ended.stdout.strip()


def build_commit(commit: str) -> Path:
    """Where its package lies, built in a folder of its own, once."""
    place = PLACE / commit[:12]
    if not (place / "package").exists():
        source = place / "source"
        source.mkdir(parents=True, exist_ok=True)
        archive = subprocess.Popen(
            ["git", "-C", str(ROOT), "archive", commit], stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "-x", "-C", str(source)], stdin=archive.stdout, check=True)
        if archive.wait() != 0:
            raise RuntimeError(f"git archive {commit} failed")
        build(source, place)
    return place / "package"


def build(source: Path, place: Path) -> Path:
    """Builds the extension in release mode; where it lies with the Python files as they are."""
    import pybind11

    if shutil.which("cmake") is None:
        sys.exit("compare: no `cmake` command: pip install cmake ninja")
    print(f"building {source} …", file=sys.stderr, flush=True)
    tree = place / "build"
    configure = ["cmake", "-S", str(source), "-B", str(tree), "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}"]
    configure += [f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
    configure += ["-G", "Ninja"] if shutil.which("ninja") else []
    for command in (configure, ["cmake", "--build", str(tree), "--target", "_core"]):
        subprocess.run(command, check=True, stdout=sys.stderr)
    (core,) = tree.glob("_core*.so")
    return assemble(source / "python" / "gradwire", core, place / "package")


def assemble(python: Path, core: Path, package: Path) -> Path:
    """Copies the files of a package and its extension to package/gradwire; `package`."""
    with tempfile.TemporaryDirectory(dir=package.parent) as folder:
        made = Path(folder) / "package"
        other = shutil.ignore_patterns("_core*.so", "__pycache__")
        shutil.copytree(python, made / "gradwire", ignore=other)
        shutil.copy2(core, made / "gradwire")
        shutil.rmtree(package, ignore_errors=True)
        made.rename(package)
    return package


class Side:
    """The ranks of one tree."""

    def __init__(self, package: Path, ranks: int, transport: str) -> None:
        # Without site: an installed gradwire that is editable would come before PYTHONPATH.
        paths = [
            str(package),
            str(ROOT),
            *(sysconfig.get_path(each) for each in ("purelib", "platlib")),
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-m", "bench.collectives.compare_side", str(ranks), transport],
            env={**os.environ, "PYTHONPATH": ":".join(dict.fromkeys(paths))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **command: Any) -> Any:
        """Its answer; raises RuntimeError when it has ended, after it has said why."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the ranks ended in {command}")
        return json.loads(line)

    def close(self) -> None:
        """Ends the ranks."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()


def _compare(
    options: argparse.Namespace, packages: Mapping[str, Path], ranks: int, transport: str
) -> Iterator[Compared]:
    with contextlib.ExitStack() as stack:
        sides = {}
        for name, package in packages.items():
            sides[name] = Side(package, ranks, transport)
            stack.callback(sides[name].close)
        cases = list(itertools.product(options.collectives, options.sizes))
        for collective, nbytes in tqdm(cases, desc=f"p={ranks} {transport}", leave=False):
            case = {"collective": collective, "nbytes": nbytes, "algorithm": options.algorithm}
            case["codec"] = options.codec
            yield _compare_case(sides, case, options.rounds, ranks, transport)


def _compare_case(
    sides: Mapping[str, Side], case: dict[str, Any], rounds: int, ranks: int, transport: str
) -> Compared:
    calls = {name: side.ask(**case)["calls"] for name, side in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name in list(sides) if turn % 2 else reversed(list(sides)):
            times[name].append(sides[name].ask(**case, calls=calls[name])["seconds"])
    ratios = [base / this for base, this in zip(times["base"], times["this"], strict=True)]
    return Compared(case, ranks, transport, statistics.median(times["this"]) * 1e6, ratios)


if __name__ == "__main__":
    sys.exit(main())

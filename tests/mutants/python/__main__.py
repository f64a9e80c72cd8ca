"""`python -m tests.mutants.python`: whether tests notice small changes in the code.

A random sample of mutants, each with the tests that `TESTS` has for its file. They run in copies of
what is committed, so that the working tree stays as it is. (mutmut runs tests in one process, which
those that have threads and ranks do not survive; cosmic-ray knows one command for all files.)
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter

from tests.mutants.python.sample import Mutant, mutants
from tests.mutants.python.selection import EQUIVALENT
from tests.mutants.python.trees import ROOT, Job, Tree, run

_GOAL = 0.9  # share of mutants that tests notice


def _limits(trees: list[Tree], chosen: list[Mutant]) -> dict[tuple[str, ...], float]:
    """Seconds for each set of tests, which must pass as things are."""
    limits = {}
    for job, how, tree in run(trees, [Job(each, 900) for each in {m.tests: 0 for m in chosen}]):
        print(f"{tree.seconds:4.0f} s  {' '.join(job.tests)}", flush=True)
        if how != "passed":
            sys.exit(f"{tree.log}\n{how} without any change")
        limits[job.tests] = 60 + 3 * tree.seconds
    return limits


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.python", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="the number of mutants")
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--only", default="", help="a regular expression of files")
    parser.add_argument("--limit", type=float, help="seconds; without trying tests as things are")
    parser.add_argument("--workers", type=int, default=2, help="the number of mutants at a time")
    return parser.parse_args()


def _told(how: str, tree: Tree) -> str:
    """Says how a mutant's tests have ended, and which one has failed first."""
    failed = [each for each in tree.log.splitlines() if each.startswith(("FAILED", "ERROR"))]
    return "SURVIVED" if how == "passed" else " ".join([how, *failed[:1]])[:150]


def main() -> int:
    """Runs the sample; returns 1 where tests notice less than they should."""
    options = _parsed()
    trees = [Tree(ROOT / f"build/mutants/{each}") for each in range(options.workers)]
    known = mutants(trees[0].package, options.only)
    sample = random.Random(options.seed).sample(known, min(options.count, len(known)))
    print(f"seed {options.seed}: {len(sample)} of {len(known)} mutants", flush=True)
    chosen = [each for each in sample if each.key not in EQUIVALENT]
    limits = {} if options.limit else _limits(trees, chosen)
    jobs = {
        Job(m.tests, limits.get(m.tests, options.limit), m.path, m.change.of(m.source)): m
        for m in chosen
    }
    counts: Counter[str] = Counter()
    for job, how, tree in run(trees, jobs):
        counts[how] += 1
        print(
            f"{counts.total():3} {jobs[job].place} {_told(how, tree)}",
            *jobs[job].diff,
            sep="\n    ",
        )
        sys.stdout.flush()
    killed = counts["failed"] + counts["timed out"]
    share = killed / max(1, len(jobs))
    print(f"{killed} of {len(jobs)} killed ({share:.0%}), {len(sample) - len(chosen)} equivalent")
    return int(share < _GOAL)


sys.exit(main())

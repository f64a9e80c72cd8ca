"""Draws mutants at random, and says which of them the tests notice."""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING

from tests.mutants.cpp.operators import mutants_of
from tests.mutants.cpp.programs import PROGRAMS
from tests.mutants.cpp.trial import ROOT, Trials

if TYPE_CHECKING:
    from tests.mutants.cpp.operators import Mutant


def main() -> int:
    """Returns 0 where at least the wanted share was killed."""
    options = _options()
    files = [each for each in PROGRAMS if re.search(options.files, each)]
    texts = {each: ROOT.joinpath(each).read_text() for each in files}
    drawn = [mutant for file in files for mutant in mutants_of(file, texts[file])]
    random.Random(options.seed).shuffle(drawn)
    print(f"seed {options.seed}: {len(drawn)} mutants of {len(files)} files", flush=True)
    trials = Trials(sorted({each for file in files for each in PROGRAMS[file]}))
    counts = _try_all(trials, drawn, texts, options)
    tried = counts["killed"] + counts["survived"]
    share = counts["killed"] / max(tried, 1)
    print(f"seed {options.seed}: {counts['killed']} of {tried} killed, {share:.0%}")
    print(f"besides: {counts['equivalent']} equivalents, {counts['no build']} that do not compile")
    return 0 if share >= options.share else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.cpp", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--count", type=int, default=40, help="mutants that are counted")
    parser.add_argument("--files", default="", help="regular expression of those to mutate")
    parser.add_argument("--only", type=int, nargs="*", help="the mutants of these numbers")
    parser.add_argument("--share", type=float, default=0.9, help="that must be killed")
    return parser.parse_args()


def _try_all(
    trials: Trials, drawn: list[Mutant], texts: dict[str, str], options: argparse.Namespace
) -> dict[str, int]:
    counts = dict.fromkeys(("killed", "survived", "equivalent", "no build"), 0)
    equivalents = _equivalents()
    for number, mutant in enumerate(drawn):
        if counts["killed"] + counts["survived"] == options.count:
            break
        if options.only and number not in options.only:
            continue
        text = texts[mutant.file]
        if (mutant.file, *mutant.lines(text)) in equivalents:
            counts["equivalent"] += 1
            continue
        verdict = trials.verdict(mutant, PROGRAMS[mutant.file])
        counts[verdict if verdict in counts else "killed"] += 1
        line = text.count("\n", 0, mutant.first) + 1
        print(f"{number} {verdict}: {mutant.operator} at {mutant.file}:{line}", flush=True)
        if verdict == "survived":
            print(mutant.diff(text), flush=True)
    return counts


def _equivalents() -> set[tuple[str, str, str]]:
    """Reads equivalents.txt, whose first block says what the others are."""
    text = Path(__file__).with_name("equivalents.txt").read_text()
    listed = set()
    for block in text.strip().split("\n\n")[1:]:
        file, was, now, _why = block.splitlines()
        listed.add((file, was.removeprefix("- "), now.removeprefix("+ ")))
    return listed

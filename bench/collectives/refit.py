"""Does the cost model, fitted to some of the measured calls, predict the others?

    python -m bench.collectives.refit bench/results/model-2026-11-22.json

It takes a file of `model_check`, and measures nothing: the fit of `gradwire tune` gets the times of
four of its six sizes, and predicts those of the other two; auto's choice under the fitted model
is judged by what was measured of the algorithm that it names. Writes refit-STEM.md beside the file.
What tune measures itself is not in such files: other sizes, and broadcasts too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from gradwire import _core, _model
from gradwire._model import CostModel
from gradwire._schedules.schedule import groups_of
from gradwire._tuning import fit, measure

from bench.collectives import model_check
from bench.collectives.model_check import AUTO, CLOSE, CLOSE_SHARE, NEARLY_BEST, Case

HELD_OUT = (4 << 10, 8 << 20)  # bytes of calls that the fit does not see
_CORES = 2  # of the machines on which the files were measured
_FIT_SECONDS = 60.0  # a busy machine may take longer than a tuning is given


class Group(NamedTuple):
    """The cases of one link and number of ranks, their fitted model, and the cases' errors."""

    link: str
    ranks: int
    cases: Sequence[Case]
    model: CostModel
    errors: Mapping[tuple[str, int], float]  # predicted over measured, less one

    def close(self, sizes: Sequence[int] | None = None) -> tuple[int, int]:
        """How many predictions, of these sizes, are near enough, and of how many."""
        judged = [e for (_, size), e in self.errors.items() if sizes is None or size in sizes]
        return sum(abs(each) <= CLOSE for each in judged), len(judged)

    def per_host(self) -> int:
        """The ranks of a host: each has a network namespace where the links are held to a rate."""
        return self.ranks if self.link in ("shm", "tcp") else 1

    def behind(self, size: int) -> tuple[str, float]:
        """What auto chooses, and how far that is behind the best: infinite where nobody knows."""
        name, _ = self.model.choose(size, self.ranks, per_host=self.per_host())
        beside = [case for case in self.cases if case["bytes"] == size]
        taken = [case for case in beside if case["algorithm"] == name]
        taken += [c for c in beside if c["algorithm"] == AUTO and model_check.chosen(c) == name]
        if not taken:
            return name, float("inf")
        return name, model_check.behind({**taken[0], "algorithm": AUTO}, beside)[0]


def main() -> int:
    """Fits, judges, writes and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="a json file of model_check")
    path = parser.parse_args().file
    fit._MOST_FIT_SECONDS = _FIT_SECONDS
    groups = refit(json.loads(path.read_text(encoding="utf-8"))["cases"])
    text = "\n".join(document(groups))
    path.with_name(f"refit-{path.stem}.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def refit(cases: Sequence[Case]) -> list[Group]:
    """Fits a model for each link and number of ranks."""
    keys = dict.fromkeys((case["link"], case["ranks"]) for case in cases)
    return [
        _refit(*key, [case for case in cases if (case["link"], case["ranks"]) == key])
        for key in keys
    ]


def _refit(link: str, ranks: int, cases: Sequence[Case]) -> Group:
    named = model_check.fixed(cases)
    timings = [
        fit.Timing(
            measure.case_of_bytes(
                each["bytes"], ranks, collective="all_reduce", algorithm=each["algorithm"]
            ),
            model_check.measured(each),
        )
        for each in named
        if each["bytes"] not in HELD_OUT
    ]
    one_host = link in ("shm", "tcp")
    hosts = groups_of(ranks, ranks if one_host else 1)
    comm: Any = SimpleNamespace(hosts=tuple(map(tuple, hosts)), size=ranks)
    model = _core.CostModel(link if one_host else "shm", "tcp", _CORES)
    model.set("sharing", len(hosts))
    found = fit.Fit(comm, model, timings)
    found.run()
    public = _model.wrap(found.model)
    errors = {
        (each["algorithm"], each["bytes"]): public.predict(
            each["algorithm"], each["bytes"], ranks, per_host=len(hosts[0])
        )
        / model_check.measured(each)
        - 1
        for each in named
    }
    return Group(link, ranks, cases, public, errors)


def document(groups: Sequence[Group]) -> list[str]:
    """The report: shares of both goals, and the errors of all cases."""
    lines = ["# Predicted by a model that was fitted to other sizes", ""]
    lines += [f"`python -m bench.collectives.refit {' '.join(sys.argv[1:])}`.", ""]
    for words, sizes in (("all", None), ("sizes that the fit has not seen", HELD_OUT)):
        close, count = map(sum, zip(*(each.close(sizes) for each in groups), strict=True))
        lines.append(
            f"- {words}: {close / count:.0%} of {count} cases within {CLOSE:.0%} "
            f"(goal {CLOSE_SHARE:.0%})"
        )
    choices = [each.behind(size) for each in groups for size in _sizes(each)]
    best = sum(more <= NEARLY_BEST for _, more in choices) / len(choices)
    lines.append(f"- auto within {NEARLY_BEST:.0%} of the best in {best:.0%} of {len(choices)}")
    for each in groups:
        lines += _table(each)
    return lines


def _sizes(group: Group) -> list[int]:
    return list(dict.fromkeys(size for _, size in group.errors))


def _table(group: Group) -> list[str]:
    names = list(dict.fromkeys(name for name, _ in group.errors))
    lines = ["", f"## {group.link}, p = {group.ranks}: predicted over measured, less one", ""]
    lines += ["| bytes | " + " | ".join(names) + " | auto | to the best |"]
    lines += ["|---:|" + "---:|" * len(names) + "---|---:|"]
    for size in _sizes(group):
        cells = [f"{group.errors[name, size]:+.0%}" for name in names]
        chosen, more = group.behind(size)
        star = " \\*" if size in HELD_OUT else ""
        behind = f"{more:+.0%}" if more < float("inf") else "not measured"
        lines.append(f"| {size:,}{star} | " + " | ".join(cells) + f" | {chosen} | {behind} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())

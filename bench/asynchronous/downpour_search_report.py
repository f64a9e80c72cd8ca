"""The tables and the picture of downpour_search.py, from what its json holds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.asynchronous.downpour_simulated_report import Way
from bench.asynchronous.seeds import accuracy, final
from bench.common import report
from bench.common.report import Found

_SMALL = tuple((place, "int8") for place in "123")  # bias, 32 × 10, bias
_WARM = Way("uncompressed", "Adagrad", 0.02, warm_start=50)
_PLAIN = _WARM._replace(
    name="onebit up, int8 down, and no more", push_codec="onebit", pull_codec="int8", warm_up=0
)
_SYNCHRONOUS = Way("synchronous", "Adagrad", 0.02, synchronous=True)

CODECS = (
    _WARM,
    _WARM._replace(name="uncompressed, no warm start", warm_start=0),
    _WARM._replace(name="int8 up and down", push_codec="int8", pull_codec="int8"),
    _PLAIN,
    _PLAIN._replace(name="and every 20th push in int8", int8_every=20),
    _PLAIN._replace(name="and the last tenth of all pushes in int8", int8_from=0.9),
    _PLAIN._replace(name="in blocks of 256", push_codec="onebit:block=256"),
    _PLAIN._replace(name="rate 0.03", lr=0.03),
    _PLAIN._replace(name="and small parameters in int8", rules=_SMALL),
    _PLAIN._replace(
        name="and small parameters and the first 1,000 pushes in int8: the default", warm_up=None
    ),
)


def _rates(
    rates: Sequence[float], each: int, staleness: str = "keep", most: int | None = None
) -> Iterator[Way]:
    rule = {"keep": "", "divide": " over staleness"}[staleness]
    limit = "" if most is None else f", max_staleness {most}"
    for lr in rates:
        name = f"rate {lr:g}{rule}{limit}, warm start {each}"
        yield _WARM._replace(
            name=name, lr=lr, warm_start=each, staleness=staleness, max_staleness=most
        )


_SYNCHRONOUS_RATES = tuple(
    _SYNCHRONOUS._replace(name=f"synchronous, rate {lr:g}", lr=lr) for lr in (0.02, 0.04)
)
CASES: Mapping[int, Sequence[Way]] = {
    4: CODECS,
    16: (
        *_SYNCHRONOUS_RATES,
        *_rates((0.02, 0.01, 0.005, 0.0025), 50),
        *_rates((0.02, 0.04), 50, "divide"),
    ),
    64: (
        *_SYNCHRONOUS_RATES,
        *_rates((0.02, 0.01, 0.005, 0.0025), 50),
        *_rates((0.02, 0.04), 50, "divide"),
        *_rates((0.02, 0.01, 0.005, 0.0025), 4),
        *_rates((0.02, 0.04), 4, "divide"),
        *_rates((0.005,), 50, most=32),
    ),
}


def codecs(found: Found) -> list[str]:
    """Accuracy with compressed pushes, beside that without."""
    base = {run["seed"]: run for run in _runs(found, 4, CODECS[0].name)}
    rows = (
        [way.name, accuracy(runs), _differences(runs, [base[run["seed"]] for run in runs])]
        for way in CODECS
        if (runs := _runs(found, 4, way.name))
    )
    return report.table("4 replicas, warm start | test accuracy, % | less than uncompressed", rows)


def rates(found: Found) -> list[str]:
    """Accuracy by rate, rule for staleness and warm start, for each number of replicas."""
    rows = (
        (replicas, way.name, accuracy(runs), f"{_staleness(runs):.1f}")
        for replicas, ways in CASES.items()
        for way in (ways if replicas != 4 else ())
        if (runs := _runs(found, replicas, way.name))
    )
    return report.table("replicas | Adagrad | test accuracy, % | mean staleness", rows, "rl")


def document(found: Found, stem: str) -> str:
    """The md file, whose picture is called as it is."""
    seeds = sorted({each["seed"] for each in found["runs"]})
    return report.document(
        "Settings of Downpour SGD, in virtual time",
        report.origin(found),
        f"{found['data']}, 784-32-10, {len(seeds)} seed(s): means ± standard deviations; "
        f"differences are those of equal seeds. {max(r['gradients'] for r in found['runs']):,} "
        "gradients of 32 images in each run. A warm start is so many pushes for each replica, by "
        "the first one alone.",
        f"![Test accuracy by rate]({stem}.png)",
        codecs(found),
        rates(found),
    )


def draw(found: Found, path: Path) -> None:
    """Accuracy with 16 and 64 replicas: a dot for each seed and a mark for their mean."""
    ways = {replicas: ways for replicas, ways in CASES.items() if replicas != 4}
    heights = [len(each) + 1 for each in ways.values()]
    options = {"sharex": True, "height_ratios": heights}
    with report.picture(path, report.PAGE, 0.33 * sum(heights), len(ways), **options) as (_, rows):
        for panel, (replicas, its) in zip(rows.flat, ways.items(), strict=True):
            shown = {way: runs for way in its if (runs := _runs(found, replicas, way.name))}
            for place, (way, runs) in enumerate(shown.items()):
                _draw_seeds(panel, place, way, runs)
            names = [way.name.replace("over staleness", "÷ staleness") for way in shown]
            panel.set_yticks(range(len(shown)), names, fontsize=10)
            panel.yaxis.set_inverted(True)
            panel.set_title(f"{replicas} replicas", loc="left")
        panel.set_xlabel(f"test accuracy, {found['data']} (%)")


def _draw_seeds(panel: Any, place: int, way: Way, runs: Sequence[Found]) -> None:
    plain = report.OTHERS if way.synchronous else report.NEUTRAL
    colour = report.OURS if way.staleness == "divide" else plain
    ends = [100 * each["curve"][-1][2] for each in runs]
    panel.plot(ends, [place] * len(ends), ".", color=colour, alpha=0.5)
    panel.plot([final(runs)], [place], "|", color=colour, markersize=14, markeredgewidth=3)


def _runs(found: Found, replicas: int, way: str) -> Sequence[Found]:
    return [each for each in found["runs"] if each["replicas"] == replicas and each["way"] == way]


def _staleness(runs: Sequence[Found]) -> float:
    return statistics.fmean(each["staleness"] for each in runs)


def _differences(runs: Sequence[Found], base: Sequence[Found]) -> str:
    ends = [
        100 * (one["curve"][-1][2] - other["curve"][-1][2])
        for one, other in zip(runs, base, strict=True)
    ]
    return report.spread(ends, 2, sign=True).replace("−", "-")

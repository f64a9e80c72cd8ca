"""Pictures of `gradwire advise`, `gradwire bench` and `gradwire simulate`, by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradwire._base.units import show_bytes
from gradwire._errors import InvalidArgument
from gradwire.lab.planner.report import Advice
from gradwire.lab.simulation.runs import Run, fastest
from gradwire.lab.tuning.measure import Result


def require() -> None:
    """Raises InvalidArgument where matplotlib is not installed: before anything is computed."""
    try:
        import matplotlib
    except ImportError:
        raise InvalidArgument("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")


def advice(found: Advice, path: Path) -> None:
    """Draws the steps of each codec, by the fastest algorithm, and how training scales."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    _steps(left, found)
    for label, rows in (("same batch on each rank", found.weak), ("batch shared", found.strong)):
        right.plot([row[0] for row in rows], [row[2] for row in rows], "o-", ms=4, label=label)
    ends = [1, found.ranks]
    right.plot(ends, ends, color="0.6", lw=0.8, label="ideal")
    right.set(xscale="log", yscale="log", xlabel="ranks", ylabel="speed-up over one rank")
    right.set_title("scaling without a codec")
    right.legend(fontsize=8)
    right.grid(alpha=0.3)
    figure.suptitle(f"{found.network.name} on {found.ranks} ranks")
    _save(figure, path)


def _steps(axes: Any, found: Advice) -> None:
    fastest_of: dict[str, Any] = {}
    for each in found.predictions:
        if each.mode != "synchronous":
            continue
        if each.codec not in fastest_of or each.step < fastest_of[each.codec].step:
            fastest_of[each.codec] = each
    names = [f"{codec}\n{each.algorithm}" for codec, each in fastest_of.items()]
    computed = [each.compute * 1e3 for each in fastest_of.values()]
    waited = [each.exposed * 1e3 for each in fastest_of.values()]
    axes.barh(names, computed, label="computing")
    axes.barh(names, waited, left=computed, label="waiting")
    axes.invert_yaxis()
    axes.set(xlabel="predicted milliseconds of a step")
    axes.tick_params(axis="y", labelsize=7)
    axes.legend(fontsize=8)


def simulation(runs: Sequence[Run], path: Path) -> None:
    """Draws seconds over ranks or bytes; of several of both, which algorithm is the fastest."""
    from matplotlib import pyplot

    ranks = sorted({each.ranks for each in runs})
    sizes = sorted({each.nbytes for each in runs})
    if len(ranks) > 1 and len(sizes) > 1:
        figure, axes = pyplot.subplots(figsize=(8.5, 5), layout="constrained")
        _map(axes, runs, ranks, sizes)
    else:
        figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
        _lines(axes, runs, over_ranks=len(ranks) > 1)
    _save(figure, path)


def _lines(axes: Any, runs: Sequence[Run], *, over_ranks: bool) -> None:
    for name in dict.fromkeys(each.algorithm for each in runs):
        own = [each for each in runs if each.algorithm == name and each.ranks > 1]
        at = [each.ranks if over_ranks else each.nbytes for each in own]
        axes.plot(at, [each.seconds for each in own], "o-", ms=3, label=name)
    axes.set(xscale="log", yscale="log", ylabel="predicted seconds")
    axes.set_xlabel("ranks" if over_ranks else "bytes")
    fixed = show_bytes(runs[0].nbytes) if over_ranks else f"{runs[0].ranks} ranks"
    axes.set_title(f"all_reduce, {fixed}")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _map(axes: Any, runs: Sequence[Run], ranks: list[int], sizes: list[float]) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    best = fastest(runs)
    names = sorted({each.algorithm for each in best.values()})
    numbers = [[names.index(best[p, size].algorithm) for size in sizes] for p in ranks]
    colors = colormaps["tab10"]
    axes.pcolormesh(numbers, cmap=colors, vmin=-0.5, vmax=9.5, edgecolors="white", lw=0.5)
    axes.set_xticks([i + 0.5 for i in range(len(sizes))], map(show_bytes, sizes), rotation=60)
    axes.set_yticks([i + 0.5 for i in range(len(ranks))], [f"{p:,}" for p in ranks])
    axes.set(xlabel="bytes", ylabel="ranks", title="the fastest all_reduce")
    patches = [Patch(color=colors(index), label=name) for index, name in enumerate(names)]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8)


def bandwidth(found: Sequence[Result], title: str, path: Path) -> None:
    """Draws bandwidths over size."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    size = [each.case.nbytes for each in found]
    axes.plot(size, [each.busbw for each in found], marker="o", label="busbw")
    axes.plot(size, [each.algbw for each in found], marker="s", label="algbw")
    axes.set_xscale("log", base=2)
    axes.set(title=title, xlabel="bytes", ylabel="GB/s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:  # an ending that matplotlib does not know
        raise InvalidArgument(f"--plot {path}: {error}") from error
    finally:
        pyplot.close(figure)

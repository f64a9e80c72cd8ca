"""The tables of README and of docs/, made from the newest files in bench/results.

    python -m bench.tables            # writes what is between <!-- table: NAME --> and <!-- end -->
    python -m bench.tables --check    # exits with 1 where a document says other than the results

A table whose results lack a row or a column of it stays as it is, and why is printed.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gradwire

from bench.asynchronous import (
    diloco_report,
    downpour_report,
    downpour_search_report,
    downpour_simulated_report,
    sandblaster_report,
    stragglers_report,
)
from bench.codecs import lossless
from bench.common import report
from bench.common.report import RESULTS, ROOT, size
from bench.cuda import report as gpu_report
from bench.libraries import between_hosts_report, peers_report
from bench.libraries.peer_teams import GLOO as GLOO_LIBRARY
from bench.libraries.peer_teams import GRADWIRE
from bench.local_sgd import coming_and_going_report, losses_report, streaming_report
from bench.network import (
    long_link_report,
    relayed_report,
    two_interfaces_report,
    two_sites_report,
)
from bench.serve import peers_report as serve_report
from bench.torch_backend import beside_gloo_report, hybrid_report
from bench.training import trace_cost
from bench.training.methods import (
    GLOO,
    GLOO_FP16,
    GLOO_POWERSGD,
    LOW_RANK,
    ONEBIT,
    PEERS,
    THRESHOLD,
    TOPK,
    TRAINED,
    Method,
)
from bench.training.train_report import DENSE, Setting, accuracy, first_share, settings_of
from bench.training.train_runs import Result, read_results
from bench.training.trials import large_batch_report, optimizers_report
from bench.training.trials.trial import Outcome, read

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

_BATCHES = (16, 64)  # images a rank and step
_LINKS = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "none": "one host"}
_CHOICES = {
    GLOO: "gloo DDP",
    "none": "gradwire `none`",
    "fp16": "`fp16`",
    ONEBIT: "`onebit`",
    LOW_RANK: "`lowrank`",
}
_ADVICE = {
    "100mbit": ("100 Mbit/s", "`lowrank`, or `onebit` for a model with few matrices"),
    "1gbit": ("1 Gbit/s", "`fp16` or `int8`; `lowrank` where it must be faster"),
    "none": ("shared memory", "`none`: there is nothing to win"),
}
_NOTES = {ONEBIT: " ¹", THRESHOLD: " ²", TOPK: " ³"}  # of their options, below the table
_SIZES = (4, 1 << 16, 1 << 20, 1 << 24, 1 << 26)  # bytes
_RANKS = (2, 4)
_LARGE_BATCH_TARGET = 0.87  # test accuracy, which large batches reach, too, in 4 epochs


class Incomplete(Exception):
    """The newest results do not make the table."""


def main() -> int:
    """Writes the documents, or compares them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 instead")
    check = parser.parse_args().check
    differing = [each for each in DOCUMENTS if not _is_up_to_date(each, write=not check)]
    if check and differing:
        names = ", ".join(each.name for each in differing)
        print(f"{names}: differ from bench/results: run `python -m bench.tables`", file=sys.stderr)
        return 1
    return 0


def _is_up_to_date(document: Path, *, write: bool) -> bool:
    before = document.read_text(encoding="utf-8")
    after = rewritten(before, RESULTS)
    if write and after != before:
        document.write_text(after, encoding="utf-8")
    return after == before


def rewritten(text: str, results: Path) -> str:
    """With every marked table made anew; prints which could not be."""

    def block(found: re.Match[str]) -> str:
        try:
            rows = TABLES[found[2]](results)
        except Incomplete as why:
            print(f"table {found[2]} is left as it is: {why}", file=sys.stderr)
            return found[0]
        return f"{found[1]}\n{chr(10).join(rows)}\n\n{found[4]}"

    return _BLOCK.sub(block, text)


def newest(results: Path, pattern: str) -> Path:
    """By the date in the name; raises Incomplete."""
    found = sorted(results.glob(pattern))
    if not found:
        raise Incomplete(f"{results} has no {pattern}")
    return found[-1]


def codecs(results: Path) -> list[str]:
    """What every codec does to accuracy, bytes, and the milliseconds of a step."""
    runs = newest(results, "train-runs-*.jsonl")
    steps = newest(results, "step-times-*.json")
    by_batch = _by_batch(read_results(runs))
    found = json.loads(steps.read_text(encoding="utf-8"))["step_ms"]
    step_ms = {link: _by_step(found.get(link, {})) for link in _LINKS}
    _check_complete(runs, by_batch, steps, step_ms)
    rows = []
    for method in (GLOO, GLOO_FP16, GLOO_POWERSGD, *TRAINED):
        cells = [_accuracy(setting, method) for setting in by_batch.values()]
        cells.append(_ratio(list(by_batch.values()), method))
        cells += [_number(step_ms[link].get(_step(method)), ".1f") for link in _LINKS]
        title = PEERS.get(method, Method.parse(method).family) + _NOTES.get(method, "")
        rows.append([title, *cells])
    head = ["", *(f"accuracy, {batch}" for batch in _BATCHES), "ratio"]
    head += [f"ms, {title}" for title in _LINKS.values()]
    return report.table(" | ".join(head), rows)


def links(results: Path) -> list[str]:
    """The milliseconds of a training step by link, of a few methods, and which of them to use."""
    steps = newest(results, "step-times-*.json")
    found = json.loads(steps.read_text(encoding="utf-8"))["step_ms"]
    rows = []
    for link, (title, advice) in _ADVICE.items():
        step_ms = _by_step(found.get(link, {}))
        cells = [step_ms.get(_step(method)) for method in _CHOICES]
        if None in cells:
            raise Incomplete(f"{steps.name} has not all of {', '.join(_CHOICES)} over {link}")
        rows.append([title, *(_number(ms, ".1f") for ms in cells), advice])
    head = ["ranks joined by", *_CHOICES.values(), "use"]
    return report.table(" | ".join(head), rows, "l" + "r" * len(_CHOICES) + "l")


def _by_batch(results: Sequence[Result]) -> dict[int, Setting]:
    """The runs with each batch size, of the settings that the most methods share."""
    settings = settings_of([each for each in results if _is_known(each.run.method)])
    found: dict[int, Setting] = {}
    for each in sorted(settings, key=lambda setting: len(setting.methods)):
        found[each.run.batch] = each
    return {batch: found[batch] for batch in _BATCHES if batch in found}


def _by_step(milliseconds: Mapping[str, float]) -> dict[str, float]:
    return {_step(method): ms for method, ms in milliseconds.items() if _is_known(method)}


def _step(method: str) -> str:
    """What a step does; how many steps another codec has before it makes no difference."""
    parsed = Method.parse(method)
    return str(parsed._replace(options=parsed.options._replace(int8=None)))


def _is_known(method: str) -> bool:
    """Whether it is one, and not one that was."""
    try:
        Method.parse(method).check()
    except gradwire.InvalidArgument:
        return False
    return True


def _check_complete(
    runs: Path,
    by_batch: Mapping[int, Setting],
    steps: Path,
    step_ms: Mapping[str, Mapping[str, float]],
) -> None:
    for batch in _BATCHES:
        have = by_batch[batch].methods if batch in by_batch else []
        if missing := [each for each in TRAINED if each not in have]:
            raise Incomplete(f"{runs.name} has no {batch}-image runs of {', '.join(missing)}")
    for link in _LINKS:
        if missing := [each for each in TRAINED if _step(each) not in step_ms[link]]:
            raise Incomplete(f"{steps.name} has no steps over {link} of {', '.join(missing)}")


def _accuracy(setting: Setting, method: str) -> str:
    """Less that of `none`; in brackets how many seeds."""
    points = setting.points(method)
    if method != DENSE:
        points = setting.differences(method, DENSE, accuracy)
    sign = "" if method == DENSE else "+"
    return f"{statistics.fmean(points):{sign}.2f} ({len(points)})" if points else "–"


def _ratio(settings: Sequence[Setting], method: str) -> str:
    results = [each for setting in settings for each in setting.of(method)]
    found = [ratio for each in results if (ratio := each.ratio(first_share(each))) is not None]
    mean = statistics.fmean(found) if found else None
    return "–" if mean is None else f"{mean:.{1 if mean < 100 else 0}f}×"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def peers(results: Path) -> list[str]:
    """Microseconds of all_reduce, and how many times faster than the best other, and than gloo."""
    path = newest(results, "peers-*.json")
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    found = {(each["transport"], each["ranks"], each["bytes"]): each for each in cases}
    columns = [(transport, ranks) for transport in ("shm", "tcp") for ranks in _RANKS]
    rows = []
    for nbytes in _SIZES:
        cells = [_beside(path, found.get((*column, nbytes)), column, nbytes) for column in columns]
        rows.append([size(nbytes), *cells])
    head = ["", *(f"{transport}, {ranks} ranks" for transport, ranks in columns)]
    return _of(path, report.table(" | ".join(head), rows))


def _beside(
    path: Path, case: peers_report.Case | None, column: tuple[str, int], nbytes: int
) -> str:
    to_best = None if case is None else peers_report.to_best(case)
    if case is None or to_best is None or GLOO_LIBRARY not in case["seconds"]:
        raise Incomplete(f"{path.name} has no {nbytes} bytes over {column[0]}, p = {column[1]}")
    microseconds = peers_report.median(case, GRADWIRE) * 1e6
    digits = 2 if microseconds < 10 else 1 if microseconds < 1000 else 0
    gloo = peers_report.ratio(case, GLOO_LIBRARY)
    return f"{microseconds:,.{digits}f} ({to_best:.1f}×, {gloo:.1f}×)"


def gpu(results: Path) -> list[str]:
    """Kernels on a GPU as shares of a copy's bandwidth, and how many checks passed there."""
    files = sorted(results.glob("gpu-*.json"))
    if not files:
        return ["Nothing was measured on a GPU yet."]
    found = json.loads(files[-1].read_text(encoding="utf-8"))
    document = f"all of it: `bench/results/{files[-1].stem}.md`"
    said = f"{found['gpu']['name']}, {found['date'][:10]}: {gpu_report.verdict(found)}"
    times = gpu_report.of_kernels(found)
    if not times:
        return [f"{said} No kernel was timed; {document}."]
    rate = gpu_report.copy_rate(times)
    copies = f"A copy reads and writes {rate:,.0f} GB/s; {document}."
    return [f"{said} {copies}", "", *gpu_report.speeds(times)]


def backend(results: Path) -> list[str]:
    """Milliseconds of the backend's collectives, and how many times faster than gloo they are."""
    path = newest(results, "backend-*.json")
    found = _loaded(path)["collectives"]
    rows = []
    first = next(iter(found.values()))
    for operation, by_size in first.items():
        for nbytes in by_size:
            cells = [_beside_gloo(its[operation][nbytes]) for its in found.values()]
            title = f"{operation}, {size(int(nbytes))}"
            rows.append([title, *cells])
    return _of(path, report.table(" | ".join(["", *(f"{ranks} ranks" for ranks in found)]), rows))


def _beside_gloo(its: Mapping[str, list[float]]) -> str:
    ratio = beside_gloo_report.ratio(its, beside_gloo_report.GLOO, beside_gloo_report.GRADWIRE)
    milliseconds = beside_gloo_report.milliseconds(its[beside_gloo_report.GRADWIRE])
    return f"{milliseconds} ({ratio:.1f}×)"


def backend_goals(results: Path) -> list[str]:
    """What the backend's calls may cost, and what they cost."""
    found = _loaded(newest(results, "backend-*.json"))
    return beside_gloo_report.goals(found)


def backend_steps(results: Path) -> list[str]:
    """Milliseconds and bytes of training steps, by way and link, with the most ranks."""
    return _steps_of_most_ranks(newest(results, "backend-*.json"))


def shaped_backend_steps(results: Path) -> list[str]:
    """The same over links that hold gloo's traffic back too."""
    return _steps_of_most_ranks(newest(results, "shaped-backend-*.json"))


def _steps_of_most_ranks(path: Path) -> list[str]:
    found = _loaded(path)["steps"]
    most = {link: list(by_ranks.items())[-1:] for link, by_ranks in found.items()}
    return _of(path, beside_gloo_report.steps({"steps": {k: dict(v) for k, v in most.items()}}))


def hybrid(results: Path) -> list[str]:
    """Bytes and milliseconds of a step with the most ranks, by network and way."""
    found = _loaded(newest(results, "hybrid-*.json"))
    return hybrid_report.summary(found)


def diloco(results: Path) -> list[str]:
    """Accuracy, bytes and simulated seconds of DiLoCo and local SGD beside synchronous SGD."""
    return diloco_report.summary(_loaded(newest(results, "diloco-*.json")))


def coming_and_going(results: Path) -> list[str]:
    """Trainings with elastic.DiLoCo, undisturbed and disturbed, and the goals."""
    return coming_and_going_report.summary(_loaded(newest(results, "coming-and-going-*.json")))


def streaming(results: Path) -> list[str]:
    """How long a step takes with Streaming DiLoCo over a link of just its rate."""
    path = newest(results, "streaming-*.json")
    return _of(path, streaming_report.table(_loaded(path)))


def local_sgd_by_ranks(results: Path) -> list[str]:
    """The loss of DiLoCo with AdamW inside, by number of ranks."""
    return _local_sgd(results).by_ranks()


def local_sgd_by_rounds(results: Path) -> list[str]:
    """The loss of SparseLoCo beside DiLoCo's, by length of a round."""
    return _local_sgd(results).by_rounds()


def local_sgd_by_inner(results: Path) -> list[str]:
    """The loss of DiLoCo with AdamW and Muon inside, by codec of outer gradients."""
    return _local_sgd(results).by_inner()


def _local_sgd(results: Path) -> losses_report.Rows:
    return losses_report.Rows(losses_report.read(newest(results, "local-sgd-*-runs.jsonl")))


def optimizers(results: Path) -> list[str]:
    """The loss above AdamW's with dense gradients, by optimizer and exchange, and ratios."""
    return list(optimizers_report.summary(_optimizer_runs(results)))


def other_optimizers(results: Path) -> list[str]:
    """What compression costs SGD and Lion."""
    return list(optimizers_report.others(_optimizer_runs(results)))


def optimizer_links(results: Path) -> list[str]:
    """Milliseconds of a step by optimizer and link; no rows until some were timed."""
    return list(optimizers_report.links(_optimizer_runs(results)))


def _optimizer_runs(results: Path) -> list[Outcome]:
    return optimizers_report.read(newest(results, "optimizers-*-runs.jsonl"))


def large_batch(results: Path) -> list[str]:
    """Accuracy, steps and bytes by batch, and what growth, codecs and local steps save."""
    outcomes = read(newest(results, "large-batch-*-runs.jsonl"))
    rows = large_batch_report.rows_of(outcomes)
    growth = large_batch_report.growth(rows, _LARGE_BATCH_TARGET)
    return [*growth, "", *large_batch_report.savings(rows, _LARGE_BATCH_TARGET)]


def downpour(results: Path) -> list[str]:
    """Accuracy, seconds, staleness and pace of Downpour SGD beside synchronous training."""
    return downpour_report.summary(_loaded(newest(results, "downpour-*.json")))


def simulated_downpour(results: Path) -> list[str]:
    """Accuracy of Downpour SGD with 4, 16 and 64 replicas in virtual time."""
    found = _loaded(newest(results, "simulated-downpour-*.json"))
    return downpour_simulated_report.tables(found)


def downpour_codecs(results: Path) -> list[str]:
    """Accuracy of Downpour SGD with compressed pushes."""
    return downpour_search_report.codecs(_searched(results))


def downpour_rates(results: Path) -> list[str]:
    """Accuracy of Downpour SGD with 16 and 64 replicas, by rate and warm start."""
    return downpour_search_report.rates(_searched(results))


def _searched(results: Path) -> dict[str, Any]:
    return _loaded(newest(results, "search-downpour-*.json"))


def sandblaster(results: Path) -> list[str]:
    """The losses of L-BFGS on several replicas, beside SGD, Adam and one process."""
    found = _loaded(newest(results, "sandblaster-*.json"))
    return sandblaster_report.summary(found)


def stragglers(results: Path) -> list[str]:
    """What slow and stopped replicas cost a batch."""
    found = _loaded(newest(results, "sandblaster-*.json"))
    return sandblaster_report.stragglers(found)


def real_stragglers(results: Path) -> list[str]:
    """What slow replicas cost Sandblaster in real time."""
    return stragglers_report.summary(_loaded(newest(results, "stragglers-*.json")))


def serve(results: Path) -> list[str]:
    """Milliseconds of pulls and pushes beside other ways, and what they may cost."""
    files = sorted(results.glob("serve-*.json"))
    if not files:
        return ["Not measured on a machine without other work yet."]
    path = files[-1]
    found = _loaded(path)
    if missing := [each for each in serve_report.TEAMS if each not in found["cases"][0]["seconds"]]:
        raise Incomplete(f"{path.name} has no turns of {', '.join(missing)}")
    return _of(path, [*serve_report.summary(found), "", *serve_report.goal_table(found)])


def between_hosts(results: Path) -> list[str]:
    """How long an all_reduce between two namespaces takes, beside gloo and MPICH."""
    path = newest(results, "between-hosts-*.json")
    return _of(path, between_hosts_report.table(_loaded(path)))


def long_links(results: Path) -> list[str]:
    """How full an all_reduce makes a long link, beside plain TCP streams."""
    path = newest(results, "long-link-*.json")
    return _of(path, long_link_report.table(_loaded(path)))


def two_sites(results: Path) -> list[str]:
    """A step of DDP at two sites, beside what its bytes take between them."""
    path = newest(results, "two-sites-*.json")
    return _of(path, two_sites_report.table(_loaded(path)))


def two_interfaces(results: Path) -> list[str]:
    """One interface and two, between two ranks."""
    path = newest(results, "two-interfaces-*.json")
    return _of(path, two_interfaces_report.table(_loaded(path)))


def relayed(results: Path) -> list[str]:
    """The rate of a relayed pair, beside its share of the relay's link."""
    path = newest(results, "relayed-*.json")
    return _of(path, relayed_report.table(_loaded(path)))


def traces(results: Path) -> list[str]:
    """The cost of recording, in training steps and calls."""
    return trace_cost.table(_loaded(newest(results, "trace-cost-*.json")))


def metrics(results: Path) -> list[str]:
    """The cost of counting, in calls."""
    return trace_cost.table(_loaded(newest(results, "metrics-cost-*.json")))


def packed(results: Path) -> list[str]:
    """Bytes and speed of the codec lossless."""
    path = newest(results, "lossless-*.json")
    return _of(path, lossless.table(_loaded(path)))


def _of(path: Path, rows: list[str]) -> list[str]:
    """Rows after a line that says when, where and beside what they were measured."""
    found = _loaded(path)
    where = f"{found['date'][:10]}, {found['machine']}"
    return [f"{where}; all of it: `bench/results/{path.stem}.md`.", "", *rows]


def _loaded(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


TABLES: dict[str, Callable[[Path], list[str]]] = {
    "codecs": codecs,
    "links": links,
    "peers": peers,
    "gpu": gpu,
    "backend": backend,
    "backend-goals": backend_goals,
    "backend-steps": backend_steps,
    "shaped-backend-steps": shaped_backend_steps,
    "hybrid": hybrid,
    "diloco": diloco,
    "coming-and-going": coming_and_going,
    "streaming": streaming,
    "local-sgd-by-ranks": local_sgd_by_ranks,
    "local-sgd-by-rounds": local_sgd_by_rounds,
    "local-sgd-by-inner": local_sgd_by_inner,
    "optimizers": optimizers,
    "optimizer-others": other_optimizers,
    "optimizer-links": optimizer_links,
    "large-batch": large_batch,
    "downpour": downpour,
    "simulated-downpour": simulated_downpour,
    "downpour-codecs": downpour_codecs,
    "downpour-rates": downpour_rates,
    "sandblaster": sandblaster,
    "stragglers": stragglers,
    "real-stragglers": real_stragglers,
    "serve": serve,
    "between-hosts": between_hosts,
    "long-link": long_links,
    "two-interfaces": two_interfaces,
    "two-sites": two_sites,
    "relayed": relayed,
    "trace-cost": traces,
    "metrics-cost": metrics,
    "lossless": packed,
}


if __name__ == "__main__":
    sys.exit(main())

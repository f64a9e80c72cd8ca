"""Does `gradwire advise` predict what steps of DistributedDataParallel take? Ten cases.

    python -m bench.planning.step_check             # between network namespaces, which takes root
    python -m bench.planning.step_check --emulated  # over gradwire's emulated links: no root
    python -m bench.planning.step_check --of bench/results/step-times-DATE.json  # measures nothing

Two networks are trained over links of 100 Mbit/s and 1 Gbit/s by `step_times`, 4 ranks, and each
codec's step is predicted from the time of the same step with a hook that averages nothing (which
the planner cannot know) and a cost model of the links, which the ranks have tuned. Computing takes
that step's time, or the processor time of all ranks over the machine's cores if that is more: ranks
that do not wait for each other are not all at work at once. With `--of` the figures of a run of
`step_times` are predicted, from its step over shared memory. Writes
bench/results/planned-steps-DATE.json, .md and .png. Other work on the machine makes what is
measured longer, and not what is predicted: run it alone.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire import CostModel
from gradwire.lab.planner.exchanges import PER_BUCKET, Cluster
from gradwire.lab.planner.steps import buckets, synchronous
from gradwire.lab.planner.walk import walk
from gradwire.lab.simulation.topology import flat
from torch import nn

from bench.common import job, report
from bench.common.machine import OtherLoad
from bench.network import links
from bench.training import images
from bench.training.methods import ONEBIT, PEERS, Method
from bench.training.step_report import EMPTY_HOOK, LOCAL

RANKS, SIDE = 4, 28
CLOSE, CLOSE_SHARE = 0.2, 0.8  # the goal: so near in so many cases
CASES: dict[tuple[str, str], tuple[str, ...]] = {  # network and link: methods
    ("cnn", "100mbit"): ("none", "int8", ONEBIT),
    ("cnn", "1gbit"): ("none", "int8"),
    ("mlp", "100mbit"): ("int8", ONEBIT),
    ("mlp", "1gbit"): ("none", "fp16", "int8"),
}
_TICKS = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000)  # milliseconds
_EMULATED_LATENCY = 40e-6  # seconds one way


def cnn() -> nn.Module:
    """The network that step_times trains by default."""
    return images.small_cnn(SIDE, 640)


def mlp() -> nn.Module:
    """The network that step_times trains as "mlp"."""
    return images.mlp(SIDE)


def main() -> int:
    """Measures, predicts, writes, and prints how near they are."""
    options = _parse()
    if options.of is not None:
        measured = json.loads(options.of.read_text(encoding="utf-8"))
        return _report(of_step_times(measured), f"measured on {measured['machine']}", options)
    why = None if options.emulated else links.missing()
    if why is not None:
        print(f"step_check: {why}; --emulated needs none of it", file=sys.stderr)
        return 1
    load = OtherLoad()
    rows = [row for case in CASES for row in _case(*case, options)]
    return _report(rows, load.describe(), options)


def _report(rows: list[dict[str, Any]], machine: str, options: argparse.Namespace) -> int:
    found = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine,
        "command": " ".join(["-m bench.planning.step_check", *sys.argv[1:]]),
        "cases": rows,
    }
    report.write(options.output, "planned-steps", found, document, draw)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--emulated", action="store_true", help="no root")
    parser.add_argument("--steps", type=int, default=20, help="of each method; default: 20")
    parser.add_argument("--batch", type=int, default=16, help="images a rank and step; default: 16")
    parser.add_argument("--of", type=Path, metavar="FILE", help="a json file of step_times")
    parser.add_argument("--tune", type=float, default=10.0, help="seconds of each network and link")
    parser.add_argument("--output", type=Path, help="a path without suffix")
    return parser.parse_args()


def of_step_times(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of the codecs in a document of step_times, for which 4 ranks trained the "cnn"."""
    compute = found["step_ms"]["none"]["none"] / 1e3  # over shared memory the exchange is short
    return [
        {
            "network": "cnn",
            "link": link,
            "method": method,
            "compute_ms": compute * 1e3,
            "latency_us": check["latency_us"],
            "measured_ms": measured,
            "predicted_ms": 1e3
            * predicted("cnn", compute, link, check["latency_us"] / 1e6, method, hook=False),
        }
        for link, check in found["checks"].items()
        for method, measured in found["step_ms"][link].items()
        if method not in (*PEERS, LOCAL)
    ]


def _case(network: str, link: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one network on one link: predicted and measured milliseconds of each method."""
    print(f"{network}, {link} …", file=sys.stderr, flush=True)
    methods = (EMPTY_HOOK, *CASES[network, link])
    if options.emulated:
        latency = _EMULATED_LATENCY
        setting = {"GRADWIRE_LINK": f"{link},{latency * 1e6:.0f}us", "GLOO_SOCKET_IFNAME": "lo"}
        found = _measure(network, methods, options, setting, None)
    else:
        place = {"GLOO_SOCKET_IFNAME": "eth0", "GRADWIRE_SOCKET_IFNAME": "eth0"}
        with contextlib.closing(links.ShapedLinks(RANKS, links.rate(link))) as shaped:
            latency = links.ping_pong(shaped)
            starters = [host.run for host in shaped.hosts]
            found = _measure(network, methods, options, place, starters)
    steps = found["steps"]
    empty = steps[EMPTY_HOOK]
    compute = max(empty["ms"], empty["processor_ms"] * RANKS / _cores()) / 1e3
    model = CostModel(found["cost_model"])
    return [
        {
            "network": network,
            "link": link,
            "method": method,
            "compute_ms": compute * 1e3,
            "latency_us": latency * 1e6,
            "measured_ms": steps[method]["ms"],
            "predicted_ms": 1e3
            * predicted(network, compute, link, latency, method, model=model, measured=True),
            "cost_model": found["cost_model"],
        }
        for method in methods[1:]
    ]


def _measure(
    network: str,
    methods: Sequence[str],
    options: argparse.Namespace,
    setting: Mapping[str, str],
    starters: Sequence[job.Starter] | None,
) -> dict[str, Any]:
    words = ["--methods", *methods, "--steps", str(options.steps), "--network", network]
    words += ["--batch", str(options.batch), "--ranks", str(RANKS)]
    words += ["--calls", "100000", "--algorithms", "ring", "--tune", str(options.tune)]
    return job.run("bench.training.step_times", words, RANKS, setting, starters)


def predicted(
    network: str,
    compute: float,
    link: str,
    latency: float,
    method: str,
    *,
    hook: bool = True,
    model: CostModel | None = None,
    measured: bool = False,
) -> float:
    """The planner's seconds of a step by the fastest algorithm, as `auto` takes it.

    `hook` says that `compute` lacks the hook's own work, and `measured` that the model is of these
    links themselves.
    """
    parts = buckets(_walked(network))
    codec = Method.parse(method).codec
    topology = flat(f"{link},{latency * 1e6}us")
    cores = _cores()
    cluster = Cluster(
        RANKS,
        topology,
        model or CostModel(),
        turns=max(1.0, RANKS / cores),
        per_bucket=PER_BUCKET if hook else 0.0,
        overlaps=cores > RANKS,
        measured=measured,
    )
    return min(
        synchronous(parts, compute, cluster, algorithm, codec).step
        for algorithm in cluster.algorithms(codec)
        if algorithm != "star"
    )


def _cores() -> float:
    return CostModel().parameters["cores"]


@functools.cache
def _walked(network: str) -> Any:
    return walk(f"bench.planning.step_check:{network}", f"1,{SIDE},{SIDE}")


def error(row: Mapping[str, Any]) -> float:
    """Predicted over measured, less one."""
    return float(row["predicted_ms"] / row["measured_ms"] - 1)


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """The goal, and how near it is."""
    close = sum(abs(error(row)) <= CLOSE for row in rows)
    return (
        f"{close} of {len(rows)} cases are predicted within {CLOSE:.0%} "
        f"(goal: {CLOSE_SHARE:.0%} of them)"
    )


def document(found: Mapping[str, Any], name: str) -> str:
    """The md file."""
    rows: list[dict[str, Any]] = found["cases"]
    return report.document(
        "Predicted steps and measured ones",
        f"{found['date']}; {found['machine']}. `python {found['command']}`.",
        f"{summary(rows)}. Computing is the step with a hook that averages nothing, or over shared "
        "memory.",
        table(rows),
        f"![predicted over measured]({name}.png)",
    )


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The cases as Markdown."""
    cells = (
        [row["network"], row["link"], Method.parse(row["method"]).family]
        + [f"{row[f'{what}_ms']:.1f}" for what in ("compute", "predicted", "measured")]
        + [f"{error(row):+.0%}"]
        for row in rows
    )
    head = "network | links | codec | computing, ms | predicted, ms | measured, ms | error"
    return report.table(head, cells, "lll")


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Predicted over measured, and the band within which predictions should be."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = found["cases"]
    figure, axes = pyplot.subplots(figsize=(6, 5), layout="constrained")
    for network, link in dict.fromkeys((row["network"], row["link"]) for row in rows):
        own = [row for row in rows if (row["network"], row["link"]) == (network, link)]
        measured = [row["measured_ms"] for row in own]
        axes.plot(measured, [row["predicted_ms"] for row in own], "o", label=f"{network}, {link}")
    every = [row["measured_ms"] for row in rows]
    ends = [min(every) / 1.3, max(every) * 1.3]
    low, high = ([(1 + sign * CLOSE) * end for end in ends] for sign in (-1, 1))
    axes.fill_between(ends, low, high, color="0.88", label=f"within {CLOSE:.0%}")
    axes.plot(ends, ends, color="0.6", lw=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted, ms")
    ticks = [tick for tick in _TICKS if ends[0] <= tick <= ends[1]]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks([], minor=True)
        axis.set_ticks(ticks, map(str, ticks))
    axes.set_title("a step of DistributedDataParallel, 4 ranks")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())

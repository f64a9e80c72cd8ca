"""Trains a language model of 25 M parameters on 2 ranks, once per way to exchange.

    python -m bench.training.large_model                       # 20 minutes of a core
    python -m bench.training.large_model --exchanges none int8 --steps 100
    python -m bench.training.large_model --report              # only writes the report

AdamW, or OneBitAdam, learns the text of Python's standard library byte by byte, from the same
parameters over the same data. The ranks are threads of this process, so that one that is stopped
for a while stops the other one too. Every step is a line in the file of `--runs`: what a training
that was stopped had done is seen there, and another call begins it anew. Losses do not depend on
what else the machine does.

Writes bench/results/large-model-DATE.md, and large-model-DATE-runs.jsonl.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import gradwire
import gradwire.torch
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from bench.common import machine, report
from bench.common.report import ROOT
from bench.training import images
from bench.training.models import text
from bench.training.models.transformers import LanguageModel
from bench.training.train_ranks import versions
from bench.training.trials.trial import Trial

RANKS, WIDTH, LAYERS, CONTEXT = 2, 512, 8, 64
EXCHANGES = ("none", "OneBitAdam", "int8", "int4")
_UNSEEN = 256  # windows
_LATE = 50  # steps
_WARM_UP = 0.29  # OneBitAdam's, share of the steps
_TIMEOUT = 7200.0  # seconds: a training may be stopped for a while


class Step(NamedTuple):
    """A line of the file."""

    exchange: str
    settings: dict[str, Any]
    step: int
    loss: float  # of the batch, mean over ranks
    seconds: float  # of rank 0 since the training began
    cpu_seconds: float  # of the process, likewise
    bytes: int  # that rank 0 has sent so far
    unseen: float | None = None  # the loss on text that was not trained with; of the last step
    identical: bool | None = None  # the ranks' parameters, at the end
    versions: dict[str, str] | None = None


def main() -> int:
    options = parse_options()
    torch.set_num_threads(1)
    options.runs.parent.mkdir(parents=True, exist_ok=True)
    if not options.report:
        for exchange in options.exchanges:
            if exchange not in finished(options.runs, settings_of(options)):
                train(exchange, options)
    write(options)
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--exchanges", nargs="+", default=list(EXCHANGES), metavar="CODEC")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=1, help="windows of 64 bytes a rank")
    parser.add_argument("--rate", type=float, default=5e-4, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=ROOT / "build/large-model-runs.jsonl")
    parser.add_argument("--report", action="store_true", help="only write the report")
    parser.add_argument("--output", type=Path, help="of the report, without suffix")
    return parser.parse_args()


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What decides the result besides the exchange."""
    return {name: getattr(options, name) for name in ("steps", "batch", "rate", "seed")}


def train(exchange: str, options: argparse.Namespace) -> None:
    """Appends a line for each step."""
    torch.manual_seed(options.seed)
    model = LanguageModel(WIDTH, LAYERS, CONTEXT)
    gradwire.spawn(
        lambda comm: _rank(comm, copy.deepcopy(model), exchange, options),
        RANKS,
        threads=True,
        timeout=_TIMEOUT,
    )


def _rank(
    comm: gradwire.Communicator, model: nn.Module, exchange: str, options: argparse.Namespace
) -> None:
    torch.set_num_threads(1)
    data, settings = text.standard_library(), settings_of(options)
    trial = Trial("lm", "adamw", exchange, options.rate, 0, options.steps, options.seed)
    optimizer, update = _updating(comm, model, trial)
    count = (len(data.seen) - 1) // CONTEXT
    order = images.batches(count, options.batch, comm.rank, RANKS, options.seed, options.steps)
    began, cpu, sent, other = time.perf_counter(), time.process_time(), _sent(comm), 0
    for step, chosen in enumerate(order, 1):
        _set_rate(optimizer, options.rate * trial.rate_factor(step - 1))
        optimizer.zero_grad(set_to_none=False)
        loss = _loss(model, data.seen, chosen * CONTEXT)
        loss.backward()
        update()
        before = _sent(comm)
        mean = loss.detach().reshape(1).clone()
        comm.all_reduce(mean, op="avg")
        other += _sent(comm) - before
        line = Step(
            exchange,
            settings,
            step,
            float(mean),
            time.perf_counter() - began,
            time.process_time() - cpu,
            _sent(comm) - sent - other,
        )
        if step == options.steps:
            line = line._replace(
                unseen=_unseen(comm, model, data.unseen),
                identical=_identical(comm, model),
                versions=versions(),
            )
        if comm.rank == 0:
            _append(options.runs, line)


def _updating(
    comm: gradwire.Communicator, model: nn.Module, trial: Trial
) -> tuple[torch.optim.Optimizer, Callable[[], object]]:
    """The optimizer, and what makes a step of it after backward."""
    if trial.exchange == "OneBitAdam":
        own: Any = gradwire.torch.OneBitAdam(
            model.named_parameters(),
            trial.rate,
            warm_up=round(_WARM_UP * trial.steps),
            clip_norm=1.0,
            ranks=comm,
        )
        return own, own.step
    optimizer = torch.optim.AdamW(model.parameters(), lr=trial.rate, fused=True)
    every = list(model.parameters())

    def update() -> None:
        gradients = [each.grad for each in every]
        comm.all_reduce(gradients, op="avg", codec=trial.exchange)
        clip_grad_norm_(every, 1.0)
        optimizer.step()

    return optimizer, update


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _loss(model: nn.Module, source: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    found = text.windows(source, starts, CONTEXT)
    return cross_entropy(model(found[:, :-1]), found[:, 1:].flatten())


def _unseen(comm: gradwire.Communicator, model: nn.Module, source: torch.Tensor) -> float:
    """Every rank does a part."""
    starts = torch.arange(_UNSEEN) * ((len(source) - CONTEXT - 1) // _UNSEEN)
    mine = starts[comm.rank :: comm.size].split(32)
    with torch.inference_mode():
        losses = torch.tensor([float(_loss(model, source, each)) for each in mine])
    mean = losses.double().mean().reshape(1)
    comm.all_reduce(mean, op="avg")
    return float(mean)


def _identical(comm: gradwire.Communicator, model: nn.Module) -> bool:
    """Whether the ranks' parameters have the same bits."""
    flat = torch.cat([each.detach().flatten() for each in model.parameters()]).view(torch.int32)
    least, most = flat.clone(), flat.clone()
    comm.all_reduce(least, op="min")
    comm.all_reduce(most, op="max")
    return torch.equal(least, most)


def _sent(comm: gradwire.Communicator) -> int:
    return comm.traffic.bytes_sent


def _append(path: Path, line: Step) -> None:
    known = {name: value for name, value in line._asdict().items() if value is not None}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(known) + "\n")


def read(path: Path) -> list[Step]:
    """Every step in a file, none if there is no file; raises OSError and ValueError."""
    if not path.exists():
        return []
    return [Step(**json.loads(each)) for each in path.read_text(encoding="utf-8").splitlines()]


def begun(path: Path, settings: dict[str, Any]) -> dict[str, list[Step]]:
    """The steps of the last training with each exchange and these settings."""
    found: dict[str, list[Step]] = {}
    for each in read(path):
        if each.settings == settings:
            if each.step == 1:
                found[each.exchange] = []
            found[each.exchange].append(each)
    return found


def finished(path: Path, settings: dict[str, Any]) -> dict[str, list[Step]]:
    """Those that came to their end."""
    known = begun(path, settings)
    return {name: steps for name, steps in known.items() if steps[-1].unseen is not None}


def write(options: argparse.Namespace) -> None:
    """Writes the report, of what was made of trainings that are not finished, too; prints it."""
    stem = report.stem_of(options.output, "large-model")
    document = "\n".join(_document(begun(options.runs, settings_of(options)), options))
    report.save_runs(stem, options.runs, document + "\n")
    print(document)


def _document(trainings: dict[str, list[Step]], options: argparse.Namespace) -> Iterable[str]:
    ends = [steps[-1].versions or {} for steps in trainings.values()]
    known = {", ".join(f"{name} {each[name]}" for name in each) for each in ends if each}
    yield "# A language model of 25 M parameters"
    yield ""
    yield (
        f"{'; '.join([machine.describe(), *sorted(known)])}; `python -m bench.training.large_model "
        f"--steps {options.steps} --batch {options.batch} --rate {options.rate:g} "
        f"--seed {options.seed}`."
    )
    yield ""
    yield (
        f"{parameters():,} parameters (width {WIDTH}, {LAYERS} layers), {RANKS} ranks with "
        f"{options.batch} × {CONTEXT} bytes each a step, {options.steps} steps of AdamW with a "
        f"rate of {options.rate:g}, which rises for 10 % of the steps and then falls to 0. "
        f"`OneBitAdam` has a warm-up of {100 * _WARM_UP:g} % of the steps. *Unseen* is the loss on "
        "text that was not trained with, after the last step; *last 50* the training loss, a mean "
        "of the last 50 steps made, beside that of the same steps of `none`. *Ratio* is what a "
        "ring sends of dense gradients over the bytes sent so far. Hours are of one core, and of "
        "the clock while other programs ran. One seed."
    )
    yield ""
    yield from rows(trainings, options.steps)
    yield ""
    yield from _curves(trainings, options.steps)


def parameters() -> int:
    """Of the model."""
    with torch.device("meta"):
        return sum(each.numel() for each in LanguageModel(WIDTH, LAYERS, CONTEXT).parameters())


def rows(trainings: dict[str, list[Step]], count: int) -> Iterable[str]:
    """A row for each training."""
    return report.table(
        "exchange | steps | unseen | above none, % | last 50 | above none, % | MB a step | ratio | "
        "hours of a core | hours | same bits",
        (
            _cells(name, steps, trainings.get("none", []), count)
            for name, steps in trainings.items()
        ),
    )


def _cells(name: str, steps: list[Step], base: list[Step], count: int) -> report.Cells:
    end, other = steps[-1], base[-1] if base and base is not steps else None
    late = _mean(steps[-_LATE:])
    beside = base[: len(steps)][-_LATE:] if len(base) >= len(steps) and other else []
    return (
        f"`{name}`",
        f"{len(steps)} of {count}",
        report.shown(end.unseen, "{:.4f}"),
        _above(end.unseen, other.unseen if other else None),
        f"{late:.4f}",
        _above(late, _mean(beside) if beside else None),
        f"{end.bytes / len(steps) / 1e6:.2f}",
        report.times(2 * (RANKS - 1) / RANKS * 4 * parameters() * len(steps) / end.bytes),
        f"{end.cpu_seconds / 3600:.2f}",
        f"{end.seconds / 3600:.2f}",
        None if end.identical is None else report.yes(end.identical),
    )


def _above(loss: float | None, base: float | None) -> str | None:
    if loss is None or base is None:
        return None
    return f"{100 * (loss / base - 1):+.2f}".replace("-", "−")


def _mean(steps: list[Step]) -> float:
    return statistics.fmean(each.loss for each in steps)


def _curves(trainings: dict[str, list[Step]], count: int) -> Iterable[str]:
    """Training losses, each the mean of a tenth of the steps."""
    tenth = max(1, count // 10)
    ends = range(tenth, count + 1, tenth)
    yield "Training losses, means of the steps since the column before:"
    yield ""
    yield from report.table(
        " | ".join(["exchange", *map(str, ends)]),
        ([f"`{name}`", *_curve(steps, ends, tenth)] for name, steps in trainings.items()),
    )


def _curve(steps: list[Step], ends: Iterable[int], tenth: int) -> Iterable[str | None]:
    for end in ends:
        yield f"{_mean(steps[end - tenth : end]):.4f}" if end <= len(steps) else None


if __name__ == "__main__":
    sys.exit(main())

"""What losses and joins cost in accuracy: a training with ten of each, beside one without.

    python -m bench.training.elastic_accuracy

Three ranks train the CNN of `images.py` on Fashion-MNIST with AdamW and a constant global batch.
Whenever all three train, one of them is killed after a random number of steps, and another started.
Prints the accuracy of each training, and how many changes it had.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from gradwire._bootstrap.store import Address
from gradwire._bootstrap.store_server import StoreServer
from gradwire.torch import Ranks, elastic
from torch.nn.functional import cross_entropy

from bench.training import images
from bench.training.elastic import Log
from bench.training.elastic_ranks import report

RANKS = 3


def main() -> int:
    """Runs the trainings, or one of their ranks."""
    if "BENCH_LOG" in os.environ:
        _train(int(os.environ["BENCH_EPOCHS"]), int(os.environ["BENCH_SEED"]))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--losses", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    for seed in range(options.seeds):
        for losses in (0, options.losses):
            accuracy, changes = _training(options.epochs, losses, seed)
            print(
                f"seed {seed}, {losses} losses and joins: {100 * accuracy:.2f} % "
                f"({changes} changes of members)",
                flush=True,
            )
    return 0


def _training(epochs: int, losses: int, seed: int) -> tuple[float, int]:
    """The accuracy of a training, and how often its members changed."""
    job, secret = f"bench-{secrets.token_hex(4)}", secrets.token_hex(16)
    store = Address("unix", f"gradwire-{os.getuid()}-{job}")
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch, StoreServer(store, job, secret.encode()):
        log = Log(Path(scratch) / "log")
        shared = {
            **{"GRADWIRE_STORE": str(store), "GRADWIRE_SECRET": secret, "GRADWIRE_JOB": job},
            **{"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"},
            **{"BENCH_LOG": str(log.path), "BENCH_EPOCHS": str(epochs), "BENCH_SEED": str(seed)},
        }

        def start(rank: int, **more: str) -> subprocess.Popen[bytes]:
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            program = [sys.executable, "-m", "bench.training.elastic_accuracy"]
            return subprocess.Popen(program, env={**os.environ, **shared, **place, **more})

        ranks = [start(rank) for rank in range(RANKS)]
        try:
            newest, changes, after = ranks[-1].pid, [RANKS], 0
            for _ in range(losses):
                begun = log.wait(lambda line: line.process == newest and line.step > after)  # noqa: B023
                goal = begun.step + chance.randint(5, 40)
                log.wait(lambda line: line.step >= goal and line.ranks == RANKS)  # noqa: B023
                ranks.pop(chance.randrange(RANKS)).kill()
                ranks.append(start(0, GRADWIRE_JOIN="1"))
                newest = ranks[-1].pid
            for each in ranks:
                each.wait()
            for line in sorted(log.lines()):
                if line.ranks > 0 and line.ranks != changes[-1]:
                    changes.append(line.ranks)
        finally:
            for each in ranks:
                each.kill()
                each.wait()
        return float((log.path.parent / "accuracy").read_text()), len(changes) - 1


def _train(epochs: int, seed: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data = images.load(None)
    model = images.small_cnn(data.side)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    sampler = elastic.Sampler(len(data.train_labels), 32, epochs=epochs, seed=seed)
    steps = epochs * len(data.train_labels) // (32 * RANKS)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    with elastic.session(model, optimizer, sampler, carry=[schedule], ranks=Ranks(timeout=60)) as s:
        for batch in s:
            outputs = model(data.train_images[batch])
            s.backward(cross_entropy(outputs, data.train_labels[batch]))
            if s.commit():
                optimizer.step()
                schedule.step()
                report(s.steps, s.communicator.size)
        is_first = s.communicator.rank == 0
    if is_first:
        with torch.no_grad():
            model.eval()
            right = [
                (model(x).argmax(1) == y).sum()
                for x, y in zip(
                    data.test_images.split(500), data.test_labels.split(500), strict=True
                )
            ]
        accuracy = float(torch.stack(right).sum()) / len(data.test_labels)
        Path(os.environ["BENCH_LOG"]).with_name("accuracy").write_text(str(accuracy))


if __name__ == "__main__":
    sys.exit(main())

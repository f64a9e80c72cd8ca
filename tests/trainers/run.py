"""Runs the programs of the documentation for trainers, on two ranks each.

`make test-with WHAT=trainers` calls it, by the Python of an environment that has all of them.
The programs with the hook train, save and go on from there. They do so as they are, and with
validation and accumulation; over gloo, and over the backend gradwire.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
COMPRESSED = f"{'onebit':<28}{1:>11,}{40 * 40:>12,}"  # of the table of statistics
LIMIT = 600.0  # seconds, after which a program is taken to hang
TRAINERS = ("transformers", "accelerate", "lightning")  # in the order of their page
# What Lightning ignores on CPUs; accelerate's own hooks have names.
DROPPED_HOOK = """
import gradwire.torch
import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def training_step(self, batch, _):
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


module = Regression()
with gradwire.init() as comm:
    state = gradwire.torch.State(comm, parameters=module.named_parameters())
    strategy = DDPStrategy(
        process_group_backend="gloo",
        ddp_comm_state=state,
        ddp_comm_hook=gradwire.torch.ddp.hook.comm_hook,
    )
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False
    )
    data = torch.utils.data.TensorDataset(torch.randn(64, 8))
    try:
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8))
    except gradwire.Error as error:
        print("refused:", error)
"""

# What makes the programs validate between steps, which accumulate the gradients of two batches.
VALIDATED = {
    "accelerate": {
        "cpu=True": "cpu=True, gradient_accumulation_steps=2",
        "range(5)": "range(6)",
        "range(5, 8)": "range(6, 10)",
        """
        loss = model(torch.randn(4, 8)).pow(2).mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
""": """
        model.eval()
        with torch.no_grad():
            model(torch.randn(4, 8))
        net.train()
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(4, 8)).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
""",
    },
    "lightning": {
        "max_epochs=epochs,": "max_epochs=epochs, accumulate_grad_batches=2,",
        "Regression(), loader,": "Regression(), loader, loader,",
        """
    def configure_optimizers(self):
""": """
    def validation_step(self, batch, index):
        self.log("loss", self.training_step(batch, index), sync_dist=True)

    def configure_optimizers(self):
""",
    },
    "transformers": {
        "max_steps=8,": 'max_steps=8, gradient_accumulation_steps=2, eval_strategy="steps", '
        "eval_steps=1,",
        "train_dataset=data,": "train_dataset=data, eval_dataset=data,",
    },
}

USE = "from gradwire.integrations import use_backend\nuse_backend()\n"
# What makes them train over the backend gradwire.
OVER_BACKEND = {
    "accelerate": {"accelerator = Accelerator(": USE + "accelerator = Accelerator("},
    "lightning": {
        "strategy=GradwireStrategy(": 'strategy=GradwireStrategy(process_group_backend="gradwire", '
        "codec="
    },
    "transformers": {"once, _ = train()": USE + "once, _ = train()"},
}


def backend_programs() -> list[str]:
    """The blocks of Python in the section on trainers of the backend's page."""
    page = (DOCS / "backend.md").read_text()
    return _blocks(page.split("\n## accelerate and Lightning\n")[1].split("\n## ")[0])


def hook_programs() -> list[str]:
    """The blocks of Python in the page on trainers."""
    page = (DOCS / "trainers.md").read_text()
    return _blocks(page.split("\n## The backend under a trainer\n")[0])


def _blocks(text: str) -> list[str]:
    return [block.split("```")[0] for block in text.split("```python\n")[1:]]


def changed(program: str, trainer: str, changes: Mapping[str, Mapping[str, str]]) -> str:
    """The program of a trainer, with its texts replaced."""
    for text, instead in changes[trainer].items():
        assert text in program, f"the page has another program for {trainer}: {text!r}"
        program = program.replace(text, instead)
    return program


def output_of(program: str) -> str:
    """What it prints on all ranks, and why it failed where it did."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    with tempfile.TemporaryDirectory() as folder:  # trainers leave logs where they run
        path = Path(folder) / "program.py"
        path.write_text(program)
        done = subprocess.run(
            [*torchrun, str(path)],
            cwd=folder,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
    assert done.returncode == 0, done.stdout
    return done.stdout


def main() -> None:
    """Fails where a program does, or its last line tells of something else than it should."""
    for program, trainer in zip(backend_programs(), ("accelerate", "lightning"), strict=True):
        printed = output_of(program)
        assert printed.count(f"{trainer} over gradwire: 0.0") == 2, printed
        print(f"{trainer} over the backend: passed")
    for program, trainer in zip(hook_programs(), TRAINERS, strict=True):
        both = program, changed(program, trainer, VALIDATED)
        for each in (*both, *(changed(one, trainer, OVER_BACKEND) for one in both)):
            printed = output_of(each)
            assert printed.count(f"{trainer}: spread 0.0, resumed alike: True") == 2, printed
            assert COMPRESSED in printed, printed
        print(f"{trainer} with the hook, resumed; with validation and accumulation too: passed")
    printed = output_of(DROPPED_HOOK)
    assert printed.count("refused: SGD steps 'net.weight'") == 2, printed
    print("a hook that Lightning drops: refused")


if __name__ == "__main__":
    main()

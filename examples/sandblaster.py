"""Fit a logistic regression by L-BFGS: three replicas share all samples, rank 0 coordinates.

Run: gradwire run -n 4 --servers 2 examples/sandblaster.py

Replica 3 is slowed down: it gets fewer portions, and others copy its last ones.
"""

import os
import time

import gradwire.torch
import torch
from torch.nn.functional import cross_entropy

SAMPLES, ITERATIONS = 20_000, 15
rank = int(os.environ["RANK"])

torch.set_num_threads(1)
torch.manual_seed(0)
inputs = torch.randn(SAMPLES, 40)
labels = (inputs @ torch.randn(40, 5) + torch.randn(SAMPLES, 5)).argmax(1)
net = torch.nn.Linear(40, 5)


def loss(indices):
    """The sum of the losses of these samples."""
    if rank == 3:
        time.sleep(0.05)
    return cross_entropy(net(inputs[indices]), labels[indices], reduction="sum")


fit = gradwire.torch.Sandblaster(net.parameters(), loss, samples=SAMPLES, portion=500)
if rank > 0:
    fit.serve()
    right = (net(inputs).argmax(1) == labels).float().mean()
    print(f"replica {rank}: accuracy {100 * right:.1f} %\n", end="")
else:
    with fit:
        for _ in range(ITERATIONS):
            found = fit.step()
            if found.iteration % 5 == 0:
                counts = sorted(found.portions.items())
                print(f"iteration {found.iteration}: loss {found.loss:.4f}, {found.seconds:.2f} s")
    print("portions:", ", ".join(f"{name.split(' (')[0]}: {count}" for name, count in counts))

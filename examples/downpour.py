"""Train four replicas asynchronously: each pushes its gradients to a parameter server.

Run: gradwire run -n 4 --servers 2 examples/downpour.py

Replica 3 is slowed down, and holds up nobody.
"""

import os
import time

import gradwire.serve
import gradwire.torch
import torch
from torch.nn.functional import cross_entropy

STEPS = 300
rank = int(os.environ["RANK"])

torch.set_num_threads(1)
torch.manual_seed(0)
target = torch.randn(20, 5)
net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))
optimizer = gradwire.torch.Downpour(
    net.parameters(),
    gradwire.serve.Adagrad(lr=0.05),
    compression="onebit",
    warm_start=20,
    pull_codec="int8",
)
torch.manual_seed(1 + rank)
started = time.perf_counter()
for _ in range(STEPS):
    inputs = torch.randn(32, 20)
    loss = cross_entropy(net(inputs), (inputs @ target).argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.02 if rank == 3 else 0.002)
seconds = time.perf_counter() - started
print(f"replica {rank}: loss {loss.item():.3f}, {STEPS / seconds:.0f} steps/s\n", end="")
optimizer.close()

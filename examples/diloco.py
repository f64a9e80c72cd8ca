"""Train on four ranks that average every 20 steps, over links that are held to 100 Mbit/s.

Run: gradwire run --link 100mbit,100us -n 4 examples/diloco.py

Each rank makes steps on its own, some more than others, and finishes when it has no more data.
"""

import time

import gradwire.torch
import torch
from torch.nn.functional import mse_loss

STEPS, EVERY = 300, 20

torch.set_num_threads(1)
with gradwire.init() as comm:
    torch.manual_seed(0)
    target = torch.randn(400, 10)
    net = torch.nn.Sequential(torch.nn.Linear(400, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.005, momentum=0.9)
    outer = gradwire.torch.DiLoCo(net, optimizer, every=EVERY, compression="int8", ranks=comm)
    torch.manual_seed(1 + comm.rank)
    started = time.perf_counter()
    for _ in range(STEPS + 10 * comm.rank):
        inputs = torch.randn(32, 400)
        loss = mse_loss(net(inputs), inputs @ target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if outer.step() and comm.rank == 0 and outer.rounds % 5 == 1:
            print(f"round {outer.rounds}: loss {loss.item():.1f}, steps by rank {outer.pace}")
    outer.finish()
    outer.check_agreement()
    if comm.rank == 0:
        seconds, sent = time.perf_counter() - started, comm.traffic.bytes_sent / 1e6
        print(f"loss {loss.item():.1f} in {seconds:.1f} s, {sent:.1f} MB sent, same on all ranks")

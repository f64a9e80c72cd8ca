"""Train with one bit per gradient element, over links that are held to 100 Mbit/s.

Run: gradwire run --link 100mbit,100us -n 2 examples/ddp_onebit.py

onebit trains well with int8 for the first steps, and with momentum in the hook, before the codec,
instead of in the optimizer.
"""

import time

import gradwire.torch
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

STEPS, INT8_STEPS = 150, 20


def train(codec, momentum=None):
    """Train the same network on the same inputs, and print what that took."""
    torch.manual_seed(0)
    target = torch.randn(400, 10)
    net = torch.nn.Sequential(torch.nn.Linear(400, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10))
    model = DistributedDataParallel(net)
    in_optimizer = 0 if momentum else 0.9
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=in_optimizer)
    state = gradwire.torch.register(model, codec, momentum=momentum, optimizer=optimizer)
    torch.manual_seed(1 + dist.get_rank())
    started = time.perf_counter()
    for _ in range(STEPS):
        inputs = torch.randn(32, 400)
        loss = mse_loss(model(inputs), inputs @ target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - started
    if dist.get_rank() == 0:
        sent = state.communicator.traffic.bytes_sent / 1e6
        print(f"{codec!s:40} loss {loss.item():6.1f}, {seconds:4.1f} s, {sent:5.1f} MB sent")
    state.close()


dist.init_process_group("gradwire")
train("none")
train(
    gradwire.torch.Stages((0, "int8"), (INT8_STEPS, "onebit")),
    momentum=0.9,
)
dist.destroy_process_group()

"""Train with DistributedDataParallel, gradients averaged by gradwire at half their size.

Run: torchrun --nproc-per-node 2 examples/ddp.py
"""

import gradwire.torch
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH = 100, 64

dist.init_process_group("gradwire")
torch.manual_seed(0)  # the same target on all ranks
target = torch.randn(100, 10)
net = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10))
model = DistributedDataParallel(net)
state = gradwire.torch.register(model, "fp16")
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

torch.manual_seed(1 + dist.get_rank())  # each rank draws its own inputs
for step in range(STEPS + 1):
    inputs = torch.randn(BATCH, 100)
    loss = mse_loss(model(inputs), inputs @ target)
    if step % 50 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.1f}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

parameters = torch.cat([each.detach().flatten() for each in net.parameters()])
all_ranks = state.communicator.all_gather(parameters[None])
if dist.get_rank() == 0:
    print(f"replicas bit-identical: {bool((all_ranks == all_ranks[0]).all())}")
state.close()
dist.destroy_process_group()

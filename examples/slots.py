"""Train in time slots: stop before a slot ends, and go on in the next one with the same bits.

Run: gradwire run -n 2 --slot 20s --margin 5s examples/slots.py

Two or three such slots are enough for this training; a slot for yours may be 40m, with the margin
of a minute that it has without --margin. Two jobs share a machine if both take turns at a lock:
gradwire run -n 2 --slot 20s --margin 5s --lock /tmp/machine.lock examples/slots.py first.pt
gradwire run -n 2 --slot 20s --margin 5s --lock /tmp/machine.lock examples/slots.py second.pt
"""

import hashlib
import os
import sys
import tempfile
import time

import gradwire.torch
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH = 300, 32
SECONDS = 0.05  # of a step, as a larger network would take
checkpoint = sys.argv[1] if sys.argv[1:] else f"{tempfile.gettempdir()}/gradwire-slots.pt"

dist.init_process_group("gradwire")
gradwire.catch_stops()  # SIGTERM and SIGUSR1 ask to stop, too
rank = dist.get_rank()
torch.manual_seed(0)  # the same target on all ranks
target = torch.randn(20, 10)
net = torch.nn.Sequential(torch.nn.Linear(20, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
model = DistributedDataParallel(net)
state = gradwire.torch.register(model, gradwire.torch.Compression("int8", feedback=True))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

step = 0
if os.path.exists(checkpoint):
    saved = torch.load(checkpoint)
    step = saved["step"]
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    state.load_state_dict(saved["hook"])

while step < STEPS and not state.should_stop():  # on all ranks after the same step
    draw = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
    inputs = torch.randn(BATCH, 20, generator=draw)
    loss = mse_loss(model(inputs), inputs @ target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    time.sleep(SECONDS)

hook = gradwire.torch.gather_state_dict(state)  # of all ranks, on rank 0
digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in net.parameters()))
if rank == 0:
    print(f"step {step} of {STEPS}: weights {digest.hexdigest()[:12]}", flush=True)
if rank == 0 and step < STEPS:
    saved = {"step": step, "model": net.state_dict(), "hook": hook}
    torch.save({**saved, "optimizer": optimizer.state_dict()}, f"{checkpoint}.new")
    os.replace(f"{checkpoint}.new", checkpoint)  # whole, even if this is killed meanwhile
elif rank == 0 and os.path.exists(checkpoint):
    os.remove(checkpoint)  # the training is over
state.communicator.barrier()  # no rank leaves before all is saved
state.close()
dist.destroy_process_group()
if step < STEPS:
    sys.exit(os.EX_TEMPFAIL)  # 75: run me again

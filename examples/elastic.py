"""Train on when ranks die, and let their replacements join, in the same processes.

Run: gradwire run --min 2 --max 3 --restarts 1 examples/elastic.py

Rank 1 kills itself half-way. `gradwire run` starts it anew, and it joins the others, which are
still there: with `min_ranks=3` they wait for it, and with 2 they would train on meanwhile. The
digest says that all ranks end with the same bits. Under torchrun (`export GRADWIRE_SECRET=$(openssl
rand -hex 32)`, `torchrun --standalone --nproc-per-node 3 --max-restarts 1 examples/elastic.py`) all
ranks begin anew instead.
"""

import hashlib
import os
import signal

import torch
from gradwire.torch import elastic
from torch.nn.functional import mse_loss

torch.manual_seed(0)  # the same data on all ranks
inputs = torch.randn(4096, 20)
targets = inputs @ torch.randn(20, 10)

net = torch.nn.Sequential(torch.nn.Linear(20, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=500)
sampler = elastic.Sampler(len(inputs), batch=8, epochs=3)
is_new = "GRADWIRE_JOIN" in os.environ
restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
is_victim = os.environ["RANK"] == "1" and not is_new and restarts == 0

with elastic.session(net, optimizer, sampler, carry=[scheduler], min_ranks=3, wait=300) as s:
    for batch in s:
        if s.steps == 200 and is_victim:
            os.kill(os.getpid(), signal.SIGKILL)
        s.backward(mse_loss(net(inputs[batch]), targets[batch]))
        if s.commit():  # the same answer on all ranks
            optimizer.step()
            scheduler.step()

digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in net.parameters()))
who = "the new rank" if is_new else "a rank"
print(f"{who} ends after step {s.steps}: weights {digest.hexdigest()[:12]}\n", end="")

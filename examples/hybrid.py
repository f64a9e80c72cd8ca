"""Train a network like AlexNet with its convolutions data-parallel and its linear layers split.

Run: torchrun --nproc-per-node 2 examples/hybrid.py
"""

import gradwire.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

STEPS, BATCH, CLASSES, SIDE = 40, 16, 16, 32


def alexnet_like() -> nn.Module:
    """Most of its weights are in two linear layers, as in AlexNet and VGG."""
    features = nn.Sequential(
        nn.Conv2d(3, 32, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )
    classifier = nn.Sequential(
        nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, CLASSES)
    )
    return nn.Sequential(features, nn.Flatten(), classifier)


def train(model: nn.Module) -> float:
    """Returns the last loss; each class is one image, to which noise is added."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    classes = torch.randn(CLASSES, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1 + dist.get_rank())  # each rank draws its own batches
    for _ in range(STEPS):
        labels = torch.randint(CLASSES, (BATCH,))
        images = classes[labels] + 0.5 * torch.randn(BATCH, 3, SIDE, SIDE)
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    return loss.item()


dist.init_process_group("gradwire")
torch.set_num_threads(1)
torch.manual_seed(0)
plans = {
    "all data-parallel": {},
    "hybrid": gradwire.torch.hybrid_plan(alexnet_like(), dist.get_world_size()),
}
for name, plan in plans.items():
    model = gradwire.torch.parallelize(alexnet_like(), plan)
    before = gradwire.torch.traffic()
    loss = train(model)
    sent = gradwire.torch.traffic().bytes_sent - before.bytes_sent
    if dist.get_rank() == 0:
        split = [layer for layer, kind in plan.items() if kind == "model"]
        print(f"{name}: loss {loss:.3f}, {sent / STEPS / 1e6:.2f} MB a step, split: {split}")
dist.destroy_process_group()

"""gradwire's DDP hook on a GPU: two processes on one, beside plain DDP.

DDP itself has a gloo group, for nothing here but plain DDP's own averages.
With --simulated the model is on the CPU: there is no torch on a simulated GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import sys
from dataclasses import dataclass
from typing import Any

import gradwire.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.gpu import arrays
from tests.gpu.backend import busy_gpu
from tests.gpu.ranks import nccl_environment, nccl_version
from tests.gpu.rows import Row

sys.path.append(str(arrays.SUPPORT))
import torch_ranks

CODECS = ("none", "fp16", "onebit", "topk:density=0.05")
_RANKS = 2
_STEPS = 5
_CLOSE = 1e-5  # of the largest gradient: both add two floats and halve them, in some order


@dataclass(frozen=True)
class Setting:
    """Of a check."""

    device: str
    links: str
    nccl: str
    codec: str


def main() -> int:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--simulated", action="store_true")
    simulated = parser.parse_args().simulated
    device = "cpu" if simulated else "cuda:0"
    nccl = "" if simulated else nccl_version()
    for links in ("host", *(["nccl"] if nccl else [])):
        for codec in CODECS[::2] if simulated else CODECS:
            setting = Setting(device, links, nccl, codec)
            with Row(
                f"DDP hook over {links}" if device != "cpu" else "DDP hook, on the CPU", codec
            ) as row:
                for told in torch_ranks.run(_RANKS, check, setting):
                    for what, holds in told.items():
                        row.expect(holds, what)
    return 0


def check(setting: Setting) -> dict[str, bool]:
    """What holds on this rank."""
    os.environ["GRADWIRE_GPU_LINKS"] = setting.links
    if setting.links == "nccl":
        os.environ.update(nccl_environment(dist.get_rank(), setting.nccl))
    found: dict[str, bool] = {}
    if setting.codec in ("none", "fp16"):
        rounding = _CLOSE if setting.codec == "none" else 2e-3
        found["gradients are plain DDP's"] = _largest_difference(setting) <= rounding
        found["so they are with no_sync"] = _largest_difference(setting, 2) <= rounding
    found |= _trained(setting)
    found |= _with_amp(setting)
    found |= _with_momentum(setting)
    if setting.device != "cpu":
        found["backward does not wait for the GPU"] = not _waits(setting)
    return found


def _model(setting: Setting) -> nn.Module:
    torch.manual_seed(7)
    layers = [nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 10)]
    return nn.Sequential(*layers).to(setting.device)


def _wrapped(model: nn.Module, setting: Setting) -> DDP:
    """With several buckets."""
    devices = None if setting.device == "cpu" else [torch.device(setting.device)]
    return DDP(model, device_ids=devices, bucket_cap_mb=0.1)  # type: ignore[arg-type]


def _register(ddp: DDP, setting: Setting, **options: Any) -> gradwire.torch.State:
    return gradwire.torch.register(
        ddp, gradwire.torch.Compression(setting.codec, min_elements=0, warm_up=0), **options
    )


def _loss(ddp: DDP, setting: Setting, step: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x = torch.randn(32, 64, generator=random).to(setting.device)
    y = torch.randint(10, (32,), generator=random).to(setting.device)
    return nn.functional.cross_entropy(ddp(x), y)


def _largest_difference(setting: Setting, accumulated: int = 1) -> float:
    """Of gradients, over steps, in units of the largest of plain DDP's."""
    model = _model(setting)
    plain, hooked = _wrapped(model, setting), _wrapped(copy.deepcopy(model), setting)
    state = _register(hooked, setting)
    worst = 0.0
    for step in range(_STEPS):
        for ddp in (plain, hooked):
            ddp.zero_grad(set_to_none=step % 2 == 0)
            for part in range(accumulated):
                last = part == accumulated - 1
                with contextlib.nullcontext() if last else ddp.no_sync():
                    _loss(ddp, setting, accumulated * step + part).backward()
        expected, actual = _gradients(plain), _gradients(hooked)
        worst = max(worst, float((actual - expected).abs().max() / expected.abs().max()))
    state.close()
    return worst


def _gradients(ddp: DDP) -> torch.Tensor:
    return torch.cat([each.grad.reshape(-1) for each in ddp.parameters() if each.grad is not None])


def _trained(setting: Setting) -> dict[str, bool]:
    """Steps of SGD: replicas stay equal, and losses are fed back where the codec has them."""
    ddp = _wrapped(_model(setting), setting)
    state = _register(ddp, setting)
    losses = _losses(ddp, setting, lr=0.05)
    found = {"the loss falls": losses[-1] < losses[0], "replicas are equal": _replicas_equal(ddp)}
    if setting.device != "cpu":
        gpu = state.communicator._gpu
        found["the links are those asked for"] = gpu is not None and gpu.links == setting.links
    if setting.codec.startswith(("onebit", "topk")):
        feedback = state.feedback
        assert feedback is not None
        norms = [float(abs(feedback.residual(key)).max()) for key in feedback.keys()]  # noqa: SIM118
        found["residuals are kept"] = len(norms) > 0 and max(norms) > 0
    state.close()
    return found


def _losses(ddp: DDP, setting: Setting, lr: float) -> list[float]:
    """Of steps of SGD."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    losses = []
    for step in range(4 * _STEPS):
        optimizer.zero_grad()
        loss = _loss(ddp, setting, step % 2)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _replicas_equal(ddp: DDP) -> bool:
    flat = torch.cat([each.detach().reshape(-1) for each in ddp.parameters()]).cpu()
    all_of_them: list[Any] = [None] * _RANKS
    dist.all_gather_object(all_of_them, flat.numpy().tobytes())
    return len(set(all_of_them)) == 1


def _with_amp(setting: Setting) -> dict[str, bool]:
    """With a GradScaler, and one step that overflows on one rank."""
    kind = torch.device(setting.device).type
    dtype = torch.bfloat16 if kind == "cpu" else torch.float16
    ddp = _wrapped(_model(setting), setting)
    scaler = torch.amp.GradScaler(kind, init_scale=256.0, growth_interval=100)
    state = _register(ddp, setting, scaler=scaler)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    skipped = _STEPS // 2
    scales = []
    for step in range(_STEPS):
        optimizer.zero_grad()
        with torch.autocast(kind, dtype=dtype):
            loss = _loss(ddp, setting, step)
        if step == skipped and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    state.close()
    finite = all(bool(each.isfinite().all()) for each in ddp.parameters())
    return {
        "AMP: an overflow halves the scale on all ranks": scales
        == [256.0] * skipped + [128.0] * (_STEPS - skipped),
        "AMP: parameters are finite": finite,
        "AMP: replicas are equal": _replicas_equal(ddp),
    }


def _with_momentum(setting: Setting) -> dict[str, bool]:
    """Steps with momentum and clipping in the hook."""
    ddp = _wrapped(_model(setting), setting)
    state = _register(ddp, setting, momentum=0.9, clip_norm=1.0)
    losses = _losses(ddp, setting, lr=0.02)
    state.close()
    return {
        "momentum: the loss falls": losses[-1] < losses[0],
        "momentum: replicas are equal": _replicas_equal(ddp),
    }


def _waits(setting: Setting) -> bool:
    """Whether the GPU, busy when backward began, was idle when it came back."""
    ddp = _wrapped(_model(setting), setting)
    state = _register(ddp, setting)
    for step in range(3):
        _loss(ddp, setting, step).backward()
    loss = _loss(ddp, setting, 3)
    with busy_gpu() as busy:
        loss.backward()
        waited = busy.query()
    state.close()
    return waited


if __name__ == "__main__":
    sys.exit(main())

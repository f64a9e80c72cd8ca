"""Every way to train on a GPU but the hook's and the backend's own: two processes on one.

Each trains a small network on the GPU and then, as the expectation, on the CPU. With --simulated,
which torch has no GPU for, both are on the CPU: that checks this program alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import gradwire.torch
import torch
import torch.distributed as dist
from gradwire import serve
from gradwire.torch import Compression, elastic
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from tests.gpu import arrays
from tests.gpu.build import ROOT
from tests.gpu.rows import Row

sys.path.append(str(arrays.SUPPORT))
import torch_ranks

Checks = dict[str, bool]
Parameters = list[torch.Tensor]

_RANKS = 2
_STEPS = 12
_CLOSE = 1e-3  # of values near 1: GPUs and CPUs add up in other orders
# Of elements: a codec of signs, or of the largest values, turns the last bit of one into much.
_MOST_CLOSE = 0.97
_SHARDED = (
    ("none", None),
    ("fp16", "bf16"),
    ("int8", None),
    ("onebit", None),
    ("auto", None),
)
_RUN_SECONDS = 60


def main() -> int:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--elastic", metavar="DEVICE", help="be a rank of a session on it")
    options = parser.parse_args()
    if options.elastic:
        return _elastic_rank(options.elastic)
    device = "cpu" if options.simulated else "cuda"
    for trainer in trainers():
        with Row("trainers", trainer) as row:
            for told in torch_ranks.run(_RANKS, check, trainer, device, backend="gradwire"):
                for what, holds in told.items():
                    row.expect(holds, what)
    for name, alone in {"Downpour": downpour, "Sandblaster": sandblaster}.items():
        with Row("trainers", name) as row:
            row.expect(_most_close(alone(device), alone("cpu")), "parameters are the CPU's")
    with Row("trainers", "elastic session, a rank dies and another joins") as row:
        digests = _elastic_run(device)
        row.expect(len(digests) == _RANKS, f"{_RANKS} ranks ended: {digests}")
        row.expect(len(set(digests)) == 1, "replicas are equal")
    return 0


def trainers() -> dict[str, Callable[[str], Parameters]]:
    """What trains on every rank, by name; called with a device."""
    found: dict[str, Callable[[str], Parameters]] = {
        f"register_fsdp, {codec}, gathered as {gathered or 'they are'}": partial(
            sharded, codec, gathered
        )
        for codec, gathered in _SHARDED
    }
    found |= {f"register, {codec}": partial(hooked, codec) for codec in ("auto", "lowrank")}
    return found | {"OneBitAdam": one_bit_adam, "parallelize": hybrid, "DiLoCo": diloco}


def check(trainer: str, device: str) -> Checks:
    """What holds on this rank."""
    train = trainers()[trainer]
    ours = train(device)
    together = [torch.empty_like(each) for each in ours for _ in range(_RANKS)]
    for index, each in enumerate(ours):
        dist.all_gather(together[_RANKS * index : _RANKS * (index + 1)], each)
    return {
        "replicas are equal": all(map(torch.equal, together[::_RANKS], together[1::_RANKS])),
        "parameters are the CPU's": _most_close(ours, train("cpu")),
        "they moved": not any(map(torch.equal, ours, _values(_model("cpu")))),
    }


def _most_close(ours: Parameters, theirs: Parameters) -> bool:
    a, b = (torch.cat([each.flatten() for each in of]) for of in (ours, theirs))
    return bool(torch.isclose(a, b, atol=_CLOSE).float().mean() >= _MOST_CLOSE)


def _model(device: str) -> nn.Sequential:
    torch.manual_seed(7)
    layers = [nn.Linear(20, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 10)]
    return nn.Sequential(*layers).to(device)


def _values(model: nn.Module) -> Parameters:
    """Whole parameters, on the CPU."""
    with torch.no_grad():
        whole = [getattr(each, "full_tensor", each.detach)() for each in model.parameters()]
    return [each.cpu() for each in whole]


def _loss(model: nn.Module, step: int, rank: int, device: str) -> torch.Tensor:
    source = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 20, generator=source).to(device)
    return mse_loss(model(x), x[:, :10].clone())


def _train(model: nn.Module, device: str, optimizer: Any, after: Callable[[], object]) -> None:
    for step in range(_STEPS):
        optimizer.zero_grad()
        _loss(model, step, dist.get_rank(), device).backward()
        optimizer.step()
        after()


def _nothing() -> None:
    """After a step."""


def sharded(codec: str, gathered: str | None, device: str) -> Parameters:
    """FSDP2's shards."""
    model, mesh = _model(device), init_device_mesh(device, (_RANKS,))
    for each in (model[0], model[2], model[4], model):
        fully_shard(each, mesh=mesh)
    given = Compression(codec, min_elements=0, warm_up=0)
    state = gradwire.torch.register_fsdp(model, given, gather_codec=gathered)
    _train(model, device, torch.optim.SGD(model.parameters(), lr=0.1), _nothing)
    state.close()
    return _values(model)


def hooked(codec: str, device: str) -> Parameters:
    """DistributedDataParallel's."""
    model = DistributedDataParallel(_model(device), bucket_cap_mb=0.05)
    state = gradwire.torch.register(model, Compression(codec, min_elements=0, warm_up=0))
    _train(model, device, torch.optim.SGD(model.parameters(), lr=0.1), _nothing)
    state.close()
    return _values(model)


def one_bit_adam(device: str) -> Parameters:
    """AdamW first, then momenta in one bit."""
    model = _model(device)
    optimizer = gradwire.torch.OneBitAdam(model.named_parameters(), lr=1e-3, warm_up=_STEPS // 2)
    _train(model, device, optimizer, _nothing)
    optimizer.check_agreement()
    optimizer.close()
    return _values(model)


def hybrid(device: str) -> Parameters:
    """A layer that is split between the ranks; foreach mixes no DTensor with plain tensors."""
    model = _model(device)
    plan = dict(gradwire.torch.hybrid_plan(model, _RANKS)) | {"2": "model"}
    parallel = gradwire.torch.parallelize(model, plan)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, foreach=False)
    _train(parallel, device, optimizer, _nothing)
    return _values(parallel)


def diloco(device: str) -> Parameters:
    """Rounds of inner steps, averaged in int8."""
    model = _model(device)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = gradwire.torch.DiLoCo(model, inner, every=4, compression="int8", pace=False)
    _train(model, device, inner, outer.step)
    outer.finish()
    return _values(model)


def downpour(device: str) -> Parameters:
    """One replica, and two servers."""
    model = _model(device)
    with serve.Server(2) as server:
        optimizer = gradwire.torch.Downpour(
            model.parameters(),
            serve.Adagrad(lr=0.02),
            compression="onebit",
            pull_codec="int8",
            store=server.store,
        )
        for step in range(_STEPS):
            optimizer.zero_grad()
            _loss(model, step, 0, device).backward()
            optimizer.step()
        optimizer.close()
    return _values(model)


def sandblaster(device: str) -> Parameters:
    """A replica in a thread, whose parameters are compared, and the coordinator."""
    samples, models = 64, [_model(device), _model(device)]

    def make(model: nn.Module, server: serve.Server) -> gradwire.torch.Sandblaster:
        def loss(which: torch.Tensor) -> torch.Tensor:
            return sum((_loss(model, int(each), 0, device) for each in which), torch.zeros(()))

        return gradwire.torch.Sandblaster(
            model.parameters(), loss, samples=samples, portion=samples, store=server.store
        )

    with serve.Server(2) as server:
        thread = threading.Thread(target=make(models[1], server).serve)
        thread.start()
        with make(models[0], server) as lead:
            for _ in range(3):
                lead.step()
        thread.join()
    return _values(models[1])


def _elastic_rank(device: str) -> int:
    """A rank; rank 1 dies once, and its successor joins."""
    model, given = _model(device), Compression("onebit", min_elements=0, warm_up=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = elastic.Sampler(512, batch=8, epochs=2)
    dies = os.environ["RANK"] == "1" and "GRADWIRE_JOIN" not in os.environ
    with elastic.session(
        model, optimizer, sampler, compression=given, min_ranks=_RANKS, wait=30
    ) as session:
        for batch in session:
            if dies and session.steps == 10:
                os._exit(3)
            session.backward(_loss(model, int(batch[0]), 0, device))
            if session.commit():
                optimizer.step()
    digest = sum(float(each.double().abs().sum()) for each in _values(model))
    print(f"digest {digest.hex()}\n", end="", flush=True)
    return 0


def _elastic_run(device: str) -> list[str]:
    """What its ranks print at the end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "gradwire", "run", "--min", "2", "--max", "2"]
    command += ["--restarts", "1", "-m", "tests.gpu.trainers", "--elastic", device]
    with tempfile.TemporaryFile("w+") as output:
        subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, timeout=_RUN_SECONDS
        )
        output.seek(0)
        lines = output.read().splitlines()
    return [line.split()[-1] for line in lines if "digest" in line] or lines[-3:]


if __name__ == "__main__":
    sys.exit(main())

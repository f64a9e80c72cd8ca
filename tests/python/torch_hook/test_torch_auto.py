"""The codec "auto": none, fp16, int8 or lowrank, by links, model and optimizer."""

from __future__ import annotations

import logging
from typing import Any

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.torch import Compression, State, register
from gradwire.torch.exchange.automatic import choose
from gradwire.torch.exchange.defaults import Model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_training import backward


class Ranks:
    """Enough of a communicator, with links of a rate in bit/s."""

    def __init__(self, rate: float, hosts: list[list[int]], latency: float = 1e-4) -> None:
        self.hosts, self.size = hosts, sum(map(len, hosts))
        link = "between" if len(hosts) > 1 else "within"
        costs = {f"{link}.beta": 8 / rate, f"{link}.latency": latency} if rate else {}
        self.cost_model = gradwire.CostModel(costs)


FOUR_HOSTS = [[0], [1], [2], [3]]


def network(width: int) -> Model:
    module = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    return Model(module, dict(module.named_parameters()))


def chosen(rate: float, hosts: Any, width: int, optimizer: Any) -> tuple[str, str]:
    model = network(width)
    its = None if optimizer is None else optimizer(model.parameters.values(), lr=0.1)
    found = choose(model, Ranks(rate, hosts), Compression("auto"), its)  # type: ignore[arg-type]
    return str(found.last), found.why


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
CASES: list[tuple[float, Any, int, Any, str, str]] = [
    (1e9, FOUR_HOSTS, 512, SGD, "lowrank", "over links of 1 Gbit/s the 4.2 MB"),
    (1e9, FOUR_HOSTS, 512, ADAMW, "int8", "left out: with AdamW training ends at a higher loss"),
    (1e8, [[0, 1, 2, 3]], 512, None, "int8", "100 Mbit/s"),
    (1e8, [[0, 1, 2, 3]], 512, None, "int8", "optimizer= was not given"),
    (1e8, [[0, 1], [2, 3]], 512, SGD, "lowrank", "after 500 steps in int8"),
    (1e9, FOUR_HOSTS, 1, SGD, "none", "none "),
    (1e10, FOUR_HOSTS, 512, SGD, "none", "links of 10 Gbit/s by the cost model are too fast"),
    (9.5e9, FOUR_HOSTS, 512, SGD, "none", "9.5 Gbit/s by the cost model"),
    (0, [[0, 1, 2, 3]], 512, SGD, "none", "over shared memory none pays"),
    (0, FOUR_HOSTS, 512, SGD, "none", "`gradwire tune` measures them"),
    (1e8, [[0]], 512, SGD, "none", "there is nothing to compress"),
]


@pytest.mark.parametrize(("rate", "hosts", "width", "optimizer", "codec", "why"), CASES)
def test_the_codec_follows_links_model_and_optimizer(
    rate: float, hosts: Any, width: int, optimizer: Any, codec: str, why: str
) -> None:
    found, says = chosen(rate, hosts, width, optimizer)
    assert found == codec, says
    assert f"codec='auto' chose {codec}: " in says
    assert why in says
    assert "\n" not in says


class OnGpu(nn.Parameter):
    """A parameter that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("rate", "hosts", "codec", "why"),
    [
        (1e9, FOUR_HOSTS, "int8", "is left out: what it costs a GPU was not measured"),
        (1e9, [[0, 1], [2, 3]], "int8", "over links of 1 Gbit/s the 4.2 MB"),
        (1e10, FOUR_HOSTS, "none", "too fast"),
        (1e8, [[0, 1, 2, 3]], "none", "between GPUs of one host none pays"),
    ],
)
def test_on_gpus_the_links_between_hosts_decide(
    rate: float, hosts: Any, codec: str, why: str
) -> None:
    model = network(512)
    gpus = {name: OnGpu(each) for name, each in model.parameters.items()}
    optimizer = SGD(gpus.values(), lr=0.1)
    ranks: Any = Ranks(rate, hosts)
    found = choose(model._replace(parameters=gpus), ranks, Compression("auto"), optimizer)
    assert str(found.last) == codec
    assert why in found.why


def wide() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 300), nn.Linear(300, 300), nn.Linear(300, 10))


@pytest.mark.parametrize(
    ("link", "codec"),
    [(None, "none"), ("100mbit,100us", "Stages((0, 'int8'), (500, 'lowrank'))")],
)
@torch_ranks.on_ranks(2)
def test_ranks_choose_alike_and_say_why(link: str | None, codec: str) -> None:
    """The codec that this rank trains with, and what it says of it."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("gradwire")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("GRADWIRE_MODEL", "default")
        if link is not None:
            environment.setenv("GRADWIRE_LINK", link)
        ddp = DistributedDataParallel(wide())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        log.setLevel(logging.INFO)
        log.addHandler(handler)
        state: State = register(ddp, "auto", optimizer=optimizer)
        log.removeHandler(handler)
        backward(ddp, 0)
    why = [each for each in logged if each.startswith("codec='auto'")]
    assert all(each in repr(state) and each in str(state.stats()) for each in (*why, state.why))
    (first, said), (second, silent) = torch_ranks.gathered((str(state.codec), why))
    assert first == second == codec
    assert len(said) == 1
    assert silent == []


@torch_ranks.on_ranks(2)
def test_auto_on_one_rank_alone_is_refused_on_all() -> None:
    with pytest.raises(gradwire.InvalidArgument) as raised:
        register(DistributedDataParallel(wide()), ("auto", "int8")[dist.get_rank()])
    assert "a different codec=" in str(raised.value)


@pytest.mark.parametrize("codec", ["auto", "auto:rank=2"])
def test_auto_elsewhere_is_told_where_it_belongs(codec: str) -> None:
    with gradwire.init() as comm, pytest.raises(gradwire.InvalidArgument) as raised:
        comm.all_reduce(torch.ones(3), codec=codec)
    assert f"codec={codec!r}: only gradwire.torch.register() and" in str(raised.value)

"""Downpour as programs use it: an optimizer, one in each replica."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire import InvalidArgument, TransportError, serve
from gradwire.torch import Compression, Downpour

Make = Callable[..., Downpour]


@pytest.fixture
def make(stack: ExitStack, server: serve.Server) -> Make:
    """Makes a replica's optimizer."""

    def made(params: Any, rule: serve.Rule, **options: Any) -> Downpour:
        optimizer = Downpour(params, rule, store=server.store, timeout=30, **options)
        stack.callback(optimizer.close)
        return optimizer

    return made


def net(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.ReLU(), torch.nn.Linear(40, 5))


def batches(number: int, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    truth = torch.randn(20, 5, generator=torch.Generator().manual_seed(99))
    for _ in range(number):
        x = torch.randn(16, 20, generator=draw)
        yield x, (x @ truth).argmax(1)


def train(model: torch.nn.Module, optimizer: Any, steps: int, seed: int = 0) -> float:
    loss = torch.tensor(0.0)
    for x, y in batches(steps, seed):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


@torch.no_grad()
def loss_of(model: torch.nn.Module) -> float:
    return sum(
        float(torch.nn.functional.cross_entropy(model(x), y)) for x, y in batches(20, seed=50)
    )


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def test_one_replica_has_the_bits_of_torchs_sgd(make: Make) -> None:
    model, other = net(), net()
    train(model, make(model.parameters(), serve.SGD(lr=0.1)), 20)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1), 20)
    assert torch.equal(weights(model), weights(other))


def test_one_replica_with_adagrad_is_torchs(make: Make) -> None:
    model, other = net(), net()
    train(model, make(model.parameters(), serve.Adagrad(lr=0.1, eps=1e-20)), 20)
    train(other, torch.optim.Adagrad(other.parameters(), lr=0.1), 20)
    torch.testing.assert_close(weights(model), weights(other), rtol=1e-5, atol=1e-6)


def test_rules_by_name_leave_a_parameter_as_it_is(make: Make) -> None:
    ours, theirs = net(), net()
    rules = [("2.*", "none")]
    optimizer = make(
        ours.named_parameters(), serve.SGD(lr=0.1), compression=Compression("onebit", rules=rules)
    )
    train(ours, optimizer, 1)
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), 1)
    for (name, found), wanted in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(found, wanted) == name.startswith("2."), name
    with pytest.raises(InvalidArgument, match=r"give Downpour model.named_parameters\(\)"):
        make(net().parameters(), serve.SGD(lr=0.1), compression=Compression("none", rules=rules))


def test_schedulers_and_decay_reach_the_servers(make: Make) -> None:
    def run(optimizer: Any, model: torch.nn.Module) -> torch.Tensor:
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for seed in range(3):
            train(model, optimizer, 2, seed)
            schedule.step()
        return weights(model)

    model, other = net(), net()
    found = run(make(model.parameters(), serve.SGD(lr=0.2), weight_decay=0.01), model)
    wanted = run(torch.optim.SGD(other.parameters(), lr=0.2, weight_decay=0.01), other)
    torch.testing.assert_close(found, wanted)


def test_groups_have_rates_of_their_own(make: Make) -> None:
    def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
        return [
            {"params": model[0].parameters(), "lr": 0.1},  # type: ignore[index]
            {"params": model[2].parameters(), "lr": 0.05, "weight_decay": 0.1},  # type: ignore[index]
        ]

    model, other = net(), net()
    train(model, make(groups(model), serve.SGD(lr=0.1)), 10)
    train(other, torch.optim.SGD(groups(other), lr=0.1), 10)
    torch.testing.assert_close(weights(model), weights(other))


def test_adagrads_groups_have_one_rate(make: Make) -> None:
    model = net()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 1.0}]  # type: ignore[index]
    optimizer = make(groups, serve.Adagrad(lr=0.1))
    with pytest.raises(InvalidArgument, match="same one"):
        train(model, optimizer, 1)


def test_gradients_accrue_between_pushes(make: Make) -> None:
    model, other = net(), net()
    optimizer = make(model.parameters(), serve.SGD(lr=0.1), n_push=4, n_fetch=4)
    train(model, optimizer, 8)
    optimizer.fetch()
    # The first push is that of step 0 (algorithm 1.1), the next ones are sums of four.
    pushed: list[list[torch.Tensor]] = []
    for step, (x, y) in enumerate(batches(8)):
        other.zero_grad()
        torch.nn.functional.cross_entropy(other(x), y).backward()
        gradients = [each.grad.clone() for each in other.parameters() if each.grad is not None]
        pushed.append(gradients)
        if step % 4 == 3:
            with torch.no_grad():
                for each in pushed[: 1 if step == 3 else 4]:
                    for parameter, gradient in zip(other.parameters(), each, strict=True):
                        parameter -= 0.1 * gradient
            pushed = pushed[1:] if step == 3 else []
    torch.testing.assert_close(weights(model), weights(other))


@pytest.mark.parametrize(
    ("push", "pull", "fetch"),
    [("none", "none", "wait"), ("onebit", "int8", "wait"), ("none", "none", "ahead")],
)
def test_replicas_train_together(make: Make, push: str, pull: str, fetch: str) -> None:
    models = [net(seed) for seed in range(3)]
    optimizers = [
        make(
            each.parameters(),
            serve.Adagrad(lr=0.05),
            compression=push,
            pull_codec=pull,
            fetch=fetch,
        )
        for each in models
    ]
    before = loss_of(models[0])

    def run(i: int) -> None:
        train(models[i], optimizers[i], 80, seed=i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    optimizers[0].fetch()
    assert loss_of(models[0]) < before / 2
    assert optimizers[0].server.stats()[0]["pushes"] + optimizers[0].server.merged >= 3


def test_later_replicas_wait_for_the_warm_start(make: Make) -> None:
    first, second = net(0), net(1)
    optimizer = make(first.parameters(), serve.SGD(lr=0.1), warm_start=5)
    made: list[Downpour] = []
    waiting = threading.Thread(
        target=lambda: made.append(make(second.parameters(), serve.SGD(lr=0.1), warm_start=5))
    )
    waiting.start()
    train(first, optimizer, 4)
    assert not made
    train(first, optimizer, 1, seed=1)
    waiting.join(30)
    assert made
    assert torch.equal(weights(first), weights(second))


def test_saved_residuals_and_steps_are_taken_up(make: Make) -> None:
    model = net()
    optimizer = make(model.parameters(), serve.SGD(lr=0.1), compression="onebit")
    train(model, optimizer, 5)
    saved = optimizer.state_dict()
    other = net()
    again = make(other.parameters(), serve.SGD(lr=0.1), compression="onebit")
    again.load_state_dict(saved)
    assert again.state_dict()["downpour"]["steps"] == 5
    mine, theirs = (each.state_dict()["downpour"]["residuals"] for each in (optimizer, again))
    assert all((mine[key]["residual"] == theirs[key]["residual"]).all() for key in mine)


def test_the_state_of_another_optimizer_is_refused(make: Make) -> None:
    parameters = list(net().parameters())
    state = torch.optim.SGD(parameters, 0.1).state_dict()
    with pytest.raises(InvalidArgument, match="another optimizer"):
        make(parameters, serve.SGD(lr=0.1)).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "keeps"),
    [({}, False), ({"compression": "int8"}, True), ({"max_staleness": 3}, True)],
    ids=["whole", "in a codec", "or refused"],
)
def test_residuals_are_kept_where_a_push_may_lose_something(
    make: Make, options: dict[str, Any], keeps: bool
) -> None:
    optimizer = make(net().parameters(), serve.SGD(lr=0.1), **options)
    assert (optimizer.state_dict()["downpour"]["residuals"] is not None) == keeps


def test_frozen_parameters_stay_here(make: Make) -> None:
    model = net()
    model[0].requires_grad_(False)  # type: ignore[index]
    before = model[0].weight.clone()  # type: ignore[index]
    train(model, make(model.parameters(), serve.SGD(lr=0.1)), 3)
    assert torch.equal(model[0].weight, before)  # type: ignore[index]


def test_a_scaler_unscales_before_the_push(make: Make) -> None:
    model, other = net(), net()
    optimizer = make(model.parameters(), serve.SGD(lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x, y in batches(5):
        optimizer.zero_grad()
        scaler.scale(torch.nn.functional.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    train(other, torch.optim.SGD(other.parameters(), lr=0.1), 5)
    torch.testing.assert_close(weights(model), weights(other))


def test_other_types_are_refused(make: Make) -> None:
    with pytest.raises(InvalidArgument, match="float32"):
        make(net().bfloat16().parameters(), serve.SGD(lr=0.1))


def test_a_warm_start_goes_on_without_the_first(
    server: serve.Server, caplog: pytest.LogCaptureFixture
) -> None:
    first = Downpour(net().parameters(), serve.SGD(lr=0.1), store=server.store, warm_start=5)
    first.close()
    model = net(1)
    options: dict[str, Any] = {"store": server.store, "warm_start": 5, "timeout": 1.0}
    second = Downpour(model.parameters(), serve.SGD(lr=0.1), **options)
    train(model, second, 2)
    second.close()
    assert "at 0 of 5" in caplog.text


def test_a_parameter_may_be_frozen_later(make: Make) -> None:
    model = net()
    optimizer = make(model.parameters(), serve.SGD(lr=0.1))
    train(model, optimizer, 1)
    model[0].requires_grad_(False)  # type: ignore[index]
    before = model[0].weight.clone()  # type: ignore[index]
    train(model, optimizer, 2)
    assert torch.equal(model[0].weight, before)  # type: ignore[index]
    with pytest.raises(InvalidArgument, match="at first"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})


def test_an_unused_parameter_does_not_decay(make: Make) -> None:
    used, unused = (torch.nn.Parameter(torch.ones(50)) for _ in range(2))
    optimizer = make([used, unused], serve.SGD(lr=0.1), weight_decay=0.1)
    used.sum().backward()
    optimizer.step()
    assert torch.equal(unused, torch.ones(50))
    assert (used < 1).all()


def test_a_rate_may_begin_and_end_at_zero(make: Make) -> None:
    def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
        rates = {0.1: model[0], 0.2: model[2]}  # type: ignore[index]
        return [{"params": each.parameters(), "lr": lr} for lr, each in rates.items()]

    def run(optimizer: Any, model: torch.nn.Module) -> torch.Tensor:
        rates = [lambda step: (0, 0, 1, 0)[step], lambda step: (0, 1, 1, 0)[step]]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
        for seed in range(3):
            train(model, optimizer, 1, seed)
            schedule.step()
        train(model, optimizer, 1, 3)
        return weights(model)

    model, other = net(), net()
    found = run(make(groups(model), serve.SGD(lr=0.1)), model)
    torch.testing.assert_close(found, run(torch.optim.SGD(groups(other), lr=0.1), other))


def test_impossible_numbers_are_refused(make: Make) -> None:
    for name in ("clip_norm", "local_lr", "warm_start"):
        with pytest.raises(InvalidArgument, match=name):
            make(net().parameters(), serve.SGD(lr=0.1), **{name: -1})


@pytest.mark.parametrize("tensors", [1, 3])
@pytest.mark.parametrize(("norm", "pushed"), [(10.0, 2.0), (1.0, 1.0)])
def test_all_that_is_pushed_has_at_most_the_norm(
    make: Make, tensors: int, norm: float, pushed: float
) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(50)) for _ in range(tensors)]
    optimizer = make(parameters, serve.SGD(lr=1.0), clip_norm=2.0)
    for each in parameters:
        each.grad = torch.full((50,), norm / (50 * tensors) ** 0.5)
    optimizer.step()
    vector = torch.cat([each.detach() for each in parameters])
    torch.testing.assert_close(vector, torch.full_like(vector, -pushed / len(vector) ** 0.5))


def test_arguments_of_connect_reach_it(
    server: serve.Server, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    connect = serve.connect

    def noted(*args: Any, **options: Any) -> serve.ParameterServer:
        given.update(options)
        return connect(*args, **options)

    monkeypatch.setattr(serve, "connect", noted)
    options = {"store": server.store, "name": "parameters", "replica": "a", "timeout": 30.0}
    options |= {"secret": None, "staleness": "divide", "max_staleness": 3, "reconnect": 5.0}
    optimizer = Downpour([torch.zeros(5, requires_grad=True)], serve.SGD(lr=1.0), **options)  # type: ignore[arg-type]
    stack.callback(optimizer.close)
    assert options.items() <= given.items()


def test_an_error_is_raised_once(make: Make) -> None:
    parameter = torch.nn.Parameter(torch.ones(50))
    optimizer = make([parameter], serve.SGD(lr=0.5))
    parameter.grad = torch.full((50,), float("nan"))
    with pytest.raises(InvalidArgument, match="NaN"):
        optimizer.step()
    parameter.grad = torch.ones(50)
    optimizer.step()
    assert torch.equal(parameter, torch.full((50,), 0.5))


def test_close_ends_the_thread_of_a_dead_server(server: serve.Server) -> None:
    model = net()
    options: dict[str, Any] = {"store": server.store, "n_push": 3, "n_fetch": 3}
    optimizer = Downpour(model.parameters(), serve.SGD(lr=0.1), **options)
    train(model, optimizer, 2)
    server.stop()
    with pytest.raises(TransportError):
        optimizer.close()
    assert "closed" in repr(optimizer.server)


def test_what_is_too_stale_is_pushed_with_the_next_one(make: Make) -> None:
    mine, others = (torch.nn.Parameter(torch.zeros(50)) for _ in range(2))
    options: dict[str, Any] = {"max_staleness": 0, "n_fetch": 100}
    here, there = (make([each], serve.SGD(lr=1.0), **options) for each in (mine, others))
    mine.grad, others.grad = torch.full((50,), 10.0), torch.full((50,), 1.0)
    there.step()
    there.fetch()
    here.step()  # is from version 0, and there is version 1
    here.fetch()
    assert here.server.stale == 2
    here.step()
    here.fetch()
    assert torch.equal(mine, torch.full((50,), -21.0))


def test_staleness_counts_from_the_values_that_are_installed(make: Make) -> None:
    """With `fetch="ahead"` newer ones may be here already, which no gradient has seen yet."""
    mine, others = (torch.nn.Parameter(torch.zeros(50)) for _ in range(2))
    options: dict[str, Any] = {"max_staleness": 0, "fetch": "ahead"}
    here, there = (make([each], serve.SGD(lr=1.0), **options) for each in (mine, others))
    mine.grad, others.grad = torch.full((50,), 10.0), torch.full((50,), 1.0)
    there.step()
    there.fetch()
    mine.grad.zero_()
    here.fetch()
    before = here.server.stale
    there.step()
    there.fetch()
    here._request()
    assert here._incoming is not None
    here._incoming.wait()  # has come, and is not installed
    mine.grad.fill_(10.0)
    here.step()
    here.fetch()
    assert here.server.stale == before + 2


def test_what_has_accrued_is_saved(make: Make) -> None:
    parameter, other = (torch.nn.Parameter(torch.zeros(50)) for _ in range(2))
    options: dict[str, Any] = {"n_push": 3, "n_fetch": 3}
    optimizer = make([parameter], serve.SGD(lr=1.0), **options)
    parameter.grad = torch.ones(50)
    optimizer.step()  # pushes the first gradient
    optimizer.step()
    again = make([other], serve.SGD(lr=1.0), **options)
    again.load_state_dict(optimizer.state_dict())
    other.grad = torch.ones(50)
    again.step()
    again.step()
    again.fetch()
    assert torch.equal(other, torch.full((50,), -4.0))


def test_what_a_loaded_state_has_not_accrued_is_forgotten(make: Make) -> None:
    parameter = torch.zeros(50, requires_grad=True)
    optimizer = make([parameter], serve.SGD(lr=1.0), n_push=3, n_fetch=3)
    pushed = optimizer.state_dict()
    parameter.grad = torch.ones(50)
    optimizer.step()
    optimizer.step()
    assert optimizer.state_dict()["downpour"]["accrued"] is not None
    optimizer.load_state_dict(pushed)
    assert optimizer.state_dict()["downpour"]["accrued"] is None


def test_a_default_device_changes_nothing(make: Make) -> None:
    parameter = torch.nn.Parameter(torch.zeros(50))
    with torch.device("meta"):
        optimizer = make([parameter], serve.SGD(lr=1.0))
        parameter.grad = torch.ones(50, device="cpu")
        optimizer.step()
        optimizer.fetch()
    assert torch.equal(parameter, torch.full((50,), -1.0))


def test_memory_is_used_again_and_by_one_push_at_a_time(make: Make) -> None:
    parameter = torch.nn.Parameter(torch.zeros(50))
    optimizer = make([parameter], serve.SGD(lr=1.0), n_fetch=100)
    for _ in range(20):
        parameter.grad = torch.ones(50)
        optimizer.step()
    optimizer.close()
    assert not optimizer._outgoing
    free = [id(each) for each in optimizer._free]
    assert 0 < len(free) == len(set(free))


def test_layouts_stay(make: Make) -> None:
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    other = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    other.load_state_dict(model.state_dict())
    mine = make(model.parameters(), serve.SGD(lr=0.1), clip_norm=1e9, n_push=1)
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    x = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)
    for net_, optimizer in ((model, mine), (other, theirs)):
        net_(x).square().sum().backward()
        optimizer.step()
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(model.weight, other.weight)


@pytest.mark.parametrize("fetch", ["wait", "ahead"])
def test_local_steps_go_on_while_a_server_is_dialled(
    job_secret: str, stack: ExitStack, tmp_path: Path, fetch: str
) -> None:
    first = serve.Server(1, store="tcp://127.0.0.1:0", snapshot=tmp_path)
    value = torch.zeros(1, requires_grad=True)
    options = {"local_lr": 0.5, "reconnect": 60.0, "fetch": fetch, "store": first.store}
    optimizer = Downpour([value], serve.SGD(lr=1.0), **options)  # type: ignore[arg-type]
    stack.callback(optimizer.close)
    value.grad = torch.ones(1)
    optimizer.step()
    optimizer.fetch()
    assert value.item() == -1.0
    first.stop()
    lost = 0
    while optimizer.server.lost + (optimizer._accrued is not None) == 0:
        optimizer.step()
        lost += 1
    alone = value.item()
    for _ in range(10):  # more than the servers' values, which cannot come
        optimizer.step()
    assert value.item() == alone - 10 * 0.5
    stack.enter_context(serve.Server(1, store=first.store, snapshot=tmp_path))
    optimizer.fetch()
    assert -lost - 1 <= value.item() <= -1.0
    before = value.item()
    value.grad = torch.zeros(1)
    optimizer.step()  # pushes what has accrued
    optimizer.fetch()
    assert before - 10 - lost <= value.item() <= before - 10


def test_a_step_waits_for_a_server_without_local_steps(
    job_secret: str, stack: ExitStack, tmp_path: Path
) -> None:
    first = serve.Server(1, store="tcp://127.0.0.1:0", snapshot=tmp_path)
    value = torch.zeros(1, requires_grad=True)
    optimizer = Downpour([value], serve.SGD(lr=1.0), reconnect=60.0, store=first.store)
    stack.callback(optimizer.close)
    value.grad = torch.ones(1)
    optimizer.step()
    first.stop()
    waiting = threading.Thread(target=optimizer.fetch)
    waiting.start()
    stack.enter_context(serve.Server(1, store=first.store, snapshot=tmp_path))
    waiting.join()
    assert value.item() == -1.0

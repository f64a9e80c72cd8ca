"""OneBitAdam: AdamW's steps in the warm-up, and what its momenta are after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradwire import Communicator
from gradwire.torch import OneBitAdam, Stages
from local_training import bits, small, weights
from ranks import on_ranks, run
from replicated_training import Replica, average_gradients, own_gradients
from torch import nn

CODECS = ["none", "bf16", "int8", "onebit", "topk:density=0.05", "lowrank:rank=2"]


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with options of their own."""
    named = list(model.named_parameters())
    return [
        {"params": named[:2], "lr": 0.02, "betas": (0.8, 0.95)},
        {"params": named[2:], "weight_decay": 0.3, "eps": 1e-4},
    ]


def test_the_warm_up_is_torchs_adamw_bit_for_bit() -> None:
    """With groups and a schedule: the sum of two ranks' gradients does not depend on its order."""

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def body(comm: Communicator) -> bytes:
        model = small()
        optimizer = OneBitAdam(groups_of(model), 0.01, warm_up=9, warm_up_codec="none", ranks=comm)
        replica = Replica(comm, lambda *_, **__: optimizer, model)
        rates = schedule(optimizer)
        for _ in range(8):
            replica.train(1)
            rates.step()
        return bits(model)

    model = small()
    optimizer = torch.optim.AdamW(groups_of(model), 0.01)
    rates = schedule(optimizer)
    for step in range(8):
        average_gradients(model, step, ranks=2)
        optimizer.step()
        rates.step()
    assert run(2, body) == [bits(model)] * 2


@pytest.mark.parametrize("every", [1, 3])
def test_after_the_warm_up_the_second_moment_is_frozen(every: int) -> None:
    """Against the formulas in double precision, with bias corrections, without compression."""

    def body(comm: Communicator) -> torch.Tensor:
        options = {"warm_up_codec": "none", "codec": "none", "betas": (0.9, 0.99)}
        replica = Replica(comm, weight_decay=0.1, every=every, **options)
        replica.train(9)
        return weights(replica.model)

    models = [small().double() for _ in range(3)]
    parameters = list(zip(*(each.parameters() for each in models), strict=True))
    firsts = [[torch.zeros_like(each) for each in ranks] for ranks in parameters]
    second = [torch.zeros_like(each) for each, *_ in parameters]
    common, length, single = [each.data.clone() for each, *_ in parameters], 0.0, small()
    for step in range(9):
        gradients = []
        for rank, model in enumerate(models):
            single.load_state_dict(model.state_dict())
            gradients.append(own_gradients(single, step, ranks=3)[rank])
        rate, decayed = 0.01 / (1 - 0.9 ** (step + 1)), 1 - 0.01 * 0.1
        length += rate
        exchanges = step < 3 or (step + 1) % every == 0
        for i, values in enumerate(parameters):
            own = [each[i].double() for each in gradients]
            if step < 3:
                own = [sum(own) / 3] * 3
                second[i] = 0.99 * second[i] + 0.01 * own[0] ** 2
            root = (second[i] / (1 - 0.99 ** min(step + 1, 3))).sqrt()
            if step >= 3:
                root = root.clamp(min=0.1 * root.square().mean().sqrt())
                own = [(each / root).clamp(-10, 10) * root for each in own]
            firsts[i] = [0.9 * m + 0.1 * g for m, g in zip(firsts[i], own, strict=True)]
            common[i] *= decayed
            for each, momentum in zip(values, firsts[i], strict=True):
                each.data = decayed * each.data - rate * momentum / (root + 1e-8)
            if exchanges:
                moved = common[i] - sum(each.data for each in values) / 3
                firsts[i] = [moved * (root + 1e-8) / length] * 3
                common[i] -= moved
                for each in values:
                    each.data = common[i].clone()
        if exchanges:
            length = 0.0
    model = models[0]
    for found in run(3, body):
        torch.testing.assert_close(found, weights(model), rtol=0, atol=1e-5)


@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("codec", CODECS)
@on_ranks()
def test_all_ranks_have_the_same_bits_after_each_step(
    comm: Communicator, p: int, codec: str
) -> None:
    replica = Replica(comm, codec=codec, clip_norm=0.5)
    found = replica.train(8)
    replica.optimizer.check_agreement()
    found = comm.all_gather_object(found)
    assert all(each == found[0] for each in found)
    assert len(set(found[0])) == 8


class Recorded(OneBitAdam):
    """Keeps what its ranks gave to the exchanges, and what these delivered."""

    def _average(self, inputs: Any, prepare: Any = None, waiting: Any = None) -> Any:
        given = {name: each.double() for name, each in inputs.items()}
        found = super()._average(inputs, prepare, waiting)
        self.flows.append((given, {name: each.double() for name, each in found.items()}))
        return found


@pytest.mark.parametrize("codec", ["onebit", "topk:density=0.05"])
def test_what_a_codec_does_not_deliver_is_kept(codec: str) -> None:
    """Also across the end of the warm-up, where gradients' residuals become momenta's."""

    def body(comm: Communicator) -> Any:
        options = {"warm_up": 3, "lr": 0.01, "min_elements": 0, "warm_up_codec": "int8"}
        replica = Replica(comm, Recorded, codec=codec, **options)
        optimizer = replica.optimizer
        found = []
        for _ in range(9):
            optimizer.flows = []
            before = residuals(optimizer)
            was = set(optimizer.state[replica.model[0].weight])
            replica.train(1)
            ended = "denominator" in optimizer.state[replica.model[0].weight].keys() - was
            if ended:  # the second moment is frozen when the first momentum travels
                denominators = [
                    optimizer.state[each]["denominator"] for each in parameters(replica)
                ]
                before = (
                    before * 0.1 / torch.cat([each.flatten() for each in denominators]).double()
                )
            ((given, delivered),) = optimizer.flows
            found.append((flat(given) + before, flat(delivered), residuals(optimizer)))
        return found

    def residuals(optimizer: OneBitAdam) -> torch.Tensor:
        assert optimizer.feedback is not None
        names = optimizer._names.items()
        kept = [(each, optimizer.feedback.residual(name)) for each, name in names]
        return torch.cat(
            [torch.from_numpy(its) if its.size else torch.zeros(each.numel()) for each, its in kept]
        ).double()

    def parameters(replica: Replica) -> list[torch.Tensor]:
        return list(replica.model.parameters())

    def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([each.flatten() for each in tensors.values()])

    found = run(3, body)
    for step, ranks in enumerate(zip(*found, strict=True)):
        given, kept = (sum(each[i] for each in ranks) for i in (0, 2))
        torch.testing.assert_close(3 * ranks[0][1] + kept, given, rtol=1e-5, atol=2e-5)
        assert bool(kept.abs().max() > 0), step


@on_ranks(2)
def test_between_exchanges_ranks_train_alone_and_send_little(comm: Communicator) -> None:
    replica, sent, found = Replica(comm, warm_up=2, every=3, weight_decay=0.1), [], []
    for step in range(9):
        before = comm.traffic.bytes_sent
        replica.backward()
        if step == 8:  # it has moved since the last exchange
            replica.model[0].weight.grad = None
        replica.optimizer.step()
        found.append(bits(replica.model))
        sent.append(comm.traffic.bytes_sent - before)
        replica.optimizer.check_agreement()
    (sent, found), (_, other) = comm.all_gather_object((sent, found))
    assert [found[step] == other[step] for step in range(9)] == [True] * 3 + [
        False,
        False,
        True,
    ] * 2
    assert [step for step in range(9) if sent[step] > sent[3] + 50] == [0, 1, 2, 5, 8]


@on_ranks(2)
def test_a_rate_of_zero_between_exchanges_moves_nothing(comm: Communicator) -> None:
    replica = Replica(comm, warm_up=2, every=2)
    replica.train(4)
    replica.optimizer.param_groups[0]["lr"] = 0.0
    before = bits(replica.model)
    replica.train(2)
    same = bits(replica.model) == before
    replica.optimizer.param_groups[0]["lr"] = 0.01
    replica.train(2)
    replica.optimizer.check_agreement()
    assert same
    assert bool(weights(replica.model).isfinite().all())


@on_ranks(2)
def test_codecs_by_parameter_hold_after_the_warm_up(comm: Communicator) -> None:
    codec = Stages((0, "onebit"), (4, "none"))
    options = {"warm_up": 2, "warm_up_codec": "none", "rules": [("*.bias", "none")]}
    replica = Replica(comm, codec=codec, **options)
    kept, found = replica.optimizer.feedback, []
    for _ in range(5):
        replica.train(1)
        names = ("0.weight", "0.bias")
        found.append(tuple(bool(kept.residual(name).any()) for name in names))
    expected = [(False, False)] * 2 + [(True, False)] * 2 + [(False, False)]
    assert found == expected


def test_clipping_is_of_the_average_in_the_warm_up() -> None:
    def body(comm: Communicator) -> torch.Tensor:
        replica = Replica(comm, clip_norm=0.1, warm_up=9, warm_up_codec="none")
        replica.train(6)
        return weights(replica.model)

    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(6):
        average_gradients(model, step, ranks=2)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm > 0.2
        optimizer.step()
    for found in run(2, body):
        torch.testing.assert_close(found, weights(model), rtol=0, atol=1e-5)


@on_ranks(2)
def test_clipping_is_of_each_ranks_own_gradient_after_it(comm: Communicator) -> None:
    """A gradient that is far too long on one rank counts as one of the limit's norm."""
    replica = Replica(comm, Recorded, lr=0.01, warm_up=1, clip_norm=0.1, codec="none")
    replica.optimizer.flows = []
    replica.train(1)
    named = replica.optimizer._names.items()
    before = {name: replica.optimizer.state[each]["exp_avg"].clone() for each, name in named}
    replica.backward(1000.0 if comm.rank == 1 else 1e-9)
    replica.optimizer.step()
    given, _ = replica.optimizer.flows[-1]
    own = [
        (given[name] * state["denominator"] - 0.9 * before[name]) / 0.1
        for name, state in ((name, replica.optimizer.state[each]) for each, name in named)
    ]
    small_one, long_one = comm.all_gather_object(
        float(torch.cat([each.flatten() for each in own]).norm())
    )
    assert small_one < 1e-5
    assert long_one == pytest.approx(0.1 * 2**0.5, rel=1e-3)


@on_ranks(2)
def test_a_word_that_first_appears_after_the_warm_up_moves_as_others_do(comm: Communicator) -> None:
    """Its second moment is frozen at 0."""
    words = nn.Embedding(64, 32)
    words.weight.data.zero_()
    optimizer = OneBitAdam(words.named_parameters(), 0.01, warm_up=4, ranks=comm)
    for step in range(12):
        seen = torch.arange(32) if step < 4 else torch.arange(64)
        optimizer.zero_grad()
        words(seen).sum().backward()
        optimizer.step()
    moved = words.weight.detach().abs()
    assert 0.05 < float(moved[:32].mean()) < 0.2
    assert float(moved[32:].max()) < 2


@on_ranks(2)
def test_parameters_that_are_thawed_or_added_have_their_own_warm_up(comm: Communicator) -> None:
    model = small()
    model[2].weight.requires_grad_(requires_grad=False)
    replica = Replica(comm, OneBitAdam, model, warm_up=2)
    replica.train(3)
    model[2].weight.requires_grad_()
    with torch.random.fork_rng():
        torch.manual_seed(comm.rank)
        added = nn.Parameter(torch.randn(8))
    replica.optimizer.add_param_group({"params": [("more", added)], "lr": 0.5})
    found = []
    for _ in range(4):
        replica.backward()
        added.grad = torch.ones(8)
        replica.optimizer.step()
        state = replica.optimizer.state
        found.append(["denominator" in state[each] for each in (model[2].weight, added)])
    replica.optimizer.check_agreement()
    one, other = comm.all_gather_object((found, added.tolist()))
    assert one == other
    assert one[0] == [[False] * 2] * 2 + [[True] * 2] * 2

"""DiLoCo's outer steps: what they compute, and that all ranks end with the same bits."""

from __future__ import annotations

from typing import Any

import gradwire
import pytest
import torch
from gradwire import Communicator, Error, InvalidArgument
from gradwire.torch import Compression, DiLoCo, Stages
from local_training import Trainee, batch, bits, sgd, small, weights
from ranks import on_ranks, outcomes, run
from torch import nn
from torch.nn.functional import mse_loss

CODECS = ["none", "bf16", "int8", "onebit", "topk:density=0.05", "lowrank:rank=2"]
SPARSE_LOCO = {"codec": "topk:density=0.1,values=2bit", "lr": 1, "momentum": 0, "decay": 0.75}
CODECS.append(str(SPARSE_LOCO["codec"]))


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("codec", CODECS)
@on_ranks()
def test_ranks_have_the_same_bits_after_an_outer_step(
    comm: Communicator, p: int, codec: str
) -> None:
    trainee = Trainee(comm, every=3, codec=codec)
    after = trainee.train(10)
    trainee.outer.check_agreement()
    found = comm.all_gather_object((after, bits(trainee.model)))
    assert [len(after) for after, _ in found] == [3] * p
    assert all(after == found[0][0] for after, _ in found)
    assert len({last for _, last in found}) == p  # between outer steps each has its own


def test_one_inner_step_and_a_plain_mean_are_synchronous_sgd() -> None:
    def body(comm: Communicator) -> torch.Tensor:
        trainee = Trainee(comm, every=1, lr=1, momentum=0)
        trainee.train(6)
        return weights(trainee.model)

    model = small()
    optimizer = sgd(model)
    for step in range(6):
        optimizer.zero_grad()
        for rank in range(4):
            x, y = batch(step, rank)
            (mse_loss(model(x), y) / 4).backward()
        optimizer.step()
    for each in run(4, body):
        torch.testing.assert_close(each, weights(model), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, True), (0.9, False), (0.0, True)])
def test_the_outer_optimizer_is_torchs_sgd_bit_for_bit(momentum: float, nesterov: bool) -> None:
    def body(comm: Communicator) -> bytes:
        trainee = Trainee(comm, every=4, lr=0.7, momentum=momentum, nesterov=nesterov)
        trainee.train(20)
        return bits(trainee.model)

    model, common = small(), small()
    optimizer = sgd(model)
    nesterov = nesterov and momentum > 0
    outer = torch.optim.SGD(common.parameters(), 0.7, momentum=momentum, nesterov=nesterov)
    for step in range(20):
        x, y = batch(step, 0)
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
        if step % 4 == 3:
            for value, own in zip(common.parameters(), model.parameters(), strict=True):
                value.grad = value.detach() - own.detach()
            outer.step()
            model.load_state_dict(common.state_dict())
    assert run(1, body) == [bits(model)]


@pytest.mark.parametrize("codec", CODECS)
@on_ranks(3)
def test_what_a_codec_does_not_deliver_is_kept(comm: Communicator, codec: str) -> None:
    trainee = Trainee(comm, every=2, lr=1, momentum=0, codec=codec, feedback=True)
    common = first = weights(trainee.model)
    given = torch.zeros_like(first)
    for _ in range(12):
        trainee.inner_step()
        given_now = common - weights(trainee.model)
        if trainee.outer.step():
            given += given_now
            common = weights(trainee.model)
    assert trainee.outer.feedback is not None
    names = [name for name, _ in trainee.model.named_parameters()]
    kept = [torch.from_numpy(trainee.outer.feedback.residual(each)) for each in names]
    found = comm.all_gather_object((given, 3 * (first - common), torch.cat(kept).double()))
    given, kept = (sum(each[i] for each in found) for i in (0, 2))
    torch.testing.assert_close(found[0][1] + kept, given, rtol=0, atol=2e-5)
    assert bool(kept.abs().max() > 1e-6) == (codec != "none")


def kept_by(trainee: Trainee) -> dict[str, torch.Tensor]:
    """Residuals by parameter, or rows of it; zeros where there is none yet."""
    feedback = trainee.outer.feedback
    assert feedback is not None
    every = trainee.outer._steps._parameters()
    found = {name: torch.from_numpy(feedback.residual(name)) for name in every}
    return {
        name: found[name] if len(found[name]) else torch.zeros(each.numel())
        for name, each in every.items()
    }


@pytest.mark.parametrize("fragments", [1, 2])
@on_ranks(4)
def test_residuals_decay_once_in_a_round_and_lose_nothing_else(
    comm: Communicator, fragments: int
) -> None:
    trainee = Trainee(comm, every=2, fragments=fragments, **SPARSE_LOCO)
    names = list(kept_by(trainee))
    values = {
        name: each for part in trainee.outer._steps._parts for name, each in part.values.items()
    }
    for _ in range(12):
        trainee.inner_step()
        before, kept = {name: values[name].clone() for name in names}, kept_by(trainee)
        now = trainee.outer._steps._parameters()
        given = {name: (before[name] - now[name]).flatten() for name in names}
        trainee.outer.step()
        left = kept_by(trainee)
        for name in names:
            moved = (before[name] - values[name]).flatten() * comm.size
            if not moved.any():
                assert torch.equal(left[name], kept[name])  # it has not travelled
                continue
            every = comm.all_gather_object(given[name] + kept[name] - left[name] / 0.75)
            torch.testing.assert_close(moved, sum(every), rtol=0, atol=1e-5)
    assert all(each.any() for each in kept_by(trainee).values())


@on_ranks(4)
def test_sparse_loco_agrees_on_every_bit_and_goes_on_from_a_checkpoint(comm: Communicator) -> None:
    trainee, other = (Trainee(comm, every=2, **SPARSE_LOCO) for _ in range(2))
    trainee.train(6)
    other.outer.load_state_dict(trainee.outer.state_dict())
    other.step_number = trainee.step_number
    trainee.train(6)
    other.train(6)
    found = comm.all_gather_object((bits(trainee.model), bits(other.model)))
    assert len({each for both in found for each in both}) == 1


@on_ranks(2)
def test_a_round_that_fails_decays_nothing(comm: Communicator) -> None:
    trainee = Trainee(comm, every=1, **SPARSE_LOCO)
    trainee.train(2)
    kept = kept_by(trainee)
    if comm.rank == 1:
        next(trainee.model.parameters()).data.fill_(float("nan"))
    with pytest.raises(InvalidArgument, match="NaN"):
        trainee.outer.step()
    assert all(torch.equal(each, kept[name]) for name, each in kept_by(trainee).items())


@pytest.mark.parametrize("decay", [-0.1, 1.5, float("nan"), "0.9", None])
def test_a_decay_is_a_share(decay: Any) -> None:
    with pytest.raises(InvalidArgument, match="decay"):
        Compression("topk", decay=decay)


@pytest.mark.parametrize(
    ("codec", "more"), [("auto", {}), ("topk", {"feedback": False}), ("int8", {})]
)
def test_only_residuals_decay(codec: str, more: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="decay="):
        Compression(codec, decay=0.9, **more)


@on_ranks(2)
def test_codecs_change_with_parameters_and_outer_steps(comm: Communicator) -> None:
    codec = Stages((0, "none"), (2, "onebit"))
    trainee = Trainee(comm, every=1, codec=codec, rules=[("*.bias", "none")])
    found = []
    for _ in range(3):
        trainee.step()
        kept = trainee.outer.feedback
        assert kept is not None
        found.append((kept.residual("0.weight").any(), kept.residual("0.bias").any()))
    assert found == [(False, False), (False, False), (True, False)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_of_other_types(dtype: torch.dtype) -> None:
    """Outer steps that round to 16 bits would lose most of a small momentum."""

    def body(comm: Communicator) -> tuple[bytes, torch.Tensor]:
        trainee = Trainee(comm, small().to(dtype), every=2, codec="int8")
        trainee.train(10)
        assert next(trainee.model.parameters()).dtype is dtype
        return bits(trainee.model), weights(trainee.model)

    def exact(comm: Communicator) -> torch.Tensor:
        trainee = Trainee(comm, every=2)
        trainee.train(10)
        return weights(trainee.model)

    (first, one), (second, _) = run(2, body)
    assert first == second
    difference = (one - run(2, exact)[0]).abs().max()
    assert difference < (0.1 if dtype is torch.bfloat16 else 0.02)


@on_ranks(1)
def test_a_16_bit_parameter_that_does_not_change_has_no_outer_gradient(comm: Communicator) -> None:
    model = nn.Linear(8, 4, dtype=torch.bfloat16)

    outer = DiLoCo(model, sgd(model), every=1, lr=1e-3, ranks=comm)
    part = outer._steps._parts[0]
    part.values["weight"].add_(1e-5)  # what a rounded parameter does not have
    part.install()
    assert len({bits(model) for _ in range(3) if outer.step()}) == 1


@on_ranks(2)
def test_complex_and_channels_last_parameters(comm: Communicator) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.ones(5, dtype=torch.complex64))
            self.kernel = nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last))

    model = Odd()
    outer = DiLoCo(model, sgd(model), every=1, lr=1, momentum=0, ranks=comm)
    with torch.no_grad():
        model.turn += (1 + 2j) * comm.rank
        model.kernel[0, 1] += comm.rank
    assert outer.step()
    assert model.kernel.is_contiguous(memory_format=torch.channels_last)
    assert model.turn.tolist() == [1.5 + 1j] * 5
    assert model.kernel[:, :, 0, 0].tolist() == [[1, 1.5, 1], [1, 1, 1]]


@on_ranks(2)
def test_tied_weights_travel_once(comm: Communicator) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))
    model[2].weight = model[0].weight
    trainee = Trainee(comm, model, every=2, codec="onebit")
    trainee.train(4)
    assert model[2].weight is model[0].weight
    found = comm.all_gather_object((len(trainee.outer.feedback.keys()), bits(model)))
    assert found[0] == found[1]
    assert found[0][0] == 5


@on_ranks(2)
def test_frozen_parameters_do_not_travel_and_are_not_to_change(comm: Communicator) -> None:
    model = small()
    model[0].requires_grad_(requires_grad=False)
    frozen = model[0].weight.clone()
    trainee = Trainee(comm, model, every=2, codec="onebit")
    trainee.train(4)
    same = torch.equal(frozen, model[0].weight)
    if comm.rank == 1:
        with torch.no_grad():
            model[0].weight += 1
    with pytest.raises(InvalidArgument) as raised:
        trainee.train(2)
    assert (len(trainee.outer.feedback.keys()), same) == (2, True)
    assert str(raised.value).startswith(
        "rank 1: the parameter '0.weight' was changed, which was frozen"
    )


@on_ranks(2)
def test_parameters_of_several_optimizers_and_of_none(comm: Communicator) -> None:
    model = small()
    both = [sgd(model[0]), torch.optim.Adam(model[2].parameters())]
    outer = DiLoCo(model, both, every=1, pace=False, ranks=comm)
    assert len(outer._names) == 4
    outer = DiLoCo(model, both[0], every=1, pace=False, ranks=comm)
    assert outer.step()
    with torch.no_grad():
        model[2].bias += 1  # as an optimizer would that DiLoCo was not told of
    with pytest.raises(InvalidArgument) as raised:
        outer.step()
    text = str(raised.value)
    assert "rank 0: the parameter '2.bias' was changed" in text
    assert "inner_optimizer=[a, b]" in text


class Counts(nn.Module):
    """A buffer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf"), 0.1]))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("short", torch.zeros(2, dtype=torch.bfloat16), persistent=False)


@pytest.mark.parametrize("average", [True, False])
def test_buffers_are_averaged_or_left_alone(average: bool) -> None:
    def body(comm: Communicator) -> tuple[Any, ...]:
        model = Counts()
        options = {"average_buffers": average, "ranks": comm}
        outer = DiLoCo(model, sgd(model), every=1, **options)
        for _ in range(2):
            model.mean += comm.rank + 1
            model.short += comm.rank + 1
            model.count += comm.rank + 1
            assert outer.step()
        mask = model.mask.tolist() == Counts().mask.tolist()
        return model.mean.tolist(), model.short.tolist(), int(model.count), mask

    if average:  # of changes by 1, 2 and 3; the count is rank 0's, which goes on from its own
        assert run(3, body) == [([4, 4], [4, 4], 2, True)] * 3
    else:
        expected = [([2.0 * i, 2.0 * i], [2.0 * i, 2.0 * i], 2 * i, True) for i in (1, 2, 3)]
        assert run(3, body) == expected


@on_ranks(2)
def test_a_network_with_batch_norm_evaluates_alike_on_all_ranks(comm: Communicator) -> None:
    trainee = Trainee(comm, small(normalized=True), every=3)
    trainee.train(6)
    trainee.model.eval()
    one, other = comm.all_gather_object(trainee.model(batch(0, 0)[0]).detach().numpy().tobytes())
    assert one == other


@on_ranks(3)
def test_not_a_number_on_one_rank_is_told_by_all_and_training_goes_on(comm: Communicator) -> None:
    trainee = Trainee(comm, every=2, codec="onebit")
    (before,) = trainee.train(2)
    kept = trainee.outer.feedback.residual("0.weight").tobytes()
    trainee.step()
    trainee.inner_step()
    if comm.rank == 1:
        with torch.no_grad():
            trainee.model[2].bias[0] = float("nan")
    with pytest.raises(InvalidArgument) as raised:
        trainee.outer.step()
    assert trainee.outer.feedback.residual("0.weight").tobytes() == kept
    after = bits(trainee.model)
    (last,) = trainee.train(2)
    found = comm.all_gather_object((str(raised.value), before, after, last))
    for text, before, after, last in found:
        assert text.startswith("rank 1: '2.bias' had NaN or Inf after the inner steps: all ranks")
        assert after == before
        assert last == found[0][3]


@on_ranks(3)
def test_common_values_that_differ_are_found_in_the_next_round(comm: Communicator) -> None:
    trainee = Trainee(comm, every=1)
    trainee.step()
    if comm.rank == 2:
        trainee.outer._steps._parts[0].values["2.weight"][3, 3] += 1e-7
    with pytest.raises(Error) as raised:
        trainee.step()
    text = str(raised.value)
    assert "outer values of '2.weight' differ" in text
    assert "ranks 0, 1; ranks 2" in text


@on_ranks(2)
def test_amp_a_scheduler_and_accumulation_stay_the_users(comm: Communicator) -> None:
    trainee = Trainee(comm, every=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    schedule = torch.optim.lr_scheduler.StepLR(trainee.optimizer, 1, 0.5)
    for step in range(6):
        for part in range(2):
            x, y = batch(2 * step + part, comm.rank)
            loss = mse_loss(trainee.model(x), y) * (float("inf") if step == 3 else 1)
            scaler.scale(loss).backward()
        scaler.step(trainee.optimizer)
        scaler.update()
        schedule.step()
        trainee.optimizer.zero_grad()
        trainee.outer.step()
    assert scaler.get_scale() == 2.0**15
    assert weights(trainee.model).isfinite().all()
    one, other = comm.all_gather_object(
        (bits(trainee.model), trainee.optimizer.param_groups[0]["lr"])
    )
    assert one == other
    assert one[1] == 0.1 * 0.5**6


def leave_early(comm: Communicator) -> Any:
    trainee = Trainee(comm, every=2)
    trainee.train(2)
    if comm.rank == 1:
        comm.abort("leaves")
        return None
    with pytest.raises(gradwire.Aborted) as raised:
        trainee.train(2)
    return raised.value.peer


def test_an_error_names_the_rank_that_left() -> None:
    ended = outcomes(3, leave_early)
    assert [ended[rank].value for rank in (0, 2)] == [1, 1]

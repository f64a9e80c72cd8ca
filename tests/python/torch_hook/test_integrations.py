"""What the adapters for trainers share: warm-ups, checkpoints, and the backend.

The trainers' own programs run by `make test-with WHAT=trainers` and `WHAT=ray`.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any

import gradwire
import gradwire.torch
import pytest
import torch
import torch.distributed as dist
from gradwire.integrations import restore, save, use_backend
from gradwire.integrations._hook import register_wrapped, with_warm_up
from gradwire.torch import Compression, Stages
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import on_ranks, run


def wrapped() -> DistributedDataParallel:
    torch.manual_seed(1)
    return DistributedDataParallel(torch.nn.Linear(32, 64))


def train(model: torch.nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        torch.manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(4, 32)).pow(2).mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("given", "steps", "warm_up"),
    [
        (Compression("onebit"), 100, 20),
        (Compression("onebit"), 4, 1),
        (Compression("onebit", warm_up=7), 100, 7),
        (Compression("onebit"), math.inf, None),
        (Compression("onebit"), None, None),
        (Compression("onebit"), -1, None),
        (Compression("auto"), 100, 20),
        (Compression("int8"), 100, None),
        (Compression(Stages((0, "int8"), (9, "onebit"))), 100, None),
    ],
)
def test_biased_codecs_warm_up_for_a_fifth_of_the_steps(
    given: Compression, steps: float | None, warm_up: int | None
) -> None:
    assert with_warm_up(given, steps).warm_up == warm_up


def residuals_of(state: gradwire.torch.State) -> dict[str, bytes]:
    assert state.feedback is not None
    return {key: state.feedback.residual(key).tobytes() for key in dict(state.feedback.keys())}


def save_trained(folder: Path) -> Any:
    model = wrapped()
    state = register_wrapped(model, Compression("onebit", warm_up=0), None)
    assert state is not None
    train(model, 3)
    save(model, folder / "checkpoint")
    return residuals_of(state)


def restored_residuals(folder: Path) -> Any:
    model = wrapped()
    state = register_wrapped(model, Compression("onebit", warm_up=0), None)
    assert state is not None
    restore(state, folder / "checkpoint")
    assert state.steps == 3
    return residuals_of(state)


def test_a_checkpoint_goes_on_with_the_same_and_with_other_ranks(tmp_path: Path) -> None:
    before = run(2, partial(save_trained, tmp_path))
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["gradwire.pt"]
    assert run(2, partial(restored_residuals, tmp_path)) == before
    one, other, third = run(3, partial(restored_residuals, tmp_path))
    assert sorted(one) == sorted(other) == sorted(third) == sorted(before[0])


@on_ranks(2)
def test_without_a_file_residuals_begin_empty(tmp_path: Path) -> None:
    model = wrapped()
    state = register_wrapped(model, Compression("onebit", warm_up=0), None)
    assert state is not None
    restore(model, tmp_path)
    assert state.steps == 0
    train(model, 1)


@on_ranks(2)
def test_a_file_that_cannot_be_read_is_told_on_all_ranks(tmp_path: Path) -> None:
    model = wrapped()
    register_wrapped(model, "onebit", None)
    if dist.get_rank() == 0:
        (tmp_path / "gradwire.pt").write_bytes(b"broken")
    with pytest.raises(Exception) as raised:  # noqa: PT011 - rank 0 has torch's own error
        restore(model, tmp_path)
    assert dist.get_rank() == 0 or isinstance(raised.value, gradwire.InvalidArgument)


@on_ranks(2)
def test_a_model_without_a_hook_is_refused(tmp_path: Path) -> None:
    with pytest.raises(gradwire.InvalidArgument, match="call register"):
        save(wrapped(), tmp_path)


@on_ranks(1)
def test_one_process_needs_no_hook(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    assert register_wrapped(model, "onebit", None) is None
    save(model, tmp_path)
    restore(model, tmp_path)
    assert not list(tmp_path.iterdir())


@on_ranks(2)
def test_compiled_models_are_unwrapped() -> None:
    state = register_wrapped(torch.compile(wrapped()), "int8", None)
    assert state is not None
    state.close()


@on_ranks(2)
def test_use_backend_refuses_another_backend() -> None:
    with pytest.raises(gradwire.InvalidArgument, match="'gloo' already: call use_backend"):
        use_backend()


@on_ranks(2, backend="gradwire")
def test_use_backend_takes_the_group_that_is_there() -> None:
    use_backend()
    assert dist.get_backend() == "gradwire"


def test_use_backend_does_nothing_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    use_backend()
    assert not dist.is_initialized()

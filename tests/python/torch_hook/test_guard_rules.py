"""What the guard takes for a backward that bypassed the hook, without ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from gradwire import Error
from gradwire.torch.ddp import model_hooks as module
from gradwire.torch.ddp.model_hooks import Guard


@dataclass
class Output:
    loss: torch.Tensor
    rest: Any


class Model:
    """Three parameters, of which the last one is frozen, and a guard, for which it is the steps."""

    def __init__(self) -> None:
        self.a, self.b = (torch.ones(2, requires_grad=True) for _ in range(2))
        self.submitted_steps = 0
        named = {"a": self.a, "b": self.b, "frozen": torch.ones(2)}
        steps: Any = self
        self.guard = Guard(named, steps)
        self.begun: list[int] = []

    def begin_backward(self) -> None:
        self.begun.append(1)

    def backward(self, *parameters: torch.Tensor, hook: bool) -> None:
        output = torch.stack([each.sum() for each in parameters]).sum()
        self.guard.after_forward(output)
        if hook:
            parameters[0].register_hook(lambda _: self.count())
        output.backward()

    def count(self) -> None:
        self.submitted_steps += 1


def test_a_backward_that_reaches_the_hook_is_left_alone() -> None:
    model = Model()
    for step in range(3):
        model.submitted_steps = step
        model.backward(model.a, model.b, hook=True)
        model.guard.require_averaged()
    assert model.begun == [1, 1, 1]


def test_a_backward_that_does_not_raises_at_its_end() -> None:
    model = Model()
    with pytest.raises(Error, match=r"find_unused_parameters=True$"):
        model.backward(model.a, model.b, hook=False)
    model.guard.require_averaged()  # is told once
    model.backward(model.a, model.b, hook=True)


def test_what_is_missing_may_come_in_the_next_backward() -> None:
    model = Model()
    model.backward(model.a, hook=False)
    with pytest.raises(Error, match=r"no gradient came for b$"):
        model.guard.require_averaged()
    model.guard.require_averaged()
    model.backward(model.a, hook=False)
    with pytest.raises(Error, match=r"find_unused_parameters=True$"):
        model.backward(model.b, hook=False)  # now all have one, and none was averaged
    model.backward(model.a, hook=False)
    model.submitted_steps += 1
    model.guard.require_averaged()
    model.backward(model.b, hook=False)  # begins anew
    with pytest.raises(Error, match=r"no gradient came for a$"):
        model.guard.require_averaged()


def test_a_backward_that_reaches_no_parameter_is_none() -> None:
    model = Model()
    x = torch.ones(1, requires_grad=True)
    model.backward(x, hook=False)
    model.guard.require_averaged()


def test_a_gradient_is_written_anew_or_added_to() -> None:
    one, other = torch.ones(1), torch.ones(1)
    moves = [((one, 1), (None, -1)), ((one, 2), (one, 1)), ((one, 1), (other, 1))]
    stays = [((None, -1), (None, -1)), ((None, -1), (one, 1)), ((one, 1), (one, 1))]
    assert all(module._moved(*each) for each in moves)
    assert not any(module._moved(*each) for each in stays)


@pytest.mark.parametrize(("count", "more"), [(1, ""), (5, ""), (6, " and 1 more")])
def test_five_parameters_are_named(count: int, more: str) -> None:
    names = [f"p{each}" for each in range(count)]
    wanted = f"; no gradient came for {', '.join(names[:5])}{more}"
    assert module._without_gradient(names) == wanted
    assert module._without_gradient([]) == ""


def test_outputs_of_any_form_are_watched() -> None:
    tensors = [torch.ones(1, requires_grad=True) * 1 for _ in range(5)]
    nested = {"x": tensors[0], "y": (tensors[1], [tensors[2], 3]), "z": "text"}
    found = list(module._tensors(Output(tensors[3], [nested, tensors[4], None])))
    assert [id(each) for each in found] == [id(tensors[each]) for each in (3, 0, 1, 2, 4)]


def test_hooks_on_leaves_are_removed() -> None:
    model = Model()
    model.guard.after_forward([model.a, model.a * 2, torch.ones(1)])
    assert len(model.guard._on_leaves) == 1
    assert model.a._backward_hooks
    model.guard.remove_leaf_hooks()
    assert not model.a._backward_hooks
    assert model.guard._on_leaves == []
    model.guard.after_forward(model.a)
    model.a.sum().backward()
    assert not model.a._backward_hooks  # after the backward, too

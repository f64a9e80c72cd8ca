"""Memory that the hook takes, in bytes per parameter, beside DDP over gloo."""

from __future__ import annotations

import pytest

from bench.training import hook_memory

FIXED = 3.5  # bytes a parameter that shared memory and allocators take of a model of this size


@pytest.mark.long
def test_without_feedback_the_hook_holds_no_second_copy_of_gradients() -> None:
    gloo = hook_memory.measure(None)
    for hook in ("none", "fp16", "int8"):
        found = hook_memory.measure(hook_memory.HOOKS[hook])
        assert found.peak - gloo.peak < FIXED, hook
        assert found.after - gloo.after < FIXED, hook


@pytest.mark.long
def test_feedback_takes_two_vectors_a_parameter() -> None:
    gloo = hook_memory.measure(None)
    for hook, bytes_each in (("onebit", 4), ("onebit, bfloat16", 2)):
        found = hook_memory.measure(hook_memory.HOOKS[hook])
        assert found.peak - gloo.peak < 2 * bytes_each + FIXED, hook
        assert found.after - gloo.after < 2 * bytes_each + FIXED, hook

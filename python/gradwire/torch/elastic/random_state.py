"""States of the random generators that a training uses: Python's, NumPy's and torch's."""

from __future__ import annotations

import hashlib
import pickle
import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """The states now, of GPUs only once the program has used one."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Puts states back."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])


def digest(state: dict[str, Any]) -> str:
    """The same text for the same states."""
    plain = (state["python"], state["numpy"][0], state["numpy"][2:])
    found = hashlib.sha256(pickle.dumps(plain))
    found.update(np.ascontiguousarray(state["numpy"][1]).tobytes())
    for name in ("torch", "cuda"):
        found.update(state[name].numpy().tobytes() if name in state else b"")
    return found.hexdigest()


def seed_from(text: str) -> None:
    """Seeds all generators from a text."""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)

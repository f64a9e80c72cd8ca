"""A small language model that OneBitAdam trains, on words of which most are rare."""

from __future__ import annotations

from typing import Any

import torch
from gradwire import Communicator
from gradwire.torch import OneBitAdam
from local_training import seeding
from ranks import run
from replicated_training import settings_of
from torch import nn
from torch.nn.functional import cross_entropy

STEPS, WORDS, CONTEXT = 120, 96, 4


def text() -> torch.Tensor:
    """Words of a hidden rule: each is one of three that follow the one before, mostly."""
    source = torch.Generator().manual_seed(5)
    rare = (1 / torch.arange(1.0, WORDS + 1)).expand(WORDS, WORDS)
    following = torch.multinomial(rare, 3, generator=source)
    chosen = torch.randint(3, (20_000,), generator=source).tolist()
    found = [0]
    for each in chosen:
        found.append(int(following[found[-1], each]))
    noise = torch.multinomial(rare[0], len(found), replacement=True, generator=source)
    odd = torch.rand(len(found), generator=source) < 0.1
    return torch.where(odd, noise, torch.tensor(found))


def train(**settings: Any) -> float:
    """The cross-entropy on all words in the end."""
    words = text()

    def pick(starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        windows = words[starts[:, None] + torch.arange(CONTEXT + 1)]
        return windows[:, :-1], windows[:, -1]

    def body(comm: Communicator) -> float:
        with seeding:
            torch.manual_seed(2)
            model = nn.Sequential(
                *(nn.Embedding(WORDS, 24), nn.Flatten(), nn.Linear(24 * CONTEXT, 128)),
                *(nn.Tanh(), nn.LayerNorm(128), nn.Linear(128, WORDS)),
            )
        optimizer = OneBitAdam(model.named_parameters(), ranks=comm, **settings_of(**settings))
        rates = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.05, STEPS)
        source = torch.Generator().manual_seed(comm.rank)
        for _ in range(STEPS):
            inputs, labels = pick(torch.randint(len(words) - CONTEXT - 1, (64,), generator=source))
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            rates.step()
        with torch.no_grad():
            inputs, labels = pick(torch.arange(len(words) - CONTEXT))
            return float(cross_entropy(model(inputs), labels))

    one, other = run(2, body)
    assert one == other
    return one


def test_one_bit_adam_trains_as_adamw_does_and_its_controls_do_not() -> None:
    """A warm-up that does not end is AdamW, of gradients in the warm-up's codec."""
    adamw = train(lr=5e-3, warm_up=STEPS, warm_up_codec="none")
    compressed = train(lr=5e-3, warm_up=STEPS // 5)
    assert compressed < 1.01 * adamw
    gradients = train(lr=5e-3, warm_up=STEPS, warm_up_codec="onebit")
    assert gradients > 1.015 * adamw
    without_feedback = train(lr=5e-3, warm_up=STEPS // 5, feedback=False)
    assert without_feedback > 1.03 * adamw

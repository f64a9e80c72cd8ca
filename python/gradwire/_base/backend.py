"""How torch.distributed names our backend, and for which devices it is."""

from __future__ import annotations

BACKEND = "gradwire"
DEVICES = ("cpu", "cuda")

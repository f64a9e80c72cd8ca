"""Registration of the backend "gradwire" with torch.distributed, where `import torch` finds it.

torch calls `register` at the end of its own import, in programs that may never use it. So this
imports nothing but what is there already, and `gradwire.torch` only when a group is made.
"""

from __future__ import annotations

import importlib
from typing import Any

from gradwire._base.backend import BACKEND, DEVICES


def register() -> None:
    """Makes `init_process_group("gradwire")` known to torch; may be called again."""
    distributed = importlib.import_module("torch.distributed")
    if distributed.is_available():
        distributed.Backend.register_backend(
            BACKEND, create, extended_api=True, devices=list(DEVICES)
        )


def create(options: Any, backend_options: Any) -> Any:
    """Makes this rank's end of a process group; torch calls it on each of its ranks."""
    from gradwire.torch.backend import creation

    return creation.create(options, backend_options)

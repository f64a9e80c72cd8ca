"""gradwire under PyTorch's DistributedDataParallel: averages gradients in a communication hook.

    ddp = DistributedDataParallel(model)
    gradwire.torch.register(ddp, codec="fp16")

Importing this module imports torch; `import gradwire` alone does not.
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as _missing:
    raise ModuleNotFoundError(
        "gradwire.torch needs PyTorch: pip install 'gradwire[torch]'", name=_missing.name
    ) from _missing

from gradwire.torch._hook import comm_hook
from gradwire.torch._momentum import Momentum
from gradwire.torch._register import register, stats
from gradwire.torch._rules import Stages, warm_up
from gradwire.torch._state import State
from gradwire.torch._stats import CodecStats, Stats, StepStats

__all__ = [
    "CodecStats",
    "Momentum",
    "Stages",
    "State",
    "Stats",
    "StepStats",
    "comm_hook",
    "register",
    "stats",
    "warm_up",
]

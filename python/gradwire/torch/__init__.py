"""gradwire under PyTorch's DistributedDataParallel: averages gradients in a communication hook.

    ddp = DistributedDataParallel(model)
    gradwire.torch.register(ddp, "fp16")

It also has the backend of `torch.distributed.init_process_group("gradwire")`.

Importing this module imports torch; `import gradwire` alone does not.
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as _missing:
    raise ModuleNotFoundError(
        "gradwire.torch needs PyTorch: pip install torch", name=_missing.name
    ) from _missing

from gradwire import _autoload
from gradwire.torch import elastic
from gradwire.torch._async_save import async_save
from gradwire.torch._downpour import Downpour
from gradwire.torch._gathered import gather_state_dict, scatter_state_dict
from gradwire.torch._group_calls import monitored_barrier, traffic
from gradwire.torch._hybrid import hybrid_plan, parallelize
from gradwire.torch._ranks.broadcasts import broadcast_optimizer_state, broadcast_parameters
from gradwire.torch._ranks.ranks import Ranks
from gradwire.torch._sandblaster import Sandblaster
from gradwire.torch.backend.options import Options
from gradwire.torch.ddp.register import register, stats
from gradwire.torch.ddp.state import State
from gradwire.torch.exchange.compression import Compression
from gradwire.torch.exchange.rules import Stages
from gradwire.torch.exchange.steps import CodecStats, Stats, StepStats
from gradwire.torch.fsdp.register import register_fsdp
from gradwire.torch.fsdp.state import FSDPState
from gradwire.torch.optimizers.one_bit_adam import OneBitAdam
from gradwire.torch.outer.diloco import DiLoCo

_autoload.register()

__all__ = [
    "CodecStats",
    "Compression",
    "DiLoCo",
    "Downpour",
    "FSDPState",
    "OneBitAdam",
    "Options",
    "Ranks",
    "Sandblaster",
    "Stages",
    "State",
    "Stats",
    "StepStats",
    "async_save",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "gather_state_dict",
    "hybrid_plan",
    "monitored_barrier",
    "parallelize",
    "register",
    "register_fsdp",
    "scatter_state_dict",
    "stats",
    "traffic",
]

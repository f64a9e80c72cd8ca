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

from gradwire.torch._hook import State, comm_hook, register

__all__ = ["State", "comm_hook", "register"]

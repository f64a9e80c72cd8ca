"""gradwire under PyTorch's DistributedDataParallel: averages gradients in a communication hook.

    ddp = DistributedDataParallel(model)
    gradwire.torch.register(ddp, codec="fp16")

Importing this module imports torch; `import gradwire` alone does not.
"""

from gradwire.torch._hook import State, comm_hook, register

__all__ = ["State", "comm_hook", "register"]

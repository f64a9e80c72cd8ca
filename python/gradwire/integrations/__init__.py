"""The hook of DistributedDataParallel in the trainers that people have.

- `gradwire.integrations.transformers`: ``Trainer(callbacks=[GradwireCallback("int8")])``
- `gradwire.integrations.lightning`: ``Trainer(strategy=GradwireStrategy("int8"))``
- `gradwire.integrations.accelerate`: ``prepare(accelerator, model, optimizer, codec="int8")``
- `gradwire.integrations.ray`: ``prepare_model(model, "int8", optimizer)``

Each needs its trainer, which gradwire does not install.
"""

from gradwire.integrations._hook import restore, save, use_backend

__all__ = ["restore", "save", "use_backend"]

"""Hugging Face's Trainer: ``Trainer(..., callbacks=[GradwireCallback("int8")])``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from gradwire._errors import InvalidArgument
from gradwire.integrations._hook import register_wrapped, restore, save
from gradwire.torch import State
from gradwire.torch.exchange.compression import CompressionLike


class GradwireCallback(TrainerCallback):  # type: ignore[misc]
    """Registers gradwire's hook for the model that a Trainer wraps in DistributedDataParallel.

    `codec` is a codec, or a `gradwire.torch.Compression`; a biased codec's warm-up is a fifth of
    the Trainer's steps unless the Compression says another. `options` are further arguments of
    `gradwire.torch.register`, such as `momentum` and `clip_norm`. Residuals are in ``gradwire.pt``
    of each checkpoint, from which `resume_from_checkpoint` goes on, with any number of ranks.

    `state` is what `register` returned; None before training and on one process, where nothing
    is exchanged. `TrainingArguments(max_grad_norm=)`, 1.0 by default, clips the average of the
    ranks' gradients, without the residuals of a biased codec: give `clip_norm=` here, and
    `max_grad_norm=0` there, to clip before they are added.
    """

    state: State | None = None

    def __init__(self, codec: CompressionLike = "none", **options: Any) -> None:
        self._codec, self._options = codec, options

    def on_train_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Registers the hook; goes on from a checkpoint's residuals where there is one."""
        trainer, checkpoint = _calling_trainer()
        if self.state is not None:
            self.state.close()
        self.state = register_wrapped(
            trainer.model_wrapped,
            self._codec,
            trainer.optimizer,
            state.max_steps,
            **{"scaler": getattr(trainer.accelerator, "scaler", None), **self._options},
        )
        if checkpoint is not None:
            restore(self.state, checkpoint)

    def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Adds the residuals to the checkpoint that the Trainer has written."""
        save(self.state, Path(args.output_dir) / f"checkpoint-{state.global_step}")


def _calling_trainer() -> tuple[Trainer, str | None]:
    """The Trainer that calls this callback, and the checkpoint that it goes on from.

    Callbacks are given the model as it was before the Trainer wrapped it, and nothing that leads
    from it to the wrapped one.
    """
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and "resume_from_checkpoint" in frame.f_locals:
            return found, frame.f_locals["resume_from_checkpoint"] or None
    raise InvalidArgument("GradwireCallback is for transformers.Trainer, which calls it in train()")

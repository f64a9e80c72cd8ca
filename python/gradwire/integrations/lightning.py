"""Lightning: ``Trainer(strategy=GradwireStrategy("int8"))``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from gradwire.integrations._hook import go_on, register_wrapped
from gradwire.torch import State, gather_state_dict
from gradwire.torch.exchange.compression import CompressionLike

KEY = "gradwire"  # in Lightning's checkpoints


class GradwireStrategy(DDPStrategy):  # type: ignore[misc]
    """Lightning's DDPStrategy, whose models average their gradients with gradwire.

    `codec` is a codec, or a `gradwire.torch.Compression`; a biased codec's warm-up is a fifth of
    the Trainer's steps unless the Compression says another. `options` are further arguments of
    `gradwire.torch.register`; all others go to DDPStrategy. Checkpoints hold all ranks' residuals,
    for any number of ranks. `state` is what `register` returned; None on one process. A Trainer's
    `gradient_clip_val` clips the average, without residuals; ``options={"clip_norm": 1.0}`` clips
    before they are added.
    """

    state: State | None = None

    def __init__(
        self,
        codec: CompressionLike = "none",
        options: Mapping[str, Any] | None = None,
        **ddp: Any,
    ) -> None:
        super().__init__(**ddp)
        self._codec, self._options = codec, dict(options or {})

    def setup(self, trainer: Any) -> None:
        """Registers the hook, once Lightning has wrapped the model and made the optimizer."""
        super().setup(trainer)
        if self.state is not None:  # of an earlier fit()
            self.state.close()
            self.state = None
        if trainer.training:
            optimizer = self.optimizers[0] if len(self.optimizers) == 1 else None
            scaler = getattr(self.precision_plugin, "scaler", None)
            self.state = register_wrapped(
                self.model,
                self._codec,
                optimizer,
                trainer.estimated_stepping_batches,
                **{"scaler": scaler, **self._options},
            )

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Adds all ranks' residuals to the checkpoint."""
        if self.state is not None:
            checkpoint[KEY] = gather_state_dict(self.state)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Goes on from the residuals of a checkpoint, too."""
        super().load_optimizer_state_dict(checkpoint)
        if self.state is not None:
            go_on(self.state, lambda: checkpoint.get(KEY))

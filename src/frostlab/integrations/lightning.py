"""Gradient flow in Lightning: `Trainer(callbacks=[GradFlowCallback()])`; needs `lightning`."""

from typing import Any

from frostlab.integrations.transformers import Watching

try:
    from lightning import Callback
except ImportError:
    from frostlab.errors import FrostlabError

    raise FrostlabError("this callback needs Lightning: pip install lightning") from None


class GradFlowCallback(Watching, Callback):
    """Watches a LightningModule, before and after clipping; `.flow` is what was seen."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch."""
        self.begin(pl_module, trainer.optimizers, trainer.global_step)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Lightning has made the gradients, and not yet clipped them."""
        self.flow.before_clip()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End watching, and write."""
        self.end(trainer.is_global_zero)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End watching too where training ends early."""
        if hasattr(self, "flow"):
            self.on_train_end(trainer, pl_module)

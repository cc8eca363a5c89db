"""Gradient flow in Lightning: `Trainer(callbacks=[GradFlowCallback()])`; requires `lightning`."""

from typing import Any

from frostlab.errors import FrostlabError
from frostlab.integrations.transformers import FlowCallback

try:
    from lightning import Callback
except ImportError:  # no extra of frostlab installs it
    raise FrostlabError("this callback needs Lightning: pip install lightning") from None


class GradFlowCallback(FlowCallback, Callback):
    """A callback that measures a LightningModule's gradient flow, before and after clipping."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to measure."""
        self.start_flow(pl_module, trainer.optimizers, trainer.global_step)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Measure the gradients before Lightning clips them."""
        self.flow.before_clip()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop measuring, and save the flow if a path was given."""
        self.stop_flow(trainer.is_global_zero)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop measuring when training fails, and save the flow so far if a path was given."""
        if hasattr(self, "flow"):
            self.on_train_end(trainer, pl_module)

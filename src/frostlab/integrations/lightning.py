"""Gradient flow in Lightning: `Trainer(callbacks=[GradFlowCallback()])`; needs `lightning`."""

from pathlib import Path
from typing import Any

try:
    from lightning import Callback
except ImportError:
    from frostlab.errors import FrostlabError

    raise FrostlabError("this callback needs Lightning: pip install lightning") from None

from frostlab.flow import Watch, watch
from frostlab.flow.watching import Tell


class GradFlowCallback(Callback):
    """Watches a LightningModule, before and after clipping; `.flow` is what was seen."""

    flow: Watch

    def __init__(
        self,
        every: int = 10,
        path: str | Path | None = None,
        *,
        change: bool = False,
        agreement: bool = False,
        units: bool = False,
        entropy: bool = False,
        verify: bool = True,
        tell: Tell | None = None,
    ) -> None:
        self.every, self.path = every, path
        self.options: dict[str, Any] = {
            "change": change, "agreement": agreement, "units": units, "entropy": entropy,
            "verify": verify, "tell": tell,
        }  # fmt: skip

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch."""
        self.flow = watch(pl_module, trainer.optimizers, self.every, **self.options)
        self.flow.step = trainer.global_step
        self.flow.start()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Lightning has made the gradients, and not yet clipped them."""
        self.flow.before_clip()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End watching, and write."""
        self.flow.stop()
        if self.path is not None and trainer.is_global_zero:
            self.flow.save(self.path)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End watching too where training ends early."""
        if hasattr(self, "flow"):
            self.on_train_end(trainer, pl_module)

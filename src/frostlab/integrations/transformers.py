"""Gradient flow in the Hugging Face Trainer: `Trainer(…, callbacks=[fl.GradFlowCallback()])`."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from frostlab.flow.measurements import can_save
from frostlab.flow.watch import Tell, Watch, watch


class Watching:
    """Begins and ends a flow; `.flow` is what was seen, also written to `path` at the end."""

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

    def begin(self, model: Any, optimizer: Any, step: int) -> None:
        """Begin to watch, so many steps after the first."""
        if self.path is not None:
            can_save(self.path)  # training that ends in an error would be lost
        self.flow = watch(model, optimizer, self.every, **self.options)
        self.flow.step = step
        self.flow.start()

    def end(self, writes: bool) -> None:
        """End watching; one process writes."""
        self.flow.stop()
        if self.path is not None and writes:
            self.flow.save(self.path)


class GradFlowCallback(Watching, TrainerCallback):
    """Watches a Trainer's model; `.flow` is what was seen, also written to `path` at the end.

    The Trainer clips before anything is called, so norms before clipping are not known here.
    """

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **more: Any
    ) -> None:
        """Begin to watch the optimizer inside accelerate's."""
        inner: Any = optimizer
        while hasattr(inner, "accelerator_state"):
            inner = inner.optimizer
        self.begin(model, inner, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """End watching, and write."""
        self.end(state.is_world_process_zero)

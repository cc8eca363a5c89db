"""Gradient flow in the Hugging Face Trainer: `Trainer(…, callbacks=[fl.GradFlowCallback()])`."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from frostlab.flow.measurements import check_save_path
from frostlab.flow.watch import LiveFlow, OnReport, watch


class Watching:
    """Begins and ends a flow; `.flow` is what was seen, also written to `path` at the end."""

    flow: LiveFlow

    def __init__(
        self,
        every_n_steps: int = 10,
        path: str | Path | None = None,
        *,
        distance: bool = False,
        gradient_cosine: bool = False,
        dead_units: bool = False,
        attention_entropy: bool = False,
        verify: bool = True,
        on_report: OnReport | None = None,
    ) -> None:
        self.every_n_steps, self.path = every_n_steps, path
        self.options: dict[str, Any] = {
            "distance": distance, "gradient_cosine": gradient_cosine, "dead_units": dead_units,
            "attention_entropy": attention_entropy, "verify": verify, "on_report": on_report,
        }  # fmt: skip

    def begin(self, model: Any, optimizer: Any, step: int) -> None:
        """Begin to watch, so many steps after the first."""
        if self.path is not None:
            check_save_path(self.path)  # training that ends in an error would be lost
        self.flow = watch(model, optimizer, self.every_n_steps, **self.options)
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

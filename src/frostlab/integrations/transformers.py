"""Gradient flow in the Hugging Face Trainer: `Trainer(…, callbacks=[fl.GradFlowCallback()])`."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from frostlab.flow.measurements import check_save_path
from frostlab.flow.watch import LiveFlow, OnReport, watch


class FlowCallback:
    """Base class of the callbacks for the Hugging Face Trainer and Lightning.

    `.flow`, set when training begins, is the measured gradient flow (norms of gradients and updates
    in each part of the model); it is saved to `path`, if given, when training ends. The other
    arguments are passed to `fl.watch`.
    """

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

    def start_flow(self, model: Any, optimizer: Any, step: int) -> None:
        """Start measuring; `step` is the number of steps already taken."""
        if self.path is not None:
            check_save_path(self.path)  # fail before training rather than after it
        self.flow = watch(model, optimizer, self.every_n_steps, **self.options)
        self.flow.step = step
        self.flow.start()

    def stop_flow(self, saves: bool) -> None:
        """Stop measuring, and save the flow if a path was given.

        Of several processes, only the one with `saves` saves it.
        """
        self.flow.stop()
        if self.path is not None and saves:
            self.flow.save(self.path)


class GradFlowCallback(FlowCallback, TrainerCallback):
    """A callback that measures the gradient flow of a Trainer's model.

    The Trainer clips gradients before it calls callbacks, so gradients are measured only after
    clipping.
    """

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **more: Any
    ) -> None:
        """Start measuring, with the optimizer itself instead of accelerate's wrapper around it."""
        inner: Any = optimizer
        while hasattr(inner, "accelerator_state"):
            inner = inner.optimizer
        self.start_flow(model, inner, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Stop measuring, and save the flow if a path was given."""
        self.stop_flow(state.is_world_process_zero)

"""Gradient flow in the Hugging Face Trainer: `Trainer(…, callbacks=[fl.GradFlowCallback()])`."""

from typing import Any

from transformers import TrainerCallback

from frostlab.integrations.watching import Watching


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

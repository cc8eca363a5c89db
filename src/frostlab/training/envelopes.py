"""A decoder of envelopes and its loss: what a step differentiates and an evaluation reads."""

from typing import Literal

from torch import Tensor, nn

from frostlab.recipe import Recipe
from frostlab.recipe.conformer import EnvelopeLoss
from frostlab.training.batching import Batch
from frostlab.training.objective import Exits, Objective
from frostlab.training.signal_losses import envelope_loss


class EnvelopeObjective(Objective):
    """Calls a model that answers (B, T, channels) of EEG with (B, T) of envelope."""

    def __init__(self, model: nn.Module, loss: EnvelopeLoss) -> None:
        super().__init__(model)
        self.loss = loss

    def forward(self, batch: Batch, want: Literal["loss", "logits"] | Exits = "loss") -> Tensor:
        """The loss, summed over windows, or the prediction."""
        prediction: Tensor = self.model(**batch.inputs)
        return prediction if want == "logits" else self.loss_of(prediction, batch)

    def loss_of(self, prediction: Tensor, batch: Batch) -> Tensor:
        """The loss of a prediction; a window that stands in for none counts for nothing."""
        kind, weight, scales = self.loss.kind, self.loss.weight, self.loss.scales
        found = envelope_loss(kind, prediction, batch.targets, weight=weight, scales=scales)
        return found if batch.scored else 0.0 * found


def objective_for(model: nn.Module, recipe: Recipe) -> Objective:
    """A model with the loss of its task."""
    if recipe.data.task == "envelope":
        return EnvelopeObjective(model, recipe.loss or EnvelopeLoss())
    return Objective(model)

"""The table of tasks: the examples, loss, metrics and report of each task."""

from torch import nn

from frostlab.data.eeg.recordings import Signals
from frostlab.data.prepare import PreparedData
from frostlab.recipe.model import EnvelopeLoss
from frostlab.recipe.recipe import Recipe
from frostlab.training.batches.batch import token_examples, window_examples
from frostlab.training.evaluate import envelope_tally, text_tally
from frostlab.training.state import Report, RunContext, Task
from frostlab.training.step.envelope_loss import EnvelopeObjective
from frostlab.training.step.objective import Objective


def _cross_entropy(model: nn.Module, recipe: Recipe) -> Objective:
    return Objective(model)


def _envelope_loss(model: nn.Module, recipe: Recipe) -> Objective:
    return EnvelopeObjective(model, recipe.loss or EnvelopeLoss())


def _check_recordings(prepared: PreparedData) -> None:
    """Fit and score the ridge decoder; an error is raised if recordings cannot be scored."""
    from frostlab.training.eeg_report import baseline_scores  # imports scipy, only EEG needs it

    assert isinstance(prepared, Signals)
    baseline_scores(prepared)


def _report_recordings(context: RunContext, metrics: dict[str, float]) -> Report:
    from frostlab.training.eeg_report import measure_recordings

    assert isinstance(context.prepared, Signals)
    return measure_recordings(context, context.prepared, metrics)


TASKS = {
    "classification": Task(token_examples, _cross_entropy, text_tally, predicts_classes=True),
    "language": Task(token_examples, _cross_entropy, text_tally),
    "envelope": Task(
        window_examples,
        _envelope_loss,
        envelope_tally,
        report=_report_recordings,
        check=_check_recordings,
    ),
}

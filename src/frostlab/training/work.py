"""The work of a run: train, report, write the result, whatever happens on the way."""

import json
from typing import Any

import torch

from frostlab.data import Signals
from frostlab.records.checkpoints import Checkpoint
from frostlab.records.environment import gpu_state
from frostlab.records.folder import RunFolder, write_whole
from frostlab.records.telemetry import Telemetry
from frostlab.training.boundary import best_checkpoint, go_to, load_weights
from frostlab.training.failures import Failure, failure_of
from frostlab.training.loop import measure, train
from frostlab.training.patience import Best
from frostlab.training.progress import Progress
from frostlab.training.recordings import measure_recordings
from frostlab.training.results import result
from frostlab.training.setting import Setting
from frostlab.training.stopwatch import Meter, Stopwatch
from frostlab.training.treating import state_digest


def work(setting: Setting, resumed: Checkpoint | None, meter: Meter) -> None:
    """Train, report, and write the result, whatever happens on the way.

    `meter` has measured the device's memory since before the model was built.
    """
    progress = Progress(Best(setting.recipe.metric))
    if resumed is not None:
        progress = Progress.from_dict(resumed.progress())
        go_to(setting, progress, resumed)
    where, before = str(setting.device), gpu_state(str(setting.device))
    watch = Stopwatch(setting.device, progress.seconds)
    report, scores, weights = None, None, None
    failure: Failure | None = None
    with Telemetry(where) as telemetry:
        try:
            train(setting, progress, watch, resumed)
            report, scores = _report(setting, progress)
            weights = state_digest(setting.model)
        except BaseException as error:
            failure = failure_of(error, setting.recipe)
            progress.seconds = watch.seconds
    if setting.folder is not None:
        extra = {
            "gpu_before": before,
            "gpu_after": gpu_state(where),
            "telemetry": telemetry.summary(),
            "device_memory_peak": meter.peak_bytes(),
            "weights_digest": weights,
            "order_digest": progress.order,
        }
        extra |= {} if scores is None else {"scores": scores}
        _conclude(setting, setting.folder, progress, report, failure, extra)
    if failure is not None:
        raise failure.error from None


def _conclude(
    setting: Setting,
    folder: RunFolder,
    progress: Progress,
    report: dict[str, float] | None,
    failure: Failure | None,
    extra: dict[str, Any],
) -> None:
    """Write the end; a disk that is full must not hide why the run ended."""
    status = "finished" if failure is None else failure.status
    error = None if failure is None else str(failure.error)
    try:
        folder.event("end", progress.step, status=status, error=error)
        folder.write("result.json", result(
            setting, folder, progress, status=status, error=error, report=report, extra=extra
        ))  # fmt: skip
    except OSError:
        if failure is None:
            raise


def _report(setting: Setting, progress: Progress) -> tuple[dict[str, float], dict[str, Any] | None]:
    """The reported result: the best weights on the split that nothing was chosen by.

    With published splits the best evaluation is the report, and is labelled so.
    """
    best = best_checkpoint(setting, progress)
    load_weights(setting.model, best)
    if setting.frozen is not None:
        setting.frozen.verify(setting.model)
    metrics, scores = _measure_report(setting, progress.step)
    verified = 0 if setting.frozen is None else len(setting.frozen.digests)
    if setting.folder:
        setting.folder.event("evaluation", progress.step, split="report", metrics=metrics,
                             checkpoint=best.step, frozen_verified=verified)  # fmt: skip
    return metrics, scores


def _measure_report(setting: Setting, step: int) -> tuple[dict[str, float], dict[str, Any] | None]:
    """Every metric of the reporting split, and what is summed up beside them.

    What each example was taken for, or each recording decoded to, is kept in files.
    """
    prepared = setting.prepared
    if isinstance(prepared, Signals):
        return measure_recordings(setting, prepared, measure(setting, "report", step))
    if prepared.task != "classification":
        return measure(setting, "report", step), None
    labels = prepared.splits["report"].labels
    assert labels is not None
    guesses = torch.zeros(len(labels), dtype=torch.long, device=setting.device)
    metrics = measure(setting, "report", step, guesses)
    taken_for = (setting.world.total(guesses) - 1).tolist()
    if setting.folder:
        kept = {"split": "report", "labels": labels.tolist(), "classes": taken_for}
        write_whole(setting.folder.path / "predictions.json", json.dumps(kept))
    return metrics, None

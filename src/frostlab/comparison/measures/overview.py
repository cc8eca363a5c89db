"""The overview table: one row per arm, with its data, treatment, times, gap and status.

An arm is a variant of the compared recipe, and its gap is its difference from the baseline.
`overview` makes the rows of a comparison, which `frostlab.matrix.show` formats.
"""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from frostlab.comparison.evidence import Evidence
from frostlab.comparison.measures.times import arm_times
from frostlab.matrix.show import OverviewRow
from frostlab.text import NONE

_SIZES = {("gpt", 6, 512): "Medium-512"}  # (kind, layers, width) → name in the OELM study
_KINDS = {"gpt": "GPT", "decoder": "Decoder", "conformer": "Conformer"}


def overview(
    evidence: Evidence, phase: str | None = None, ids: Mapping[str, str] | None = None
) -> list[OverviewRow]:
    """Return one row for every arm of a comparison.

    Args:
        phase: the name of the group of experiments; by default, the name of the comparison.
        ids: arm → id of its experiment; an arm that is not listed has its name as id.
    """
    plan, rows = evidence.plan, []
    for arm in plan.arms:
        times, verdict = arm_times(evidence, arm.name), evidence.verdicts.get(arm.name)
        rows.append(
            OverviewRow(
                phase=phase or plan.name,
                id=(ids or {}).get(arm.name, arm.name),
                data=data_name(plan.recipe),
                method=plan.recipe_of(arm, plan.seeds[0]).treatment_name,
                total_seconds=None if times.total is None else times.total.mean,
                step_seconds=times.per_step if times.step is None else times.step,
                gap="baseline" if verdict is None else f"{verdict.paired or NONE}: {verdict.word}",
                status=_status(evidence, arm.name),
            )
        )
    return rows


def _status(evidence: Evidence, arm: str) -> str:
    """Return `finished` or how many runs finished, and whether the runs were shortened."""
    runs = evidence.arms[arm].runs
    done = sum(run.finished for run in runs)
    status = "finished" if done == len(runs) else f"{done} of {len(runs)} runs finished"
    return f"{status}, quick" if evidence.plan.quick else status


def data_name(recipe: Mapping[str, Any]) -> str:
    """Return the name of a recipe's data; XNLI's has its language, as in `xnli_en`."""
    data = recipe["data"]
    return f"{data['name']}_{data['language']}" if data["name"] == "xnli" else str(data["name"])


def model_name(recipe: Mapping[str, Any]) -> str:
    """Return the name of a recipe's model with its size, such as `GPT-Medium-512`.

    Other sizes are layers × width, as in `Decoder-4x64`; layers that stages add count, too. A
    pretrained model has its own name, with a remark if its weights are random or its settings are
    changed.
    """
    model = recipe["model"]
    kind = str(model["kind"])
    if kind == "pretrained":
        remarks = [] if model.get("weights", True) else ["random weights"]
        remarks += ["changed settings"] if model.get("config") else []
        name = PurePath(str(model["name"])).name
        return f"{name} ({', '.join(remarks)})" if remarks else name
    stages = recipe.get("stages") or ()
    added = sum((stage.get("add") or {}).get("layers", 0) for stage in stages)
    layers, width = model["layers"] + added, model["width"]
    size = _SIZES.get((kind, layers, width), f"{layers}x{width}")
    return f"{_KINDS.get(kind, kind)}-{size}"

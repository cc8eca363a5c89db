"""One result: times, speed, memory, the ceiling, and whether the target was reached."""

from typing import Any

from frostlab.bench.ceilings import FORMULA, Work
from frostlab.bench.rounds import Times
from frostlab.bench.setting import Setting

Result = dict[str, Any]


def result_of(
    setting: Setting,
    times: Times,
    work: Work,
    items: float,
    *,
    case: str,
    check: dict[str, Any],
    step: tuple[str, str],
    notes: tuple[str, ...] = (),
    whole: bool = False,
    extra: dict[str, Any] | None = None,
) -> Result:
    """Put a measurement together; `items` is what a step handles, in the benchmark's unit."""
    benchmark, ceilings = setting.benchmark, setting.ceilings
    timed = times.to_dict(whole)
    seconds = timed["ours_ms"] / 1e3
    least = work.least(ceilings)
    spec = ceilings.spec_flops
    result: Result = {
        "benchmark": benchmark.name,
        "case": case,
        "scale": "small" if setting.small else "full",
        "status": "measured",
        "work": benchmark.work,
        "against": benchmark.against,
        "precision": str(setting.precision).removeprefix("torch."),
        **timed,
        "unit": benchmark.unit,
        "ours_per_s": items / seconds,
        "theirs_per_s": items / (timed["theirs_ms"] / 1e3),
        "ours_step": step[0],
        "ours_step_reason": step[1],
        **least,
        "of_ceiling": least["ceiling_ms"] / timed["ours_ms"],
        "ceiling_is": FORMULA,
        "flops": work.flops,
        "trainable": work.parameters,
        "mfu": work.flops / seconds / ceilings.matmul_flops,
        "mfu_of_spec": None if spec is None else work.flops / seconds / spec,
        **check,
        **(extra or {}),
        "notes": list(notes),
    }
    result["target"] = str(benchmark.target)
    comparable = setting.cuda and not setting.small
    result["reached"] = benchmark.target.reached(result) if comparable else None
    return result

"""Questions that pairs of arms answer, the arms having been chosen before the first run."""

from frostlab.compare.verdict import Records
from collections.abc import Mapping
from typing import Any

from frostlab.compare.plan import Contrast, Plan
from frostlab.compare.rules import Rules
from frostlab.compare.sameness import why_unpaired
from frostlab.compare.verdict import judge_family
from frostlab.records.record import RunRecord



def contrasts(plan: Plan, records: Records, rules: Rules) -> list[dict[str, Any]]:
    """Every question with its verdict; Holm over those that ask for the same thing."""
    answered: dict[str, dict[str, Any]] = {}
    for of in ("value", "gain"):
        asked = [contrast for contrast in plan.contrasts if contrast.of == of]
        if asked:
            answered |= _family(plan, asked, records, rules)
    return [contrast.model_dump() | answered[contrast.question] for contrast in plan.contrasts]


def _family(
    plan: Plan, asked: list[Contrast], records: Records, rules: Rules
) -> dict[str, dict[str, Any]]:
    values, failed = _values(plan, asked, records, rules)
    arms = {arm.name: arm for arm in plan.arms}
    apart = {c.question: _apart(plan, c, records) for c in asked}
    mixed = {c.question: plan.between(arms[c.against], arms[c.arm]) for c in asked}
    verdicts = judge_family(
        values,
        {contrast.question: (contrast.arm, contrast.against) for contrast in asked},
        rules.model_copy(update={"noninferior": None}),
        "questions",
        confounds={question: [str(one) for one in found] for question, found in mixed.items()},
        failed=failed,
        unproven={question: reason for question, reason in apart.items() if reason},
    )
    return {question: verdict.to_dict() for question, verdict in verdicts.items()}


def _values(
    plan: Plan, asked: list[Contrast], records: Records, rules: Rules
) -> tuple[dict[str, dict[int, float]], dict[str, list[int]]]:
    """What each arm gave at each seed, and the seeds that gave nothing."""
    names = {name for contrast in asked for name in (contrast.arm, contrast.against)}
    found = {
        name: {seed: _value(records[name, seed], rules, asked[0].of) for seed in plan.seeds}
        for name in names
    }
    values = {
        name: {seed: value for seed, value in each.items() if value is not None}
        for name, each in found.items()
    }
    failed = {
        name: [s for s, value in each.items() if value is None] for name, each in found.items()
    }
    return values, failed


def _apart(plan: Plan, contrast: Contrast, records: Records) -> str | None:
    """Why the runs of a contrast are no pairs, if any is not."""
    for seed in plan.seeds:
        one, other = records[contrast.against, seed], records[contrast.arm, seed]
        if one.status == other.status == "finished":
            reason = why_unpaired(one, other, plan.vary)
            if reason is not None:
                return f"seed {seed}: {reason}"
    return None


def _value(record: RunRecord, rules: Rules, of: str) -> float | None:
    """A run's result; or what its last stage made of its first one's, where stages are chosen."""
    if record.status != "finished":
        return None
    if of == "value":
        return record.metrics.get(rules.metric)
    bests = [stage["best"]["value"] for stage in record.result["stages"]]
    return float(bests[-1] / bests[0] if rules.log else bests[-1] - bests[0])

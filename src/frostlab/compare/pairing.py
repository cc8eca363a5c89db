"""Which seeds can be paired, and what is said of those that cannot."""

import math
from collections.abc import Mapping, Sequence

from frostlab.compare.rules import Rules
from frostlab.errors import BadInput, nearest

Values = Mapping[int, float]


def check(
    arms: Mapping[str, Values],
    baseline: str,
    confounds: Mapping[str, Sequence[str]],
    failed: Mapping[str, Sequence[int]],
    unproven: Mapping[str, str],
) -> None:
    """Refuse names that are no arm, one arm alone, and a seed that failed with a value."""
    if baseline not in arms:
        raise BadInput(f"baseline `{baseline}` is not among the arms{nearest(baseline, arms)}")
    if len(arms) < 2:
        raise BadInput(f"baseline `{baseline}` is the only arm; a comparison needs another")
    said = {"confounds": confounds, "failed": failed, "unproven": unproven}
    for what, mapping in said.items():
        for arm in mapping:
            if arm not in arms or (arm == baseline and what != "failed"):
                raise BadInput(f"{what} names `{arm}`, which is no arm here{nearest(arm, arms)}")
    for arm, seeds in failed.items():
        if both := sorted(set(seeds) & set(arms[arm])):
            raise BadInput(f"seed {both[0]} of `{arm}` failed and has a value: it cannot be both")


def usable_values(
    arms: Mapping[str, Values], failed: Mapping[str, Sequence[int]], rules: Rules
) -> tuple[dict[str, dict[int, float]], dict[str, list[str]]]:
    """Finite values, and a note for each arm of the seeds that gave none."""
    usable, lost = {}, {}
    for arm, values in arms.items():
        usable[arm] = {seed: value for seed, value in values.items() if math.isfinite(value)}
        for seed, value in usable[arm].items():
            if rules.log and value <= 0:
                said = f"seed {seed} of `{arm}` has {rules.metric} {value:g}"
                raise BadInput(f"{said}: on log scale values must be above 0")
        wild = {
            seed: f"{seed} ({value})" for seed, value in values.items() if seed not in usable[arm]
        }
        names = [str(seed) for seed in sorted(failed.get(arm, ()))]
        names += [wild[seed] for seed in sorted(wild)]
        if names:
            kept = "fewer pairs, and what is said holds for runs that finished"
            lost[arm] = [f"failed seeds of {arm}: {', '.join(names)}: {kept}"]
    return usable, lost


def without_partner(
    arm: str, baseline: str, arms: Mapping[str, Values], failed: Mapping[str, Sequence[int]]
) -> list[str]:
    """A note of seeds that only one side was run with."""
    ours = {*arms[arm], *failed.get(arm, ())}
    theirs = {*arms[baseline], *failed.get(baseline, ())}
    notes = []
    for name, seeds in ((arm, ours - theirs), (baseline, theirs - ours)):
        if seeds:
            listed = ", ".join(str(seed) for seed in sorted(seeds))
            notes.append(f"seeds of {name} without a partner, left out: {listed}")
    return notes

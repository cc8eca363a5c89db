"""Looks at results, counted over all comparisons that ask the same question.

A look is one analysis of the results. Whoever looks again, with more seeds, another metric or
another folder, gets another chance of a false alarm. So every look is registered with its date in
the user's cache, and a comparison counts the looks of its siblings: the comparisons of the same
recipe that share its baseline and at least one other arm.
"""

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from frostlab.comparison.plan import LEAST_SEEDS, MOST_LOOKS, Plan
from frostlab.errors import BadInput, FrostlabError
from frostlab.storage import Lock, cache_folder, digest_of, parse_json, read_text
from frostlab.typed import read

REGISTER = "looks.jsonl"
_MOST_REGISTERED = 2**26  # bytes of the register, at most


@dataclass(frozen=True)
class Look:
    """One line of the register."""

    recipe: str  # digest of the recipe without its metric, treatment and seed
    baseline: str  # digest of the baseline's treatment and settings
    arms: list[str]  # digests of the other arms' treatments and settings
    plan: str  # digest of the plan
    results: str  # digest of the metric and of every result; equal results are the same look
    metric: str
    seeds: list[int]
    folder: str
    at: float  # seconds since 1970


@dataclass(frozen=True)
class Looks:
    """The current look at a question, and the looks before it."""

    current: Look
    earlier: tuple[Look, ...]  # looks at other results, in any folder

    @property
    def number(self) -> int:
        """The number of the current look, counted from 1."""
        return len(self.earlier) + 1


def take_look(
    plan: Plan,
    folder: Path,
    results: Mapping[tuple[str, int], float | str | None],
    known: Iterable[Look],
) -> Looks:
    """Register a look at these results, and return it with all earlier looks at the same question.

    `results` holds, by arm and seed, the value of the metric or the status of a run that did not
    finish. If the same results were seen before, nothing is registered, and the look that saw them
    first is returned. `known` holds the looks that are stored in the comparison's folder; this
    machine's register lacks them if the folder came from another machine. Looks with too few seeds
    for a verdict are registered, and do not count.
    """
    look = _look(plan, folder, results)
    path = cache_folder(None) / REGISTER
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = Lock(path.with_suffix(".lock"))
        if not lock.acquire(seconds=30):
            raise FrostlabError(f"{path} is in use by another process")
        try:
            registered = [*known, *_registered(path)]
            counting = (each for each in registered if len(each.seeds) >= LEAST_SEEDS)
            looks = _distinct(each for each in counting if _is_sibling(each, look))
            same = [i for i, each in enumerate(looks) if each.results == look.results]
            if same:
                return Looks(looks[same[0]], tuple(looks[: same[0]]))
            if len(looks) >= MOST_LOOKS - 1:
                raise BadInput(
                    f"{path}: {len(looks)} looks at this question; {MOST_LOOKS - 1} is the most"
                )
            with path.open("a", encoding="utf-8") as register:
                # A line that a crash cut off ends here.
                register.write("\n" * _is_cut_off(path) + json.dumps(asdict(look)) + "\n")
        finally:
            lock.release()
    except OSError as error:
        raise BadInput(f"{path} cannot be written ({error.strerror})") from None
    return Looks(look, tuple(looks))


def _look(plan: Plan, folder: Path, results: Mapping[tuple[str, int], float | str | None]) -> Look:
    recipe = {key: value for key, value in plan.recipe.items() if key not in ("treatment", "seed")}
    recipe["evaluate"] = {**recipe.get("evaluate", {}), "metric": None}
    arms = {arm.name: _arm_digest(plan, arm.name) for arm in plan.arms}
    rows = sorted([arms[arm], seed, value] for (arm, seed), value in results.items())
    return Look(
        recipe=digest_of(recipe)[:16],
        baseline=arms[plan.baseline.name],
        arms=sorted(arms[arm.name] for arm in plan.others),
        plan=plan.digest,
        results=digest_of([plan.rules.metric, rows])[:16],
        metric=plan.rules.metric,
        seeds=sorted(plan.seeds),
        folder=str(folder),
        at=round(time.time(), 3),
    )


def _arm_digest(plan: Plan, name: str) -> str:
    arm = next(arm for arm in plan.arms if arm.name == name)
    surgery = plan.recipe_of(arm, 0).surgery
    return digest_of([surgery.model_dump(mode="json"), arm.set])[:16]


def _registered(path: Path) -> list[Look]:
    """Return the readable lines of the register; a line that was cut off by a crash is skipped."""
    try:
        text = read_text(path, _MOST_REGISTERED)
    except FileNotFoundError:
        return []
    looks = []
    for line in text.splitlines():
        try:
            looks.append(read(Look, parse_json(line, path), path))
        except BadInput:
            continue
    return looks


def _is_cut_off(path: Path) -> bool:
    """Return whether a file has a last line without an end."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _is_sibling(look: Look, current: Look) -> bool:
    return (
        look.recipe == current.recipe
        and look.baseline == current.baseline
        and bool(set(look.arms) & set(current.arms))
    )


def _distinct(looks: Iterable[Look]) -> list[Look]:
    """Return the first look at each set of results, in order of time."""
    first: dict[str, Look] = {}
    for look in sorted(looks, key=lambda look: look.at):
        first.setdefault(look.results, look)
    return list(first.values())

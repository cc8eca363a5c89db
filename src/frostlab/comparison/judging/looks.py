"""The count of looks at results, over all comparisons that ask the same question.

A look is one analysis of the results. Every further look, with more seeds, another metric or other
results, in any folder, is another chance of a false alarm. So each look spends a part of alpha,
which is the allowed false-alarm rate (`plan.alpha_spent`). Every new look with enough seeds for a
verdict is registered in the user's cache. Two comparisons ask the same question if they have the
same recipe and share at least two arms (variants of the recipe); a look at one counts for both.
"""

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from frostlab.comparison.plan import LEAST_SEEDS, MOST_LOOKS, Plan, alpha_spent
from frostlab.errors import BadInput, FrostlabError
from frostlab.storage import Lock, cache_folder, digest_of, parse_json, read_text
from frostlab.typed import read

REGISTER = "looks.jsonl"
_NOT_ASKED = ("about", "treatment", "seed", "watch")  # settings that do not change the question
_MOST_REGISTERED = 2**26  # bytes of the register, at most


@dataclass(frozen=True)
class Look:
    """One line of the register."""

    recipe: str  # digest of the recipe without its metric and `_NOT_ASKED`
    arms: list[str]  # for each arm, a digest of its treatment and its `set`
    plan: str  # digest of the plan
    results: str  # digest of results, rules, questions and arms; if equal, it is the same look
    spent: float  # the false-alarm rate that the look was allowed: its part of alpha
    metric: str  # metric of the verdicts
    seeds: list[int]  # seeds of the results
    folder: str  # path of the comparison's folder
    at: float  # seconds since 1970


@dataclass(frozen=True)
class Looks:
    """The current look at a question, and the looks before it."""

    current: Look
    earlier: tuple[Look, ...]  # at the same question in any folder, but at other results

    @property
    def number(self) -> int:
        """The number of the current look, counted from 1."""
        return len(self.earlier) + 1

    @property
    def spent(self) -> float:
        """The sum of what the earlier looks spent of alpha."""
        return sum(look.spent for look in self.earlier)


Results = Mapping[str, float | str | None]  # a run's recipe digest → its metric, or status


def take_look(
    plan: Plan,
    folder: Path,
    results: Results,
    known: Iterable[Look],
) -> Looks:
    """Register a look at these results, and return it with all earlier looks at the same question.

    `results` holds, for every run, the value of the metric or, if it did not finish, its status.
    `known` holds the looks that are stored in the comparison's folder; this machine's register
    lacks them if the folder came from another machine. Looks with too few seeds for a verdict do
    not count, and are not registered. If an earlier look that counts saw the same results, that
    look is returned, and nothing is registered.
    """
    unnumbered = _look(plan, folder, results)
    path = cache_folder(None) / REGISTER
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = Lock(path.with_suffix(".lock"))
        if not lock.acquire(seconds=30):
            raise FrostlabError(f"{path} is in use by another process; try again")
        try:
            registered = [*known, *_registered(path)]
            counting = (past for past in registered if len(past.seeds) >= LEAST_SEEDS)
            looks = _distinct(past for past in counting if _asks_the_same(past, unnumbered))
            same = [i for i, past in enumerate(looks) if past.results == unnumbered.results]
            if same:
                return Looks(looks[same[0]], tuple(looks[: same[0]]))
            if len(looks) >= MOST_LOOKS - 1:
                raise BadInput(
                    f"{path}: {len(looks)} looks at this question; {MOST_LOOKS - 1} is the most"
                )
            spent = alpha_spent(plan.rules.alpha, len(looks) + 1, plan.rules.looks)
            look = replace(unnumbered, spent=spent)
            if len(look.seeds) >= LEAST_SEEDS:
                with path.open("a", encoding="utf-8") as register:
                    # if a crash cut off the last line, end it first
                    register.write("\n" * _is_cut_off(path) + json.dumps(asdict(look)) + "\n")
        finally:
            lock.release()
    except OSError as error:
        raise BadInput(f"{path} cannot be read or written ({error.strerror})") from None
    return Looks(look, tuple(looks))


def _look(plan: Plan, folder: Path, results: Results) -> Look:
    """Describe a look; `spent` is 0 until its number is known."""
    recipe = {key: value for key, value in plan.recipe.items() if key not in _NOT_ASKED}
    recipe["evaluate"] = {**recipe.get("evaluate", {}), "metric": None}
    rules = plan.rules.model_dump(mode="json", exclude={"look", "spent"})
    asked = [contrast.model_dump(mode="json") for contrast in plan.contrasts]
    arms = sorted(_arm_digest(plan, arm.name) for arm in plan.arms)
    return Look(
        recipe=digest_of(recipe)[:16],
        arms=arms,
        plan=plan.digest,
        results=digest_of([rules, asked, arms, sorted(results.items())])[:16],
        spent=0.0,
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
    """Return the looks in the register; unreadable lines, such as one cut off, are skipped."""
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
    """Return whether the last line of a file lacks its newline."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _asks_the_same(look: Look, current: Look) -> bool:
    return look.recipe == current.recipe and len(set(look.arms) & set(current.arms)) > 1


def _distinct(looks: Iterable[Look]) -> list[Look]:
    """Return the first look at each set of results, in order of time."""
    first: dict[str, Look] = {}
    for look in sorted(looks, key=lambda look: look.at):
        first.setdefault(look.results, look)
    return list(first.values())

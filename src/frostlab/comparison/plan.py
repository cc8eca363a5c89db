"""A comparison as data: one recipe, its arms, seeds and rules, fixed before the first run."""

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from frostlab.errors import BadInput, nearest
from frostlab.recipe.load import recipe_from
from frostlab.recipe.recipe import METRICS, Recipe
from frostlab.recipe.settings import LOWER_IS_BETTER
from frostlab.recipe.treatment import Positive, Strict
from frostlab.records.folder import differences

LEAST_SEEDS = 5  # with fewer pairs an arm is never called better or worse
DEFAULT_SEEDS = 6  # from here on the sign-flip test can reach 5 %
_TIMES = ("_seconds", "_ms")
_SMALLER = (*_TIMES, "_bytes")


class Rules(Strict):
    """What is compared, and what it takes to call an arm better or worse.

    `minimum_effect` is the smallest effect of interest, in the metric's unit or, on log scale, as
    a ratio − 1. `noninferior` is the limit of "no more than 1.05 times as bad". `looks` is how
    many looks were planned, `look` which of them this is.
    """

    metric: Annotated[str, Field(min_length=1)]
    lower_is_better: bool
    log: bool = False
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    minimum_effect: Annotated[float, Field(gt=0)] | None = None
    noninferior: Annotated[float, Field(ge=1)] | None = None
    looks: Positive = 1
    look: Positive = 1

    @property
    def level(self) -> float:
        """The false-alarm rate that this look may spend."""
        return spent(self.alpha, self.look, self.looks)

    @property
    def risk(self) -> float:
        """What all looks so far have spent: alpha at most, unless one look was planned and more
        were taken."""
        return sum(spent(self.alpha, k, self.looks) for k in range(1, self.look + 1))

    def history(self) -> str | None:
        """Say that the comparison was, or may be, looked at more than once."""
        if self.look == 1:
            if self.looks == 1:
                return None
            return f"look 1 of {self.looks} planned: it spends {self.level:.4g} of {self.alpha:.4g}"
        said = f"look {self.look}, looked at before: this look spends {self.level:.4g}"
        if self.risk <= self.alpha:
            return f"{said}, all looks together at most {self.alpha:.4g}"
        return (
            f"{said}; one look was planned and it had spent all of {self.alpha:.4g}, "
            f"so together the looks so far raise a false alarm in up to {self.risk:.2%}"
        )


def spent(alpha: float, look: int, looks: int = 1) -> float:
    """The share of alpha that look number `look` spends where `looks` were planned.

    A plan of one look spends alpha on it. Any other look k spends alpha / 2**k: these sum to less
    than alpha however many are taken, so a plan of two or more looks can be extended without end.
    A plan of one look cannot: its first look spent everything, and with every later look the sum
    grows, to less than 1.5 alpha.
    """
    return alpha if look == looks == 1 else alpha / 2**look


def rules_for(
    metric: str,
    *,
    alpha: float = 0.05,
    minimum_effect: float | None = None,
    noninferior: float | None = None,
    looks: int = 1,
    look: int = 1,
) -> Rules:
    """Rules with the direction and the scale of a known metric: perplexity and times are ratios."""
    higher = {name for names in METRICS.values() for name in names} - set(LOWER_IS_BETTER)
    lower = metric in LOWER_IS_BETTER or metric.endswith(_SMALLER)
    if not lower and metric not in higher:
        known = (*LOWER_IS_BETTER, *sorted(higher))
        raise BadInput(
            f"metric `{metric}` has no known direction (known: {', '.join(known)}, and what ends "
            f"in {', '.join(_SMALLER)}){nearest(metric, known)}"
        )
    return Rules(
        metric=metric,
        lower_is_better=lower,
        log=metric == "perplexity" or metric.endswith(_SMALLER),
        alpha=alpha,
        minimum_effect=minimum_effect,
        noninferior=noninferior,
        looks=looks,
        look=look,
    )


_OWN = ("about", "treatment", "seed")  # what arms and their runs may differ in
NEVER = ("data", "tokenizer")  # arms that saw other data are not comparable at all


@dataclass(frozen=True)
class Confound:
    """A setting that differs between an arm and the baseline."""

    key: str  # such as optim.lr
    baseline: Any
    arm: Any

    def within(self, keys: Iterable[str]) -> bool:
        """Whether it is one of these settings, or below one."""
        return any(self.key == key or self.key.startswith(f"{key}.") for key in keys)

    def __str__(self) -> str:
        return f"{self.key} {_shown(self.baseline)} → {_shown(self.arm)}"


def confounds(baseline: Recipe, arm: Recipe) -> tuple[Confound, ...]:
    """Every setting in which an arm differs from the baseline."""
    one, other = baseline.to_dict(), arm.to_dict()
    keys = [key for key in differences(one, other) if key.partition(".")[0] not in _OWN]
    return tuple(Confound(key, _at(one, key), _at(other, key)) for key in sorted(keys))


def check_confounds(
    baseline: str, arm: str, found: Iterable[Confound], allowed: Iterable[str]
) -> None:
    """Refuse what differs and was not declared; other data can not be declared."""
    permitted = set(allowed)
    for confound in found:
        where = f"{arm} differs from {baseline} in {confound}"
        if confound.key.partition(".")[0] in NEVER:
            raise BadInput(f"{where}: arms must see the same data")
        section, _, short = confound.key.partition(".")
        if not permitted & {confound.key, section, short, short.rpartition(".")[2]}:
            raise BadInput(
                f"{where}: a confound; give both the same, tune it for both (--tune), "
                f"or declare it (--allow-confound {short})"
            )


def check_known(said: str, keys: Iterable[str], recipe: Recipe) -> None:
    """Refuse to name a setting that there is not."""
    paths = _paths(recipe.to_dict())
    known = {*recipe.to_dict(), *paths, *(path.rpartition(".")[2] for path in paths)}
    for name in keys:
        if name not in known:
            raise BadInput(f"{said} {name}: no setting is called that{nearest(name, known)}")


def _paths(values: Any, path: str = "") -> list[str]:
    if not isinstance(values, dict) or not values:
        return [path]
    return [found for key in values for found in _paths(values[key], f"{path}.{key}".strip("."))]


def _at(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


SCHEMA = 1
_KEYS = {"oelm": "oelm_freeze"}
_RESERVED = ("dataset", "model", "environment", "comparison")
_NOT_SET = ("seed", "treatment")
TUNING_SEED = 900_000  # tuning runs take seeds from here on, results never do


class Arm(Strict):
    """A treatment under a name, and what else it changes, which is a confound."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.+-]*$")]
    treatment: str | dict[str, Any]
    set: dict[str, Any] = Field(default_factory=dict)  # dotted keys


class Tune(Strict):
    """A setting that every arm gets its own best value of, on an equal budget."""

    key: str = "optim.lr"
    values: Annotated[tuple[float, ...], Field(min_length=2)]
    seeds: Positive = 2

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if list(self.values) != sorted(set(self.values)):
            raise ValueError("tune.values should rise, each value once")
        return self


class Contrast(Strict):
    """A question that two arms answer; `gain` asks by how much each improved since its first
    stage."""

    question: str
    arm: str
    against: str
    of: Literal["value", "gain"] = "value"


class Clock(Strict):
    """How long steps are timed against each other."""

    seconds: Annotated[float, Field(gt=0)] = 60.0
    width: Annotated[float, Field(gt=0, lt=1)] = 0.01  # of the interval, when it is enough


class Plan(Strict):
    """Everything about a comparison that is decided before it begins."""

    name: str
    recipe: dict[str, Any]
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    rules: Rules
    tune: tuple[Tune, ...] = ()  # one after another, each at the best of those before
    allow: tuple[str, ...] = ()
    vary: tuple[str, ...] = ()  # settings that are the treatment here, such as stages
    contrasts: tuple[Contrast, ...] = ()
    rounds: Annotated[int, Field(ge=0)] = 0  # whole runs that alternate, for their time
    clock: Clock | None = Clock()
    quick: bool = False

    @property
    def baseline(self) -> Arm:
        """The arm the others are compared with: the one of that name, else the first."""
        return next((arm for arm in self.arms if arm.name == "baseline"), self.arms[0])

    @property
    def others(self) -> tuple[Arm, ...]:
        return tuple(arm for arm in self.arms if arm is not self.baseline)

    @property
    def digest(self) -> str:
        """A name for the plan without its seeds: more of them may be added."""
        values = self.model_dump(mode="json", exclude={"seeds"})
        if len(self.tune) < 2:  # the same
            values["tune"] = values["tune"][0] if self.tune else None
        for key in ("vary", "contrasts"):  # plans from before there were such keys
            values = values if values[key] else {k: v for k, v in values.items() if k != key}
        for key in ("watch", "loss"):  # the same
            if self.recipe.get(key, "") is None:
                values["recipe"] = {k: v for k, v in values["recipe"].items() if k != key}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    def recipe_of(self, arm: Arm, seed: int, tuned: Mapping[str, float] | None = None) -> Recipe:
        """What a run of an arm trains."""
        values = copy.deepcopy(self.recipe)
        values["treatment"], values["seed"] = arm.treatment, seed
        for key, value in copy.deepcopy(arm.set).items():
            put(values, key, value)
        for key, value in (tuned or {}).items():
            put(values, key, value)
        return recipe_from(values, source=f"arm {arm.name}")

    def confounds(self) -> dict[str, tuple[Confound, ...]]:
        """What each arm differs in beside its treatment; what is tuned for all is none."""
        return {arm.name: self.between(self.baseline, arm) for arm in self.others}

    def between(self, one: Arm, other: Arm) -> tuple[Confound, ...]:
        """What two arms differ in that is neither treatment, nor tuned for all."""
        found = confounds(self.recipe_of(one, 0), self.recipe_of(other, 0))
        tuned = [tune.key for tune in self.tune]
        return tuple(c for c in found if c.key not in tuned and not c.within(self.vary))

    def check(self) -> None:
        """Refuse what cannot be compared."""
        _check_arms(self)
        base = self.recipe_of(self.baseline, 0)
        if self.seeds and min(self.seeds) < 0:
            raise BadInput(f"seeds {list(self.seeds)}: none below 0")
        if not self.seeds:
            raise BadInput("seeds 0: a comparison needs at least one")
        if max(self.seeds) >= TUNING_SEED:
            raise BadInput(f"seeds from {TUNING_SEED} on are kept for tuning")
        if len(set(self.seeds)) < len(self.seeds):
            raise BadInput(f"seeds {list(self.seeds)}: one is given twice")
        check_known("--allow-confound", self.allow, base)
        check_known("vary", self.vary, base)
        for key in self.vary:
            if key.partition(".")[0] in NEVER:
                raise BadInput(f"vary {key}: arms must see the same data")
        self._check_contrasts()
        self._check_quick()
        for name, found in self.confounds().items():
            check_confounds(self.baseline.name, name, found, self.allow)
        self._check_tuning()

    def _check_tuning(self) -> None:
        keys = [tune.key for tune in self.tune]
        if twice := [key for i, key in enumerate(keys) if key in keys[:i]]:
            raise BadInput(f"tune: {twice[0]} is given twice")
        for arm in self.arms if self.tune else ():
            for tune in self.tune:
                for value in tune.values:
                    self.recipe_of(arm, 0, {tune.key: value})
            own = any(stage.lr is not None for stage in self.recipe_of(arm, 0).stages)
            if own and "optim.lr" in keys:
                raise BadInput(
                    f"arm {arm.name}: a stage has an lr of its own, which tuning optim.lr "
                    "would not reach; leave it out"
                )

    def _check_quick(self) -> None:
        for arm in self.arms if self.quick else ():
            own = [key for key in arm.set if key in ("train", "train.steps", "train.epochs")]
            if own or self.recipe_of(arm, 0).stages:
                what = f"set.{own[0]}" if own else "its stages"
                raise BadInput(
                    f"--quick: arm {arm.name} says itself how long it trains ({what}), "
                    "so that its runs cannot be cut short"
                )

    def _check_contrasts(self) -> None:
        arms = {arm.name: arm for arm in self.arms}
        questions = [contrast.question for contrast in self.contrasts]
        for i, contrast in enumerate(self.contrasts):
            if contrast.question in questions[:i]:
                raise BadInput(f"contrasts: `{contrast.question}` is asked twice")
            if contrast.arm == contrast.against:
                raise BadInput(f"contrasts: {contrast.arm} against itself")
            for name in (contrast.arm, contrast.against):
                if name not in arms:
                    raise BadInput(f"contrasts: {name} is no arm here{nearest(name, arms)}")
                if contrast.of == "gain" and len(self.recipe_of(arms[name], 0).stages) < 2:
                    raise BadInput(f"contrasts: a gain is asked of {name}, which has one stage")


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set `a.b` in nested values; of a list, as in `a.0.b`, what is there."""
    *path, last = key.split(".")
    inner: Any = values
    for name in path:
        if isinstance(inner, list):
            if not name.isdigit() or int(name) >= len(inner):
                raise BadInput(f"{key}: there is no {name} among {len(inner)}")
            inner = inner[int(name)]
        else:
            inner = inner.setdefault(name, {})
        if not isinstance(inner, dict | list):
            raise BadInput(f"{key}: {name} has nothing below it")
    inner[last] = value


def key_of(arm: str, baseline: str) -> str:
    """What an arm is called in `comparison.json`."""
    return "baseline" if arm == baseline else _KEYS.get(arm, arm.replace("-", "_"))


def _check_arms(plan: Plan) -> None:
    names = [arm.name for arm in plan.arms]
    if len(names) < 2:
        listed = ", ".join(names) or "none"
        raise BadInput(f"arms: {listed}: a comparison needs two, such as baseline,oelm")
    for i, arm in enumerate(plan.arms):
        own = next((key for key in arm.set if key.partition(".")[0] in _NOT_SET), None)
        if own is not None:
            raise BadInput(f"arm {arm.name}: set.{own} cannot be: it is given apart")
        if "model.preset" in arm.set:
            raise BadInput(
                f"arm {arm.name}: set.model.preset is spelled out in the recipe already; "
                "set what it stands for, such as model.residual"
            )
        key = key_of(arm.name, plan.baseline.name)
        taken = [key_of(other.name, plan.baseline.name) for other in plan.arms[:i]]
        if key in (*taken, *_RESERVED) and names.count(arm.name) == 1:
            raise BadInput(f"arm {arm.name}: its name is taken in comparison.json; choose another")
        for other in plan.arms[:i]:
            if arm.name == other.name:
                raise BadInput(f"arms: {arm.name} is given twice")
            one, two = (plan.recipe_of(each, 0) for each in (arm, other))
            if one.surgery == two.surgery and not confounds(one, two):
                raise BadInput(f"arms: {other.name} and {arm.name} are the same treatment")

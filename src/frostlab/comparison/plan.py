"""The plan of a comparison: its recipe, arms, seeds and rules.

An arm is a variant of the recipe: a treatment of the model (such as freezing some weights), or
other settings that the plan varies on purpose. Any further difference between two arms is a
confound, which must be declared or removed. A plan is fixed before the first run, and only seeds
can be added later. It can also be made after the fact, from runs that have ended; then it lists
these runs.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from frostlab.errors import BadInput, nearest
from frostlab.recipe.bounded_yaml import shown, shown_key
from frostlab.recipe.load import recipe_from
from frostlab.recipe.recipe import Recipe, differences, set_nested, shorten_paths
from frostlab.recipe.settings import all_metrics, metric_facts
from frostlab.recipe.treatment import Strict
from frostlab.storage import digest_of

SCHEMA = 3  # version of plan.json
LEAST_SEEDS = 5  # with fewer pairs, no arm is called better or worse
# With one arm besides the baseline, 6 seeds find an effect of 1.5 standard deviations with a
# probability of 79 %. Without step timing, which takes a part of alpha (`TIME_SHARE`), it is 83 %.
DEFAULT_SEEDS = 6
MOST_RUNS = 10_000  # most runs of a comparison, over all arms
MOST_ARMS = 100
MOST_SEED = 2**32  # every seed is below this number
MOST_LOOKS = 1000  # at one question
AFTER_THE_FACT = "runs chosen after the fact"  # remark in verdicts of a plan of finished runs
TIME_SHARE = 0.2  # share of alpha for statements about time, if steps are timed
_COST_ENDINGS = ("_seconds", "_ms", "_bytes")  # ends of names of metrics compared as ratios
_NO_CONFOUNDS = ("about", "treatment", "seed")  # recipe keys whose differences are no confounds
_SAME_FOR_ALL = ("data", "tokenizer")  # recipe sections that may not differ between arms
_NOT_IN_SET = ("seed", "treatment", "scale")  # recipe keys that an arm's `set` may not change


Look = Annotated[int, Field(gt=0, le=MOST_LOOKS)]


class Rules(Strict):
    """The metric that is compared, and the conditions for calling an arm better or worse.

    A look is one analysis of the results. Each look spends a part of alpha, which is the allowed
    false-alarm rate of all looks together.
    """

    metric: Annotated[str, Field(min_length=1)]  # the metric that decides the verdicts
    lower_is_better: bool  # whether lower values of the metric are better
    log: bool = False  # whether values are compared as ratios, on the log scale
    # probability of a false alarm that is allowed in all statements together
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    # smallest effect of interest, in the metric's unit or, on the log scale, as a ratio − 1
    minimum_effect: Annotated[float, Field(gt=0)] | None = None
    # largest acceptable cost against the baseline: a factor for perplexity and other ratios, a
    # factor of 1 − metric for accuracies and F1 (1.1: 10 % more errors), else a difference
    margin: Annotated[float, Field(gt=0)] | None = None
    timed: bool = False  # whether statements about time take a part of alpha
    looks: Look = 1  # planned number of looks
    look: Look = 1  # number of the current look, counted from 1
    spent: Annotated[float, Field(ge=0)] = 0.0  # the part of alpha that earlier looks spent

    @property
    def level(self) -> float:
        """The false-alarm rate of this look, over all statements about the metric."""
        share = 1 - TIME_SHARE if self.timed else 1.0
        return share * alpha_spent(self.alpha, self.look, self.looks)

    @property
    def time_level(self) -> float:
        """The false-alarm rate of all statements about time."""
        return TIME_SHARE * self.alpha

    @property
    def of_errors(self) -> bool:
        """Whether the margin is a factor of the error rate, 1 − metric."""
        return metric_facts(self.metric).compared_by == "error rate"

    def margin_as_cost(self, baseline: float) -> float:
        """Return the margin in the unit of the effect; `baseline` is the baseline's mean."""
        assert self.margin is not None
        if self.of_errors:
            return (self.margin - 1) * (1 - baseline)
        return self.margin

    def margin_text(self) -> str:
        """Return the margin in words, such as "1.05 ×"."""
        if self.of_errors:
            return f"{self.margin:g} × the errors"
        return f"{self.margin:g}" + (" ×" if self.log else "")

    @property
    def risk(self) -> float:
        """An upper bound on the false-alarm rate of all looks so far.

        It can exceed alpha, for example if a plan of one look was followed by further looks.
        """
        return self.spent + alpha_spent(self.alpha, self.look, self.looks)

    def history(self) -> str | None:
        """Describe the looks taken and planned; return None for a single look."""
        if self.look == 1:
            if self.looks == 1:
                return None
            return (
                f"look 1 of {self.looks} planned: it spends {self.level:.4g} "
                f"of alpha = {self.alpha:.4g}"
            )
        text = f"look {self.look} at this question: it spends {self.level:.4g} of alpha"
        if self.risk <= self.alpha + 1e-12:
            return f"{text}, and all looks together spend at most {self.alpha:.4g}"
        return (
            f"{text}, but earlier looks had spent {self.spent:.4g}, so the false-alarm rate of all "
            f"looks so far is up to {self.risk:.2%}"
        )


def alpha_spent(alpha: float, look: int, looks: int = 1) -> float:
    """Return the false-alarm rate of look number `look` if `looks` were planned.

    A plan of one look spends all of alpha on it. In a plan of several looks, look k spends
    alpha / 2**k. The sum stays below alpha for any number of looks, so such a plan can be extended.
    If a plan of one look is extended, look k = 2, 3, … also spends alpha / 2**k, and the sum
    exceeds alpha but stays below 1.5 alpha.
    """
    return alpha if look == looks == 1 else math.ldexp(alpha, -look)


def scale_of(metric: str) -> dict[str, bool]:
    """Return whether lower values of a metric are better, and whether it is compared as a ratio.

    Perplexity, times and sizes in bytes are compared as ratios, on the log scale.
    """
    if metric.endswith(_COST_ENDINGS):
        return {"lower_is_better": True, "log": True}
    if metric not in (known := all_metrics()):
        raise BadInput(
            f"metric `{metric}` has no known direction (known: {', '.join(known)}, and names that "
            f"end in {', '.join(_COST_ENDINGS)}){nearest(metric, known)}"
        )
    facts = known[metric]
    return {"lower_is_better": facts.lower_is_better, "log": facts.compared_by == "ratio"}


@dataclass(frozen=True)
class Confound:
    """A setting that differs between an arm and the baseline."""

    key: str  # such as optim.lr
    baseline: Any  # value of the setting in the baseline
    arm: Any  # value of the setting in the arm

    def within(self, keys: Iterable[str]) -> bool:
        """Return whether the setting is one of these keys or nested in one of them."""
        return any(self.key == key or self.key.startswith(f"{key}.") for key in keys)

    def __str__(self) -> str:
        return f"{self.key} {_as_text(self.baseline)} → {_as_text(self.arm)}"


def confounds(baseline: Recipe, arm: Recipe) -> tuple[Confound, ...]:
    """Return the settings in which an arm differs from the baseline, apart from its treatment."""
    base_values, arm_values = baseline.to_dict(), arm.to_dict()
    changed = differences(base_values, arm_values)
    keys = [key for key in changed if _section(key) not in _NO_CONFOUNDS]
    return tuple(
        Confound(key, _value_at(base_values, key), _value_at(arm_values, key))
        for key in sorted(keys)
    )


def check_confounds(
    baseline: str,
    arm: str,
    confounds: Iterable[Confound],
    allowed: Iterable[str],
    remedy: str = "set it to the same value, tune it for both arms (--tune)",
) -> None:
    """Refuse a confound that was not declared, and any difference in the data or the tokenizer.

    A confound such as `optim.lr` is declared by its key, its section `optim` or its last part `lr`.
    """
    permitted = set(allowed)
    for confound in confounds:
        problem = f"{arm} differs from {baseline} in {confound}"
        if _section(confound.key) in _SAME_FOR_ALL:
            raise BadInput(f"{problem}: arms must see the same data")
        if not permitted & {confound.key, _section(confound.key), confound.key.rpartition(".")[2]}:
            raise BadInput(
                f"{problem}, which is a confound; {remedy}, or declare it "
                f"(--allow-confound {confound.key})"
            )


class Arm(Strict):
    """A named treatment, with further settings in `set`.

    A further setting that differs from the baseline's is a confound, unless the plan varies or
    tunes it.
    """

    # unique in the plan
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.+-]*$", max_length=100)]
    treatment: str | dict[str, Any]  # name of a treatment, or its settings
    set: dict[str, Any] = Field(default_factory=dict)  # by dotted key, such as optim.lr


class Tune(Strict):
    """A setting that is tuned for each arm, with the same grid for all and the plan's seeds."""

    key: Annotated[str, Field(pattern=r"^\w+(\.\w+)*$", max_length=100)] = "optim.lr"  # dotted key
    values: Annotated[tuple[float, ...], Field(min_length=2, max_length=MOST_RUNS)]  # the grid

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if list(self.values) != sorted(set(self.values)):
            raise ValueError("tune.values should be in ascending order, without duplicates")
        return self


class Contrast(Strict):
    """A question that is answered by comparing two arms.

    `of: gain` compares how much each arm improves from its first stage to its last.
    """

    question: str  # in words
    arm: str  # name of the first arm
    against: str  # name of the second arm
    of: Literal["value", "gain"] = "value"  # the metric, or its gain


class TimingPlan(Strict):
    """The conditions that end the timing of the arms' steps (see `timing.interleave.StopRule`)."""

    seconds: Annotated[float, Field(gt=0)] = 60.0  # time limit
    width: Annotated[float, Field(gt=0, lt=1)] = 0.01  # target width of every interval: ±0.5 %


class Plan(Strict):
    """Every decision about a comparison."""

    name: str  # name of the comparison
    about: str = ""  # what is compared; comparison.md and the report show this text
    recipe: dict[str, Any]  # settings that all arms share
    # the baseline and the others, in order of the tables
    arms: Annotated[tuple[Arm, ...], Field(max_length=MOST_ARMS)]
    seeds: Annotated[tuple[int, ...], Field(max_length=MOST_RUNS)]  # each arm has one run per seed
    rules: Rules  # the metric, and when an arm is better or worse
    tune: tuple[Tune, ...] = ()  # tuned together, in all combinations of their values
    allow_confounds: tuple[str, ...] = ()  # settings that may differ; the verdict says so
    vary: tuple[str, ...] = ()  # settings that are compared like treatments, such as stages
    contrasts: tuple[Contrast, ...] = Field(default=(), max_length=1000)  # further questions
    rounds: Annotated[int, Field(ge=0, le=MOST_RUNS)] = 0  # extra runs per arm, only to time them
    clock: TimingPlan | None = TimingPlan()  # None: steps are not timed
    assay: bool = False  # whether to check that the baseline with half its steps is found worse
    quick: bool = False  # whether long runs are shortened
    # arm → seed → folder of the run, if the comparison does not train its runs: an absolute path
    # in a new plan, and a path relative to the comparison's folder in plan.json
    runs: dict[str, dict[int, str]] = Field(default_factory=dict)

    @property
    def baseline(self) -> Arm:
        """The arm that the others are compared with: the arm named `baseline`, else the first."""
        return next((arm for arm in self.arms if arm.name == "baseline"), self.arms[0])

    @property
    def others(self) -> tuple[Arm, ...]:
        """Every arm but the baseline."""
        return tuple(arm for arm in self.arms if arm is not self.baseline)

    @property
    def has_stages(self) -> bool:
        """Whether an arm trains in stages; its steps then differ by stage, so none are timed."""
        return any(self.recipe_of(arm, 0).stages for arm in self.arms)

    @property
    def digest(self) -> str:
        """A digest of the plan without its description and its seeds, since seeds may be added.

        The path of the data is left out, too, because every run records a digest of the data. Of
        the recipe's other paths, only the last part counts.
        """
        values = self.model_dump(mode="json", exclude={"about", "seeds"})
        shorten_paths(values["recipe"])
        if isinstance(data := values["recipe"].get("data"), dict):
            data.pop("path", None)
        return digest_of(values)[:16]

    def recipe_of(self, arm: Arm, seed: int, tuned: Mapping[str, float] | None = None) -> Recipe:
        """Return the recipe of an arm's run with a seed and, if given, with tuned settings."""
        key = arm.model_dump_json(), seed, tuple((tuned or {}).items())
        if key not in self._recipes:
            values = copy.deepcopy(self.recipe)
            values["treatment"], values["seed"] = arm.treatment, seed
            for name, value in (*copy.deepcopy(arm.set).items(), *(tuned or {}).items()):
                set_nested(values, name, value)
            self._recipes[key] = recipe_from(values, source=f"arm {arm.name}")
        return self._recipes[key]

    @cached_property
    def _recipes(self) -> dict[tuple[Any, ...], Recipe]:
        """The recipes made so far, since `recipe_of` is often asked for the same ones."""
        return {}

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy without the recipes made so far, as its settings may differ."""
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("_recipes", None)
        return copied

    def changed(
        self,
        scale: str | None,
        settings: Mapping[str, Any],
        stand_in: Callable[[Recipe], Recipe] | None,
        differing: Callable[[Recipe, Recipe], dict[str, Any]],
    ) -> "Plan":
        """Return the plan with smaller recipes (`scale`) or stand-ins for missing data, or both.

        The scale changes the values in an arm's `set`, too, but not the values in `settings`, which
        the user gave for all arms. `stand_in` replaces a recipe's missing data or weights.
        `differing` compares two recipes and returns the settings of the second that differ.
        """
        if scale is None and stand_in is None:
            return self

        def change(recipe: Recipe, arm_keys: Iterable[str] = ()) -> Recipe:
            if scale is not None:
                kept = {key: value for key, value in settings.items() if key not in arm_keys}
                recipe = recipe_from(recipe.to_dict(), settings={**kept, "scale": scale})
            return recipe if stand_in is None else stand_in(recipe)

        base = change(recipe_from(self.recipe))
        sets = [differing(base, change(self.recipe_of(arm, 0), arm.set)) for arm in self.arms]
        pairs = zip(self.arms, sets, strict=True)
        arms = tuple(arm.model_copy(update={"set": own}) for arm, own in pairs)
        return self.model_copy(update={"recipe": base.to_dict(), "arms": arms})

    def confounds(self) -> dict[str, tuple[Confound, ...]]:
        """Return the confounds by arm, for every arm but the baseline."""
        return {arm.name: self.confounds_between(self.baseline, arm) for arm in self.others}

    def confounds_between(self, baseline: Arm, arm: Arm) -> tuple[Confound, ...]:
        """Return the settings that differ between two arms and are neither varied nor tuned."""
        tuned = [tune.key for tune in self.tune]
        return tuple(
            confound
            for confound in confounds(self.recipe_of(baseline, 0), self.recipe_of(arm, 0))
            if confound.key not in tuned and not confound.within(self.vary)
        )

    def together(self, baseline: Arm, arm: Arm) -> tuple[str, ...]:
        """Return the factors in which two arms differ on purpose, if there are several.

        A factor is the treatment, or one of the settings that the plan varies.
        """
        recipes = self.recipe_of(baseline, 0), self.recipe_of(arm, 0)
        differing = confounds(*recipes)
        factors = [] if recipes[0].surgery == recipes[1].surgery else ["the treatment"]
        factors += [
            key for key in self.vary if any(confound.within([key]) for confound in differing)
        ]
        return tuple(factors) if len(factors) > 1 else ()

    @property
    def retry(self) -> str:
        """Advice about runs that failed."""
        if self.runs:
            return "finish them with frostlab run --resume, and compare the runs again"
        return "the same command tries them again"

    def shortcomings(self, baseline: Arm, arm: Arm) -> dict[str, str]:
        """Return the weaknesses of a plan of finished runs, each with its explanation.

        The dict is empty if the comparison trains its runs.
        """
        if not self.runs:
            return {}
        reasons = {
            AFTER_THE_FACT: "no plan was made before the results were known, so the false-alarm "
            "rate holds only if the choice of the runs did not depend on their results"
        }
        rates = {self.recipe_of(either, 0).optim.lr for either in (baseline, arm)}
        if len(rates) == 1:
            reasons["untuned"] = (
                f"both arms have optim.lr {rates.pop():g}, and no record shows that it was tuned "
                "for each arm with an equal budget"
            )
        return reasons

    def check(self) -> None:
        """Raise an error if the arms, seeds or settings do not make a fair comparison."""
        self.check_seeds()
        self._check_runs()
        self._check_chosen_runs()
        self._check_arms()
        recipe = self.recipe_of(self.baseline, 0)
        check_settings_exist("--allow-confound", self.allow_confounds, recipe)
        check_settings_exist("vary", self.vary, recipe, by_last_part=False)
        for key in self.vary:
            if _section(key) in _SAME_FOR_ALL:
                raise BadInput(f"vary {shown_key(key)}: arms must see the same data")
        self._check_contrasts()
        self._check_quick()
        self._check_assay()
        remedy = ["choose runs that share it"] if self.runs else []
        for name, differing in self.confounds().items():
            check_confounds(self.baseline.name, name, differing, self.allow_confounds, *remedy)
        self._check_tuning()

    def _check_arms(self) -> None:
        names = [arm.name for arm in self.arms]
        if len(names) < 2:
            listed = ", ".join(names) or "none"
            raise BadInput(f"arms: {listed}: a comparison needs two, such as baseline,oelm")
        recipes: list[Recipe] = []
        for i, arm in enumerate(self.arms):
            misplaced = next((key for key in arm.set if _section(key) in _NOT_IN_SET), None)
            if misplaced is not None:
                raise BadInput(
                    f"arm {arm.name}: an arm cannot set {shown_key(misplaced)} under `set`"
                )
            if "model.preset" in arm.set:
                raise BadInput(
                    f"arm {arm.name}: set.model.preset would have no effect, because the loaded "
                    "recipe has a value for every setting; set model.residual, model.head or "
                    "model.gradient_scale instead"
                )
            if arm.name in names[:i]:
                raise BadInput(f"arms: {arm.name} is given twice")
            recipe = self.recipe_of(arm, 0)
            recipes.append(recipe)
            for other, other_recipe in zip(self.arms[:i], recipes, strict=False):
                same_surgery = recipe.surgery == other_recipe.surgery
                if same_surgery and not confounds(recipe, other_recipe):
                    raise BadInput(f"arms: {other.name} and {arm.name} train in the same way")

    def check_seeds(self) -> None:
        """Refuse an empty list of seeds, and seeds that are negative, too large or repeated."""
        if not self.seeds:
            raise BadInput("seeds: a comparison needs at least one seed")
        if min(self.seeds) < 0:
            raise BadInput(f"seeds {shown(list(self.seeds))}: a seed is 0 or more")
        if max(self.seeds) >= MOST_SEED:
            raise BadInput(f"seeds {shown(list(self.seeds))}: a seed is less than {MOST_SEED}")
        if len(set(self.seeds)) < len(self.seeds):
            raise BadInput(f"seeds {shown(list(self.seeds))}: a seed is given twice")

    @property
    def settings_tried(self) -> int:
        """The number of combinations of the values in `tune`; tuning may add values at the ends."""
        return math.prod(len(tune.values) for tune in self.tune)

    def _check_runs(self) -> None:
        runs = len(self.arms) * (len(self.seeds) * self.settings_tried + self.rounds)
        if runs > MOST_RUNS:
            raise BadInput(
                f"{len(self.arms)} arms with {len(self.seeds)} seeds, {self.settings_tried} "
                f"combinations of tuned values and {self.rounds} rounds are {runs} runs; "
                f"{MOST_RUNS} is the most"
            )

    def _check_chosen_runs(self) -> None:
        """In a plan of finished runs, refuse unknown arms or seeds, and keys that need training."""
        if not self.runs:
            return
        seeds = {seed for by_seed in self.runs.values() for seed in by_seed}
        if self.runs.keys() != {arm.name for arm in self.arms} or seeds != set(self.seeds):
            raise BadInput("runs: their arms and seeds are not those of the plan")
        if self.tune or self.rounds or self.clock or self.assay or self.quick or self.contrasts:
            raise BadInput(
                "runs: a plan of finished runs trains nothing, so it cannot have tune, rounds, "
                "clock, assay, quick or contrasts"
            )

    def _check_contrasts(self) -> None:
        arms = {arm.name: arm for arm in self.arms}
        questions = [contrast.question for contrast in self.contrasts]
        for i, contrast in enumerate(self.contrasts):
            if contrast.question in questions[:i]:
                raise BadInput(f"contrasts: `{shown_key(contrast.question)}` is asked twice")
            if contrast.arm == contrast.against:
                raise BadInput(f"contrasts: {shown_key(contrast.arm)} is compared with itself")
            for name in (contrast.arm, contrast.against):
                if name not in arms:
                    hint = nearest(name, arms)
                    raise BadInput(f"contrasts: {shown_key(name)} is not an arm{hint}")
                if contrast.of == "gain" and len(self.recipe_of(arms[name], 0).stages) < 2:
                    raise BadInput(f"contrasts: a gain needs two stages, but {name} has only one")

    def _check_assay(self) -> None:
        if self.assay and self.has_stages:
            raise BadInput(
                "--assay trains the baseline for fewer steps, which is not possible with stages"
            )

    def _check_quick(self) -> None:
        """Refuse `quick` for arms that it cannot shorten: with stages, or own steps or epochs."""
        for arm in self.arms if self.quick else ():
            lengths = [key for key in arm.set if key in ("train", "train.steps", "train.epochs")]
            if lengths or self.recipe_of(arm, 0).stages:
                reason = f"sets its own length (set.{lengths[0]})" if lengths else "has stages"
                raise BadInput(f"--quick: arm {arm.name} {reason}, so its runs cannot be cut short")

    def _check_tuning(self) -> None:
        keys = [tune.key for tune in self.tune]
        if twice := [key for i, key in enumerate(keys) if key in keys[:i]]:
            raise BadInput(f"tune: {twice[0]} is given twice")
        for arm in self.arms if self.tune else ():
            for tune in self.tune:
                for value in tune.values:
                    self.recipe_of(arm, 0, {tune.key: value})  # raises if the value is invalid
            stages = self.recipe_of(arm, 0).stages
            if "optim.lr" in keys and any(stage.lr is not None for stage in stages):
                raise BadInput(
                    f"arm {arm.name}: a stage sets its own lr, which tuning optim.lr does not "
                    "change; remove the stage's lr"
                )


def check_settings_exist(
    option: str, keys: Iterable[str], recipe: Recipe, by_last_part: bool = True
) -> None:
    """Refuse keys that name no section or setting; `by_last_part` accepts `lr` for `optim.lr`."""
    paths = _paths(recipe.to_dict())
    by_last = {path.rpartition(".")[2]: path for path in reversed(paths)}  # the first path wins
    names = {*recipe.to_dict(), *paths, *(by_last if by_last_part else ())}
    for key in keys:
        if key not in names:
            hint = f"; did you mean `{by_last[key]}`?" if key in by_last else nearest(key, names)
            raise BadInput(f"{option} {shown_key(key)}: no setting has this name{hint}")


def _section(key: str) -> str:
    return key.partition(".")[0]


def _paths(values: Any, path: str = "") -> list[str]:
    """Return the dotted key of every leaf."""
    if not isinstance(values, dict) or not values:
        return [path]
    return [leaf for key in values for leaf in _paths(values[key], f"{path}.{key}".strip("."))]


def _value_at(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values


def _as_text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

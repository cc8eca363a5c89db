"""Scales: the rule that makes a recipe smaller, so that any experiment can be tried on 2 cores.

A scaled recipe keeps its data set, number of layers, stages, treatment and learning rates. It has
fewer and shorter examples, a smaller vocabulary and batch, fewer steps and narrower layers, where
these were larger. A run takes seconds at the scale tiny and minutes at the scale small, or longer
with a pretrained model, which keeps its size, or if a large data set must be read.
"""

import copy
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from frostlab.recipe.data import BPE, Corpus, Docstrings, EEGData, Generated, SimulatedEEG, Words
from frostlab.recipe.model import SCALES, PretrainedModel
from frostlab.recipe.recipe import Recipe

Path = tuple[str, ...]  # the keys from a section to a setting


@dataclass(frozen=True)
class Sizes:
    """The largest values of the settings that a scale limits."""

    steps: int  # per stage
    epochs: int  # per stage
    batch: int
    examples: int  # training examples
    evaluated: int  # examples of each split that is not trained on: tune, report
    length: int  # tokens per example
    samples: int  # samples per window of EEG
    width: int
    bpe: int  # size of a BPE vocabulary
    words: int  # size of a vocabulary of whole words
    per_package: int  # docstrings per package
    subjects: int  # simulated subjects to train on, and simulated unseen subjects
    recordings: int  # simulated recordings per subject in train, in tune and in report
    windows: int  # windows of EEG per recording and epoch
    seconds: float  # length of a simulated recording
    timing: float  # seconds of step timing in a comparison


SIZES = {
    "tiny": Sizes(
        steps=8, epochs=2, batch=4, examples=32, evaluated=32, length=64, samples=128, width=32,
        bpe=400, words=1000, per_package=60, subjects=3, recordings=1, windows=4, seconds=10.0,
        timing=5.0,
    ),
    "small": Sizes(
        steps=300, epochs=5, batch=16, examples=1000, evaluated=500, length=128, samples=320,
        width=128, bpe=4000, words=8000, per_package=500, subjects=6, recordings=3, windows=10,
        seconds=60.0, timing=20.0,
    ),
}  # fmt: skip
ORDER = ("tiny", "small", "full")
_HEAD = 4  # smallest size of an attention head


def scaled_values(recipe: Recipe, fixed: Collection[Path] = ()) -> dict[str, Any]:
    """Return the values of a recipe at its scale.

    Numbers become smaller or stay the same, and scaling the result again changes nothing.

    Args:
        fixed: settings that keep their values, such as `("train", "steps")`.
    """
    scaling = _Scaling(recipe, fixed)
    if recipe.scale != "full":
        scaling.scale_data()
        scaling.scale_tokenizer()
        scaling.scale_model()
        scaling.scale_training()
        scaling.scale_intervals()
    return scaling.values


def narrowed(scale: str, width: int, heads: int) -> int:
    """Return a model's width at a scale; heads that become smaller get an even size."""
    most = SIZES[scale].width // (2 * heads) * 2 * heads
    return min(width, max(most, _HEAD * heads))


class _Scaling:
    """The values of a recipe while they are scaled, section by section."""

    def __init__(self, recipe: Recipe, fixed: Collection[Path]) -> None:
        self.recipe, self.fixed = recipe, set(fixed)
        self.values = copy.deepcopy(recipe.to_dict())
        self.sizes = SIZES.get(recipe.scale, SIZES["small"])

    def get(self, section: str, key: str) -> Any:
        return self.values[section][key]

    def set(self, section: str, key: str, value: Any) -> None:
        if (section, key) not in self.fixed:
            self.values[section][key] = value

    def limit(self, section: str, key: str, most: float) -> None:
        """Lower a number to at most `most`; null counts as no limit."""
        value = self.get(section, key)
        self.set(section, key, most if value is None else min(value, most))

    def scale_data(self) -> None:
        data, sizes = self.recipe.data, self.sizes
        if isinstance(data, Generated):
            self.limit("data", "examples", sizes.examples)
        elif isinstance(data, Corpus):
            self.limit("data", "length", sizes.length)
            if data.stride is not None:  # keeps the gap between two examples
                stride = data.stride - data.length + self.get("data", "length")
                self.set("data", "stride", max(stride, self.get("data", "length")))
            self.limit("data", "limit", sizes.examples)
            self.limit("data", "evaluation_limit", sizes.evaluated)
            if isinstance(data, Docstrings):
                self.limit("data", "per_package", sizes.per_package)
        elif isinstance(data, EEGData):
            self._scale_windows(data)

    def _scale_windows(self, data: EEGData) -> None:
        loss, sizes = self.recipe.loss, self.sizes
        largest = max(loss.scales or SCALES) if loss is not None else max(SCALES)
        # The multiscale loss needs two averages of a window, also at its largest scale.
        self.limit("data", "length", max(sizes.samples, 2 * largest))
        if data.windows is not None:
            self.limit("data", "windows", sizes.windows)
        if not isinstance(data, SimulatedEEG):
            return
        for key in ("subjects", "unseen"):
            self.limit("data", key, sizes.subjects)
        for key in ("tune", "report"):
            self.limit("data", key, sizes.recordings)
        held_out = self.get("data", "tune") + self.get("data", "report")
        self.limit("data", "recordings", held_out + sizes.recordings)
        two_windows = 2 * self.get("data", "length") / self.get("data", "rate")
        self.limit("data", "seconds", max(sizes.seconds, two_windows))

    def scale_tokenizer(self) -> None:
        tokenizer = self.recipe.tokenizer
        if isinstance(tokenizer, BPE):
            self.limit("tokenizer", "size", self.sizes.bpe)
        elif isinstance(tokenizer, Words):
            self.limit("tokenizer", "size", self.sizes.words)
        elif tokenizer is None and isinstance(self.recipe.data, Corpus):
            from_scratch = not isinstance(self.recipe.model, PretrainedModel)
            if from_scratch and ("tokenizer",) not in self.fixed:  # the default is a larger BPE
                self.values["tokenizer"] = {"kind": "bpe", "size": self.sizes.bpe}

    def scale_model(self) -> None:
        """Make layers narrower; the number of heads stays and divides the width."""
        model = self.recipe.model
        if isinstance(model, PretrainedModel):
            return
        self.set("model", "width", narrowed(self.recipe.scale, model.width, model.heads))
        if model.hidden is not None:
            hidden = model.hidden * self.get("model", "width") // model.width
            self.set("model", "hidden", min(model.hidden, max(2, hidden - hidden % 2)))

    def scale_training(self) -> None:
        train, sizes = self.recipe.train, self.sizes
        parts = train.accumulate * (train.processes or 1)  # the batch must be a multiple of this
        self.limit("train", "batch", max(sizes.batch // parts, 1) * parts)
        if not self.fixed & {("train", "steps"), ("train", "epochs")}:
            self._limit_duration(self.values["train"])
            if train.steps is None and not self._examples_are_limited:
                self.values["train"] |= {"steps": sizes.steps, "epochs": None}
        if self.recipe.evaluate.patience is not None:
            self.limit("evaluate", "patience", sizes.epochs)
        if ("stages",) not in self.fixed:
            for stage in self.values["stages"]:
                self._limit_duration(stage)
                if stage["patience"] is not None:
                    stage["patience"] = min(stage["patience"], sizes.epochs)
        warmup, steps = self.recipe.optim.warmup, train.steps
        # a number of steps becomes a share of train.steps, or 10 % if that is null or not larger
        if warmup >= 1:
            share = warmup / steps if steps is not None and warmup < steps else 0.1
            self.set("optim", "warmup", float(f"{min(share, 0.5):g}"))

    def _limit_duration(self, values: dict[str, Any]) -> None:
        for unit in ("steps", "epochs"):
            if values[unit] is not None:
                values[unit] = min(values[unit], getattr(self.sizes, unit))

    @property
    def _examples_are_limited(self) -> bool:
        """Whether the data have a setting that limits the examples of an epoch."""
        return isinstance(self.recipe.data, Generated | Corpus | SimulatedEEG)

    def scale_intervals(self) -> None:
        """Shorten the intervals of evaluating and watching gradients to fit the shortest stage."""
        epochs = [epochs for epochs, _ in self._durations if epochs is not None]
        steps = self._fewest_steps
        every: int | str = self.get("evaluate", "every")
        if isinstance(every, str):
            number = 1 if every == "epoch" else int(every.split()[0])
            number = min([number, *epochs])
            shown = "epoch" if number == 1 else f"{number} epochs"
            # an epoch of unknown length counts as longer than the stage
            too_long = steps is not None and number * (self._steps_per_epoch or steps + 1) > steps
            self.set("evaluate", "every", max(1, steps // 2) if steps and too_long else shown)
        elif steps is None:
            self.set("evaluate", "every", "epoch")
        else:
            self.limit("evaluate", "every", max(1, steps // 2))
        if self.recipe.watch is not None:
            self.limit("watch", "every_n_steps", 2 if steps is None else max(1, steps // 4))

    @property
    def _durations(self) -> list[tuple[int | None, int | None]]:
        """Epochs and steps of each stage, one of which is None."""
        train = self.values["train"]
        stages = self.values["stages"] or [{"epochs": None, "steps": None}]
        own = [(stage["epochs"], stage["steps"]) for stage in stages]
        default = (train["epochs"], train["steps"])
        return [duration if any(duration) else default for duration in own]

    @property
    def _steps_per_epoch(self) -> int | None:
        """The most steps of an epoch; None if the number of examples is not known."""
        key = "examples" if isinstance(self.recipe.data, Generated) else "limit"
        examples = self.values["data"].get(key)
        return None if examples is None else -(-examples // self.get("train", "batch"))

    @property
    def _fewest_steps(self) -> int | None:
        """The steps of the shortest stage; None if they are not known."""
        per_epoch, counts = self._steps_per_epoch, list[int]()
        for epochs, steps in self._durations:
            if steps is not None:
                counts.append(steps)
            elif epochs is None or per_epoch is None:
                return None
            else:
                counts.append(epochs * per_epoch)
        return min(counts)

"""Small comparisons for tests: a few arms of tiny models that train for a moment."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import frostlab as fl
from frostlab.comparison.load import make_plan
from frostlab.comparison.plan import Plan, Rules, scale_of
from frostlab.records.manifest import write_manifest
from hearing import hearing
from stages import progressive
from tiny import tiny

SMALL = tiny(data__examples=96, train__epochs=1, train__batch=16, model__layers=1)
LANGUAGE = tiny(
    data={"name": "induction", "examples": 96, "length": 16, "symbols": 16},
    train__epochs=1, train__batch=16, model__layers=1,
)  # fmt: skip
ARMS = ["baseline", "oelm"]
RECORDS = ("evidence.json", "comparison.json", "timing.json")
Change = Callable[[dict[str, Any]], None]
HOT = {"name": "hot", "treatment": "oelm", "set": {"optim.lr": 0.01}}

ASKED = [
    {"question": "Do two layers help?", "arm": "two", "against": "one"},
    {"question": "Does freezing hurt with two?", "arm": "two-frozen", "against": "two"},
]
LAYERS: dict[str, Any] = {  # arms of one and two layers, and their questions
    "recipe": SMALL,
    "arms": [
        {"name": "one", "set": {}},
        {"name": "two", "set": {"model.layers": 2}},
        {"name": "two-frozen", "treatment": "oelm", "set": {"model.layers": 2}},
    ],
    "vary": "model.layers",
    "contrasts": ASKED,
    "clock": None,
}

STAGES = [{"name": "one layer"}, {"name": "grown", "add": {}, "train": ["layers[1]", "head"]}]
ALL = [{"name": "one layer"}, {"name": "grown", "add": {}}]
GROWN: dict[str, Any] = {  # arms with stages
    "recipe": progressive(stages=[]),
    "vary": ["model.layers", "stages", "supervise", "train.epochs"],
    "arms": [
        {"name": "scratch", "set": {"model.layers": 2, "train.epochs": 4}},
        {"name": "grown", "set": {"stages": STAGES}},
        {"name": "deep", "set": {"stages": ALL, "supervise.layers": "all"}},
    ],
    "contrasts": [
        {"question": "Is it better?", "arm": "grown", "against": "scratch"},
        {"question": "Is it easier?", "arm": "deep", "against": "grown", "of": "gain"},
    ],
    "seeds": 2,
}

VARY = ["model.residual", "model.head", "model.gradient_scale"]
PLAIN = {"model.residual": "none", "model.head": "linear", "model.gradient_scale": 1.0}
HEARING: dict[str, Any] = {  # decoders of EEG, watched
    "recipe": hearing(
        data__subjects=3,
        data__unseen=2,
        model__layers=3,
        train__epochs=1,
        watch={"every_n_steps": 1},
    ),
    "vary": VARY,
    "arms": [
        {"name": "v1", "set": PLAIN},
        {"name": "v2", "set": {}},
        {"name": "head", "set": PLAIN | {"model.head": "mlp"}},
    ],
    "contrasts": [{"question": "Better?", "arm": "v2", "against": "v1"}],
    "clock": None,
}


def plant(path: Path, **values: Any) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def changed(folder: Path, target: Path, *changes: Change) -> Path:
    """Copy the records from which a report's words and tables are made; change evidence.json."""
    target.mkdir(parents=True, exist_ok=True)
    for name in RECORDS:
        shutil.copy(folder / name, target / name)
    path = target / "evidence.json"
    values = json.loads(path.read_text())
    for change in changes:
        change(values)
    path.write_text(json.dumps(values))
    return target


def own_data(path: Path, first: int = 0) -> Path:
    """Write labelled texts of a few words."""
    path.parent.mkdir(parents=True, exist_ok=True)
    words = ["one", "two", "three", "four", "five"]
    rows = [f"{words[i % 5]} {words[i * 3 % 5]} {words[i * i % 5]} {i},{i % 2}"
            for i in range(first, first + 120)]  # fmt: skip
    path.write_text("\n".join(["text,label", *rows]))
    return path


def reseal(folder: Path) -> None:
    """Write the manifests of a comparison again, as if its files had always been as they are."""
    for manifest in folder.glob("*/*/manifest.json"):
        write_manifest(manifest.parent)
    write_manifest(folder)


def compare(folder: Path, jobs: int = 1, **changes: Any) -> fl.Comparison:
    """Compare arms of the small recipe, without timing."""
    values = {"recipe": SMALL, "arms": ARMS, "seeds": 2, "clock": None, **changes}
    return fl.compare(values, out=folder, jobs=jobs)


def plan(**changes: Any) -> Plan:
    """Plan a comparison of the tiny recipe."""
    return make_plan({"recipe": tiny(), "arms": ARMS, **changes})


def rules_for(
    metric: str,
    *,
    alpha: float = 0.05,
    minimum_effect: float | None = None,
    margin: float | None = None,
    looks: int = 1,
    look: int = 1,
) -> Rules:
    """Return rules in which the metric's name decides the direction and the scale."""
    return Rules(
        metric=metric,
        **scale_of(metric),
        alpha=alpha,
        minimum_effect=minimum_effect,
        margin=margin,
        looks=looks,
        look=look,
    )

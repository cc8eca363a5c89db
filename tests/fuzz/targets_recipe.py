"""Fuzz targets: recipes, settings, groups, comparisons and their files, selections, variables."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from frostlab.comparison.evidence import read_evidence
from frostlab.comparison.judging.looks import Look
from frostlab.comparison.load import make_plan
from frostlab.comparison.oelm_json import timing_json
from frostlab.comparison.page import page, show
from frostlab.comparison.plan import SCHEMA
from frostlab.comparison.run import _shortened, _stored_tuning, _time_steps
from frostlab.comparison.runner import ComparisonFolder, Finished, Runner, StoredPlan
from frostlab.experiments.plans import group_plans
from frostlab.launcher import check_variables
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.recipe.groups import group_table, load_group
from frostlab.recipe.load import load_recipe, parse_settings
from frostlab.roles.read import anatomy
from fuzz.comparison_made import evidence, plan, steps, tuning
from fuzz.mutate import Target

_RECIPES = (
    b"extends: docstrings-gpt\noptim: {lr: 2e-3, betas: [0.9, 0.98], schedule: cosine}\nseed: 7\n",
    b"data: {name: induction, examples: 64, length: 16}\nmodel: {kind: decoder, width: 8}\n"
    b"train: {steps: 5, batch: 8}\nsupervise: {layers: [1, 2], weights: [1, 2.5]}\n"
    b"stages:\n  - {name: one, steps: 2, lr: {new: 1e-3, head: 2e-3}}\n"
    b"  - {add: {layers: 1, at: top, init: copy}, train: [head], keep_state: false}\n",
    b"data: {name: own, path: x.csv, text: [a, b], label: c}\ntokenizer: {kind: words, size: 99}\n"
    b"treatment:\n  init: [{method: randomize, select: [key], std: match}]\n  freeze: [key]\n",
    b"data: {name: eeg-simulated, subjects: 2}\nmodel: {kind: conformer, preset: v1, layers: 2}\n"
    b"loss: {kind: multiscale, scales: [1, 2]}\nwatch: {every_n_steps: 3, distance: true}\n",
    b"model: {kind: pretrained, name: bert, config: {hidden_size: 8, id2label: {0: a}}}\n"
    b"treatment: {peft: {method: lora, r: 2}}\nevaluate: {every: 2 epochs, metric: loss}\n",
)
_COMPARISONS = (
    b"recipe: docstrings-gpt\narms: baseline,oelm\nseeds: 6\nmetric: accuracy\nrounds: 1\n",
    b"about: x\nrecipe: {data: {name: majority, examples: 64, length: 8}}\nseeds: [3, 1]\n"
    b"arms:\n  - {name: a, set: {}}\n  - {name: b, treatment: oelm, set: {optim.lr: 1e-4}}\n"
    b"vary: optim.lr\ntune: [{key: optim.decay, values: [0.01, 0.1], seeds: 1}]\n"
    b"contrasts: [{question: 'Is it?', arm: b, against: a}]\nclock: {seconds: 5, width: 0.1}\n"
    b"alpha: 0.1\nlooks: 3\nallow_confounds: [optim.eps]\nset: {train.batch: 8, seed: 3}\n",
)
_GROUPS = (
    b"about: x\nmachine: a laptop\nexperiments:\n  gpt-01: {reported: {perplexity: 4.27}}\n"
    b"  docstrings-demo: {optional: true, cost: 8 h}\npublished: {a: [gpt-01, docstrings-demo]}\n"
    b"fair:\n  b: {recipe: docstrings-gpt, arms: baseline}\n  c: growth\n"
    b"further: {d: {data.x: 1}}\n",
    b"about: x\nexperiments: {gpt-01: {}, gpt-02: {}}\n"
    b"published: {a: {arms: [gpt-01, gpt-02], metric: loss}}\nfair: {}\n",
    b"about: x\nfair:\n  b: {recipe: docstrings-gpt, arms: [baseline, oelm], tune: null}\n"
    b"  c: {recipe: {data: {name: majority}}, arms: [none, oelm]}\n"
    b"interactions: [{question: q, arm: oelm, comparison: b, against: c}]\n",
)
_SELECTIONS = (b"query", b"layers[0:2].key", b"!layers[-1].up.bias", b"all\nembedding\n!head")
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def _written(data: bytes, path: Path) -> str:
    path.write_bytes(data)
    return str(path)


def _recipe(data: bytes, folder: Path) -> None:
    recipe = load_recipe(_written(data, folder / "me.yaml"))
    assert recipe.digest


def _settings(data: bytes, folder: Path) -> None:
    texts = data.decode("utf-8", "surrogateescape").split("\n")
    load_recipe("docstrings-gpt", parse_settings(text for text in texts if text))


def _group(data: bytes, folder: Path) -> None:
    group = load_group(_written(data, folder / "me.yaml"))
    assert group_table(group, 80) is not None
    for as_published, comparisons in ((True, group.published), (False, group.fair)):
        assert not comparisons or group_plans(group, as_published=as_published)


def _comparison(data: bytes, folder: Path) -> None:
    make_plan(_written(data, folder / "me.yaml"))


def _plans() -> list[bytes]:
    values = plan().model_dump(mode="json")
    look = Look("a", ["b", "c"], "d", "e", 0.05, "accuracy", [0, 1], "comparisons/it", 1.5)
    stored = [StoredPlan(SCHEMA, values, 1.0, []), StoredPlan(SCHEMA, values, 1.0, [look, look])]
    return [json.dumps(asdict(content)).encode() for content in stored]


def _plan_file(data: bytes, folder: Path) -> None:
    _written(data, folder / "plan.json")
    comparison = ComparisonFolder(folder)
    with comparison.open(plan()) as with_seeds:
        comparison.look(with_seeds, {})


def _evidence(data: bytes, folder: Path) -> None:
    path = Path(_written(data, folder / "evidence.json"))
    stored = read_evidence(path)
    if stored is not None:
        json.dumps(stored.to_dict())
        assert page(stored)
        assert show(stored, path)


def _tuning(data: bytes, folder: Path) -> None:
    _written(data, folder / "tuning.json")
    values = ComparisonFolder(folder).read("tuning.json")
    _stored_tuning(values, plan(), folder / "tuning.json")


def _steps(data: bytes, folder: Path) -> None:
    """Read a stored timing, choose the length of a quick run by it, and show it in the evidence."""
    _written(data, folder / "steps.json")
    _written(evidence(), folder / "evidence.json")
    comparison = ComparisonFolder(folder)
    timing = _time_steps(plan(), comparison, Runner(None))
    prepared = SimpleNamespace(splits={"train": range(64)})
    with patch("frostlab.comparison.run.prepare", lambda recipe, data_dir: prepared):
        _shortened(plan(), comparison, timing, Runner(None))
    stored = read_evidence(folder / "evidence.json")
    assert stored is not None
    timed = replace(stored, timing=timing)
    json.dumps([timed.to_dict(), timing_json(timed)])
    assert page(timed)
    assert show(timed, folder)


def _quick(data: bytes, folder: Path) -> None:
    _written(data, folder / "quick.json")
    short = _shortened(plan(), ComparisonFolder(folder), None, Finished())
    for arm in short.arms:
        assert short.recipe_of(arm, 0).digest


@cache
def _parts() -> Callable[..., object]:
    return anatomy(GPT(GPTConfig(vocabulary=8, width=4, layers=3, heads=2, positions=4))).select


def _selection(data: bytes, folder: Path) -> None:
    _parts()(*data.decode("utf-8", "surrogateescape").split("\n"))


def _variables(data: bytes, folder: Path) -> None:
    texts = data.replace(b"\0", b"").split(b"\n")
    variables = {name: os.fsdecode(text) for name, text in zip(_VARIABLES, texts, strict=False)}
    with patch.dict(os.environ, variables):
        check_variables()


TARGETS: dict[str, Target] = {
    "recipe": Target(lambda: list(_RECIPES), _recipe, "yaml"),
    "settings": Target(lambda: [b"optim.lr=1e-4\nmodel={kind: gpt, width: 8}"], _settings),
    "group": Target(lambda: list(_GROUPS), _group, "yaml"),
    "comparison": Target(lambda: list(_COMPARISONS), _comparison, "yaml"),
    "plan": Target(_plans, _plan_file, "json"),
    "evidence": Target(lambda: [evidence()], _evidence, "json"),
    "tuning": Target(lambda: [tuning()], _tuning, "json"),
    "steps": Target(lambda: [steps()], _steps, "json"),
    "quick": Target(lambda: [b'{"steps": 10, "of": 1000}'], _quick, "json"),
    "selection": Target(lambda: list(_SELECTIONS), _selection),
    "variables": Target(lambda: [b"0\n0\n1\n1", b"1\n1\n2\n2"], _variables),
}

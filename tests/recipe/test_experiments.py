"""Every experiment is what the sources ran.

The facts are read from the table in docs/from-the-sources.md, and, where it is at hand, from
MISSION.md, the document that the table was made from.
"""

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import frostlab as fl
from frostlab.comparison.load import make_plan
from frostlab.models.build import recipe_blueprint
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.recipe.groups import group_names, load_group
from frostlab.recipe.load import load_recipe, shipped_experiments, shipped_recipes
from frostlab.recipe.recipe import Recipe
from frostlab.training.stages import Entered, enter_stage, stages_of
from frostlab.training.treatment import count_parameters

ROOT = Path(__file__).parents[2]
MISSION = [path for folder in ROOT.parents if (path := folder / "shared/MISSION.md").is_file()][:1]
GROUPS = {name: load_group(name) for name in group_names()}
REPORTED = {
    name: facts.reported for group in GROUPS.values() for name, facts in group.experiments.items()
}
OPTIONAL = {
    name for group in GROUPS.values() for name, facts in group.experiments.items() if facts.optional
}
EXAMPLES = {  # of the whole training set; recipes of running text have their own limit or steps
    "sst2": 67_349,
    "mnli": 392_702,
    "xnli": 392_702,  # trained on MNLI
    "imdb": 25_000,
    "ag_news": 120_000,
}


class Fact(NamedTuple):
    """What a document says about an experiment; None: nothing."""

    id: str
    data: str
    method: str
    lr: float | None = None
    batch: int | None = None
    steps: int | None = None
    reported: float | None = None  # the main metric
    optional: bool = False


def steps_of(recipe: Recipe) -> int:
    examples = EXAMPLES.get(recipe.data.name) or getattr(recipe.data, "limit", None) or 1
    return sum(stage.steps for stage in stages_of(recipe, examples))


# The table


def rows() -> list[dict[str, str]]:
    text = (ROOT / "docs/from-the-sources.md").read_text()
    lines = text.partition("## The experiments")[2].partition("\n## ")[0].splitlines()
    cells = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    head, _, *body = [[cell.strip() for cell in row] for row in cells]
    return [dict(zip(head, row, strict=True)) for row in body]


TABLE = {re.findall(r"`(.+)`", row["id"])[0]: row for row in rows()}


def number(text: str) -> int | None:
    match = re.fullmatch(r"(?:≤ )?([\d,]+)", text)
    return None if match is None else int(match[1].replace(",", ""))


def main_value(text: str) -> float | None:
    """The perplexity, accuracy or correlation among what the table says was reported."""
    if match := re.search(r"PPL ([\d.]+)|^r ([\d.]+)|^([\d.]+) %$|^([\d.]+) %;", text):
        value = float(next(group for group in match.groups() if group))
        return round(value / 100, 6) if "%" in match[0] else value
    assert text == "–"
    return None


def table_facts() -> Iterator[Fact]:
    for name, row in TABLE.items():
        yield Fact(
            name, row["data"], row["method"], float(row["learning rate"]), int(row["batch"]),
            number(row["steps"]), main_value(row["reported"]), "(optional)" in row["id"],
        )  # fmt: skip


# MISSION.md

DATA = {  # data set's name in the document → its name in recipes, and the beginning of ids
    "SST-2": ("sst2", "sst2"),
    "MNLI": ("mnli", "mnli"),
    "IMDB": ("imdb", "imdb"),
    "AG News": ("ag_news", "agnews"),
    "XNLI": ("xnli", "xnli-gpt"),
    "TinyStories": ("tinystories", "tinystories"),
    "OpenWebText": ("openwebtext", "openwebtext"),
    "WikiText-103": ("wikitext103", "wikitext103"),
}
METHODS = {  # method in the document → its treatment, and its row of the table of rates
    "baseline": ("baseline", "Baseline"),
    "OELM": ("oelm", "OELM-Freeze"),
    "random": ("oelm-random", "OELM-Random"),
    "global QR": ("oelm-global", None),
    "per-head QR": ("oelm", "OELM-Freeze"),
}
# "As published, BERT's baseline also had its Q/K overwritten (orthogonal, trained; on XNLI normal)"
BERT_BASELINES = {"sst2": "orthogonal-trainable", "mnli": "orthogonal-trainable"}
BERT_BASELINES["xnli"] = "random-trainable"
ENDINGS = {"global QR": "global-qr", "per-head QR": "head-qr", "OELM": "oelm"}


def mission_facts(text: str) -> Iterator[Fact]:
    rates = {
        method: (float(bert), float(gpt))
        for method, bert, gpt in re.findall(
            r"^\| (Baseline|OELM-\w+) \|.*\| ([\d.e-]+) / ([\d.e-]+) \|$", text, re.MULTILINE
        )
    }
    assert len(rates) == 3
    results = numbers_in(text)
    bert_batch, bert_epochs = found(r"12 heads\): batch (\d+), (\d+) epochs", text)
    gpt_batch, classify_batch, classify_epochs, xnli_epochs = chain(
        found(r"8 heads,\s+batch (\d+);", text),
        found(r"bidirectional attention, batch (\d+), (\d+) epochs \(XNLI (\d+)\)", text),
    )
    thousands, sets = re.findall(r"([\dk /]+) steps \(([^)]+)\)", text)[0]
    pairs = zip(re.split(r" /\s+", sets), re.findall(r"\d+", thousands), strict=True)
    steps = {DATA[name][0]: 1000 * int(count) for name, count in pairs}

    def fact(name: str, data: str, method: str, bert: bool, numbers: list[float]) -> Fact:
        treatment, rate = METHODS[method]
        lr = None if rate is None else rates[rate][0 if bert else 1]
        if bert and method == "baseline":
            treatment = BERT_BASELINES[data]
        arms = ("baseline", "OELM", "random")
        place = arms.index(method) if method in arms else len(numbers)
        value = numbers[place] if place < len(numbers) else None
        if data in steps:
            count, batch = steps[data], gpt_batch
        else:
            batch = bert_batch if bert else classify_batch
            epochs = bert_epochs if bert else xnli_epochs if data == "xnli" else classify_epochs
            count = -(-EXAMPLES[data] // batch) * epochs
        if bert and data == "xnli":  # launched with 16, though the document says 32
            count, batch = -(-EXAMPLES[data] // 16) * bert_epochs, 16
        return Fact(name, data, treatment, lr, batch, count, value)

    (paper, arms), = re.findall(r"paper: (.+?) × \{(.+?)\}", text)  # fmt: skip
    for name in paper.split(" and "):
        for method in arms.split(", "):
            data, begin = DATA[name]
            ending = ENDINGS.get(method, method)
            yield fact(f"{begin}-{ending}", data, method, True, results[f"BERT {name}"])
    for digits, method in re.findall(r"XNLI-(\d+) (baseline|OELM)", text):
        yield fact(f"xnli-{digits}", "xnli", method, True, results["BERT XNLI"])
    for digits, name, methods in re.findall(r"GPT-([\d/]+) (\S+) ([\w/]+)", text):
        for digit, method in zip(digits.split("/"), methods.split("/"), strict=True):
            yield fact(f"gpt-{digit}", DATA[name][0], method, False, results[name])
    (listed, arms), = re.findall(r"phase 4: (.+?) × \{(.+?)\} with GPT", text)  # fmt: skip
    for name in listed.split(", "):
        for method in arms.split(", "):
            data, begin = DATA[name]
            ending = ENDINGS.get(method, method)
            yield fact(f"{begin}-{ending}", data, method, False, results[f"GPT {name}"])
    (name, arms), = re.findall(r"phase 2: (\S+) × \{(.+?)\}", text)  # fmt: skip
    for method in arms.split(", "):
        ending = ENDINGS.get(method, method)
        yield fact(f"{DATA[name][1]}-{ending}", DATA[name][0], method, False, [])


def found(pattern: str, text: str) -> list[int]:
    match = re.search(pattern, text)
    assert match is not None, pattern
    return list(map(int, match.groups()))


def numbers_in(text: str) -> dict[str, list[float]]:
    """The numbers that the sources reported, by data set: baseline, OELM, random."""
    part = text.partition("**What the sources reported**")[2].partition("\n\n")[0]
    before, _, after = part.partition("GPT classification:")
    classification, _, perplexities = after.partition("PPL:")
    slashed = r"(\d+\.\d+(?: / \d+\.\d+)+)"
    results = {}
    for kind, scale, words in (
        ("BERT ", 100, before), ("GPT ", 100, classification), ("", 1, perplexities),
    ):  # fmt: skip
        for name in DATA:
            if match := re.search(rf"\b{name} {slashed}", words):
                values = [float(value) / scale for value in match[1].split(" / ")]
                results[f"{kind}{name}"] = [round(value, 6) for value in values]
    return results


DOCUMENTS = {"table": list(table_facts())}
if MISSION:
    DOCUMENTS["mission"] = list(mission_facts(MISSION[0].read_text()))
FACTS = [
    pytest.param(fact, id=f"{document}-{fact.id}")
    for document, facts in DOCUMENTS.items()
    for fact in facts
]


@pytest.mark.parametrize("fact", FACTS)
def test_an_experiment_is_what_a_document_says(fact: Fact) -> None:
    recipe = load_recipe(fact.id)
    method = "supervise: all" if recipe.supervise.layers == "all" else recipe.treatment_name
    assert (recipe.data.name, method) == (fact.data, fact.method)
    if fact.lr is not None:
        assert recipe.optim.lr == fact.lr
    if fact.batch is not None:
        assert recipe.train.batch == fact.batch
    if fact.steps is not None:
        assert steps_of(recipe) == fact.steps
    if fact.reported is not None:
        assert REPORTED[fact.id][recipe.metric] == pytest.approx(fact.reported)
    assert fact.optional <= (fact.id in OPTIONAL)


def test_the_table_has_every_experiment_and_no_other() -> None:
    assert set(TABLE) == set(REPORTED) >= set(shipped_experiments())
    assert {name for name in TABLE if "(optional)" in TABLE[name]["id"]} == OPTIONAL
    without = {name for name in TABLE if TABLE[name]["reported"] == "–"}
    assert without == {name for name, reported in REPORTED.items() if not reported}
    assert {name.removesuffix("-random") for name in OPTIONAL} == {
        "mnli", "xnli", "openwebtext", "wikitext103", "imdb", "agnews", "xnli-gpt",
    }  # fmt: skip


def test_the_table_has_every_experiment_of_the_mission() -> None:
    """Where MISSION.md is not at hand, the table alone is compared with the recipes."""
    for path in MISSION:
        text, named = path.read_text(), {fact.id for fact in DOCUMENTS["mission"]}
        assert len(named) == 6 + 2 + 7 + 6 + 3
        (optional,) = re.findall(r"Optional: random for (.+?);", text)
        for name in ("MNLI", "XNLI", "OpenWebText", "WikiText-103", "phase 4"):
            assert name in optional
        rest = set(TABLE) - named - OPTIONAL
        assert all(name.startswith(("progressive-", "eeg-")) for name in rest)
        counts = {cell for row in TABLE.values() for cell in (row["parameters"], row["trainable"])}
        for count in ("9,200,896", "4,534,784", "15,521,793", "15,555,073", "15,588,161"):
            assert count in text
            assert count in counts


def test_the_published_steps() -> None:
    steps = {name: steps_of(load_recipe(name)) for name in ("sst2-oelm", "mnli-oelm", "xnli-01")}
    assert steps == {"sst2-oelm": 6_315, "mnli-oelm": 36_816, "xnli-01": 73_632}


# Parameters


@pytest.mark.parametrize("name", [name for name in TABLE if name.split("-")[0] != "eeg"])
def test_the_counts_of_parameters(name: str) -> None:
    """Built without memory; tests/models has the counts of the Conformer."""
    recipe, row = load_recipe(name), TABLE[name]
    if recipe.stages:
        assert (row["parameters"] == "–") == ("published" not in name)
        return
    model, _ = recipe_blueprint(recipe)
    anatomy = fl.anatomy(model)
    anatomy = anatomy.with_frozen(*recipe.surgery.frozen) if recipe.surgery.frozen else anatomy
    assert anatomy.count() == number(row["parameters"])
    assert anatomy.count("trainable") == number(row["trainable"])
    if recipe.model.kind == "gpt" and recipe.surgery.frozen:
        assert anatomy.count("frozen") == 3_145_728


def test_the_published_decoder_has_its_counts_in_both_stages() -> None:
    for name in ("progressive-standard-published", "progressive-deep-published"):
        recipe, entered, counts = load_recipe(name), Entered(), []
        model = Decoder(DecoderConfig(layers=recipe.model.layers))  # type: ignore[union-attr]
        for index, stage in enumerate(stages_of(recipe, 10_000)):
            entered = enter_stage(model, recipe, stage, index, entered)
            counts.append(count_parameters(model))
        assert [count["total"] for count in counts] == [9_135_232, 9_200_896]
        assert counts[1]["trainable"] == 4_534_784 == number(TABLE[name]["trainable"])


def test_the_gpt_of_12_layers() -> None:
    model, _ = recipe_blueprint(load_recipe("gpt-12x768"))
    assert fl.anatomy(model).count() == 124_046_592  # GPT-2 small with 512 positions


# What the published recipes share


def published() -> Iterator[tuple[str, Recipe]]:
    for name in shipped_recipes():
        if name.endswith("-published"):
            yield name, load_recipe(name)


def test_the_reported_split_selects() -> None:
    for name, recipe in published():
        if recipe.data.task != "envelope":
            assert recipe.data.splits == "published", name  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["sst2", "mnli", "xnli"])
def test_bert_is_trained_as_published(name: str) -> None:
    recipe = load_recipe(f"{name}-bert-published")
    assert (recipe.evaluate.every, recipe.data.length) == (500, 128)
    assert (recipe.train.batching, recipe.train.precision) == ("fixed", "float32")
    assert (recipe.optim.warmup, recipe.optim.schedule, recipe.train.epochs) == (0.1, "linear", 3)
    assert (recipe.optim.decay, recipe.optim.clip) == (0.01, 1.0)


@pytest.mark.parametrize("name", ["imdb", "ag_news", "xnli"])
def test_gpt_classifies_as_published(name: str) -> None:
    recipe = load_recipe(f"{name}-gpt-published")
    assert recipe.tokenizer.model_dump() == {"kind": "pretrained", "name": "gpt2"}  # type: ignore
    assert (recipe.data.length, recipe.optim.warmup, recipe.optim.schedule) == (512, 0, "constant")
    assert (recipe.train.batching, recipe.train.precision) == ("fixed", "float32")
    assert (recipe.model.bias, recipe.model.pooling) == ("feed-forward", "last")  # type: ignore
    assert recipe.evaluate.every == "epoch"


def test_growing_decoders_are_trained_as_published() -> None:
    for name in ("standard", "deep"):
        recipe = load_recipe(f"progressive-{name}-published")
        data: Any = recipe.data
        assert (data.name, data.limit, data.evaluation_limit) == ("wikitext2-raw", 10_000, 2_000)
        assert data.report == "validation"
        first, second = stages_of(recipe, 10_000)
        assert (first.patience, second.patience) == (1, 3)
        assert (first.lr or recipe.optim.lr, second.lr) == (1e-3, 1e-4)


def test_old_layers_alone_learn_slowly() -> None:
    *_, last = load_recipe("progressive-two-rates").stages
    assert last.lr == {"new": 1e-3, "head": 1e-3, "old": 1e-5}


GENERATION = [name for name, recipe in published() if recipe.model.kind == "gpt"
              and recipe.data.task == "language"]  # fmt: skip


@pytest.mark.parametrize("name", GENERATION)
def test_validation_takes_less_than_a_twentieth_of_the_time(name: str) -> None:
    """A batch is read forward once in an evaluation, and costs three times as much in a step."""
    recipe = load_recipe(name)
    data, steps = recipe.data, steps_of(recipe)
    assert isinstance(recipe.evaluate.every, int)
    evaluated = -(-data.evaluation_limit // recipe.train.batch)  # type: ignore[union-attr]
    spent = steps // recipe.evaluate.every * evaluated
    assert 0 < spent / (spent + 3 * steps) < 0.05
    assert len(GENERATION) == 3


# Fair comparisons


FAIR = [(group.name, name) for group in GROUPS.values() for name in group.fair]


@pytest.mark.parametrize(("group", "name"), FAIR)
def test_a_fair_comparison_can_be_planned(group: str, name: str) -> None:
    values = GROUPS[group].fair[name]
    plan = make_plan(values)
    assert not any(plan.confounds().values())
    assert plan.recipe_of(plan.baseline, 0).data.name in ("eeg-simulated", *EXAMPLES, "wikitext2",
        "tinystories", "openwebtext", "wikitext103")  # fmt: skip
    assert bool(plan.tune) == ((group, name) != ("proposals", "two-rates"))


def test_a_fair_arm_of_a_proposal_is_its_recipe() -> None:
    for name, values in GROUPS["proposals"].fair.items():
        plan = make_plan(values)
        tuned = {tune.key for tune in plan.tune}
        for arm in plan.arms:
            kind, _, proposal = arm.name.partition("-")
            deep = "-deep" if kind == "deep" else ""
            own = f"progressive-{proposal}{deep}" if proposal else f"progressive-{kind}"
            assert proposal in ("", name)
            arm_values, recipe_values = plan.recipe_of(arm, 0).to_dict(), load_recipe(own).to_dict()
            for values in (arm_values, recipe_values):
                values["about"], values["evaluate"]["metric"] = "", None
                for index, stage in enumerate(values["stages"]):
                    if f"stages.{index}.lr" in tuned:
                        stage["lr"] = None
            assert arm_values == recipe_values, arm.name

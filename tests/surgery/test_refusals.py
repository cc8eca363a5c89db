"""Surgery refuses bad models in one clear line, and does not change them."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import BertModel

import frostlab as fl
from zoo import CASES, build

VERBS = {
    "freeze": lambda m, d: fl.freeze(m, "query"),
    "thaw": lambda m, d: fl.thaw(m),
    "orthogonalize": lambda m, d: fl.orthogonalize(m, "query"),
    "randomize": lambda m, d: fl.randomize(m, "query"),
    "grow": lambda m, d: fl.grow(m),
    "save_trainable": lambda m, d: fl.save_trainable(m, d / "x"),
    "load_trainable": lambda m, d: fl.load_trainable(m, d / "x"),
    "export": lambda m, d: fl.export(m, d / "x"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_meta_weights(verb: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = BertModel(CASES["bert"].make_config())
    with pytest.raises(fl.BadInput, match=f"{verb}: .* is on the meta device") as error:
        VERBS[verb](model, tmp_path)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", VERBS)
def test_quantised_weights(verb: str, tmp_path: Path) -> None:
    model, _ = build("bert")
    layer = model.encoder.layer[0].attention.self.query
    layer.weight = nn.Parameter(torch.zeros(32, 32, dtype=torch.int8), requires_grad=False)
    with pytest.raises(fl.BadInput, match="quantised or packed"):
        VERBS[verb](model, tmp_path)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_dynamically_quantised_modules(tmp_path: Path) -> None:
    model, _ = build("bert")
    model.pooler.dense = torch.ao.nn.quantized.dynamic.Linear(32, 32)
    with pytest.raises(fl.BadInput, match=r"pooler\.dense is quantised"):
        fl.freeze(model, "query")
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("verb", VERBS)
def test_wrapped_models(verb: str, tmp_path: Path) -> None:
    model, _ = build("bert")
    for wrapped in (nn.DataParallel(model), torch.compile(model)):
        with pytest.raises(fl.BadInput, match=f"call {verb} before wrapping it"):
            VERBS[verb](wrapped, tmp_path)
    model.encoder.layer[1].compile()
    with pytest.raises(
        fl.BadInput, match=r"the model's `encoder\.layer\.1` is already.*torch\.compile"
    ):
        VERBS[verb](model, tmp_path)
    with pytest.raises(fl.BadInput, match="is not a model"):
        VERBS[verb]("bert", tmp_path)


def test_a_fused_module_with_a_forward_of_its_own_is_split_and_keeps_it() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model, inputs = build("gpt_neox")
    fused = model.layers[1].attention.query_key_value = Scaled(32, 96)
    before = model(**inputs).last_hidden_state
    assert fl.freeze(model, "query").count("frozen") == 2 * 33 * 32
    assert isinstance(fused, Scaled)
    assert torch.equal(model(**inputs).last_hidden_state, before)
    fl.thaw(model)
    assert type(fused) is Scaled


def test_an_unknown_role_leaves_the_model_as_it_was() -> None:
    model, _ = build("gpt2")
    before = {n: id(p) for n, p in model.named_parameters()}
    for bad in ("qeury", "layers[9]", "gate"):
        with pytest.raises(fl.BadInput):
            fl.freeze(model, "query", bad)
    with pytest.raises(fl.BadInput, match="no selection given"):
        fl.freeze(model)
    assert before == {n: id(p) for n, p in model.named_parameters()}
    assert all(p.requires_grad for p in model.parameters())

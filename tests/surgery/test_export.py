"""export writes what from_pretrained loads without frostlab."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, GPT2LMHeadModel

import frostlab as fl
from zoo import CASES, build, outputs, slow_unless_layout, text


@pytest.mark.parametrize("name", slow_unless_layout(CASES))
def test_exported_models_load_with_equal_outputs(name: str, tmp_path: Path) -> None:
    model, inputs = build(name)
    fl.orthogonalize(model, "query", "key")
    fl.freeze(model, "query", "key")
    with torch.no_grad():
        expected = outputs(model, inputs)
    fl.export(model, tmp_path / "plain")
    plain = AutoModel.from_pretrained(tmp_path / "plain", attn_implementation="eager").eval()
    assert type(plain) is type(model)
    with torch.no_grad():
        for a, b in zip(expected, outputs(plain, inputs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for key, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    assert fl.anatomy(plain).count("frozen") == 0


def test_a_tied_language_model_stays_tied(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(CASES["gpt2"].make_config()).eval()
    fl.freeze(model, "query", "key")
    fl.export(model, tmp_path / "a")
    (tmp_path / "a" / "tokenizer.json").write_text("mine")
    (tmp_path / "a" / "model-00001-of-00002.safetensors").write_text("an older shard")
    fl.export(model, tmp_path / "a")  # again, over an older checkpoint
    assert (tmp_path / "a" / "tokenizer.json").read_text() == "mine"
    assert [p.name for p in (tmp_path / "a").glob("*.safetensors")] == ["model.safetensors"]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "a").eval()
    assert plain.lm_head.weight is plain.transformer.wte.weight
    inputs = text()
    torch.testing.assert_close(model(**inputs).logits, plain(**inputs).logits)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_bad_targets_are_refused(tmp_path: Path) -> None:
    model, _ = build("bert")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(fl.BadInput, match="holds something else"):
        fl.export(model, tmp_path)
    with pytest.raises(fl.BadInput, match="is a file"):
        fl.export(model, tmp_path / "notes.txt")
    with pytest.raises(fl.BadInput, match="is not a Hugging Face model"):
        fl.export(nn.TransformerEncoderLayer(32, 4), tmp_path / "x")
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]

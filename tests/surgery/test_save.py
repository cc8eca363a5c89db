"""Saved deltas restore the model or are refused; exports load without frostlab."""

import json
import re
import signal
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    GPT2LMHeadModel,
)

import frostlab as fl
from forked import killed_save
from frostlab.storage import file_digest
from zoo import CASES, build, loss_of, outputs, slow_unless_layout, text


def trained(name: str, treat: object = None) -> tuple[torch.nn.Module, dict]:
    model, inputs = build(name)
    if treat is not None:
        treat(model)  # type: ignore[operator]
    fl.freeze(model, "query", "key")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model.train()
    for _ in range(3):
        loss_of(model, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), inputs


TREATMENTS = {
    "kept": None,
    "orthogonal": lambda m: fl.orthogonalize(m, "query", "key"),
    "gaussian": lambda m: fl.orthogonalize(m, "query", "key", source="gaussian", seed=7),
    "random": lambda m: fl.randomize(m, "query", "key", seed=7),
    "matched": lambda m: fl.randomize(m, "query", "key", seed=7, std="match"),
    "orthonormal norm": lambda m: fl.randomize(m, "query", "key", seed=7, std="orthonormal"),
}


@pytest.mark.parametrize("name", slow_unless_layout())
def test_a_delta_restores_the_model_on_its_base(name: str, tmp_path: Path) -> None:
    model, inputs = trained(name, TREATMENTS["gaussian"])
    fl.save_trainable(model, tmp_path / "delta")
    fresh, _ = build(name)
    fl.load_trainable(fresh, tmp_path / "delta")
    for key, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[key], value), key
    for a, b in zip(outputs(model, inputs), outputs(fresh, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("frozen", ["rebuild", "store"])
@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize("name", ["bert", "gpt_neox"])
def test_every_treatment_is_made_again_or_stored(
    name: str, treatment: str, frozen: str, tmp_path: Path
) -> None:
    model, _ = trained(name, TREATMENTS[treatment])
    folder = fl.save_trainable(model, tmp_path / "delta", frozen=frozen)
    assert folder == tmp_path / "delta"
    fresh, _ = build(name)
    fl.freeze(fresh, "query", "key")
    fl.load_trainable(fresh, folder)
    for key, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[key], value), key
    stored = load_file(next(folder.glob("*.safetensors")))
    kept = {p.key for p in fl.anatomy(model).parts if p.state == "frozen"}
    assert bool(kept & stored.keys()) == (frozen == "store")


def test_another_base_is_refused_unless_everything_was_stored(tmp_path: Path) -> None:
    model, _ = trained("bert", TREATMENTS["orthogonal"])
    fl.save_trainable(model, tmp_path / "small")
    fl.save_trainable(model, tmp_path / "whole", frozen="store")
    other, _ = build("bert")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.01).add_(0.01)
    before = {k: v.clone() for k, v in other.state_dict().items()}
    with pytest.raises(fl.BadInput, match="load the same base"):
        fl.load_trainable(other, tmp_path / "small")
    assert all(torch.equal(before[k], v) for k, v in other.state_dict().items())
    fl.load_trainable(other, tmp_path / "whole")
    for key, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[key], value)


def test_weights_that_learned_after_surgery_are_not_mistaken_for_their_seed(tmp_path: Path) -> None:
    """Orthogonal, trained, then frozen: the seed no longer makes them."""
    model, inputs = build("bert")
    fl.orthogonalize(model, "query", "key", source="gaussian", seed=7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, inputs).backward()
    optimizer.step()
    fl.freeze(model, "query", "key")
    fl.save_trainable(model, tmp_path / "delta")
    manifest = json.loads((tmp_path / "delta" / "delta.json").read_text())
    assert {r["origin"] is None for k, r in manifest["frozen"].items() if "weight" in k} == {True}
    with pytest.raises(fl.BadInput, match="was frozen and not stored"):
        fl.load_trainable(build("bert")[0], tmp_path / "delta")


@pytest.mark.slow
def test_size_of_bert_base(tmp_path: Path) -> None:
    model = BertForSequenceClassification(BertConfig(num_labels=3))
    fl.orthogonalize(model, "query", "key", source="gaussian")
    fl.freeze(model, "query", "key")
    fl.save_trainable(model, tmp_path / "delta")
    fl.export(model, tmp_path / "full")
    small = sum(f.stat().st_size for f in (tmp_path / "delta").iterdir())
    full = (tmp_path / "full" / "model.safetensors").stat().st_size
    assert 1 - small / full == pytest.approx(0.129, abs=0.001)


def test_a_trainable_batch_norm_keeps_its_statistics(tmp_path: Path) -> None:
    model, _ = trained("wav2vec2-conformer")
    fl.save_trainable(model, tmp_path / "delta")
    fresh, _ = build("wav2vec2-conformer")
    fl.load_trainable(fresh, tmp_path / "delta")
    mean = fresh.encoder.layers[0].conv_module.batch_norm.running_mean
    assert torch.equal(mean, model.encoder.layers[0].conv_module.batch_norm.running_mean)
    assert mean.any()


def test_saving_again_replaces_and_leaves_one_file(tmp_path: Path) -> None:
    model, _ = trained("gpt2")
    fl.save_trainable(model, tmp_path)
    with torch.no_grad():
        model.wte.weight.add_(1.0)
    fl.save_trainable(model, tmp_path)
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".safetensors"]
    fresh, _ = build("gpt2")
    fl.load_trainable(fresh, tmp_path)
    assert torch.equal(fresh.wte.weight, model.wte.weight)


def test_a_failed_save_keeps_the_old_delta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = trained("gpt2")
    fl.save_trainable(model, tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with torch.no_grad():
        model.wte.weight.add_(1.0)

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("frostlab.surgery.save.os.replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        fl.save_trainable(model, tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_files_of_a_killed_save_do_not_stop_the_next(tmp_path: Path) -> None:
    model, _ = trained("gpt2")
    for name in (".trainable-0.safetensors.1.tmp", ".delta.json.1.tmp", "trainable-0.safetensors"):
        (tmp_path / name).write_text("half")
    fl.save_trainable(model, tmp_path)
    fl.load_trainable(build("gpt2")[0], tmp_path)


def test_two_saves_at_once_leave_a_whole_delta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another save begins between our tensors and our manifest: it waits until we are done."""
    from frostlab.surgery import save as folder

    ours, _ = trained("gpt2")
    theirs, _ = trained("gpt2")
    with torch.no_grad():
        theirs.wte.weight.add_(1.0)
    replace = folder.os.replace
    other = threading.Thread(target=fl.save_trainable, args=(theirs, tmp_path))

    def other_comes_between(source: Path, target: Path) -> None:
        replace(source, target)
        if other.ident is None:
            other.start()
            other.join(0.2)

    monkeypatch.setattr(folder.os, "replace", other_comes_between)
    fl.save_trainable(ours, tmp_path)
    other.join(60)
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".safetensors"]
    fresh, _ = build("gpt2")
    fl.load_trainable(fresh, tmp_path)
    assert torch.equal(fresh.wte.weight, theirs.wte.weight)


def corrupt_manifest(folder: Path, change: object) -> None:
    path = folder / "delta.json"
    manifest = json.loads(path.read_text())
    change(manifest)  # type: ignore[operator]
    path.write_text(json.dumps(manifest))


DAMAGE = {
    "not a delta folder": lambda d: (d / "delta.json").unlink(),
    "delta.json is not valid JSON": lambda d: (d / "delta.json").write_text("{"),
    "delta.json is not a JSON object": lambda d: (d / "delta.json").write_text("[]"),
    "delta.json: frozen is missing": lambda d: corrupt_manifest(d, lambda m: m.pop("frozen")),
    "has schema 9, and": lambda d: corrupt_manifest(d, lambda m: m.update(schema=9)),
    "is missing": lambda d: next(d.glob("*.safetensors")).unlink(),
    "truncated or changed": lambda d: _truncate(next(d.glob("*.safetensors"))),
    "the regenerated values of h.0": lambda d: corrupt_manifest(d, _other_seed),
    "has a value for h.9.extra, which is not in the model": lambda d: _add_tensor(d),
    "has no value for": lambda d: corrupt_manifest(d, lambda m: m["frozen"].popitem()),
    "saved from another": lambda d: corrupt_manifest(
        d, lambda m: m["architecture"].update({"h.0.ln_1.weight": [[64], []]})
    ),
    "architecture should be an object": lambda d: corrupt_manifest(
        d, lambda m: m.update(architecture=None)
    ),
    "frozen should be an object": lambda d: corrupt_manifest(d, lambda m: m.update(frozen=[])),
    ".fingerprint is missing": lambda d: corrupt_manifest(
        d, lambda m: m["frozen"].update({next(iter(m["frozen"])): {}})
    ),
    "origin.spell is not a key": lambda d: corrupt_manifest(
        d, lambda m: next(iter(m["frozen"].values())).update(origin={"spell": 1})
    ),
    "tensors.file should be": lambda d: corrupt_manifest(
        d, lambda m: m["tensors"].update(file="delta.json")
    ),
    "has a wrong length": lambda d: corrupt_manifest(
        d, lambda m: next(iter(m["frozen"].values())).update(fingerprint=[1.0])
    ),
    "should be a finite number": lambda d: corrupt_manifest(
        d, lambda m: next(iter(m["frozen"].values())).update(fingerprint=[float("nan")] * 5)
    ),
    "is not one that frostlab makes": lambda d: corrupt_manifest(
        d, lambda m: next(iter(m["frozen"].values())).update(origin={"method": "randomize"})
    ),
    "the buffer nope": lambda d: corrupt_manifest(d, lambda m: m.update(buffers=["nope"])),
}


def _add_tensor(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    save_file(load_file(path) | {"h.9.extra": torch.zeros(1)}, path)
    corrupt_manifest(folder, lambda m: m["tensors"].update(sha256=file_digest(path)))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _other_seed(manifest: dict) -> None:
    for record in manifest["frozen"].values():
        if record["origin"]:
            record["origin"]["seed"] += 1


@pytest.mark.parametrize("message", DAMAGE)
def test_damaged_and_foreign_folders_are_refused(message: str, tmp_path: Path) -> None:
    model, _ = trained("gpt2", TREATMENTS["gaussian"])
    fl.save_trainable(model, tmp_path)
    DAMAGE[message](tmp_path)
    fresh, _ = build("gpt2")
    before = {k: v.clone() for k, v in fresh.state_dict().items()}
    with pytest.raises(fl.BadInput) as error:
        fl.load_trainable(fresh, tmp_path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert all(torch.equal(before[k], v) for k, v in fresh.state_dict().items())


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    model, _ = trained("llama")
    fl.save_trainable(model, tmp_path)
    with pytest.raises(fl.BadInput, match="was saved from another LlamaModel"):
        fl.load_trainable(build("qwen2")[0], tmp_path)


def test_the_same_shapes_in_another_architecture_are_refused(tmp_path: Path) -> None:
    model, _ = trained("llama")
    fl.save_trainable(model, tmp_path / "llama")
    with pytest.raises(fl.BadInput, match="from a LlamaModel, but this is a MistralModel"):
        fl.load_trainable(build("mistral")[0], tmp_path / "llama")
    model, _ = trained("bert")
    fl.save_trainable(model, tmp_path / "bert")
    with pytest.raises(fl.BadInput, match="was saved from another BertModel"):
        fl.load_trainable(build("bert-two-heads")[0], tmp_path / "bert")


def test_frozen_statistics_are_checked_or_stored(tmp_path: Path) -> None:
    model, inputs = build("wav2vec2-conformer")
    model.train()
    outputs(model, inputs)
    model.eval()
    fl.freeze(model, "norm")
    fl.save_trainable(model, tmp_path / "small")
    fl.save_trainable(model, tmp_path / "whole", frozen="store")
    fresh, _ = build("wav2vec2-conformer")
    before = {k: v.clone() for k, v in fresh.state_dict().items()}
    with pytest.raises(fl.BadInput, match="frozen statistics"):
        fl.load_trainable(fresh, tmp_path / "small")
    assert all(torch.equal(before[k], v) for k, v in fresh.state_dict().items())
    fl.load_trainable(fresh, tmp_path / "whole")
    for a, b in zip(outputs(model, inputs), outputs(fresh, inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_foreign_targets_are_not_overwritten(tmp_path: Path) -> None:
    model, _ = trained("gpt2")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(fl.BadInput, match="holds other files"):
        fl.save_trainable(model, tmp_path)
    with pytest.raises(fl.BadInput, match="is a file"):
        fl.save_trainable(model, tmp_path / "notes.txt")
    with pytest.raises(fl.BadInput, match='not "rebuild" or "store"'):
        fl.save_trainable(model, tmp_path / "x", frozen="keep")  # type: ignore[arg-type]
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


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


def test_bad_targets_of_an_export_are_refused(tmp_path: Path) -> None:
    model, _ = build("bert")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(fl.BadInput, match="holds other files"):
        fl.export(model, tmp_path)
    with pytest.raises(fl.BadInput, match="is a file"):
        fl.export(model, tmp_path / "notes.txt")
    with pytest.raises(fl.BadInput, match="is not a Hugging Face model"):
        fl.export(nn.TransformerEncoderLayer(32, 4), tmp_path / "x")
    with pytest.raises(fl.BadInput, match="tokenizer 'a-folder' is not a Hugging Face tokenizer"):
        fl.export(model, tmp_path / "x", tokenizer="a-folder")
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("change", ["shape", "dtype"])
@pytest.mark.parametrize("name", ["gpt2", "wav2vec2-conformer"])
def test_a_tensor_that_does_not_fit_changes_nothing(name: str, change: str, tmp_path: Path) -> None:
    model, _ = trained(name)
    fl.save_trainable(model, tmp_path)
    path = next(tmp_path.glob("*.safetensors"))
    tensors = load_file(path)
    for key in (list(tensors)[-1], next(iter(tensors))):
        other = torch.zeros(3, 5) if change == "shape" else tensors[key].to(torch.float16)
        save_file(tensors | {key: other}, path)
        corrupt_manifest(tmp_path, lambda m: m["tensors"].update(sha256=file_digest(path)))
        fresh, _ = build(name)
        before = {k: v.clone() for k, v in fresh.state_dict().items()}
        with pytest.raises(fl.BadInput, match=f"{re.escape(key)} of .* in this model"):
            fl.load_trainable(fresh, tmp_path)
        assert all(torch.equal(before[k], v) for k, v in fresh.state_dict().items())


def test_a_manifest_that_names_other_files_deletes_none(tmp_path: Path) -> None:
    model, _ = trained("gpt2")
    fl.save_trainable(model, tmp_path / "delta")
    (tmp_path / "mine.safetensors").write_text("mine")
    for file in ("delta.json", "../mine.safetensors", "..", "trainable-x/../../mine.safetensors"):
        corrupt_manifest(tmp_path / "delta", lambda m, f=file: m["tensors"].update(file=f))
        with pytest.raises(fl.BadInput, match="tensors.file should be"):
            fl.load_trainable(build("gpt2")[0], tmp_path / "delta")
        fl.save_trainable(model, tmp_path / "delta")
        fl.load_trainable(build("gpt2")[0], tmp_path / "delta")
    assert (tmp_path / "mine.safetensors").read_text() == "mine"


@pytest.mark.parametrize(
    "moment",
    ["inside safetensors", "before the first rename", "between tensors and manifest",
     "before the clean-up"],
)  # fmt: skip
def test_the_next_save_cleans_up_after_a_kill(moment: str, tmp_path: Path) -> None:
    model, _ = trained("gpt2")
    fl.save_trainable(model, tmp_path)
    assert killed_save(moment, tmp_path) == -signal.SIGKILL
    fl.load_trainable(build("gpt2")[0], tmp_path)  # the old delta, or the whole new one
    if moment != "before the clean-up":
        assert len(list(tmp_path.iterdir())) > 2, "something was left"
    fl.save_trainable(model, tmp_path)
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".safetensors"]
    fl.load_trainable(build("gpt2")[0], tmp_path)

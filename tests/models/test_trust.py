"""Model folders of other people: their code does not run, and pickles are not opened."""

import contextlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import frostlab as fl
from bad_configs import BAD
from frostlab.models.build import blueprint, build_model
from frostlab.models.convert import convert
from frostlab.models.named import find_config
from frostlab.models.trust import TRUST, check_weights
from frostlab.recipe.load import recipe_from
from tiny import tiny

CODE = """
from pathlib import Path
from transformers import BertConfig, BertForMaskedLM

Path({marker!r}).touch()

class MyConfig(BertConfig):
    model_type = "mine"

class MyModel(BertForMaskedLM):
    config_class = MyConfig
"""
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 32, "vocab_size": 64, "max_position_embeddings": 32}  # fmt: skip


class Bomb:
    """An object whose pickle writes a file when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


@pytest.fixture
def with_code(tmp_path: Path, marker: Path) -> Path:
    """A model folder whose config names classes of its own Python file."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "modeling_mine.py").write_text(CODE.format(marker=str(marker)))
    names = {"AutoConfig": "modeling_mine.MyConfig", "AutoModel": "modeling_mine.MyModel"}
    config = {"model_type": "mine", "auto_map": names, "architectures": ["MyModel"], **SMALL}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A folder with a small BERT, saved by transformers."""
    folder = tmp_path / "bert"
    transformers.BertForSequenceClassification(
        transformers.BertConfig(**SMALL, num_labels=4)
    ).save_pretrained(folder)
    return folder


def config_with(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def loaded(folder: Path) -> torch.nn.Module:
    """The recipe's model, with the weights of a folder."""
    model = {"kind": "pretrained", "name": str(folder)}
    recipe = recipe_from(tiny(model={**model, "weights": False}))
    settings = recipe.model.model_copy(update={"weights": True})
    return build_model(recipe.model_copy(update={"model": settings}), 5, 4, 0)


def command(*words: str, answer: str = "y\n", **variables: str) -> Any:
    """Run frostlab with an answer on stdin."""
    return subprocess.run(
        [sys.executable, "-m", "frostlab", *words],
        input=answer * 9, capture_output=True, text=True, check=False,
        env=os.environ | variables,
    )  # fmt: skip


@pytest.mark.slow
def test_inspect_neither_asks_nor_runs_code(with_code: Path, marker: Path, tmp_path: Path) -> None:
    done = command("inspect", str(with_code), HF_HOME=str(tmp_path / "home"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"frostlab: {with_code}/config.json wants to run MyConfig of modeling_mine.py, MyModel of "
        f"modeling_mine.py; if you trust it, allow it with --trust-remote-code or {TRUST}=1\n"
    )
    assert not marker.exists()


@pytest.mark.slow
def test_inspect_runs_the_code_of_a_model_that_the_user_trusts(
    with_code: Path, marker: Path, tmp_path: Path
) -> None:
    words = ("inspect", str(with_code), "--trust-remote-code", "--json")
    done = command(*words, HF_HOME=str(tmp_path / "home"))
    assert (done.returncode, done.stderr, marker.exists()) == (0, "", True)
    shown = json.loads(done.stdout)
    queries = [part for part in shown["parts"] if part["role"] == "query"]
    assert (shown["model"], shown["evidence"]["method"]) == ("MyModel", "probe")
    assert sum(part["parameters"] for part in queries) == 2 * (16 * 16 + 16)


@pytest.mark.slow
def test_run_needs_the_permission_too(with_code: Path, marker: Path, tmp_path: Path) -> None:
    model = f"model={{kind: pretrained, weights: false, name: {with_code}}}"
    words = ("run", "majority-gpt", "--set", model, "--runs", str(tmp_path / "runs"))
    home = {"HF_HOME": str(tmp_path / "home")}
    done = command(*words, **home)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--trust-remote-code" in done.stderr
    assert not marker.exists()
    assert not (tmp_path / "runs").exists()
    command(*words, "--trust-remote-code", **home)
    assert marker.exists()


def test_a_recipe_cannot_give_the_permission(with_code: Path) -> None:
    model = {"kind": "pretrained", "name": str(with_code), "trust_remote_code": True}
    with pytest.raises(fl.BadInput, match="trust_remote_code"):
        recipe_from(tiny(model=model))


def test_a_known_architecture_is_built_without_the_folders_code(bert: Path, marker: Path) -> None:
    (bert / "modeling_mine.py").write_text(CODE.format(marker=str(marker)))
    names = dict.fromkeys(("AutoModel", "AutoModelForMaskedLM"), "modeling_mine.MyModel")
    model, _ = blueprint(str(config_with(bert, auto_map=names)))
    assert type(model) is transformers.BertForSequenceClassification
    assert not marker.exists()


def test_no_question_for_a_part_that_has_code(
    tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks about the code of a part, for which nobody passes a permission."""
    monkeypatch.setattr("builtins.input", lambda _: marker.touch() or "y")
    text = {"model_type": "clip_text_model", "auto_map": {"AutoModel": "modeling_mine.MyModel"}}
    values = {"model_type": "llava", "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "modeling_mine.py").write_text(CODE.format(marker=str(marker)))
    with contextlib.suppress(fl.BadInput):
        blueprint(str(tmp_path))
    assert not marker.exists()


@pytest.mark.parametrize(
    "values",
    [
        {"attn_implementation": "somebody/kernel"},
        {"_attn_implementation": "somebody/kernel@main:run"},
        {"attn_implementation": {"": "somebody/kernel"}},
        {"experts_implementation": "somebody/kernel"},
        {"backbone_config": {"use_pretrained_backbone": True}},
    ],
)
def test_code_and_weights_from_elsewhere_are_refused(bert: Path, values: dict[str, Any]) -> None:
    with pytest.raises(fl.BadInput, match="--trust-remote-code"):
        blueprint(str(config_with(bert, **values)))


def test_an_architecture_is_a_model_of_transformers(bert: Path) -> None:
    model, _ = blueprint(str(config_with(bert, architectures=["pipeline", "AutoModel"])))
    assert type(model) is transformers.BertForPreTraining


def test_weights_of_a_folder(bert: Path) -> None:
    assert isinstance(loaded(bert), transformers.BertForSequenceClassification)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "model.ckpt"]
)
def test_pickled_weights_are_never_opened(bert: Path, marker: Path, name: str) -> None:
    (bert / "model.safetensors").unlink()
    with (bert / name).open("wb") as file:
        pickle.dump({"x": Bomb(marker)}, file)
    if "-of-" in name:
        index = {"metadata": {}, "weight_map": {"x": name}}
        (bert / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    line = f"has no model.safetensors, only {name}; convert the weights without running their code"
    with pytest.raises(fl.BadInput, match=line):
        loaded(bert)
    with pytest.raises(
        fl.BadInput, match="is damaged, or holds more than tensors and plain values"
    ):
        convert(bert)
    assert not marker.exists()
    assert not (bert / "model.safetensors").exists()


def test_pickled_adapters_are_never_opened(bert: Path, marker: Path) -> None:
    (bert / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    with (bert / "adapter_model.bin").open("wb") as file:
        pickle.dump({"x": Bomb(marker)}, file)
    with pytest.raises(fl.BadInput, match="adapter_model.safetensors does not exist"):
        loaded(bert)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["tf_model.h5", "flax_model.msgpack"])
def test_weights_of_other_libraries_are_refused(bert: Path, name: str) -> None:
    (bert / "model.safetensors").rename(bert / name)
    with pytest.raises(fl.BadInput, match=f"only {name}, which frostlab does not read"):
        loaded(bert)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_the_command_in_the_line_converts_the_weights(bert: Path, sharded: bool) -> None:
    before = loaded(bert).state_dict()
    (bert / "model.safetensors").unlink()
    names = list(before)
    if sharded:
        files = {"a.bin": names[:5], "b.bin": names[5:]}
        for file, some in files.items():
            torch.save({name: before[name] for name in some}, bert / file)
        places = {name: file for file, some in files.items() for name in some}
        index = json.dumps({"metadata": {}, "weight_map": places})
        (bert / "pytorch_model.bin.index.json").write_text(index)
    else:
        torch.save(before, bert / "pytorch_model.bin")
    with pytest.raises(fl.BadInput) as error:
        loaded(bert)
    line = str(error.value).rpartition("code: ")[2]
    assert line.startswith("python -P -m frostlab.models.convert ")
    line = line.replace("python", sys.executable, 1)
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == (f"wrote {bert}/model.safetensors\n", 0), done.stderr
    after = loaded(bert).state_dict()
    assert all(torch.equal(after[name], before[name]) for name in names)
    again = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)


def index_of(folder: Path, name: object) -> None:
    """Replace a folder's weights by an index that names one file."""
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": {"x": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "../../x", "/outside.safetensors", "..", "", 3, None, "a\0b",
     "a/b.safetensors", "pytorch_model.bin", "x" * 300, "gone.safetensors"],
)  # fmt: skip
def test_an_index_names_safetensors_inside_its_folder(bert: Path, name: object) -> None:
    index_of(bert, name)
    (bert / "pytorch_model.bin").touch()
    with pytest.raises(fl.BadInput) as error:
        loaded(bert)
    assert "\n" not in str(error.value)
    assert str(bert) in str(error.value)


def test_links_out_of_the_folder_are_refused(bert: Path) -> None:
    index_of(bert, "shard.safetensors")
    (bert / "shard.safetensors").symlink_to(bert.parent / "outside.safetensors")
    with pytest.raises(fl.BadInput, match="is a link to .*, outside the model folder"):
        loaded(bert)
    (bert / "model.safetensors").symlink_to("../outside.safetensors")
    with pytest.raises(fl.BadInput, match="is a link to .*, outside the model folder"):
        loaded(bert)


def test_the_hubs_cache_keeps_files_behind_links(bert: Path) -> None:
    snapshot = bert.parent / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (bert.parent / "blobs").mkdir()
    for path in list(bert.iterdir()):
        path.rename(bert.parent / "blobs" / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert isinstance(loaded(snapshot), transformers.BertForSequenceClassification)


@pytest.mark.parametrize("name", ["generation_config.json", "model.safetensors", "config.json"])
def test_pipes_do_not_block(bert: Path, name: str) -> None:
    (bert / name).unlink(missing_ok=True)
    os.mkfifo(bert / name)
    with pytest.raises(fl.BadInput, match="is not a regular file"):
        loaded(bert)


def test_a_config_can_name_its_weights(bert: Path) -> None:
    (bert / "model.safetensors").rename(bert / "other.safetensors")
    check_weights(bert, {"transformers_weights": "other.safetensors"})
    for name in ("../other.safetensors", "adapter_model.bin", 3, ["x"]):
        with pytest.raises(fl.BadInput):
            check_weights(bert, {"transformers_weights": name})


def test_other_bytes_as_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"model_type": "b\xffrt"}')
    with pytest.raises(fl.BadInput, match="config.json is not"):
        find_config(str(tmp_path))
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 30)  # sparse
    with pytest.raises(fl.BadInput, match="config.json is larger than 16 MiB"):
        find_config(str(tmp_path))


@pytest.mark.slow
def test_absurd_sizes_need_little_time_and_memory(tmp_path: Path) -> None:
    code = """
import resource, sys, time
from frostlab.models.build import blueprint
from frostlab.errors import BadInput
blueprint("bert"), blueprint("llama"), blueprint("gpt2")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for folder in sys.argv[1:]:
    began = time.process_time()
    try:
        blueprint(folder)
    except BadInput as error:
        print(error)
    assert time.process_time() - began < 6, (folder, time.process_time() - began)
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert used < 1 << 20, used
"""
    folders = [tmp_path / name for name in ("wide", "1e5 layers", "vocabulary", "labels")]
    for folder in folders:
        folder.mkdir()
        (folder / "config.json").write_text(BAD[folder.name])
    words = [sys.executable, "-c", code, *map(str, folders)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.startswith(str(f)) for line, f in zip(lines, folders, strict=True)] == [True] * 4

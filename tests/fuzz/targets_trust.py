"""Fuzz targets: files of model folders, and of the repository that frostlab's code is in."""

import functools
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import BertForMaskedLM, GPT2LMHeadModel, LlamaForCausalLM

from frostlab.models.build import blueprint
from frostlab.models.convert import convert
from frostlab.models.trust import check_weights
from frostlab.records.environment import code_state
from frostlab.roles.read import anatomy
from fuzz.mutate import Target

os.environ.setdefault("HF_HUB_OFFLINE", "1")
_COMMIT = "0123456789abcdef0123456789abcdef01234567"


@functools.cache
def _configs() -> list[bytes]:
    """Configs of models with one small layer, as transformers writes them."""
    size = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 16}
    more = {"intermediate_size": 8, "max_position_embeddings": 8}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    configs: list[Any] = [
        BertForMaskedLM.config_class(**size, **more, architectures=["BertForMaskedLM"]),
        GPT2LMHeadModel.config_class(
            n_embd=8, n_head=2, n_layer=1, vocab_size=16, n_positions=8, **tokens
        ),
        LlamaForCausalLM.config_class(**size, **more, num_key_value_heads=2),
    ]
    texts = [json.dumps(config.to_dict()) for config in configs]
    texts.append('{"model_type": "mine", "auto_map": {"AutoConfig": "modeling.Config"}}')
    return [text.encode() for text in texts]


def _config(data: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(data)
    model, _ = blueprint(str(folder))
    anatomy(model).table()


def _index_seeds() -> list[bytes]:
    places = {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"}
    index = {"metadata": {"total_size": 8}, "weight_map": places}
    return [json.dumps(index).encode()]


def _index(data: bytes, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_bytes(data)
    for number in (1, 2):
        (folder / f"model-{number}.safetensors").touch()
    check_weights(folder, {})


def _pickle_seeds() -> list[bytes]:
    seeds = []
    for zipped in (True, False):
        file = io.BytesIO()
        tensors = {"a": torch.ones(2, 3), "b": torch.zeros(1, dtype=torch.int64)}
        torch.save(tensors, file, _use_new_zipfile_serialization=zipped)
        seeds.append(file.getvalue())
    return seeds


def _pickle(data: bytes, folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(data)
    convert(folder)


def _repository(name: str) -> Callable[[bytes, Path], None]:
    """Return a check that writes one file of a repository and reads the commit."""

    def check(data: bytes, folder: Path) -> None:
        package, git = folder / "src" / "frostlab", folder / ".git"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        if name == ".git":
            git.write_bytes(data)
        else:
            git.mkdir()
            (git / "HEAD").write_text("ref: refs/heads/main\n")
            (git / name).parent.mkdir(parents=True, exist_ok=True)
            (git / name).write_bytes(data)
        commit = code_state(package)["commit"]
        assert commit is None or len(commit) in (40, 64)

    return check


def _lines(*texts: str) -> Callable[[], list[bytes]]:
    return lambda: [f"{text}\n".encode() for text in texts]


TARGETS: dict[str, Target] = {
    "model-config": Target(_configs, _config, "json"),
    "safetensors-index": Target(_index_seeds, _index, "json"),
    "pickled-weights": Target(_pickle_seeds, _pickle, "bytes"),
    "git-file": Target(_lines("gitdir: ../main/.git/worktrees/x"), _repository(".git"), "bytes"),
    "git-head": Target(_lines("ref: refs/heads/main", _COMMIT), _repository("HEAD"), "bytes"),
    "git-branch": Target(_lines(_COMMIT), _repository("refs/heads/main"), "bytes"),
    "git-packed-refs": Target(
        _lines(f"# pack-refs with: peeled\n{_COMMIT} refs/heads/main\n^{_COMMIT}"),
        _repository("packed-refs"),
        "bytes",
    ),
}

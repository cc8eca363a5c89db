"""`frostlab inspect`: models by name, folder and recipe, and bad input."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bad_configs import BAD
from cases import TYPICAL, slow_unless
from forked import Command, frostlab_command
from frostlab.recipe.load import load_recipe, shipped_recipes
from zoo import build


def test_inspect_an_architecture_offline() -> None:
    result = frostlab_command("inspect", "gpt2", "--freeze", "query,key", "--length", "1024")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    for text in (
        "the architecture's default config",
        "layers[0:12]  12 alike",
        "14,174,208  11.4%",
        "−3.31% at length 1024",
        "1.034×",
    ):
        assert text in result.stdout


def test_inspect_a_folder_as_json(tmp_path: Path) -> None:
    model, _ = build("falcon")
    model.save_pretrained(tmp_path)
    result = frostlab_command("inspect", str(tmp_path), "--freeze", "key", "--json")
    assert result.returncode == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["parameters"] == sum(p.numel() for p in model.parameters())
    frozen = {p["role"] for p in data["parts"] if p["state"] == "frozen"}
    assert frozen == {"key"}
    assert data["savings"]["matmul_flop_share"] > 0


@pytest.mark.parametrize("recipe", slow_unless(TYPICAL, shipped_recipes()))
def test_every_shipped_recipe_can_be_inspected(recipe: str, in_this_process: Command) -> None:
    result = in_this_process("inspect", recipe)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"{recipe}: the recipe's model; ")
    assert ("frozen" in result.stdout) == bool(load_recipe(recipe).surgery.frozen)


def test_inspect_a_recipe_as_its_treatment_leaves_it(in_this_process: Command) -> None:
    freezing = ("inspect", "imdb-gpt", "--set", "treatment=oelm")
    result = in_this_process(*freezing, "--wide")
    assert result.returncode == 0, result.stderr
    first = "imdb-gpt: the recipe's model; vocabulary 16,000 at most, 2 classes; treatment oelm"
    assert result.stdout.splitlines()[0] == first
    assert "at length 512" in result.stdout, "the length of the recipe's examples"
    data = json.loads(in_this_process(*freezing, "--json").stdout)
    assert {p["role"] for p in data["parts"] if p["state"] == "frozen"} == {"query", "key"}
    data = json.loads(in_this_process(*freezing, "--freeze", "value", "--json").stdout)
    assert {p["role"] for p in data["parts"] if p["state"] == "frozen"} == {"value"}


def test_inspect_a_recipe_with_adapters(in_this_process: Command) -> None:
    lora = "treatment={peft: {method: lora, select: [query, key, value]}}"
    result = in_this_process("inspect", "docstrings-gpt", "--set", lora, "--json")
    assert result.returncode == 0, result.stderr
    parts = json.loads(result.stdout)["parts"]
    assert {p["role"] for p in parts if p["state"] == "trainable"} == {"adapter", "head"}


@pytest.mark.parametrize(
    ("recipe", "sizes"),
    [
        ("majority-gpt", "vocabulary 17, 16 classes"),
        ("docstrings-lm", "vocabulary 4,000 at most"),
        ("wikitext2-decoder", "vocabulary 69,830 (assumed)"),
        ("tinystories-gpt", "vocabulary 50,257"),
        ("eeg-conformer-v2", "64 channels and 8 subjects"),
        ("eeg-cocktail", "64 channels and 71 subjects (assumed)"),
        (
            "sst2-bert",
            "bert-base-uncased (not available; bert's default config is assumed), 2 classes",
        ),
    ],
)
def test_sizes_that_only_the_data_know_are_named(
    recipe: str, sizes: str, in_this_process: Command
) -> None:
    first = in_this_process("inspect", recipe, "--wide").stdout.splitlines()[0]
    assert first == f"{recipe}: the recipe's model; {sizes}"


def test_a_recipe_of_known_data_is_inspected_at_its_true_size(in_this_process: Command) -> None:
    import frostlab as fl
    from frostlab.data.prepare import prepare
    from frostlab.models.build import build_for

    recipe = fl.load_recipe("majority-gpt")
    built = build_for(recipe, prepare(recipe))
    data = json.loads(in_this_process("inspect", "majority-gpt", "--json").stdout)
    assert data["parameters"] == sum(p.numel() for p in built.parameters())


@pytest.mark.parametrize("name", ["gpt", "decoder", "whisper", "clip", "albert"])
def test_inspect_shows_every_kind(name: str, in_this_process: Command) -> None:
    result = in_this_process("inspect", name)
    assert result.returncode == 0, result.stderr
    expected = {"whisper": "fixed", "clip": "vision.layers", "albert": "share one set of weights"}
    assert expected.get(name, "trainable") in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "bert-base-uncase"), "did you mean `bert`?"),
        (("inspect", "gpt2", "--freeze", "querry"), "did you mean `query`?"),
        (("inspect", "gpt2", "--freeze", ","), "is empty"),
        (("inspect", "gpt2", "--freeze", "layers[12]"), "did you mean `layers[11]`?"),
        (("inspect", "mamba"), "MambaForCausalLM: its forward pass has no attention"),
        (("inspect", str(Path(__file__))), f"For example {__file__}:build"),
        (("inspect", "nothing.py:build"), "nothing.py is not a file"),
        (("inspect", "detr"), "frostlab: "),
        (("inspect", "x" * 300), "is not a folder or an architecture, and"),
        (("inspect", "/nope"), "/nope does not exist; / has no similar name\n"),
        (("inspect", "/nope/deep"), "/nope/deep does not exist; only / exists\n"),
        (("inspect", "somebody/xopt"), "cannot be read from the hub"),
        (("inspect", "gpt2", "--length", "0"), "--length"),
        (("inspect", "imdb-gtp"), "did you mean `imdb-gpt`?"),
        (("inspect", "imdb-gpt", "--set", "optim.lt=1"), "did you mean `lr`?"),
        (("inspect", "gpt2", "--set", "seed=1"), "--set is for a recipe; gpt2 is not one"),
        (("inspect", "nowhere.yaml"), "nowhere.yaml cannot be read (No such file"),
        (("inspekt", "gpt2"), "inspekt"),
    ],
)
def test_bad_input_is_exit_code_two_and_no_traceback(
    arguments: tuple[str, ...], message: str, in_this_process: Command
) -> None:
    result = in_this_process(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_path_is_compared_with_its_neighbours(tmp_path: Path, in_this_process: Command) -> None:
    (tmp_path / "my-model").mkdir()
    result = in_this_process("inspect", str(tmp_path / "my-modle"))
    assert result.stderr.endswith("my-modle does not exist; did you mean `my-model`?\n")


def test_a_folder_that_may_not_be_listed_gives_no_hint(
    tmp_path: Path, in_this_process: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    iterdir = Path.iterdir

    def refuse(self: Path) -> Iterator[Path]:
        if self == tmp_path:
            raise PermissionError(13, "Permission denied", str(self))
        return iterdir(self)

    monkeypatch.setattr(Path, "iterdir", refuse)
    result = in_this_process("inspect", str(tmp_path / "nothing"))
    assert (result.returncode, result.stderr) == (
        2,
        f"frostlab: {tmp_path}/nothing does not exist\n",
    )


def test_somebodys_model_is_no_misspelt_architecture(in_this_process: Command) -> None:
    assert "did you mean" not in in_this_process("inspect", "somebody/xopt").stderr
    assert "did you mean `bert`?" in in_this_process("inspect", "somebody/bert-tuned").stderr


def test_a_folder_that_is_no_model(tmp_path: Path, in_this_process: Command) -> None:
    result = in_this_process("inspect", str(tmp_path))
    assert result.returncode == 2
    assert "no config.json" in result.stderr
    for text in (
        "{broken",
        '{"model_type": "bert", "hidden_size": "x"}',
        '{"model_type": "bert", "hidden_size": 30, "num_attention_heads": 4}',
        '{"model_type": "gpt2", "architectures": ["BertModel"]}',
    ):
        (tmp_path / "config.json").write_text(text)
        result = in_this_process("inspect", str(tmp_path))
        assert result.returncode == 2, text
        assert "Traceback" not in result.stderr
        assert result.stderr.startswith("frostlab: ")


@pytest.mark.parametrize("name", slow_unless(BAD.keys() - {"experts"}, BAD))
def test_a_bad_config_is_refused_in_one_line(
    tmp_path: Path, name: str, in_this_process: Command
) -> None:
    (tmp_path / "config.json").write_text(BAD[name])
    began = time.process_time()
    done = in_this_process("inspect", str(tmp_path))
    assert time.process_time() - began < 7
    assert (done.returncode, done.stdout) == (2, ""), done.stderr[-500:]
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"frostlab: {tmp_path}")


ATTENTION = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self, attends=True):
        super().__init__()
        self.attends = attends
        self.embed = nn.Embedding(50, 16)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, ids):
        x = self.embed(ids)
        weights = (self.query(x) @ self.key(x).mT).softmax(-1)
        return weights @ self.value(x) if self.attends else x

class Asks(Own):
    def forward(self, graph):
        return super().forward(graph["ids"])

def whole(): return Own()
def compiled(): return torch.compile(Own())
def without(): return nn.Sequential(nn.Linear(4, 4))
def never(): return Own(attends=False)
def asks(): return Asks()
def lazy(): return nn.Sequential(nn.LazyLinear(4))
def quantised(): return Own().to(torch.float8_e4m3fn)
def traced(): return torch.jit.trace(Own(), torch.arange(6)[None])
"""


@pytest.mark.parametrize("name", ["whole", "compiled"])
def test_inspect_a_model_of_a_file(name: str, tmp_path: Path, in_this_process: Command) -> None:
    (tmp_path / "own.py").write_text(ATTENTION)
    result = in_this_process("inspect", f"{tmp_path}/own.py:{name}")
    assert result.returncode == 0, result.stderr
    assert "query.weight" in result.stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("without", "Sequential: its forward pass has no attention"),
        ("never", "if an attention has these weights, give a batch that runs it"),
        ("asks", "; read the model on a small batch first, fl.anatomy(model, {'graph'"),
        ("lazy", "Sequential: 0.weight has no shape yet, because it is in a lazy module; run the"),
        ("quantised", "embed.weight is quantised (float8_e4m3fn)"),
        ("traced", "it is compiled by TorchScript"),
    ],
)
def test_a_model_of_a_file_that_cannot_be_read(
    name: str, message: str, tmp_path: Path, in_this_process: Command
) -> None:
    (tmp_path / "own.py").write_text(ATTENTION)
    result = in_this_process("inspect", f"{tmp_path}/own.py:{name}")
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


BESIDE = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Sizes:
    width: int = 16
"""


@pytest.mark.parametrize("name", ["build", "model", "late"])
def test_a_file_is_run_as_python_runs_it(
    name: str, tmp_path: Path, in_this_process: Command
) -> None:
    """It can import the files beside it, and declare dataclasses whose annotations are text."""
    (tmp_path / "beside_it.py").write_text(ATTENTION)
    (tmp_path / "written.py").write_text(
        f"{BESIDE}\nfrom beside_it import Own\nmodel = Own()\n"
        "def build(): return Own()\n"
        "def late():\n    import beside_it\n    return beside_it.Own()\n"
    )
    result = in_this_process("inspect", f"{tmp_path}/written.py:{name}")
    assert result.returncode == 0, result.stderr
    assert "query.weight" in result.stdout
    assert str(tmp_path) not in sys.path


PRINTING = """
print("imported")
from own import Own
class Speaks(Own):
    def forward(self, ids):
        print("ran")
        return super().forward(ids)
def build():
    print("built")
    return Speaks()
"""


def test_what_a_file_prints_is_no_result(tmp_path: Path, in_this_process: Command) -> None:
    (tmp_path / "own.py").write_text(ATTENTION)
    (tmp_path / "speaks.py").write_text(PRINTING)
    result = in_this_process("inspect", f"{tmp_path}/speaks.py:build", "--json")
    assert json.loads(result.stdout)["parts"]
    assert result.stderr.startswith("imported\nbuilt\nran\n")


def test_a_file_that_ends_the_program(tmp_path: Path, in_this_process: Command) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit('usage: script.py DATA')")
    result = in_this_process("inspect", f"{tmp_path}/script.py:build")
    assert result.returncode == 2
    assert result.stderr == f"frostlab: {tmp_path}/script.py: SystemExit: usage: script.py DATA\n"


def test_a_module_and_function_are_no_misspelt_architecture(
    tmp_path: Path, in_this_process: Command
) -> None:
    (tmp_path / "own.py").write_text(ATTENTION)
    result = in_this_process("inspect", f"{tmp_path}/own:whole")
    assert result.returncode == 2
    assert result.stderr.endswith(f"; did you mean `{tmp_path}/own.py:whole`?\n")

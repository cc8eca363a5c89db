"""The command line, run as a program."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import frostlab
from forked import frostlab_command
from frostlab.cli.main import app, main
from zoo import build

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """The same command without the seconds a new process needs to import torch."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["frostlab", *arguments])
        code: object = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        return subprocess.CompletedProcess(arguments, int(code or 0), *capfd.readouterr())  # type: ignore[call-overload]

    return run


def test_help_and_version_without_torch() -> None:
    program = (
        "import sys; sys.argv = ['frostlab', {!r}]\n"
        "from frostlab.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    for argument in ("--help", "--version"):
        result = subprocess.run(
            [sys.executable, "-c", program.format(argument)], capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        if argument == "--version":
            assert result.stdout.strip() == f"frostlab {frostlab.__version__}"


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
        (("inspect", "mamba"), "cannot place `backbone.embeddings`"),
        (("inspect", "deepseek_v2"), "low-rank attention"),
        (("inspect", "detr"), "frostlab: "),
        (("inspect", "x" * 300), "is not a folder, an architecture"),
        (("inspect", "/nope"), "/nope does not exist; no name like it is in /\n"),
        (("inspect", "/nope/deep"), "/nope/deep does not exist; there is nothing below /\n"),
        (("inspect", "somebody/xopt"), "or a model on the hub"),
        (("inspect", "gpt2", "--length", "0"), "--length"),
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


def test_bad_input_ends_the_program_so() -> None:
    """The program itself, as a shell starts it."""
    command = [sys.executable, "-m", "frostlab", "inspect", "gpt2", "--freeze", "querry"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "frostlab: `querry` is not a role; did you mean `query`?\n"


def test_a_path_is_compared_with_its_neighbours(tmp_path: Path, in_this_process: Command) -> None:
    (tmp_path / "my-model").mkdir()
    result = in_this_process("inspect", str(tmp_path / "my-modle"))
    assert result.stderr.endswith("my-modle does not exist; did you mean `my-model`?\n")


def test_a_folder_that_may_not_be_listed_gives_no_hint(
    tmp_path: Path, in_this_process: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)
    result = in_this_process("inspect", str(tmp_path / "nothing"))
    assert (result.returncode, result.stderr) == (
        2,
        f"frostlab: {tmp_path}/nothing does not exist\n",
    )


def test_somebodys_model_is_no_misspelt_architecture(in_this_process: Command) -> None:
    assert "did you mean" not in in_this_process("inspect", "somebody/xopt").stderr
    assert "did you mean `bert`?" in in_this_process("inspect", "somebody/bert-tuned").stderr


@pytest.mark.parametrize("command", ["", *sorted(c.name or "" for c in app.registered_commands)])
def test_flags_are_shown_without_a_value(command: str, in_this_process: Command) -> None:
    result = in_this_process(*filter(None, [command]), "--help")
    assert result.returncode == 0, result.stderr
    assert "--help" in result.stdout
    assert "bool" not in result.stdout.lower()


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

"""`frostlab generate` and `frostlab export`."""

import json
from pathlib import Path

import frostlab as fl
from forked import Command
from trained import trained


def test_generate_shows_runs_side_by_side(in_this_process: Command) -> None:
    gpt, decoder = str(trained("gpt").folder), str(trained("decoder").folder)
    words = ("--prompt", "the cat", "--prompt", "", "--tokens", "6", "--device", "cpu")
    out = in_this_process("generate", gpt, decoder, *words, "--samples", "2")
    assert out.returncode == 0, out.stderr
    assert max(map(len, out.stdout.splitlines())) <= 80
    assert out.stdout.count("prompt: the cat") == out.stdout.count("without a prompt") == 1
    assert out.stdout.count("    2: ") == 4
    again = in_this_process("generate", gpt, decoder, *words, "--samples", "2", "--json")
    listed = json.loads(again.stdout)
    assert len(listed) == 8
    assert listed[0].keys() == {"run", "prompt", "text", "tokens", "ended"}
    samples = trained("gpt").generate(["the cat", ""], samples=2, max_tokens=6)
    assert [row["text"] for row in listed[:4]] == [sample.text for sample in samples]


def test_generate_takes_the_most_probable_token_at_temperature_0(in_this_process: Command) -> None:
    words = ("--prompt", "the", "--tokens", "4", "--temperature", "0", "--json")
    listed = json.loads(in_this_process("generate", str(trained("gpt").folder), *words).stdout)
    assert len(listed) == 1
    default = ("--prompt", "the", "--tokens", "4", "--json")
    listed = json.loads(in_this_process("generate", str(trained("gpt").folder), *default).stdout)
    assert len(listed) == 5


def test_runs_of_the_same_name_are_told_apart(in_this_process: Command, tmp_path: Path) -> None:
    folders = [str(trained(name).folder) for name in ("gpt", "bert decoder", "decoder")]
    out = in_this_process("generate", *folders, "--prompt", "a", "--samples", "1", "--json")
    names = [row["run"] for row in json.loads(out.stdout)]
    assert len(set(names)) == 3


def test_bad_input_of_generate_is_one_line(in_this_process: Command) -> None:
    classifier = in_this_process("generate", str(trained("classifier").folder), "--prompt", "x")
    assert classifier.returncode == 2
    assert "classifies texts, and only language models generate; try" in classifier.stderr
    assert len(classifier.stderr.splitlines()) == 1
    hot = in_this_process(
        "generate", str(trained("gpt").folder), "--prompt", "x", "--temperature", "-1"
    )
    assert hot.returncode == 2
    assert hot.stderr == "frostlab: generate: temperature -1.0 should be 0 or more\n"


def test_export_prints_its_folder(in_this_process: Command, tmp_path: Path) -> None:
    out = in_this_process("export", str(trained("gpt").folder), str(tmp_path / "out"))
    assert (out.returncode, out.stdout) == (0, f"{tmp_path / 'out'}\n"), out.stderr
    assert (tmp_path / "out" / "README.md").is_file()
    again = in_this_process("export", str(trained("gpt").folder), str(tmp_path / "out"))
    assert again.returncode == 2
    assert "is not empty; choose another folder" in again.stderr


def test_an_eeg_run_is_refused(in_this_process: Command, tmp_path: Path) -> None:
    data = {"name": "eeg-simulated", "subjects": 2, "unseen": 0, "recordings": 3, "seconds": 13,
            "length": 64}  # fmt: skip
    model = {"kind": "conformer", "width": 8, "layers": 1, "heads": 2, "kernel": 3}
    train = {"batch": 8, "steps": 2, "threads": 1}
    run = fl.run({"data": data, "model": model, "train": train}, runs=tmp_path)
    for command, message in (
        (("export", str(run.folder), str(tmp_path / "out")), "EEG with frostlab's Conformer"),
        (("generate", str(run.folder), "--prompt", "x"), "decodes EEG, and only language models"),
    ):
        out = in_this_process(*command)
        assert out.returncode == 2
        assert message in out.stderr
        assert "frostlab predict" in out.stderr

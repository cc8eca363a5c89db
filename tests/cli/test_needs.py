"""`frostlab data check` and `data fetch`: data folders, the hub's cache, bad input."""

import json
from dataclasses import replace
from pathlib import Path

import datasets
import pytest

from forked import Command
from frostlab.data import fetch, sources
from frostlab.data.sources import PUBLIC_SETS
from frostlab.recipe.load import recipe_from

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches of the Hugging Face libraries, and no data folder in the environment."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "sets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "models"))
    monkeypatch.delenv("FROSTLAB_DATA", raising=False)
    return tmp_path


def _write(folder: Path, **rows: int) -> None:
    folder.mkdir(parents=True)
    for split, count in rows.items():
        line = json.dumps({"text": "a", "label": 0}) + "\n"
        (folder / f"{split}.jsonl").write_text(line * count)


def test_the_size_of_every_public_set_is_known() -> None:
    assert [name for name, facts in PUBLIC_SETS.items() if not facts.megabytes] == []


@pytest.mark.parametrize(("weights", "kinds"), [(True, ["tokenizer", "weights"]), (False, [])])
def test_random_weights_need_no_tokenizer_from_the_hub(weights: bool, kinds: list[str]) -> None:
    model = {"kind": "pretrained", "name": "bert", "weights": weights}
    needs = fetch.needs_of({"mine": recipe_from({"model": model})})
    assert [need.kind for need in needs] == kinds


def test_a_group_is_checked_as_a_whole(tmp_path: Path, in_this_process: Command) -> None:
    _write(tmp_path / "data" / "tinystories", train=3, validation=1)
    done = in_this_process("data", "check", "phase3", "--data-dir", str(tmp_path / "data"))
    assert done.returncode == 1, "something is missing"
    lines = {tuple(line.split()[:2]): line for line in done.stdout.splitlines()}
    assert "in part" in lines["data", "tinystories"]
    assert "missing" in lines["data", "openwebtext"]
    assert "24 GB" in lines["data", "openwebtext"]
    assert "missing" in lines["tokenizer", "gpt2"]
    assert "openwebtext: needed by gpt-04, gpt-05" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


def test_a_group_also_needs_what_it_evaluates_further(
    tmp_path: Path, in_this_process: Command
) -> None:
    listed = json.loads(in_this_process("data", "check", "xnli-languages", "--json").stdout)
    users = {need["name"]: need["recipes"] for need in listed if need["kind"] == "data"}
    assert len(users) == 16, "MNLI and XNLI's 15 languages"
    assert users["xnli/fr"] == ["xnli-bert (fr)"]
    (tmp_path / "mine.yaml").write_text("data: {name: imdb}\n")
    group = tmp_path / "group.yaml"
    group.write_text(
        "about: x\nfair: {one: {recipe: mine.yaml, arms: [baseline, oelm], set: {tokenizer: "
        "{kind: pretrained, name: some/where}}}}\n"
    )
    done = in_this_process("data", "check", str(group))
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [
        ["data", "imdb"],
        ["tokenizer", "some/where"],
    ]
    assert lines[-1] == "missing: 2 of 2, about 83 MB to download, and 1 of unknown size"


def test_examples_are_counted(
    tmp_path: Path, in_this_process: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(PUBLIC_SETS["imdb"], rows={"train": 4, "test": 2})
    monkeypatch.setitem(sources.PUBLIC_SETS, "imdb", small)
    _write(tmp_path / "data" / "imdb", train=4, test=1)
    asked = ("data", "check", "imdb", "--data-dir", str(tmp_path / "data"))
    listed = json.loads(in_this_process(*asked, "--json").stdout)
    assert [(need["name"], need["state"], need["rows"]) for need in listed] == [
        ("imdb", "in part", {"train": [4, 4], "test": [1, 2]})
    ]
    done = in_this_process(*asked)
    assert done.returncode == 0, "what is here in part can be used"
    assert "imdb: test has 1 of 2 examples" in done.stdout
    _write(tmp_path / "more" / "imdb", train=4, test=2)
    done = in_this_process("data", "check", "imdb", "--data-dir", str(tmp_path / "more"))
    assert "in part" not in done.stdout


def test_what_the_libraries_have_downloaded_is_found(
    tmp_path: Path, in_this_process: Command
) -> None:
    assert in_this_process("data", "check", "sst2-bert").returncode == 1
    folder = tmp_path / "sets" / "stanfordnlp___sst2" / "default" / "0.0.0"
    for name in (f"{COMMIT}.incomplete", COMMIT):
        assert in_this_process("data", "check", "sst2").returncode == 1, "not yet complete"
        (folder / name).mkdir(parents=True)
        (folder / name / "dataset_info.json").write_text("{}")
    assert in_this_process("data", "check", "sst2").returncode == 0
    snapshot = tmp_path / "models" / "models--bert-base-uncased" / "snapshots" / COMMIT
    (tmp_path / "models" / "models--bert-base-uncased" / "refs").mkdir(parents=True)
    (tmp_path / "models" / "models--bert-base-uncased" / "refs" / "main").write_text(COMMIT)
    snapshot.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (snapshot / name).write_text("{}")
    listed = json.loads(in_this_process("data", "check", "sst2-bert", "--json").stdout)
    states = {(need["kind"], need["name"]): need["state"] for need in listed}
    assert states == {
        ("data", "sst2"): "here",
        ("tokenizer", "bert-base-uncased"): "here",
        ("weights", "bert-base-uncased"): "missing",
    }
    (snapshot / "model.safetensors").write_bytes(b"0")
    assert in_this_process("data", "check", "sst2-bert").returncode == 0


def test_fetching_downloads_a_data_set(
    tmp_path: Path, in_this_process: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path / "hub", train=3, test=2)
    local = replace(PUBLIC_SETS["imdb"], hub=(str(tmp_path / "hub"), None, None))
    monkeypatch.setitem(sources.PUBLIC_SETS, "imdb", local)
    done = in_this_process("data", "fetch", "imdb")
    assert (done.returncode, done.stdout) == (0, "fetched data imdb\n"), done.stderr
    assert list((tmp_path / "sets").rglob("*.arrow"))
    done = in_this_process("data", "fetch", "docstrings-gpt")
    assert (done.returncode, done.stdout) == (0, "nothing is missing\n")


def test_a_full_disk_is_noticed_before_a_download(
    in_this_process: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 10**9

    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: Usage)
    done = in_this_process("data", "fetch", "openwebtext")
    assert done.returncode == 2
    assert "openwebtext takes 24 GB, and " in done.stderr
    assert "has 1 GB free; set HF_HOME to a folder with more space" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("check", "phase33"), "is called 'phase33'; did you mean `phase3`?"),
        (("fetch", "imbd"), "is called 'imbd'; did you mean `imdb`?"),
        (("check", "imdb", "--data-dir", "nowhere"), "--data-dir nowhere is not a folder"),
        (("fetch", "sst2"), "data sst2: the hub's stanfordnlp/sst2: "),
        (("check", "xnli/frr"), "data.language frr is not a language of xnli; did you mean `fr`?"),
        (("check", "imdb", "--set", "data.nmae=x"), "data.nmae is not a key; did you mean `name`?"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], message: str, in_this_process: Command
) -> None:
    done = in_this_process("data", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_own_data_are_checked_and_cannot_be_fetched(
    tmp_path: Path, in_this_process: Command
) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("data: {name: own, path: texts.csv}\n")
    assert in_this_process("data", "check", str(recipe)).returncode == 1
    done = in_this_process("data", "fetch", str(recipe))
    assert done.returncode == 2
    assert "is your own data, which no hub has" in done.stderr
    recipe.write_text("data: {name: own, path: imdb/texts.csv}\n")
    assert "is your own data" in in_this_process("data", "fetch", str(recipe)).stderr
    recipe.write_text("data: {name: own, path: texts.csv}\n")
    (tmp_path / "texts.csv").write_text("text,label\na,0\n")
    assert in_this_process("data", "check", str(recipe)).returncode == 0

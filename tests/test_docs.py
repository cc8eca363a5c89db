"""The code in the documents runs as it stands."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from pydantic import BaseModel

import frostlab as fl
from frostlab.recipe.data import LOADERS
from frostlab.recipe.invalid import models_in
from frostlab.roles.description import _by_class
from tiny import tiny
from zoo import SIZES

ROOT = Path(__file__).parent.parent


def blocks(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def test_the_readme_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _ = blocks("README.md")
    loaded: list[str] = []

    def small(name: str) -> transformers.PreTrainedModel:
        loaded.append(name)
        return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES))

    auto_class = transformers.AutoModelForSequenceClassification
    monkeypatch.setattr(auto_class, "from_pretrained", small)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(code, names)
    assert loaded == ["bert-base-uncased"]
    assert {p.name for p in tmp_path.iterdir()} == {"delta", "plain-hf-checkpoint"}
    assert fl.anatomy(names["model"]).count("frozen") > 0  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")
def test_the_readme_trainer_script_prints_the_table_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section = (ROOT / "README.md").read_text().split("## Find what does not learn")[1]
    text = section.split("\n## ")[0]
    _, code = blocks("README.md")
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    (shown,) = re.findall(r"```\n(Bert.*?)```", text, re.DOTALL)
    printed = {shape(line) for line in capsys.readouterr().out.splitlines()}
    lines = [line for line in shown.splitlines() if line != "…"]
    assert len(lines) > 10
    assert [line for line in lines if shape(line) not in printed] == []
    assert not list(tmp_path.rglob("*.safetensors"))


def shape(line: str) -> str:
    """A line without its numbers, whose last digits differ between processors."""
    return re.sub(r"\s+", " ", re.sub(r"(?<!\[)\b\d[\d.]*(e[+-]\d+)?\b", "#", line))


def test_the_description_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found, registering = blocks("docs/architectures.md")
    registered = dict(_by_class)
    exec(found, {})
    (evidence,) = re.findall(r"evidence\)\n# (.*)", found)
    assert capsys.readouterr().out.startswith(f"{evidence}\n")
    try:
        exec(registering, {})
    finally:
        _by_class.clear()
        _by_class.update(registered)
    assert "layers[0:4]  4 alike" in capsys.readouterr().out


def test_the_growing_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("docs/grow.md")
    exec(code, {})
    (comment,) = re.findall(r"print\(.*\)  # (.*)", code)
    assert capsys.readouterr().out == f"{comment}\n"


def test_the_adapters_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks("docs/adapters.md"))
    exec(code, {})
    comments = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == comments
    assert len(comments) == 9


def test_the_conformer_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("docs/conformer.md")
    exec(code, {})
    total, trainable = map(int, capsys.readouterr().out.split())
    assert 0 < trainable < total


def test_the_gradient_flow_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    from frostlab.flow.judge import VERDICTS
    from frostlab.flow.measurements import QUANTITIES

    text = (ROOT / "docs/gradient-flow.md").read_text()
    assert [word for word in (*VERDICTS, *QUANTITIES) if word not in text] == []
    (code,) = blocks("docs/gradient-flow.md")
    exec(code, {})
    out = capsys.readouterr().out
    (comment,) = re.findall(r"print\(.*\)  # (.*)", code)
    assert out.splitlines()[-1] == comment
    assert "layers[2].up: not learning: it is missing from the optimizer" in out


def test_the_document_of_the_api_has_every_public_name() -> None:
    words = set(re.findall(r"\w+", (ROOT / "docs/api.md").read_text()))
    assert set(fl.__all__) - words == set()


def test_the_readme_names_every_command() -> None:
    from frostlab.cli.main import app

    section = (ROOT / "README.md").read_text().split("\n## Commands\n")[1].split("\n## ")[0]
    names = {group.name for group in app.registered_groups}
    for command in app.registered_commands:
        names.add(command.name or command.callback.__name__)  # type: ignore[union-attr]
    assert set(re.findall(r"`(\w+)`", section)) == names


def test_the_document_of_architectures_lists_every_table() -> None:
    from frostlab.roles.description import known_types

    text = (ROOT / "docs/architectures.md").read_text()
    listed = text.split("## Architectures in tables")[1].split("\n## ")[0]
    for kind in known_types():
        if kind not in ("clip_text_model", "clip_vision_model"):
            assert re.search(rf"(?<![\w-]){re.escape(kind)}(?![\w-])", listed), kind


def _keys(model: type[BaseModel]) -> Iterator[str]:
    """Yield every key of a model and of the models inside it."""
    for name, info in model.model_fields.items():
        yield name
        for inner in models_in(info.annotation):
            yield from _keys(inner)


def test_the_document_of_runs_names_every_key_event_and_treatment() -> None:
    from frostlab.recipe.data import data_names
    from frostlab.recipe.treatment import TREATMENTS
    from frostlab.records.schema import EVENTS

    text = (ROOT / "docs" / "runs.md").read_text()
    words = set(re.findall(r"[\w-]+", text))
    keys = {*_keys(fl.Recipe), *data_names(), *TREATMENTS, *EVENTS} - {"about"}
    assert keys - words == set()


def test_the_example_of_registered_data_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOADERS, "weather", LOADERS.get("weather"))  # removed again afterwards
    del LOADERS["weather"]
    scope: dict[str, object] = {}
    (code,) = (block for block in blocks("docs/runs.md") if "register_data" in block)
    exec(code, scope)
    assert isinstance(recipe := scope["recipe"], fl.Recipe)
    assert (recipe.data.name, recipe.data.task) == ("weather", "classification")


def test_the_document_of_runs_names_every_file(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "runs.md").read_text()
    fl.run(tiny(), runs=tmp_path)
    for name in (p.name for p in (tmp_path / "run-none-s0").iterdir()):
        assert name in text


def test_the_recordings_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FROSTLAB_CACHE", str(tmp_path))
    (code,) = blocks("docs/eeg-data.md")
    exec(code, {})
    printed = capsys.readouterr().out
    assert "{'train': 2, 'tune': 2, 'report': 2, 'unseen': 1} ('sub-001', 'sub-002')" in printed
    assert "(4, 2)" in printed


def test_the_document_of_security_names_the_permission_and_the_command() -> None:
    from frostlab.models import trust
    from frostlab.records.environment import VARIABLES

    text = (ROOT / "docs" / "security.md").read_text()
    assert all(word in text for word in (trust.TRUST, trust.CONVERT, "--trust-remote-code"))
    assert trust.TRUST in VARIABLES
    assert "docs/security.md" in (ROOT / "SECURITY.md").read_text()
    assert "docs/security.md" in (ROOT / "README.md").read_text()
    for name in re.findall(r"`fl\.(\w+)", text):
        assert hasattr(fl, name), name


LIMIT = re.compile(r"^\| .* \| ([\d,]+) ?(KiB|MiB|GiB)?\b.* \| `([\w.]+)` \|$", re.MULTILINE)
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
BOUNDED = ("data.arrays", "data.parquet", "data.eeg.matlab")  # all their constants are limits
NO_LIMITS = {  # they bound what is shown, computed or done at once, or an argument; never a file
    "comparison.runner._MOST_JOBS", "data.eeg.matlab._PIECE", "data.eeg.matlab._START",
    "data.parquet.BATCH", "data.parquet.ROWS", "data.parquet._PADDING",
    "envelopes.challenge._MOST_LINES",
    "flow.diagnosis._MOST_NAMES", "flow.figures.MOST_ROWS", "launcher._MOST_PROCESSES",
    "cli.monitor._MOST_ROWS", "matrix.queue._MOST_BLOCKED",
    "matrix.slots._MOST_AT_ONCE", "matrix.slurm_jobs._MOST_JOBS",
    "recipe.bounded_yaml._MOST_SHOWN", "recipe.load._MOST_NAME", "recipe.load._MOST_TEXT",
    "roles.copies._MOST_SHARED", "roles.fingerprint._MOST_VALUES", "roles.refusals._MOST_PATHS",
    "roles.tracing.dependence._MOST_STARTS",
    "roles.tracing.passes.inputs.MOST_CALLS", "roles.tracing.passes.small.MOST_LAYERS",
    "roles.tracing.verify._MOST_NAMED", "timing.flops._MOST_FLOPS_PER_BYTE",
    "timing.interleave.MOST_BATCHES",
    "timing.interleave._MOST_BLOCKS",
}  # fmt: skip


def constants() -> Iterator[str]:
    """Yield the limits in the code: constants that are called MOST, and all of some modules."""
    source = ROOT / "src" / "frostlab"
    for path in sorted(source.rglob("*.py")):
        module = ".".join(path.relative_to(source).with_suffix("").parts)
        for name in re.findall(r"^(_?[A-Z_]+) = \d", path.read_text(), re.MULTILINE):
            if name.lstrip("_").startswith("MOST_") or module in BOUNDED:
                yield f"{module}.{name}"


def test_the_table_of_limits_is_that_of_the_code() -> None:
    section = (ROOT / "docs/security.md").read_text().split("\n## Limits\n")[1].split("\n## ")[0]
    rows = LIMIT.findall(section)
    assert len(rows) == section.count("\n| ") - 1, "a row without a number or a constant"
    for number, unit, place in rows:
        module, _, name = place.rpartition(".")
        value = getattr(importlib.import_module(f"frostlab.{module}"), name)
        assert value == int(number.replace(",", "")) * UNITS[unit], place
    listed = [place for _, _, place in rows]
    assert len(listed) == len(set(listed))
    assert set(constants()) - NO_LIMITS <= set(listed)
    assert set(constants()) >= NO_LIMITS

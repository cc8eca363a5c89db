"""evidence.json is read as its schema, or refused in one line that names the key."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

import frostlab as fl
from frostlab.comparison.evidence import SCHEMA, Effect, read_evidence, stored
from frostlab.comparison.judging.statistics import paired


def written(values: Any, folder: Path) -> Path:
    path = folder / "evidence.json"
    path.write_text(json.dumps(values))
    return path


@pytest.mark.parametrize("which", ["made", "heard"])
def test_what_is_read_is_what_was_written(which: str, request: pytest.FixtureRequest) -> None:
    comparison: fl.Comparison = request.getfixturevalue(which)
    kept = json.loads((comparison.folder / "evidence.json").read_text())
    assert json.loads(json.dumps(comparison.evidence.to_dict())) == kept
    assert comparison.evidence.verdicts == comparison.verdicts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 1}, f"has schema 1, and this frostlab reads {SCHEMA}"),
        ({"look": "first"}, "look should be a whole number, but is 'first'"),
        ({"lok": 1}, "lok is not a key; did you mean `look`?"),
        ({"plan": {}}, "plan.name: Field required"),
        ({"arms": {"oelm": {"does": "", "runs": []}}}, "arms.oelm.metrics is missing"),
        ({"oelm": "baseline"}, "oelm should be one of oelm, oelm-random, or null"),
        ({"verdicts": {"oelm": {"word": "great"}}}, "verdicts.oelm"),
    ],
)
def test_a_misfit_is_refused_by_key(
    change: dict[str, Any], message: str, made: fl.Comparison, tmp_path: Path
) -> None:
    kept = json.loads((made.folder / "evidence.json").read_text())
    with pytest.raises(fl.BadInput) as refused:
        read_evidence(written(kept | change, tmp_path))
    assert message in str(refused.value)
    assert str(tmp_path / "evidence.json") in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("values", [None, [], 3])
def test_other_json_is_refused(values: Any, tmp_path: Path) -> None:
    with pytest.raises(fl.BadInput, match="is not a JSON object"):
        read_evidence(written(values, tmp_path))


def test_a_folder_without_evidence_has_no_verdicts_yet(tmp_path: Path) -> None:
    with pytest.raises(fl.FrostlabError, match="has no verdicts yet"):
        _ = fl.Comparison(tmp_path).verdicts
    (tmp_path / "evidence.json").write_text("{")
    with pytest.raises(fl.BadInput, match="is not valid JSON"):
        _ = fl.Comparison(tmp_path).verdicts


def test_numbers_that_are_not_finite_are_none() -> None:
    test = paired([1.0], [0.5])
    assert math.isnan(test.p)
    kept = stored(Effect, test)
    assert (kept.effect, kept.p, kept.low, kept.std) == (0.5, None, None, None)

"""The EEG source's rules of thumb: each hint only when its trouble was measured."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import frostlab as fl
from frostlab.flow.diagnosis import Diagnosis, diagnose
from frostlab.flow.eeg_hints import EEGHints, check_norms, eeg_hints
from frostlab.records.schema import StepEvent
from hearing import hearing
from tiny import tiny


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = hearing(train__epochs=1, watch={"every_n_steps": 1}, optim={"lr": 1e-4, "clip": None})
    return fl.run(recipe, out=tmp_path_factory.mktemp("heard") / "run").folder


@pytest.fixture
def settings(heard: Path) -> Iterator[Path]:
    """The run's recipe, which is put back afterwards."""
    path = heard / "recipe.yaml"
    text = path.read_text()
    yield path
    path.write_text(text)


def found(diagnosis: Diagnosis) -> EEGHints:
    hints = eeg_hints(diagnosis)
    assert hints is not None
    return hints


def with_ratio(diagnosis: Diagnosis, front: float) -> Diagnosis:
    """The diagnosis with this front/output gradient, and a good correlation."""
    (flow,) = diagnosis.flows.values()
    flow._reports = [
        replace(r, largest={"front": front, "back": 1.0, "output": 1.0}) for r in flow.reports
    ]
    return replace(diagnosis, value=0.4)


def test_the_second_half_of_the_steps_is_checked() -> None:
    check = check_norms([100.0] * 20 + [2.0] * 19 + [0.5])
    assert check is not None
    assert (check.steps, check.median, check.within, check.steady) == (20, 2.0, 0.95, True)
    assert "median 2, 5 % and 95 % quantiles 2 and 2, within 1 to 10 in 95% of" in check.line
    assert "these steps: steady by the study's rule of thumb (at least 95%)" in check.line
    unsteady = check_norms([2.0] * 40 + [3.0] * 36 + [11.0, 12.0, 13.0, float("inf")])
    assert unsteady is not None
    assert (unsteady.steps, unsteady.within, unsteady.high) == (40, 0.9, 12.0)
    assert "in 90% of these steps: not steady by the study's rule of thumb" in unsteady.line
    assert check_norms([]) is None
    assert json.dumps(EEGHints(check_norms([float("inf")]), ()).to_dict(), allow_nan=False)


def test_the_norm_is_that_of_every_recorded_step(heard: Path) -> None:
    norms = [n for event in fl.RunRecord(heard).events(StepEvent) for n in event.norm]
    assert found(diagnose(heard)).norm == check_norms([n or 0.0 for n in norms])


def test_no_trouble_no_hint(heard: Path) -> None:
    hints = found(with_ratio(diagnose(heard), 0.2))
    assert hints.norm is not None
    assert hints.norm.high <= 10
    assert hints.hints == ()
    assert hints.lines == [hints.norm.line]


def test_small_gradients(heard: Path, settings: Path) -> None:
    (hint,) = found(with_ratio(diagnose(heard), 0.05)).hints
    assert hint.trouble == "front/output gradient 0.05 (wanted > 0.1)"
    assert hint.settings == {"model.gradient_scale": 3.0, "optim.lr": 2e-4}
    assert "model.gradient_scale=3 (here 2) or optim.lr=0.0002 (here 0.0001); Adam" in hint.text
    text = settings.read_text()
    settings.write_text(text.replace("gradient_scale: 2.0", "gradient_scale: 3.0"))
    (hint,) = found(with_ratio(diagnose(heard), 0.05)).hints
    assert hint.settings == {"optim.lr": 2e-4}
    assert hint.text.endswith("the study tries optim.lr=0.0002 (here 0.0001)")
    settings.write_text(settings.read_text().replace("lr: 0.0001", "lr: 0.001"))
    (hint,) = found(with_ratio(diagnose(heard), 0.05)).hints
    assert hint.settings == {}
    assert hint.text.endswith("this run already goes as far or further")


def test_unstable_training(heard: Path) -> None:
    diverged = replace(with_ratio(diagnose(heard), 0.2), status="diverged", error="step 3: …")
    (hint,) = found(diverged).hints
    assert hint.trouble == "the run diverged"
    assert hint.settings == {"model.gradient_scale": 1.5, "optim.lr": 5e-5, "optim.clip": 1.0}
    assert "(here 2), optim.lr=5e-05 (here 0.0001) and optim.clip=1 (here none)" in hint.text


def test_gradients_above_the_range(heard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosis = with_ratio(diagnose(heard), 0.2)
    (event, *_) = fl.RunRecord(heard).events(StepEvent)
    loud = replace(event, norm=[20.0] * len(event.norm))
    monkeypatch.setattr(fl.RunRecord, "events", lambda record, kind: [loud])
    (hint,) = found(diagnosis).hints
    assert hint.trouble == "the norm of the gradient is above 10 (95 % quantile 20)"


def test_no_gain_shows_settings_gradients_and_weights(heard: Path) -> None:
    diagnosis = replace(with_ratio(diagnose(heard), 0.2), value=0.22)
    change = next(iter(diagnosis.flows.values())).depth_ratios().weight_change
    (hint,) = found(diagnosis).hints
    assert hint.trouble == "validation pearson 0.22 (wanted > 0.3)"
    assert "model.residual=gated, model.head=mlp, model.gradient_scale=2" in hint.text
    assert f"gradient (0.2) and the front weight change ({change:.4g})" in hint.text


def test_other_runs_have_no_rules_of_thumb(tmp_path: Path, heard: Path, settings: Path) -> None:
    record = fl.run(tiny(train__epochs=1, watch={}), out=tmp_path / "run")
    assert eeg_hints(diagnose(record.folder)) is None
    settings.write_text("another version: of frostlab")
    assert eeg_hints(diagnose(heard)) is None

"""Two processes on recordings: the same losses as one, and BatchNorm refused."""

from pathlib import Path
from typing import Any

import pytest

from forked import run_command
from frostlab.records.folder import RunRecord, read_scores
from frostlab.records.schema import StepEvent
from frostlab.training.run import run
from hearing import hearing


def in_two(recipe: dict[str, Any], folder: Path, port: int) -> Any:
    given = ("--out", str(folder))
    return run_command(folder.parent, recipe, *given, processes=2, port=port).wait()


def losses(record: RunRecord) -> list[float]:
    return [x for e in record.events(StepEvent) for x in e.loss]


def test_two_processes_train_and_report_as_one(tmp_path: Path, free_port: int) -> None:
    recipe = hearing(data__seconds=17, model__dropout=0.0, train__epochs=2, train__accumulate=2)
    one = run(recipe, out=tmp_path / "one")
    assert one.result.clocks.tokens % (2 * 8 * 64), "an epoch's last batch is not whole"
    done = in_two(recipe, tmp_path / "two", free_port)
    assert done.returncode == 0, done.stderr[-3000:]
    two = RunRecord(tmp_path / "two")
    assert losses(two) == pytest.approx(losses(one), rel=1e-4, abs=1e-5)
    assert two.digests == one.digests
    assert two.result.order_digest == one.result.order_digest
    assert two.metrics == pytest.approx(one.metrics, rel=1e-2, abs=2e-3)
    assert set(read_scores(two.folder)) == {"report", "unseen"}


@pytest.mark.slow
def test_batch_norm_of_two_processes_is_refused_on_a_cpu(tmp_path: Path, free_port: int) -> None:
    done = in_two(hearing(model__norm="batch"), tmp_path / "run", free_port)
    assert done.returncode != 0
    assert "model.norm batch cannot count over 2 processes on cpu, only on GPUs" in done.stderr
    assert not (tmp_path / "run").exists()

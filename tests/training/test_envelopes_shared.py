"""torchrun with two processes on recordings: the same losses as one, and BatchNorm refused."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from frostlab.records.record import RunRecord
from frostlab.records.scores import read_scores
from frostlab.training.running import run
from hearing import hearing


def torchrun(recipe: dict[str, Any], folder: Path, port: int) -> Any:
    path = folder.parent / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
        "--master_addr=127.0.0.1", f"--master_port={port}",
        "-m", "frostlab", "run", str(path), "--out", str(folder),
    ]  # fmt: skip
    return subprocess.run(
        command, capture_output=True, text=True, timeout=250,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def losses(record: RunRecord) -> list[float]:
    return [x for e in record.events() if e["kind"] == "step" for x in e["loss"]]


def test_two_processes_train_and_report_as_one(tmp_path: Path, free_port: int) -> None:
    recipe = hearing(data__seconds=17, model__dropout=0.0, train__epochs=2, train__accumulate=2)
    one = run(recipe, out=tmp_path / "one")
    assert one.result["clocks"]["tokens"] % (2 * 8 * 64), "an epoch's last batch is not whole"
    done = torchrun(recipe, tmp_path / "two", free_port)
    assert done.returncode == 0, done.stderr[-3000:]
    two = RunRecord(tmp_path / "two")
    assert losses(two) == pytest.approx(losses(one), rel=1e-4, abs=1e-5)
    assert two.digests == one.digests
    assert two.result["order_digest"] == one.result["order_digest"]
    assert two.metrics == pytest.approx(one.metrics, rel=1e-2, abs=2e-3)
    assert set(read_scores(two.folder)) == {"report", "unseen"}


@pytest.mark.slow
def test_batch_norm_of_two_processes_is_refused_on_a_cpu(tmp_path: Path, free_port: int) -> None:
    done = torchrun(hearing(model__norm="batch"), tmp_path / "run", free_port)
    assert done.returncode != 0
    assert "model.norm batch cannot count over 2 processes on cpu, only on GPUs" in done.stderr
    assert not (tmp_path / "run").exists()

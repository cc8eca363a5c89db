"""A matrix on a GPU that other programs use, or that its runs share."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from frostlab.records.folder import RunRecord
from tiny import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# It uses 2 GB until its input ends.
USER = (
    "import sys, torch; kept = torch.zeros(1 << 29, device='cuda'); print('ready', flush=True); "
    "sys.stdin.read()"
)


def matrix(folder: Path, *options: str) -> subprocess.Popen[str]:
    (folder / "small.yaml").write_text(yaml.safe_dump(tiny()))
    (folder / "mine.yaml").write_text(yaml.safe_dump({"recipes": ["small.yaml"], "seeds": 3}))
    words = [sys.executable, "-m", "frostlab", "matrix", "mine.yaml", "--devices", "cuda:0"]
    pipe = subprocess.PIPE
    return subprocess.Popen([*words, *options], cwd=folder, stdout=pipe, stderr=pipe, text=True)


def test_a_gpu_that_another_program_uses_is_refused_or_waited_for(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    user = subprocess.Popen([sys.executable, "-c", USER], stdin=pipe, stdout=pipe, text=True)
    assert user.stdout is not None
    assert user.stdout.readline() == "ready\n"
    refused = matrix(tmp_path)
    _, problem = refused.communicate(timeout=120)
    assert refused.returncode == 2
    assert "--devices cuda:0 is in use" in problem
    waiting = matrix(tmp_path, "--when-idle")
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(20)
    assert not list(tmp_path.glob("runs/small-*")), "no run has begun"
    user.communicate("")
    _, problem = waiting.communicate(timeout=300)
    assert waiting.returncode == 0, problem


def test_runs_share_a_gpu_in_turns_or_under_mps(tmp_path: Path) -> None:
    shared = matrix(tmp_path, "--per-device", "auto")
    _, said = shared.communicate(timeout=300)
    assert shared.returncode == 0, said
    assert "CUDA MPS" in said
    for path in tmp_path.glob("runs/small-*"):
        result = RunRecord(path).result
        assert result.runs_at_once > 1, "marked"
        environment = json.loads((path / "environment.json").read_text())
        assert environment["variables"]["OMP_NUM_THREADS"] is not None

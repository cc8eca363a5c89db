"""A comparison that a queue elsewhere carries out must be the one that this process makes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tiny import tiny


def compared_in(folder: Path, *options: str, environment: dict[str, str] | None = None) -> Path:
    """Compare two arms with two seeds in places of the options, and here; return the folder.

    Both must have the same evidence, and nothing may be written elsewhere.
    """
    values = {"recipe": tiny(), "arms": ["baseline", "oelm"], "seeds": 2, "clock": False}
    (folder / "c.yaml").write_text(yaml.safe_dump(values))
    words = [sys.executable, "-m", "frostlab"]

    def call(*arguments: str) -> str:
        done = subprocess.run(
            [*words, *arguments], cwd=folder, env=environment, capture_output=True, text=True,
            timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    there = json.loads(call("compare", "c.yaml", "--out", "there", "--json", *options))
    assert sorted(path.name for path in folder.iterdir()) == ["c.yaml", "there"]
    here = json.loads(call("compare", "c.yaml", "--out", "here", "--json"))
    assert _results(there) == _results(here)
    call("verify", "there")
    return folder / "there"


def _results(evidence: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on the place: weights, metrics, effects and verdicts."""
    keys = ("seed", "status", "metrics", "best", "final_loss", "weights_digest", "recipe_digest")
    arms = {
        name: [{key: run[key] for key in keys} for run in arm["runs"]]
        for name, arm in evidence["arms"].items()
    }
    same = ("pairs", "confounds", "verdicts", "secondary", "repeat", "mcnemar", "varied_facts")
    return {"arms": arms, **{key: evidence[key] for key in same}}

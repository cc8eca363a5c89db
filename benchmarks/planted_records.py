"""Whether a comparison notices runs that were made differently, or whose files were edited.

    python benchmarks/planted_records.py

A small comparison of three arms at five seeds is made. Each attack changes a copy of its folder,
and the copy is judged again. The outcome of an attack is `refused` (an error names the run), `left
out` (fewer pairs count), `unproven`, `said` (the page lists it), `verify` (only `frostlab verify`
finds it), or `counted` (nothing was noticed).
"""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import frostlab as fl
from common import report
from frostlab.comparison.run import judge_again
from frostlab.records.manifest import verify, write_manifest

RECIPE = {
    "data": {"name": "majority", "examples": 96, "length": 12, "symbols": 4},
    "model": {"kind": "gpt", "width": 16, "layers": 1, "heads": 2},
    "train": {"batch": 16, "epochs": 1, "threads": 1},
}
PLAN = {
    "recipe": RECIPE,
    "arms": ["baseline", "oelm", "oelm-random"],
    "contrasts": [{"question": "Orthogonal?", "arm": "oelm", "against": "oelm-random"}],
    "seeds": 5,
    "clock": None,
}
Attack = Callable[[Path], None]


def planted(file: str, *keys: str, value: Any, arms: str = "*", seeds: str = "*") -> Attack:
    """Set one value in a JSON file of the runs of these arms and seeds."""

    def attack(folder: Path) -> None:
        for path in folder.glob(f"runs/{arms}-s{seeds}/{file}"):
            values = inner = json.loads(path.read_text())
            for key in keys[:-1]:
                inner = inner.setdefault(key, {})
            inner[keys[-1]] = value
            path.write_text(json.dumps(values))

    return attack


def environment(*keys: str, value: Any, arms: str = "oelm", seeds: str = "*") -> Attack:
    return planted("environment.json", *keys, value=value, arms=arms, seeds=seeds)


# Runs that were made differently: the manifest fits.
MADE: dict[str, Attack] = {
    "another torch in one arm": environment("versions", "torch", value="1.0"),
    "another scipy in one arm": environment("versions", "scipy", value="1.0"),
    "changed frostlab code in one arm": environment("code", "digest", value="0" * 64),
    "another CPU in one arm": environment("device_name", value="another"),
    "another instruction set in one arm": environment("numerics", "cpu_capability", value="x"),
    "TF32 in one arm": environment("numerics", "cuda_matmul", value="tf32"),
    "another torch for one seed": environment(
        "versions", "torch", value="1.0", arms="*", seeds="1"
    ),
    "other pretrained weights for one seed": planted(
        "digests.json", "source", value="x", seeds="1"
    ),
    "other data for one seed": planted("digests.json", "data", value="x", seeds="1"),
    "an edited accuracy, with a new manifest": planted(
        "result.json", "report", "accuracy", value=0.999, arms="oelm"
    ),
}
# Files that were edited later.
EDITED: dict[str, Attack] = {
    "an edited accuracy": MADE["an edited accuracy, with a new manifest"],
    "an edited score on the tune split": planted(
        "result.json", "best", "value", value=0.999, arms="oelm"
    ),
    "an edited digest of the data": planted("digests.json", "data", value="x"),
    "an edited environment": environment("versions", "torch", value="1.0", arms="*"),
    "an edited page": lambda folder: (folder / "comparison.md").write_text("better") and None,
}


def outcome(folder: Path) -> str:
    """Judge a folder again, and return what was noticed."""
    noticed = "verify" if verify(folder)[1] else "counted"
    try:
        judged = judge_again(folder)
    except fl.BadInput:
        return "refused"
    evidence = judged.evidence
    verdicts = [evidence.verdicts["oelm"], evidence.contrasts[0].verdict]
    if all(verdict.word == "unproven" for verdict in verdicts):
        return "unproven"
    if any(pair.arm == "oelm" for pair in evidence.refused_pairs):
        return "left out"
    if evidence.varied_facts:
        return "said"
    return noticed


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        made = fl.compare(PLAN, out=Path(place) / "made").folder
        report("planted_records", {"attack": "none", "outcome": outcome(made)})
        for attacks, sealed in ((MADE, True), (EDITED, False)):
            for name, attack in attacks.items():
                folder = Path(place) / "copy"
                shutil.copytree(made, folder)
                attack(folder)
                if sealed:
                    for manifest in folder.glob("*/*/manifest.json"):
                        write_manifest(manifest.parent)
                    write_manifest(folder)
                report("planted_records", {"attack": name, "outcome": outcome(folder)})
                shutil.rmtree(folder)


if __name__ == "__main__":
    main()

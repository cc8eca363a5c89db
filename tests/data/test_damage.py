"""A flipped bit in the cache is noticed and mended, or changes nothing."""

import json
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cases import slow_unless
from frostlab.data.eeg.recordings import Signals
from frostlab.data.prepare import prepare
from frostlab.data.tokens import Prepared
from frostlab.errors import DamagedCache
from frostlab.recipe.recipe import Recipe
from frostlab.storage import SEAL, file_digest
from frostlab.training.eeg_report import baseline_scores


def contents(material: Prepared | Signals) -> list[Any]:
    """Return everything that a run would read."""
    if isinstance(material, Signals):
        seen: list[Any] = [material.rate, material.channels, material.known, material.digest]
        for role, windows in material.splits.items():
            seen += [role, windows.digest]
            for r in windows.recordings:
                seen += [r.name, r.subject, r.eeg.tobytes(), r.envelope.tobytes()]
        scores = {split: score.to_dict() for split, score in baseline_scores(material).items()}
        return [*seen, json.dumps(scores)]
    seen = [material.classes, material.vocabulary, material.pad, material.digest, material.origin]
    for role, tokens in material.splits.items():
        arrays = (tokens.ids, tokens.starts, tokens.stops, tokens.labels)
        seen += [role, tokens.digest, *(None if a is None else np.asarray(a) for a in arrays)]
    if material.tokenizer is not None:
        seen.append(file_digest(material.tokenizer))
    return [value.tolist() if isinstance(value, np.ndarray) else value for value in seen]


def flipped(path: Path, lot: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[lot.randrange(len(content))] ^= 1 << lot.randrange(8)
    path.write_bytes(content)


def recipes(tmp_path: Path) -> dict[str, Recipe]:
    lot = random.Random(0)
    lines = [
        json.dumps({"text": " ".join(f"w{lot.randrange(40)}" for _ in range(8)), "label": n % 2})
        for n in range(120)
    ]
    own = tmp_path / "own"
    own.mkdir()
    (own / "train.jsonl").write_text("\n".join(lines))
    text = {"name": "own", "path": str(own), "length": 8}
    eeg = {"name": "eeg-simulated", "subjects": 2, "unseen": 0, "recordings": 3, "seconds": 8}
    return {
        "text": Recipe.model_validate({"data": text, "tokenizer": {"kind": "bpe", "size": 300}}),
        "synthetic": Recipe.model_validate({"data": {"name": "majority", "examples": 64}}),
        "eeg": Recipe.model_validate(
            {"data": {**eeg, "rate": 32, "length": 64}, "model": {"kind": "conformer"}}
        ),
    }


@pytest.mark.parametrize("flips", slow_unless([1], [1, 3]))  # per file
@pytest.mark.parametrize("name", ["text", "synthetic", "eeg"])
def test_a_flipped_bit_is_mended_or_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, flips: int
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("FROSTLAB_CACHE", str(cache))
    recipe = recipes(tmp_path)[name]
    good = contents(prepare(recipe, None, cache))
    kept = tmp_path / "kept"
    shutil.copytree(cache, kept)
    lot, mended = random.Random(1), 0
    files = [path for path in kept.rglob("*") if path.is_file() and path.stat().st_size]
    assert len(files) > 5
    for path in files:
        for _ in range(flips):
            flipped(cache / path.relative_to(kept), lot)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert contents(prepare(recipe, None, cache)) == good, path.name
            mended += any(warning.category is DamagedCache for warning in caught)
            for restored in files:
                shutil.copyfile(restored, cache / restored.relative_to(kept))
    assert mended > flips * len(files) / 2


@pytest.mark.parametrize("name", ["text", "synthetic"])
def test_a_missing_file_of_the_cache_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    cache = tmp_path / "cache"
    recipe = recipes(tmp_path)[name]
    good = contents(prepare(recipe, None, cache))
    for path in sorted((cache / "prepared").rglob("*.*")):
        if path.is_file() and path.suffix != ".lock":
            path.unlink()
            with pytest.warns(DamagedCache):
                assert contents(prepare(recipe, None, cache)) == good


@pytest.mark.parametrize("content", ["{}", "[]", "[0]", "null", "[" * 5000, ""])
def test_a_seal_that_covers_nothing_is_not_believed(tmp_path: Path, content: str) -> None:
    cache = tmp_path / "cache"
    recipe = recipes(tmp_path)["synthetic"]
    good = contents(prepare(recipe, None, cache))
    (path,) = (cache / "prepared").glob(f"*/{SEAL}")
    path.write_text(content)
    np.save(path.with_name("train.labels.npy"), np.zeros(64, dtype=np.int64))
    with pytest.warns(DamagedCache):
        assert contents(prepare(recipe, None, cache)) == good


def test_a_file_that_was_added_is_not_believed(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    recipe = recipes(tmp_path)["synthetic"]
    prepare(recipe, None, cache)
    (path,) = (cache / "prepared").glob("*/train.labels.npy")
    np.save(path.with_name("train.second.npy"), np.zeros(64, dtype=np.int32))
    with pytest.warns(DamagedCache, match=r"because train\.second\.npy is missing, was changed or"):
        material = prepare(recipe, None, cache)
    assert isinstance(material, Prepared)
    assert material.splits["train"].second is None

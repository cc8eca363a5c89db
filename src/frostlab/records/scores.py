"""The scores of decoded envelopes in a run's folder: written once, and refused when edited."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from frostlab.errors import BadInput
from frostlab.records.record import RunRecord

SCORES = "scores.json"
SPLITS = {  # that are reported, and what they are
    "report": "other recordings of subjects trained on",
    "unseen": "subjects not trained on",
}
REPORTED = tuple(SPLITS)
_BEST = {"report": "best_r", "unseen": "best_r_unseen"}  # what is known beforehand, by split


def scores_file(scores: Mapping[str, Mapping[str, Any]], known: Mapping[str, float]) -> Any:
    """What `scores.json` says: raw scores by split and decoder, and the best achievable."""
    return {
        "schema": 1,
        "best": {split: known[key] for split, key in _BEST.items() if key in known},
        "splits": {
            split: {name: each.to_dict() for name, each in decoders.items()}
            for split, decoders in scores.items()
        },
    }


def read_scores(folder: Path) -> dict[str, dict[str, Any]]:
    """A run's scores by split and decoder, checked against their digests and the run's result."""
    from frostlab.scoring.scores import EnvelopeScores

    try:
        said = json.loads((folder / SCORES).read_text(encoding="utf-8"))
        found = {
            split: {name: EnvelopeScores.from_dict(each) for name, each in decoders.items()}
            for split, decoders in said["splits"].items()
        }
        kept = RunRecord(folder).result["scores"]
        if _digests(kept, lambda each: each["digest"]) != _digests(found, lambda each: each.digest):
            raise BadInput("these scores were edited: they are not those of result.json")
        return found
    except BadInput as error:
        raise BadInput(f"{folder / SCORES}: {error}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{folder / SCORES} cannot be read ({error})") from None


def _digests(scores: Mapping[str, Mapping[str, Any]], digest: Callable[[Any], str]) -> Any:
    return {split: {name: digest(each) for name, each in d.items()} for split, d in scores.items()}


def scores_lines(folder: Path) -> list[str]:
    """Tables of a run's scores, a split each; nothing where there are none."""
    if not (folder / SCORES).exists():
        return []
    from frostlab.scoring.table import scores_table

    try:
        scores = read_scores(folder)
        best = json.loads((folder / SCORES).read_text(encoding="utf-8")).get("best", {})
        tables = [
            (SPLITS.get(split, split), scores_table(decoders, best.get(split)))
            for split, decoders in scores.items()
        ]
    except BadInput as error:
        return [str(error)]
    return [line for title, table in tables for line in (f"{title}:", *table.splitlines(), "")][:-1]

"""Tasks whose right answers are known, drawn from fixed seeds."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from frostlab.data.tokens import Writer
from frostlab.errors import BadInput
from frostlab.recipe.data import Synthetic

Ids = npt.NDArray[np.int64]
SYNTHETIC_SEEDS = {"report": 101, "tune": 202, "train": 303}
TRIES = 50  # draws without a new example before giving up
DRAWN = 8192  # examples drawn at once


def synthetic_vocabulary(data: Synthetic) -> int:
    """Return the symbols, for recall once as keys and once as values, and the padding."""
    return (2 if data.name == "recall" else 1) * data.symbols + 1


def known_answer(data: Synthetic) -> dict[str, float]:
    """Return what guessing reaches, and what a perfect model does."""
    best = "best_token_accuracy" if data.name == "induction" else "best_accuracy"
    return {"chance": 1 / data.symbols, best: 1.0}


def majority(data: Synthetic, count: int, random: np.random.Generator) -> tuple[Ids, Ids]:
    """Draw sequences in which one symbol is the most frequent; it is the class."""
    ids = random.integers(data.symbols, size=(count, data.length))
    rows = np.arange(count)
    # (count, symbols)
    counts = np.zeros((count, data.symbols), dtype=np.int64)
    np.add.at(counts, (rows[:, None], ids), 1)
    # A tie goes to one of the tied by lot, who takes a place of another symbol.
    lots = random.random(counts.shape)
    winners = np.where(counts == counts.max(1, keepdims=True), lots, -1).argmax(1)
    tied = (counts == counts.max(1, keepdims=True)).sum(1) > 1
    places = np.where(ids == winners[:, None], -1, random.random(ids.shape)).argmax(1)
    ids[rows[tied], places[tied]] = winners[tied]
    return ids, winners


def recall(data: Synthetic, count: int, random: np.random.Generator) -> tuple[Ids, Ids]:
    """Draw key, value, key, value, …, then one of the keys; its value is the class."""
    pairs = min(data.symbols, (data.length - 1) // 2)
    keys = random.permuted(np.tile(np.arange(data.symbols), (count, 1)), axis=1)[:, :pairs]
    values = random.integers(data.symbols, size=(count, pairs))
    asked = random.integers(pairs, size=count)
    rows = np.arange(count)
    ids = np.empty((count, 2 * pairs + 1), dtype=np.int64)
    ids[:, 0:-1:2] = keys
    ids[:, 1::2] = values + data.symbols
    ids[:, -1] = keys[rows, asked]
    return ids, values[rows, asked]


def induction(data: Synthetic, count: int, random: np.random.Generator) -> tuple[Ids, Ids]:
    """Draw different symbols and repeat them: what followed a symbol once follows it again."""
    period = min(data.symbols, (data.length + 1) // 2)
    first = random.permuted(np.tile(np.arange(data.symbols), (count, 1)), axis=1)[:, :period]
    repeats = -(-(data.length + 1) // period)
    return np.tile(first, (1, repeats))[:, : data.length + 1], np.full(count, period + 1)


TASKS: dict[str, Callable[[Synthetic, int, np.random.Generator], tuple[Ids, Ids]]] = {
    "majority": majority,
    "recall": recall,
    "induction": induction,
}


def write_synthetic(data: Synthetic, folder: Path) -> dict[str, str]:
    """Draw and write the three splits, none holding an example of another; return digests."""
    held = max(256, data.examples // 8)
    seen: set[bytes] = set()
    digests: dict[str, str] = {}
    for role, seed in SYNTHETIC_SEEDS.items():
        count = data.examples if role == "train" else held
        ids, answers = _draw(data, count, np.random.Generator(np.random.PCG64(seed)), seen)
        seen |= {row.tobytes() for row in ids} if role != "train" else set()
        with Writer(folder, role, synthetic_vocabulary(data)) as writer:
            writer.append(ids.ravel())
        width = ids.shape[1]
        starts = np.arange(count, dtype=np.int64) * width
        digests[role] = writer.finish(
            {
                "starts": starts,
                "stops": starts + width,
                "labels": None if data.name == "induction" else answers,
                "scored_from": answers if data.name == "induction" else None,
            }
        )
    return digests


def _draw(
    data: Synthetic, count: int, random: np.random.Generator, seen: set[bytes]
) -> tuple[Ids, Ids]:
    kept: list[tuple[Ids, Ids]] = []
    missing, tries = count, 0
    while missing:
        ids, answers = TASKS[data.name](data, min(missing, DRAWN), random)
        new = np.array([row.tobytes() not in seen for row in ids])
        tries = 0 if new.any() else tries + 1
        if tries == TRIES:
            raise BadInput(
                f"data.symbols {data.symbols} and data.length {data.length} make too few different "
                f"examples of {data.name} for separate splits; raise one of them"
            )
        kept.append((ids[new], answers[new]))
        missing -= int(new.sum())
    return np.concatenate([ids for ids, _ in kept]), np.concatenate([a for _, a in kept])

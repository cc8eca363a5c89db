"""The parts of a run's report that only EEG runs have: r by subject, traces, electrodes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from frostlab.envelopes.figures import (
    channel_rows,
    draw_excerpt,
    draw_importance,
    draw_kernels,
    draw_subjects,
    excerpt_rows,
    kernel_rows,
    subject_rows,
)
from frostlab.errors import BadInput, first_line
from frostlab.pages.content import Block, Figure, Records, Table
from frostlab.records.folder import SCORES, SPLITS, best_scores, read_scores
from frostlab.storage import path_inside
from frostlab.text import plain, short

DECODED, HEARD = "decoded.npz", "heard.npz"
_CONVOLUTION = "cnn.0.conv.weight"  # the Conformer's first layer: (filters, channels, taps)
_SECONDS = 10.0  # of a trace


def blocks(folder: Path, records: Records, problems: list[str]) -> list[Block]:
    """Return the blocks of an EEG run (other runs have none); add read errors to `problems`."""
    if records.value(SCORES) is None:
        return []
    shown: list[Block] = []
    for make in (_subjects, _traces, _electrodes):
        try:
            shown += make(folder, records)
        except BadInput as error:
            problems.append(plain(str(error)))
    return shown


def _subjects(folder: Path, records: Records) -> list[Block]:
    shown: list[Block] = []
    rows = []
    scores, best = read_scores(folder), best_scores(folder)
    for split, decoders in scores.items():
        for decoder in decoders:
            at = ("splits", split, decoder, "summary")
            rows.append((
                plain(SPLITS.get(split, split)),
                plain(decoder),
                records.cell(SCORES, *at, format="mean r"),
                records.cell(SCORES, *at, "null", format="chance"),
                records.cell(SCORES, *at, "null", "p", format="p"),
                records.cell(SCORES, *at, "above", format="count"),
                records.cell(SCORES, *at, "subjects", format="count"),
                records.cell(SCORES, *at, "match", format="right share"),
                records.cell(SCORES, "challenge", decoder, "score", format="r"),
            ))  # fmt: skip
    head = ("split", "decoder", "mean r [95 %]", "by chance", "p", "above chance", "of subjects",
            "match", "challenge score")  # fmt: skip
    note = (
        "Mean r of the subjects by Fisher's z. By chance: nine of ten correlations with mismatched "
        "envelopes lie in this range. Match: how often a window was given its own envelope rather "
        "than another. The challenge score combines all splits."
    )
    shown.append(Table("scores", "Correlation with the heard envelope", head, tuple(rows), note))
    for split, decoders in scores.items():
        points = subject_rows(decoders)
        if not points:
            continue
        bound = best.get(split)
        caption = (
            "Pearson's r of each subject. The grey bars are the range by chance, in which nine of "
            "ten of the first decoder's correlations with mismatched envelopes lie."
        )
        caption += "" if bound is None else " Dashed: an upper bound on the r of any decoder."
        meaning = plain(SPLITS.get(split, split))
        shown.append(Figure(f"subjects-{_name(split)}", f"r by subject: {meaning}",
                            draw_subjects(points, bound), caption, points, (SCORES,)))  # fmt: skip
    return shown


def _traces(folder: Path, records: Records) -> list[Block]:
    """Draw the envelope that was decoded from each split's first recording, and the heard one."""
    from frostlab.data.arrays import read_npz

    if not (folder / DECODED).exists():
        return []
    decoded = read_npz(folder / DECODED)
    heard = read_npz(folder / HEARD) if (folder / HEARD).exists() else {}
    shown: list[Block] = []
    for split, decoders in (records.value(SCORES, "splits") or {}).items():
        scores: Mapping[str, Any] = next(iter(decoders.values()))
        name = scores["recordings"][0]["name"]
        rate = scores["settings"]["rate"]
        if name not in decoded:
            raise BadInput(f"{folder / DECODED} has no envelope of {plain(name)}")
        signals = {"heard": heard[name]} if name in heard else {}
        signals["decoded"] = decoded[name]
        length = min(map(len, signals.values())) / rate
        start = max(0.0, (length - _SECONDS) / 2)
        rows = excerpt_rows(signals, rate, start=start, seconds=min(_SECONDS, length))
        caption = (
            f"{plain(name)}, {plain(SPLITS.get(split, split))}: the envelope that the model "
            "decoded" + (" and the envelope of the heard speech" if "heard" in signals else "")
            + ", with mean zero and variance one, in the middle of the recording."
        )  # fmt: skip
        shown.append(Figure(f"trace-{_name(split)}",
                            f"Decoded envelope: {short(plain(SPLITS.get(split, split)), 60)}",
                            draw_excerpt(rows), caption, rows, (SCORES,)))  # fmt: skip
    return shown


def _electrodes(folder: Path, records: Records) -> list[Block]:
    """Draw how strongly the first layer reads each electrode, and its strongest filters."""
    from safetensors import SafetensorError, safe_open

    checkpoint = records.value("result.json", "checkpoint")
    names = records.value("model/inputs.json", "channels")
    if not checkpoint or not names:
        return []
    path = path_inside(folder, str(checkpoint), "model.safetensors")
    if not path.is_file():
        return []
    try:
        with safe_open(path, framework="numpy") as file:
            if _CONVOLUTION not in file.keys():  # noqa: SIM118  (not a mapping)
                return []
            weights = file.get_tensor(_CONVOLUTION)
    except (SafetensorError, OSError, TypeError, ValueError) as error:
        raise BadInput(f"{path} cannot be read ({first_line(error)})") from None
    if weights.ndim != 3 or weights.shape[1] != len(names):
        raise BadInput(f"{path}: {_CONVOLUTION} does not fit {len(names)} channels")
    norms = (weights.astype("float64") ** 2).sum((0, 2)) ** 0.5
    chart, _, reason = draw_importance(
        [plain(str(name)) for name in names], norms, "norm of weights"
    )
    caption = (
        "The norm of the first convolution's weights for each electrode, whose signals are "
        "standardized: how strongly the model reads it, not how much its result depends on it."
    )
    caption += f" {reason}" if reason else " Seen from above, nose up; the ten largest are named."
    rows = channel_rows(norms, names)
    shown: list[Block] = [
        Figure("electrodes", "Electrodes", chart, caption, rows, (f"{checkpoint}",))
    ]
    rate = float(records.value("recipe.yaml", "data", "rate") or 64.0)
    kernels = kernel_rows(weights, rate, first=-(weights.shape[-1] // 2))
    shown.append(Figure(
        "kernels", "Temporal kernels", draw_kernels(kernels),
        "Time courses of the first convolution's strongest filters, the strongest first.",
        kernels, (f"{checkpoint}",),
    ))  # fmt: skip
    return shown


def _name(text: str) -> str:
    """Return a name for files: special characters become `-`."""
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in text)[:60] or "split"

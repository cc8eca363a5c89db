"""The parts of a run's report that only EEG runs have: r by subject, traces, electrodes.

The decoder, which computes the envelope (loudness over time) of the heard speech from EEG, is the
trained model or, for comparison, a ridge regression. r is the correlation of the decoded with the
true envelope, and a trace shows 10 seconds of both.
"""

from collections.abc import Mapping
from dataclasses import replace
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
from frostlab.envelopes.scores_json import SCORES, SPLITS
from frostlab.errors import BadInput, first_line
from frostlab.pages.content import Block, Figure, Records, Table
from frostlab.records.folder import RunRecord
from frostlab.storage import path_inside
from frostlab.text import plain, short

DECODED, HEARD = "decoded.npz", "heard.npz"
_CONVOLUTION = "cnn.0.conv.weight"  # the Conformer's first layer: (filters, channels, taps)
_TRACED_ARMS = 4  # envelopes and electrodes of at most this many arms are drawn
_SECONDS = 10.0  # duration of a trace


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
    scores, bounds = RunRecord(folder).envelope_scores
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
        "r is Pearson's correlation of the decoded with the heard envelope; its mean over the "
        "subjects is computed with Fisher's z. By chance: nine of ten such means lie in this range "
        "if the envelopes are shifted in time. p: how probable a mean this large is by chance. "
        "Above chance: the number of subjects whose own p is at most five percent. Match: how "
        "often the decoded envelope of a window correlates more with the heard envelope of this "
        "window than with that of another window. The challenge score is two thirds of r on "
        "segments of subjects trained on and one third of r on segments of the others."
    )
    shown.append(Table("scores", "Correlation with the heard envelope", head, tuple(rows), note))
    for split, decoders in scores.items():
        points = subject_rows(decoders)
        if not points:
            continue
        bound = bounds.get(split)
        caption = (
            "Pearson's r of each subject. The grey bars are the range by chance, in which nine of "
            "ten of the first decoder's correlations with mismatched envelopes lie."
        )
        caption += "" if bound is None else " Dashed: an upper bound on the r of any decoder."
        meaning = plain(SPLITS.get(split, split))
        shown.append(Figure(f"subjects-{_name(split)}", f"r by subject: {meaning}",
                            draw_subjects(points, bound), caption, points, (SCORES,)))  # fmt: skip
    return shown


def of_arms(folder: Path, runs: Mapping[str, str]) -> list[Figure]:
    """Draw r by subject, decoded envelopes and electrodes, for one run of each arm.

    `runs` maps each arm to its run's folder, relative to the comparison's folder. Files that cannot
    be read are left out. Envelopes and electrodes are drawn for at most four arms.
    """
    scores, envelopes, maps = {}, {}, []
    for arm, run in runs.items():
        try:
            place = path_inside(folder, run)
            scores[arm], _ = RunRecord(place).envelope_scores
            envelopes[arm], heard = _envelopes(place)
            for figure in _electrodes(place, Records(place))[:1]:
                maps.append(replace(
                    figure, name=f"electrodes-{_name(arm)}", files=(f"{run}/result.json",),
                    title=f"Electrodes that {short(plain(arm), 60)} reads",
                ))  # fmt: skip
        except BadInput:
            continue
    shown: list[Figure] = []
    files = tuple(f"{runs[arm]}/{SCORES}" for arm in scores)
    for split in dict.fromkeys(split for own in scores.values() for split in own):
        meaning = plain(SPLITS.get(split, split))
        # the first decoder of a run is its model; the others are the same in every run
        decoders = {arm: next(iter(own[split].values())) for arm, own in scores.items()
                    if split in own}  # fmt: skip
        others = next(own[split] for own in scores.values() if split in own)
        decoders |= dict(list(others.items())[1:])
        caption = (
            "Pearson's r of each subject in the first run of each arm shown. The grey bars are the "
            "range by chance, in which nine of ten correlations of the first arm with mismatched "
            "envelopes lie."
        )
        if points := subject_rows(decoders):
            shown.append(Figure(f"subjects-{_name(split)}", f"r by subject: {meaning}",
                                draw_subjects(points), caption, points, files))  # fmt: skip
        name = next(iter(others.values())).recordings[0].name
        rate = next(iter(others.values())).settings.rate
        signals = {arm: own[name] for arm, own in envelopes.items() if name in own}
        if signals and name in heard:
            drawn = dict(list(signals.items())[:_TRACED_ARMS])
            rows = _excerpt(drawn | {"heard": heard[name]}, rate)
            caption = (
                f"{plain(name)}, {meaning}: the envelope of the heard speech, and the envelopes "
                "that the first runs of the arms decoded, each with mean zero and variance one, in "
                "the middle of the recording."
            )
            if len(drawn) < len(signals):
                caption += " Only four arms are drawn."
            shown.append(Figure(f"trace-{_name(split)}", f"Decoded envelopes: {meaning}",
                                draw_excerpt(rows), caption, rows, files))  # fmt: skip
    return [*shown, *maps[:_TRACED_ARMS]]


def _envelopes(folder: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the decoded and the heard envelopes by recording; empty if their file is missing."""
    from frostlab.data.arrays import read_npz

    decoded, heard = (read_npz(path) if (path := folder / name).exists() else {}
                      for name in (DECODED, HEARD))  # fmt: skip
    return decoded, heard


def _excerpt(signals: Mapping[str, Any], rate: float) -> list[dict[str, Any]]:
    """Return the rows of the middle 10 seconds of signals; all rows if these are shorter."""
    length = min(map(len, signals.values())) / rate
    start = max(0.0, (length - _SECONDS) / 2)
    return excerpt_rows(signals, rate, start=start, seconds=min(_SECONDS, length))


def _traces(folder: Path, records: Records) -> list[Block]:
    """Draw the envelope that was decoded from each split's first recording, and the heard one."""
    decoded, heard = _envelopes(folder)
    if not decoded:
        return []
    shown: list[Block] = []
    for split, decoders in (records.value(SCORES, "splits") or {}).items():
        scores: Mapping[str, Any] = next(iter(decoders.values()))
        name = scores["recordings"][0]["name"]
        rate = scores["settings"]["rate"]
        if name not in decoded:
            raise BadInput(f"{folder / DECODED} has no envelope of {plain(name)}")
        signals = {"heard": heard[name]} if name in heard else {}
        signals["decoded"] = decoded[name]
        rows = _excerpt(signals, rate)
        caption = (
            f"{plain(name)}, {plain(SPLITS.get(split, split))}: the envelope that the model "
            "decoded" + (" and the envelope of the heard speech" if "heard" in signals else "")
            + ", with mean zero and variance one, in the middle of the recording."
        )  # fmt: skip
        shown.append(Figure(f"trace-{_name(split)}",
                            f"Decoded envelope: {short(plain(SPLITS.get(split, split)), 60)}",
                            draw_excerpt(rows), caption, rows, (SCORES,)))  # fmt: skip
    return shown


def _electrodes(folder: Path, records: Records) -> list[Figure]:
    """Draw how strongly the first layer reads each electrode, and its strongest filters."""
    checkpoint = records.value("result.json", "checkpoint")
    names = records.value("model/inputs.json", "channels")
    if not checkpoint or not names:
        return []
    weights, path = _first_layer(folder, str(checkpoint))
    if weights is None:
        return []
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
    shown = [Figure("electrodes", "Electrodes", chart, caption, rows, (f"{checkpoint}",))]
    rate = float(records.value("recipe.yaml", "data", "rate") or 64.0)
    kernels = kernel_rows(weights, rate, first=-(weights.shape[-1] // 2))
    shown.append(Figure(
        "kernels", "Temporal kernels", draw_kernels(kernels),
        "Time courses of the first convolution's strongest filters, the strongest first.",
        kernels, (f"{checkpoint}",),
    ))  # fmt: skip
    return shown


def _first_layer(folder: Path, checkpoint: str) -> tuple[Any, Path]:
    """Return the first convolution's weights (None if no file has them) and their file.

    If the layer is frozen, its weights are in the folder `checkpoints/frozen-…`.
    """
    from safetensors import SafetensorError, safe_open

    own = path_inside(folder, checkpoint, "model.safetensors")
    stored = sorted((folder / "checkpoints").glob("frozen-*/frozen.safetensors"))
    for path in (own, *stored):
        if not path.is_file():
            continue
        try:
            with safe_open(path, framework="numpy") as file:
                if _CONVOLUTION in file.keys():  # noqa: SIM118  (not a mapping)
                    return file.get_tensor(_CONVOLUTION), path
        except (SafetensorError, OSError, TypeError, ValueError) as error:
            raise BadInput(f"{path} cannot be read ({first_line(error)})") from None
    return None, own


def _name(text: str) -> str:
    """Return a name for files: all but letters and digits of ASCII becomes `-`."""
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in text)[:60] or "split"

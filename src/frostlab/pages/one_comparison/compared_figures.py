"""The figures of a comparison's report: rows from its records, which `pages.figures` draws.

Each function returns the figures that the comparison's records allow, possibly none.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from frostlab.comparison.evidence import ArmVerdict, Effect, RunSummary, Summary, TunedSetting
from frostlab.comparison.judging.statistics import t_critical
from frostlab.flow.figures import MEANINGS, NUMBER, SIGNS, ZERO, Grid, grid_of, rows_of
from frostlab.flow.measurements import Flow, flows_of
from frostlab.pages import chart_parts, figures
from frostlab.pages.content import FORMATS, Figure
from frostlab.pages.one_comparison.compared_curves import with_band
from frostlab.text import NONE, counted, number, plain

if TYPE_CHECKING:
    from frostlab.pages.one_comparison.compared import Compared

_EVIDENCE = "evidence.json"
_ALPHA = 0.05  # 1 - confidence of the intervals of means; no verdict uses them
_SPREAD = 1.5  # while tuning: a perplexity has a logarithmic axis if max / min is larger than this
_HEAT_ROWS, _HEAT_COLUMNS, _HEAT_ARMS = 24, 24, 8  # the most of each in the heat maps
# Key of gradient flow in evidence.json → title. The front is the first two layers, the output the
# model's head.
_QUANTITIES = {
    "front_ratio": "gradient of the front / of the output",
    "weight_change": "weight change of the front",
    "update": "update / weight of the front",
}
_MEMORY = {  # key of a size in evidence.json's timing → title
    "peak_bytes": "peak memory",
    "optimizer_bytes": "optimizer state",
    "checkpoint_bytes": "trainable weights",
}


# Differences


def paired_differences(compared: "Compared") -> Figure | None:
    """Draw each seed's paired difference from the baseline, with the interval of the verdict."""
    evidence, metric = compared.evidence, compared.evidence.rules.metric
    ratio = evidence.rules.log
    base = {run.seed: run.metrics.get(metric) for run in evidence.arms[evidence.baseline].finished}
    seeds, effects = [], []
    for name in compared.others:
        for run in compared.runs(name):
            own, other = run.metrics.get(metric), base.get(run.seed)
            if own is None or other is None or (ratio and (own <= 0 or other <= 0)):
                continue
            value = own / other if ratio else own - other
            text = f"{value:.4g} ×" if ratio else f"{value:+.4g}"
            seeds.append({"arm": name, "seed": run.seed, "value": value, "text": text})
        effects.append({"arm": name, **_effect_row(evidence.verdicts[name], ratio)})
    if not seeds:
        return None
    sign = "/" if ratio else "−"
    better = "smaller is better" if evidence.rules.lower_is_better else "larger is better"
    chart = figures.paired_differences(
        seeds, effects, compared.arms,
        f"{plain(metric)} {sign} that of {plain(evidence.baseline)} ({better})", ratio,
    )  # fmt: skip
    caption = (
        "Each dot is one seed's ratio of an arm to the baseline; the dashed line is no difference."
        if ratio
        else "Each dot is one seed's difference of an arm from the baseline; the dashed line is no "
        "difference."
    )
    if any(row["low"] is not None or row["high"] is not None for row in effects):
        caption += (
            " The line above the dots is the interval of the verdict, with the effect marked; an "
            "arrow means that the interval goes on beyond the axis."
        )
    if any("seen" in row for row in effects):
        caption += (
            " A true effect inside the grey bar would be missed in more than 2 of 10 such "
            "comparisons."
        )
    return Figure("paired-differences", "Difference from the baseline, seed by seed", chart,
                  caption, [*seeds, *effects], (_EVIDENCE,))  # fmt: skip


def _effect_row(verdict: ArmVerdict, ratio: bool) -> dict[str, float | str | None]:
    row, seen = _effect(verdict.paired), verdict.could_have_seen
    if seen is not None:
        low, high = (1 / (1 + seen), 1 + seen) if ratio else (-seen, seen)
        row |= {"seen_low": low, "seen_high": high, "seen": f"{seen:.3g}"}
    return row


def _effect(effect: Effect | None) -> dict[str, float | str | None]:
    if effect is None:
        return {"effect": None, "low": None, "high": None, "text": NONE}
    return {"effect": effect.effect, "low": effect.low, "high": effect.high, "text": str(effect)}


# Means


def _mean_row(summary: Summary | None) -> dict[str, Any] | None:
    """Return a mean over seeds with its 95 % interval (t distribution)."""
    if summary is None or summary.mean is None:
        return None
    low = high = None
    if summary.std is not None and summary.n > 1:
        half = t_critical(summary.n, _ALPHA) * summary.std / math.sqrt(summary.n)
        low, high = summary.mean - half, summary.mean + half
    text = FORMATS["number"](summary.mean)
    if low is not None:
        text += f" [{number(low)}, {number(high)}]"
    return {"mean": summary.mean, "low": low, "high": high, "n": summary.n, "text": text}


def metric_bars(compared: "Compared") -> list[Figure]:
    """Draw the mean of the metric on the report split, with its interval."""
    metric = compared.evidence.rules.metric
    return _bars(
        compared, "metric-means", f"Mean {plain(metric)} of each arm", plain(metric),
        {arm: compared.evidence.arms[arm].metrics.get(metric) for arm in compared.arms},
        "The bar is the mean over seeds, the line its 95 % interval. Arms share their seeds, so "
        "the paired differences above are more precise than these intervals.",
    )  # fmt: skip


def time_bars(compared: "Compared") -> list[Figure]:
    """Draw the mean total time of a run, with its interval."""
    caption = (
        "Total time of a whole run: the bar is the mean over seeds, the line its 95 % interval."
    )
    if not compared.evidence.rounds:
        caption += " The runs were not timed in turns, so a difference may come from the machine."
        if compared.evidence.timing is not None:
            caption += " The steps, which were timed in turns, are the fair comparison."
    return _bars(
        compared, "run-time-bars", "Time of a whole run", "seconds",
        {arm: compared.evidence.arms[arm].seconds for arm in compared.arms}, caption,
    )  # fmt: skip


def _bars(
    compared: "Compared",
    name: str,
    title: str,
    axis: str,
    summaries: Mapping[str, Summary | None],
    caption: str,
) -> list[Figure]:
    rows = [
        {"arm": arm, **row}
        for arm, summary in summaries.items()
        if (row := _mean_row(summary)) is not None
    ]
    if not rows:
        return []
    caption += chart_parts.cut_off(rows, axis)
    chart = figures.bars(rows, compared.arms, axis)
    return [Figure(name, title, chart, caption, rows, (_EVIDENCE,))]


# Time


def time_ratios(compared: "Compared") -> list[Figure]:
    """Draw each arm's step time divided by the baseline's; the caption explains the marks."""
    timing = compared.evidence.timing
    if timing is None:
        return _round_ratios(compared)
    rows: list[dict[str, Any]] = []
    for arm in compared.others:
        timed = timing.arms[arm]
        row = {"arm": arm, "effect": timed.ratio, "low": timed.low, "high": timed.high,
               "text": FORMATS["step ratio"](vars(timed))}  # fmt: skip
        if timed.ceiling is not None:
            first = not any("ceiling" in earlier for earlier in rows)
            row |= {"ceiling": timed.ceiling, "first": first,
                    "ceiling_text": f"{timed.ceiling:.4f}"}  # fmt: skip
        rows.append(row)
    if all(row["effect"] is None for row in rows):
        return _round_ratios(compared)
    control, band = timing.control, None
    if control.low is not None and control.high is not None:
        band = {"low": control.low, "high": control.high,
                "text": FORMATS["step ratio"](vars(control))}  # fmt: skip
    baseline = plain(compared.evidence.baseline)
    title = f"time of a step / that of {baseline} (smaller is faster)"
    chart = figures.time_ratios(rows, compared.arms, band, title)
    caption = (
        "Ratio of the time of a training step, with its interval; steps of all arms were timed in "
        "turns on the same batches. The dashed line is equal time."
    )
    if band:
        caption += (
            " The grey band is the A/A control: the interval of a copy of the baseline against the "
            "baseline. An effect inside it shows nothing."
        )
    if any("ceiling" in row for row in rows):
        caption += (
            " The red mark is the largest speed-up that the FLOPs saved by the treatment explain; "
            "a ratio below it has another cause."
        )
    if not timing.proven:
        caption += " These times are unproven: the timing failed a check and cannot be trusted."
    stored = [*rows, {"arm": "A/A control", **band}] if band else rows
    return [Figure("step-time-ratios", "Time of a step, against the baseline", chart, caption,
                   stored, (_EVIDENCE,)), *_round_ratios(compared)]  # fmt: skip


def _round_ratios(compared: "Compared") -> list[Figure]:
    """Draw the ratio of the times of whole runs that were trained in turns."""
    rounds = compared.evidence.rounds
    rows = [
        {"arm": arm, **_effect(rounds[arm].paired)}
        for arm in compared.others
        if arm in rounds and rounds[arm].paired is not None
    ]
    if all(row["effect"] is None for row in rows):
        return []
    baseline = plain(compared.evidence.baseline)
    title = f"time of a run / that of {baseline} (smaller is faster)"
    chart = figures.time_ratios(rows, compared.arms, None, title)
    caption = (
        "Ratio of the total time of whole runs, with its interval; runs of all arms alternated. "
        "The dashed line is equal time."
    )
    return [Figure("run-time-ratios", "Time of a whole run, against the baseline", chart, caption,
                   rows, (_EVIDENCE,))]  # fmt: skip


# Tuning


def tuning(compared: "Compared") -> list[Figure]:
    """Draw each arm's score by the value of a tuned setting, one figure for each setting."""
    drawn = (_response(compared, index) for index in range(len(compared.evidence.tuning)))
    return [figure for figure in drawn if figure is not None]


def _response(compared: "Compared", index: int) -> Figure | None:
    setting = compared.evidence.tuning[index]
    rows: list[dict[str, Any]] = [
        {"arm": arm, "value": point.value, "mean": point.mean, "low": point.low,
         "high": point.high, "chosen": point.chosen, "best": setting.best[arm] == point.value,
         "seeds": f"{point.chosen}/{len(point.scores)}",
         "mark": f"{point.chosen} of {counted(len(point.scores), 'seeds')}",
         "text": "a run did not finish" if point.mean is None else with_band(vars(point))}
        for arm in compared.arms
        for point in setting.curves[arm]
    ]  # fmt: skip
    means = [row["mean"] for row in rows if row["mean"] is not None]
    if not means:
        return None
    metric = compared.evidence.rules.metric
    cut_off = chart_parts.cut_off(rows, metric)
    log_y = compared.evidence.rules.log and min(means) > 0 and max(means) / min(means) > _SPREAD
    is_rate = setting.key in ("lr", "optim.lr")
    what = "learning rate" if is_rate else plain(setting.key)
    chart = figures.responses(
        rows, compared.arms, what, f"best {plain(metric)} while tuning",
        (_is_geometric(setting), log_y),
    )  # fmt: skip
    caption = (
        "Mean over seeds of the best score on the split that selects the checkpoint, with its 95 % "
        "interval; all arms have the same scale. A filled symbol is a value that was chosen, and "
        "the number above it says for how many seeds; a seed gets the value that is best over all "
        "other seeds."
    )
    if len(means) < len(rows):
        caption += " A red × is a value with which a run did not finish."
    caption += cut_off
    slug = re.sub(r"[^a-z0-9]+", "-", setting.key.lower()).strip("-")[:40]
    name = f"tuning-{slug}" if slug else f"tuning-{index}"
    return Figure(name, f"Response to the {what}", chart, caption, rows, (_EVIDENCE,))


def _is_geometric(setting: TunedSetting) -> bool:
    """Return whether the values of a grid suit a logarithmic axis."""
    return min(setting.values) > 0 and max(setting.values) / min(setting.values) >= 4


# Gradient flow


def gradient_flow(compared: "Compared") -> list[Figure]:
    """Draw the ratios of `_QUANTITIES` to the baseline, and heat maps of the first arms."""
    return [*_flow_ratios(compared), *_heat_maps(compared)]


def _flow_ratios(compared: "Compared") -> list[Figure]:
    rows = [
        {"quantity": title, "arm": arm, **_effect(quantity.against)}
        for key, title in _QUANTITIES.items()
        for arm in compared.others
        if (quantity := compared.evidence.flow.get(arm, {}).get(key)) is not None
        and quantity.against is not None
    ]
    rows = [row for row in rows if row["effect"] is not None]
    if not rows:
        return []
    chart = figures.ratios(
        rows, compared.arms, f"ratio to {plain(compared.evidence.baseline)}",
        list(_QUANTITIES.values()),
    )  # fmt: skip
    caption = (
        "Ratios of an arm to the baseline with their 95 % intervals, paired by seed; the dashed "
        "line is no difference. The front is the first two layers, the output the head."
    )
    return [Figure("flow-ratios", "Gradient flow, against the baseline", chart, caption, rows,
                   (_EVIDENCE,))]  # fmt: skip


def _heat_maps(compared: "Compared") -> list[Figure]:
    """Draw the gradient norm of parts or layers by step, in one run of each of the first arms."""
    grids: dict[str, Grid] = {}
    files = []
    for arm in compared.arms[:_HEAT_ARMS] if compared.evidence.flow else ():
        for run in compared.runs(arm)[:1]:
            if (flow := _last_flow(compared, run)) is not None and flow.reports:
                rows = rows_of(flow, _HEAT_ROWS)[:_HEAT_ROWS]
                grids[arm] = grid_of(flow, "gradient", rows, _HEAT_COLUMNS)
                files.append(f"{run.folder}/events.jsonl")
    cells = [cell for arm, grid in grids.items() for cell in _cells(arm, grid)]
    if not any(cell["power"] is not None for cell in cells):
        return []
    chart = figures.heat_maps(cells, list(grids), "gradient norm")
    caption = (
        "Norm of the gradient of each part or layer by step, in the last stage of each arm's first "
        "run; all arms have the same scale."
    )
    drawn = {cell["sign"] for cell in cells}
    # the sign of ZERO is 0, which explains itself
    explained = [f"{sign} is {MEANINGS[kind]}" for kind, sign in SIGNS.items()
                 if sign in drawn and kind != ZERO]  # fmt: skip
    if explained:
        caption += f" In grey cells, {'; '.join(explained)}."
    if len(compared.arms) > _HEAT_ARMS:
        caption += " Only the first arms of the plan are drawn."
    return [Figure("gradient-heat-maps", "Gradients by layer and step", chart, caption, cells,
                   tuple(files))]  # fmt: skip


def _last_flow(compared: "Compared", run: RunSummary) -> Flow | None:
    """Return the gradient flow of a run's last watched stage; None if there is none."""
    folder = compared.folder / run.folder
    flows = flows_of(folder) if (folder / "events.jsonl").is_file() else {}
    return next(reversed(flows.values())) if flows else None


def _cells(arm: str, grid: Grid) -> Iterable[dict[str, Any]]:
    for place, (row, line) in enumerate(zip(grid.rows, grid.cells, strict=True)):
        for step, cell in zip(grid.steps, line, strict=True):
            known = cell.kind == NUMBER
            yield {"arm": arm, "row": plain(row.name), "place": place, "step": step,
                   "power": round(grid.power(cell.value), 3) if known else None,
                   "sign": SIGNS.get(cell.kind, ""),
                   "text": f"{cell.value:.3g}" if known else MEANINGS[cell.kind]}  # fmt: skip


# Size


def parameters(compared: "Compared") -> list[Figure]:
    """Draw the numbers of trainable and frozen parameters, and the memory of timed arms."""
    rows = []
    for arm in compared.arms:
        if (size := compared.evidence.arms[arm].parameters) is None:
            continue
        frozen = size.total - size.trainable
        rows += [
            {"arm": arm, "kind": kind, "size": amount, "text": f"{amount:,}"}
            for kind, amount in (("trainable", size.trainable), ("frozen", frozen))
        ]
    drawn = []
    if rows:
        kinds = ("trainable", "frozen")
        chart = figures.sizes(rows, compared.arms, "parameters", kinds, stacked=True)
        caption = "Numbers of parameters that train (dark) and that stay as they are (light)."
        drawn.append(Figure("parameters", "Parameters", chart, caption, rows, (_EVIDENCE,)))
    return drawn + _memory(compared)


def _memory(compared: "Compared") -> list[Figure]:
    timing = compared.evidence.timing
    if timing is None:
        return []
    rows = [
        {"arm": arm, "kind": kind, "size": size, "text": FORMATS["MiB"](size)
         if size >= 2**20 else f"{size:,} bytes"}
        for arm in compared.arms
        for key, kind in _MEMORY.items()
        if arm in timing.arms and (size := getattr(timing.arms[arm], key)) is not None
    ]  # fmt: skip
    if not rows:
        return []
    kinds = [kind for kind in _MEMORY.values() if any(row["kind"] == kind for row in rows)]
    chart = figures.sizes(rows, compared.arms, "bytes", kinds, stacked=False)
    caption = "Memory of each arm's timed model."
    caption += " The peak is that of its first steps, before timing." * ("peak memory" in kinds)
    return [Figure("memory", "Memory", chart, caption, rows, (_EVIDENCE,))]


def trained_share(compared: "Compared") -> list[Figure]:
    """Draw the metric against the share of parameters that trains."""
    metric, rows = compared.evidence.rules.metric, []
    for arm in compared.arms:
        evidence = compared.evidence.arms[arm]
        row, size = _mean_row(evidence.metrics.get(metric)), evidence.parameters
        if row is not None and size is not None and size.total:
            share = size.trainable / size.total
            rows.append({"arm": arm, "share": share, "share_text": f"{share:.1%}", **row})
    if len({row["share"] for row in rows}) < 2:
        return []
    _spread_out(rows)
    caption = (
        "The symbol is the mean over seeds, the line its 95 % interval. Arms with the same share "
        "are drawn side by side."
    )
    caption += chart_parts.cut_off(rows, metric)
    chart = figures.trade_off(rows, compared.arms, "share of parameters that trains", plain(metric))
    return [Figure("trained-share", f"{plain(metric)} against the share that trains", chart,
                   caption, rows, (_EVIDENCE,))]  # fmt: skip


def _spread_out(rows: Sequence[dict[str, Any]]) -> None:
    """Give rows with equal shares different places, `at`, so that they do not cover each other."""
    shares = [row["share"] for row in rows]
    apart = 0.02 * (max(shares) - min(shares))
    for share in set(shares):
        for index, row in enumerate(row for row in rows if row["share"] == share):
            row["at"] = share + apart * (index - (shares.count(share) - 1) / 2)


# The figures of the page's sections, in their order; `compared.SECTIONS` places them.
PERFORMANCE = (metric_bars,)
TIME_RATIOS, TIMES = (time_ratios,), (time_bars,)  # before and after the table of times
TUNING = (tuning,)
GRADIENTS = (gradient_flow,)
SHARE = (trained_share, parameters)

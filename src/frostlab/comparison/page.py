"""A comparison as a page in Markdown: verdicts first, then the numbers they rest on."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from frostlab.comparison.evidence import gradients_page, subjects_page
from frostlab.comparison.plan import Rules, key_of
from frostlab.recipe.settings import LOWER_IS_BETTER
from frostlab.text import effect, markdown, mean_and_std, mebibytes, number, ratio

_GAIN = "(By what the last stage made of the first one's best.) "
_BAR = 30  # characters of the widest bar of a curve


def page(evidence: dict[str, Any]) -> str:
    """The whole page."""
    plan = evidence["plan"]
    arms = ", ".join(evidence["arms"])
    parts = [
        f"# {plan['name']}: {arms}",
        f"Caution: {evidence['caution']}." if evidence["caution"] else "",
        _quickly(plan),
        _verdicts(evidence),
        _questions(evidence),
        _performance(evidence),
        subjects_page(evidence),
        gradients_page(evidence),
        stages_table(evidence),
        _timing(evidence),
        _whole_runs(evidence),
        _tuning(evidence),
        _fairness(evidence),
        _runs(evidence),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part) + "\n"


def _quickly(plan: dict[str, Any]) -> str:
    if not plan["quick"]:
        return ""
    return "A quick look, its runs cut short: is it worth a real run?"


def _verdicts(evidence: dict[str, Any]) -> str:
    rules = Rules.model_validate(evidence["plan"]["rules"] | {"look": evidence["look"]})
    found = evidence["verdicts"][rules.metric]
    lines = [f"- **{name}**: {each['sentence']}" for name, each in found.items()]
    for name, each in found.items():
        lines += [f"  - {name}: {note}" for note in each["notes"]]
        limit = each["noninferior"]
        if limit is not None:
            lines.append(
                f"- {name}: {rules.metric} within {limit['limit']:g} × the baseline's? "
                f"**{limit['answer']}** (ratio {ratio(limit)})"
                + (f"; {limit['reason']}" if limit["reason"] else "")
            )
    timing = evidence["timing"]
    if timing is not None:
        for name in found:
            also = ", ".join(evidence["confounds"].get(name, []))
            marked = f" Confounded by {also}." if also else ""
            lines.append(f"- **time, {name}**: {timing['arms'][name]['sentence']}{marked}")
    history = rules.history()
    if history is not None:
        lines.append(f"- {history}")
    return "## Verdicts\n\n" + "\n".join(lines)


def _questions(evidence: dict[str, Any]) -> str:
    """The questions a comparison was made for; by default the five that freezing raises."""
    own = evidence["contrasts"]
    if not own:
        title, asked = "The five questions", answers(evidence)
    else:
        title = "The questions"
        asked = [
            (each["question"], f"{_GAIN if each['of'] == 'gain' else ''}{each['sentence']}")
            for each in own
        ]
    lines = [f"{n}. **{question}** {said}" for n, (question, said) in enumerate(asked, 1)]
    return f"## {title}\n\n" + "\n".join(lines)


def _level(evidence: dict[str, Any]) -> float:
    """The false-alarm rate that this look spends."""
    rules = evidence["plan"]["rules"] | {"look": evidence["look"]}
    return Rules.model_validate(rules).level


def _performance(evidence: dict[str, Any]) -> str:
    arms, metrics = evidence["arms"], list(evidence["verdicts"])
    head = ["arm", "seeds", *metrics, "cv", "trainable"]
    rows = []
    for name, arm in arms.items():
        parameters = arm["parameters"] or {}
        finished = [run for run in arm["runs"] if run["status"] == "finished"]
        mark = " (confounded)" if evidence["confounds"].get(name) else ""
        rows.append([
            name + mark,
            f"{len(finished)} of {len(arm['runs'])}",
            *(mean_and_std(arm["metrics"].get(metric)) for metric in metrics),
            number((arm["metrics"].get(metrics[0]) or {}).get("cv")),
            f"{parameters['trainable'] / parameters['total']:.1%}" if parameters else "–",
        ])  # fmt: skip
    table = markdown(head, rows)
    paired = [
        [name, metric, effect(each["paired"]), number(each["p_adjusted"]), each["word"]]
        for metric, found in evidence["verdicts"].items()
        for name, each in found.items()
    ]
    beside = markdown(["arm", "metric", "against the baseline", "p (Holm)", "verdict"], paired)
    said = (
        "Mean ± standard deviation over seeds; cv: of the first metric. Below: paired over seeds, "
        f"{100 * (1 - _level(evidence)):.4g} % t interval; a ratio for perplexity. Only the first "
        "metric was chosen beforehand."
    )
    return f"## Performance\n\n{table}\n\n{said}\n\n{beside}"


def _timing(evidence: dict[str, Any]) -> str:
    timing = evidence["timing"]
    if timing is None:
        return ""
    rows = [
        [
            name,
            number(arm["ms"]),
            ratio(arm) if name != evidence["baseline"] else "1",
            number(arm.get("ceiling")),
            arm.get("flag") or "",
            mebibytes(arm.get("peak_bytes")),
            mebibytes(arm.get("optimizer_bytes")),
            mebibytes(arm.get("checkpoint_bytes")),
        ]
        for name, arm in timing["arms"].items()
    ]
    head = ["arm", "ms a step", "ratio [95 %]", "FLOPs allow", "", "peak memory", "optimizer",
            "trained weights"]  # fmt: skip
    control = timing["control"]
    proof = "proven" if timing["proven"] else f"**unproven**: {'; '.join(timing['reasons'])}"
    said = (
        f"Interleaved in one process, {timing['builds']} builds, {timing['rounds']} rounds, "
        f"{timing['seconds']:.0f} s, "
        f"stopped by {timing['stopped_by']}. A/A control (the baseline again): "
        f"{ratio(control)}: {proof}."
    )
    return f"## Time of a step\n\n{markdown(head, rows)}\n\n{said}"


def _whole_runs(evidence: dict[str, Any]) -> str:
    rows = []
    for name, arm in evidence["arms"].items():
        times = [run["clocks"] for run in arm["runs"] if run["status"] == "finished"]
        if times:
            rounds = evidence["rounds"].get(name, {"seconds": [], "paired": None})
            rows.append([
                name, mean_and_std(arm["seconds"]), number(arm["seconds"]["cv"]),
                number(fmean(t["validation_seconds"] for t in times)),
                ", ".join(number(value) for value in rounds["seconds"]) or "–",
                effect(rounds["paired"]),
            ])  # fmt: skip
    if not rows:
        return ""
    head = ["arm", "total s", "cv", "of it validation s", "alternating rounds s", "ratio of these"]
    beside = "" if evidence["jobs"] == 1 else (
        f"\n\nUp to {evidence['jobs']} runs at once: totals say little; the rounds ran alone."
    )  # fmt: skip
    return f"## Time of whole runs\n\n{markdown(head, rows)}{beside}"


def _tuning(evidence: dict[str, Any]) -> str:
    curves = "\n\n".join(map(_curves, evidence["tuning"]))
    return f"## Tuning\n\n{curves}" if curves else ""


def _curves(tuning: dict[str, Any]) -> str:
    lines = []
    for name, curve in tuning["curves"].items():
        means = [point["mean"] for point in curve if point["mean"] is not None]
        low, high = (min(means), max(means)) if means else (0.0, 1.0)
        lines.append(f"{name}")
        for point in curve:
            best = point["value"] == tuning["best"][name]
            lines.append(f"  {point['value']:<10g} {_drawn(point['mean'], low, high)}"
                         f"{'  ← best' if best else ''}")  # fmt: skip
    edges = [name for name, on_edge in tuning["on_edge"].items() if on_edge]
    said = f"{tuning['key']}, the mean over tuning seeds on the tune split, the same grid for all."
    if tuning["extended"]:
        said += " The grid was extended once."
    if edges:
        said += f" On the edge of the grid still: {', '.join(edges)}."
    drawn = "\n".join(lines)
    return f"{said}\n\n```\n{drawn}\n```"


def _fairness(evidence: dict[str, Any]) -> str:
    lines = _varied(evidence["plan"])
    lines += [
        f"- {name}: confounded by {', '.join(found)}"
        for name, found in evidence["confounds"].items()
        if found
    ]
    lines += [
        f"- {each['arm']} seed {each['seed']} is not paired: {each['reason']}"
        for each in evidence["refused_pairs"]
    ]
    for tuning in evidence["tuning"]:
        chosen = ", ".join(f"{name} {value:g}" for name, value in tuning["best"].items())
        lines.append(f"- {tuning['key']} was tuned for each on an equal budget: {chosen}")
    if not evidence["pairs"]:
        lines.append("- No pair of runs finished, so nothing could be compared.")
    if not lines:
        lines = ["- The arms differ in the treatment alone: data, order of examples, untouched "
                 "weights, device and precision are equal for every seed, by digest."]  # fmt: skip
    return "## What differs between the arms\n\n" + "\n".join(lines)


def _varied(plan: dict[str, Any]) -> list[str]:
    """What each arm sets of what is compared here beside treatments."""
    if not plan["vary"]:
        return []
    lines = [f"- What is compared: {', '.join(plan['vary'])}. All else is equal for every seed."]
    if any(key.partition(".")[0] == "model" for key in plan["vary"]):
        lines.append("- Models of other sizes begin with other weights, drawn from the same seed.")
    for arm in plan["arms"]:
        said = "; ".join(f"{key} {json.dumps(value)}" for key, value in arm["set"].items())
        lines.append(f"- {arm['name']}: {said or 'as the recipe has it'}")
    return lines


def _runs(evidence: dict[str, Any]) -> str:
    metric = evidence["plan"]["rules"]["metric"]
    rows = [
        [name, str(run["seed"]), _status(run), number((run["metrics"] or {}).get(metric)),
         f"[{run['folder']}]({run['folder']})"]
        for name, arm in evidence["arms"].items()
        for run in arm["runs"]
    ]  # fmt: skip
    return f"## Runs\n\n{markdown(['arm', 'seed', 'status', metric, 'record'], rows)}"


def _status(run: dict[str, Any]) -> str:
    said = run["status"] if run["error"] is None else f"{run['status']}: {run['error']}"
    return said if run["attempts"] == 1 else f"{said}, attempt {run['attempts']}"


def _drawn(value: float | None, low: float, high: float) -> str:
    if value is None:
        return "failed"
    share = (value - low) / (high - low) if high > low else 1.0
    return f"{'▇' * (1 + round(share * (_BAR - 1))):<{_BAR}} {value:.4g}"


_HEAD = ["arm", "stage", "trainable", "best on the tune split", "best epoch", "seconds", "change"]


def stages_table(evidence: dict[str, Any]) -> str:
    """A row a stage of every arm that has several; nothing where none has."""
    rows: list[list[str]] = []
    for name, arm in evidence["arms"].items():
        runs = [run["stages"] for run in arm["runs"] if run["status"] == "finished"]
        if runs and len(runs[0]) > 1:
            rows += _rows(name, runs)
    if not rows:
        return ""
    said = (
        "Means over seeds. Change: of the best value against that of the stage before, positive "
        "where it is better."
    )
    return f"## Stages\n\n{markdown(_HEAD, rows)}\n\n{said}"


def _rows(name: str, runs: Sequence[list[dict[str, Any]]]) -> list[list[str]]:
    rows, before = [], None
    for stages in zip(*runs, strict=True):  # the same one of every seed
        best = fmean(stage["best"]["value"] for stage in stages)
        rows.append([
            name if before is None else "",
            stages[0]["name"],
            f"{stages[0]['trainable']:,} of {stages[0]['total']:,}",
            number(best),
            number(fmean(stage["best"]["epoch"] for stage in stages)),
            number(fmean(stage["seconds"] for stage in stages)),
            "" if before is None else f"{_better(before, best, stages[0]['best']['metric']):+.2%}",
        ])  # fmt: skip
        before = best
    return rows


def _better(before: float, after: float, metric: str) -> float:
    change = after / before - 1
    return -change if metric in LOWER_IS_BETTER else change


QUESTIONS = (
    "How large is the gap?",
    "Is the parameter saving worth it?",
    "Is it faster?",
    "Is orthogonality needed?",
    "Does it carry from BERT to GPT?",
)


def answers(evidence: dict[str, Any]) -> list[tuple[str, str]]:
    """Question and answer, for the arm that the comparison is about."""
    arm = main_arm(evidence)
    said = (
        _gap(evidence, arm),
        _saving(evidence, arm),
        _speed(evidence, arm),
        _orthogonality(evidence),
        _carries(evidence),
    )
    return list(zip(QUESTIONS, said, strict=True))


def main_arm(evidence: dict[str, Any]) -> str:
    """OELM if it is there, else the first that is not the baseline."""
    others = [name for name in evidence["arms"] if name != evidence["baseline"]]
    named = [name for name in others if key_of(name, evidence["baseline"]) == "oelm_freeze"]
    return (named or others)[0]


def _verdict(evidence: dict[str, Any], arm: str) -> dict[str, Any]:
    found: dict[str, Any] = evidence["verdicts"][evidence["plan"]["rules"]["metric"]][arm]
    return found


def _gap(evidence: dict[str, Any], arm: str) -> str:
    return str(_verdict(evidence, arm)["sentence"])


def _saving(evidence: dict[str, Any], arm: str) -> str:
    one, whole = (evidence["arms"][name]["parameters"] for name in (arm, evidence["baseline"]))
    if one is None or whole is None:
        return "Not known: an arm has no finished run."
    saved = 1 - one["trainable"] / whole["trainable"]
    if saved <= 0:
        return f"{arm} trains as many parameters as the baseline, or more: there is no saving."
    said = (
        f"{arm} trains {saved:.1%} fewer parameters ({one['trainable']:,} of "
        f"{whole['trainable']:,}), and so much less memory for gradients and Adam's moments"
    )
    cost = {
        "better": "it is also better, so there is nothing to weigh",
        "worse": "it pays for them: see the gap",
        "no difference found": "no cost was found, as far as these seeds could have seen one",
    }
    word = _verdict(evidence, arm)["word"]
    return f"{said}; {cost.get(word, f'what it costs is not known ({word})')}."


def _speed(evidence: dict[str, Any], arm: str) -> str:
    timing = evidence["timing"]
    if timing is None:
        return "Steps were not timed against each other."
    return str(timing["arms"][arm]["sentence"])


def _orthogonality(evidence: dict[str, Any]) -> str:
    found = evidence["orthogonality"]
    if found is None:
        return "Not asked: it needs the arms oelm and oelm-random-matched (or oelm-random)."
    scale = "" if found["baseline"] == "oelm-random-matched" else (
        " oelm-random also has another scale; oelm-random-matched would tell the two apart."
    )  # fmt: skip
    return f"{found['sentence']}{scale}"


def _carries(evidence: dict[str, Any]) -> str:
    model = evidence["plan"]["recipe"]["model"]
    name = model.get("name") or model["kind"]
    return f"Not answered by one model: this comparison has {name} alone; make the other one, too."


def show(evidence: dict[str, Any], page: Path) -> str:
    """A few lines that say what was found."""
    metric = evidence["plan"]["rules"]["metric"]
    verdicts = evidence["verdicts"][metric]
    timing = evidence["timing"]
    rows = []
    for name, arm in evidence["arms"].items():
        found, parameters = arm["metrics"].get(metric), arm["parameters"]
        verdict = verdicts.get(name)
        timed = None if timing is None else timing["arms"].get(name)
        rows.append([
            name,
            mean_and_std(found),
            "" if verdict is None else effect(verdict["paired"]),
            "–" if parameters is None else f"{parameters['trainable'] / parameters['total']:.1%}",
            number(None if timed is None else timed["ms"]),
            "" if name == evidence["baseline"] else ratio(timed),
            "" if verdict is None else verdict["word"],
        ])  # fmt: skip
    head = ["arm", metric, "against baseline", "trainable", "ms a step", "ratio", "verdict"]
    lines = [*_aligned([head, *rows]), ""]
    lines += [f"{name}: {verdict['sentence']}" for name, verdict in verdicts.items()]
    if timing is not None and not timing["proven"]:
        lines.append(f"timing is unproven: {'; '.join(timing['reasons'])}")
    own = [(each["question"], each["sentence"]) for each in evidence["contrasts"]]
    lines += ["", *(f"{question} {said}" for question, said in own or answers(evidence))]
    return "\n".join([*lines, "", f"page: {page}"])


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]

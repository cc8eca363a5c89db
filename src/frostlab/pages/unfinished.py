"""The report of a comparison that has no verdicts yet: its plan, and the state of its runs."""

from pathlib import Path

from frostlab.comparison.evidence import read_plan
from frostlab.comparison.plan import SCHEMA, Plan
from frostlab.pages.content import Block, Cell, Document, Records, Section, Table, item, words
from frostlab.records.finding.index import RESULT, Summary, is_run, read_run
from frostlab.text import NONE, plain
from frostlab.typed import check_schema

PLAN = "plan.json"
_ENDED_BADLY = ("failed", "diverged", "damaged")


def document(folder: Path, language: str) -> Document:
    """Return the report of a comparison that has begun and has no verdicts yet."""
    records = Records(folder)
    plan = _plan(folder, records)
    runs = _runs(folder)
    first: list[Block] = [words(
        "This comparison is not finished: there are no verdicts yet. To continue it, repeat the "
        "command that began it; finished runs are not trained again.", alarm=True,
    )]  # fmt: skip
    baseline = plan.recipe_of(plan.baseline, plan.seeds[0])
    if baseline.caution:
        first.append(words("Caution: ", plain(baseline.caution), alarm=True))
    first += [
        item(plain(run.name), f": {run.status}", *([": ", plain(run.error)] if run.error else []),
             alarm=True)
        for run in runs
        if run.status in _ENDED_BADLY
    ]  # fmt: skip
    table = _table(records, plan, runs)
    return Document(
        title=f"{plain(plan.name)}: not finished",
        about=plain(plan.about or f"What does {' or '.join(arm.name for arm in plan.others)} "
                    f"change, compared with {plan.baseline.name}, on {plan.rules.metric}?"),
        first=tuple(first),
        sections=(
            Section("plan", "What is planned", (_planned(records, plan),)),
            *([] if table is None else [Section("runs", "Runs", (table,))]),
        ),
        language=language,
        caution=baseline.caution,
    )  # fmt: skip


def _plan(folder: Path, records: Records) -> Plan:
    path = folder / PLAN
    return read_plan(check_schema(records.value(PLAN), SCHEMA, path).get("plan"), path)


def _runs(folder: Path) -> list[Summary]:
    try:
        paths = sorted((folder / "runs").iterdir())
    except OSError:  # no run was begun
        return []
    return [read_run(path) for path in paths if is_run(path)]


def _planned(records: Records, plan: Plan) -> Table:
    rows: list[tuple[str | Cell, ...]] = [
        ("metric", records.cell(PLAN, "plan", "rules", "metric", format="text")),
        ("seeds", records.cell(PLAN, "plan", "seeds", format="list")),
        ("data", records.cell(PLAN, "plan", "recipe", "data", "name", format="text")),
        ("planned", records.cell(PLAN, "planned", format="day")),
    ]
    rows += [
        ("arm", records.cell(PLAN, "plan", "arms", number, "name", format="text"))
        for number, _ in enumerate(plan.arms)
    ]
    return Table("plan", "Plan", ("", ""), tuple(rows))


def _table(records: Records, plan: Plan, runs: list[Summary]) -> Table | None:
    rows: list[tuple[str | Cell, ...]] = []
    for run in runs:
        result = f"runs/{run.name}/{RESULT}"
        numbers = [
            Cell(NONE) if run.status == "damaged" else records.cell(result, *keys, format=style)
            for keys, style in (
                (("steps",), "count"), (("best", "metric"), "text"), (("best", "value"), "number"),
                (("clocks", "total_seconds"), "hms"),
            )
        ]  # fmt: skip
        status = Cell(run.status, alarm=run.status in _ENDED_BADLY)
        rows.append((plain(run.name), status, *numbers, plain(run.error) if run.error else ""))
    begun = {run.name for run in runs}
    # The names of planned runs are not known if settings are tuned, because they hold the tuned
    # values. If the plan compares runs that had ended before, no run is missing.
    if not plan.tune and not plan.runs:
        planned = [f"{arm.name}-s{seed}" for arm in plan.arms for seed in plan.seeds]
        rows += [(name, "not begun", *[NONE] * 4, "") for name in planned if name not in begun]
    if not rows:
        return None
    head = ("run", "status", "steps", "metric", "best value", "total time", "error")
    note = f"Only runs that have ended have numbers; the others show {NONE}."
    return Table("runs", "Runs", head, tuple(rows), note)

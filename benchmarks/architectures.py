"""Read the anatomy of every model type that transformers knows, and check each independently.

Every type of AutoModel's mapping is built small from its config. The reader finds its anatomy by
evidence, even where a table describes the type, and `invariances.py` holds the result to what must
not change in the model's outputs. A process reads one type after another; one that crashes, takes
longer than a minute or needs more than 6 GB costs one row.

    python benchmarks/architectures.py [--out architectures.jsonl] [--docs]
    python benchmarks/architectures.py --types mimi vits --seconds 600 --gigabytes 12  # again

With `--types`, the rows of those types are replaced and the others in the file stay.
"""

import argparse
import gc
import json
import resource
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

SECONDS, GIGABYTES = 60, 6
DOCS = ROOT / "docs" / "architectures-table.md"
Row = dict[str, Any]
# Checks that a type's own forward pass rules out, as was found by reading it.
RULED_OUT = {
    "bridgetower": ("outputs",),  # it always returns the weights of its attentions, too
    "convbert": ("scores", "heads", "values"),  # queries also steer a convolution beside attention
    "doge": ("values",),  # values also make the mask
    # a batch norm shifts queries, keys and values; an activation function follows the values
    "levit": ("scores", "heads", "values"),
    "vits": ("values",),  # terms for positions are added to the weighted values
}


def types() -> list[str]:
    """Return the model types of AutoModel's mapping."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return list(MODEL_MAPPING_NAMES)


# ---- one type, in the worker ----


def measure(kind: str) -> Row:
    """Return the row of one type: what was found, by what, and whether it is right."""
    from frostlab.errors import FrostlabError, first_line
    from small_types import small_model

    row: Row = {"type": kind, "found_by": "", "parts": {}}
    try:
        model = small_model(kind)
    except Exception as error:  # a config that has no small model, or needs another package
        return row | {"verdict": "not built", "why": f"{type(error).__name__}: {first_line(error)}"}
    started = time.perf_counter()
    try:
        anatomy = _probed(model)
    except FrostlabError as error:
        return row | {"verdict": "refused", "why": first_line(error)}
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {first_line(error)} ({where.name}:{where.lineno})"
        return row | {"verdict": "CRASHED", "why": why}
    row["seconds"] = round(time.perf_counter() - started, 2)
    row["found_by"] = "probe"
    row["parts"] = dict(Counter(part.role for part in anatomy.parts))
    row["unreached"] = len(anatomy.evidence.unreached)
    row["evidence"] = str(anatomy.evidence)
    return row | _table(model, anatomy) | _judged(kind, model, anatomy)


def _probed(model: Any) -> Any:
    """Return the anatomy that evidence gives, whether or not a table describes the model."""
    from frostlab.errors import UnknownArchitecture
    from frostlab.roles import read

    def no_table(*_: Any) -> Any:
        raise UnknownArchitecture("")

    place, read._place_slots = read._place_slots, no_table
    try:
        return read.anatomy(model)
    finally:
        read._place_slots = place


def _table(model: Any, probed: Any) -> Row:
    """Return whether a table describes the type too, and where it says something else."""
    from frostlab.errors import FrostlabError
    from frostlab.roles import read
    from frostlab.roles.description import known_types, model_type

    if model_type(model) not in known_types():
        return {}
    slots = [s for s in read._slots(model) if s.adapts is None and s.replaced is None]
    try:
        read._place_slots(model, slots)
    except FrostlabError:
        return {}
    table = read.anatomy(model)
    if table.evidence.method != "table":
        return {}
    unreached = set(probed.evidence.unreached)
    found = [{p.key: (p.role, p.stack, p.layers, p.place.cross) for p in a.parts
              if p.name not in unreached} for a in (table, probed)]  # fmt: skip
    differing = sorted(k for k in found[0].keys() | found[1].keys()
                       if found[0].get(k) != found[1].get(k))  # fmt: skip
    said = [f"{k}: table {found[0].get(k)}, probe {found[1].get(k)}" for k in differing[:4]]
    return {"found_by": "table", "disagreements": len(differing), "table": said}


def _judged(kind: str, model: Any, anatomy: Any) -> Row:
    from frostlab.errors import first_line
    from frostlab.roles.tracing.find import _first_pass
    from frostlab.roles.tracing.passes.trace import watched_copy
    from invariances import check

    try:
        call, _ = _first_pass(watched_copy(model), None)
        outcome = check(model, anatomy, call, RULED_OUT.get(kind, ()))
        if not outcome.failed and "scores" in outcome.without and kind not in RULED_OUT:
            with suppress(Exception):  # one token has no scores to speak of
                outcome = check(model, anatomy, _longer(call))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {first_line(error)} ({where.name}:{where.lineno})"
        return {"verdict": "read, unconfirmed", "why": why}
    row: Row = {"checks": outcome.passed, "without": outcome.without, "failed": outcome.failed}
    if outcome.failed:
        return row | {"verdict": "WRONG", "why": outcome.failed[0]}
    if outcome.passed.keys() & {"scores", "tokens"} and (
        "values" in outcome.passed or "values" in RULED_OUT.get(kind, ())
    ):
        return row | {"verdict": "right"}
    return row | {
        "verdict": "read, unconfirmed",
        "why": f"outputs do not show {', '.join(outcome.without)}",
    }


def _longer(call: Any) -> Any:
    """Return the same call with larger images or longer sounds."""
    longer = dict(call.kwargs)
    for name, value in call.kwargs.items():
        if name == "pixel_values" and value.ndim == 4:
            longer[name] = value.repeat(1, 1, 3, 3)
        elif name in ("input_values", "input_features"):
            longer[name] = value.repeat(*[1] * (value.ndim - 1), 8)
    return type(call)(call.args, longer)


def work(gigabytes: int) -> None:
    """Read types from standard input and write their rows, one line each."""
    import warnings

    import torch

    resource.setrlimit(resource.RLIMIT_AS, (gigabytes << 30, gigabytes << 30))
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    out, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(measure(line.strip())), file=out, flush=True)
        gc.collect()


# ---- all types ----


class Worker:
    """A process that measures one type after another."""

    def __init__(self, gigabytes: int) -> None:
        self.gigabytes = gigabytes
        command = [sys.executable, __file__, "--worker", "--gigabytes", str(gigabytes)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True,
        )  # fmt: skip

    def measure(self, kind: str, limit: float) -> Row:
        """Return the row of a type, or one that says how the process ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        late = threading.Timer(limit, self.process.kill)
        late.start()
        try:
            self.process.stdin.write(f"{kind}\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            in_time = late.is_alive()
            late.cancel()
        if line:
            row: Row = json.loads(line)
            return row
        code = self.process.wait()
        why = f"the process ended with {code}" if in_time else f"it took more than {limit:.0f} s"
        return {"type": kind, "found_by": "", "parts": {}, "verdict": "CRASHED", "why": why}

    def is_full(self) -> bool:
        """Return whether the process holds half of the memory that it may use."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[0]
        return int(pages) * resource.getpagesize() > self.gigabytes << 29

    def end(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()


def rows(kinds: Sequence[str], seconds: int, gigabytes: int) -> Iterator[Row]:
    """Yield the row of each type; a process that ended, or is full, is replaced."""
    worker, fresh = Worker(gigabytes), True
    for kind in kinds:
        yield worker.measure(kind, seconds + 60 * fresh)  # the first import takes its time
        fresh = worker.process.poll() is not None or worker.is_full()
        if fresh:
            worker.end()
            worker = Worker(gigabytes)
    worker.end()


def summary(found: Sequence[Row]) -> str:
    """Return the counts of all verdicts in a line."""
    counts = Counter(row["verdict"] for row in found)
    tables = [row for row in found if row["found_by"] == "table"]
    agree = sum(not row["disagreements"] for row in tables)
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    return f"{len(found)} types: {said}; {agree} of {len(tables)} tables agree with the probe"


def table(found: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the generated page."""
    yield "# Every model type of AutoModel, read by evidence"
    yield ""
    yield "Written by `python benchmarks/architectures.py --docs`; do not edit."
    yield ""
    yield f"{summary(found)}."
    yield ""
    yield "| type | found by | parts | verdict |"
    yield "| --- | --- | --- | --- |"
    for row in sorted(found, key=lambda row: str(row["type"])):
        parts = ", ".join(f"{count} {role}" for role, count in row["parts"].items())
        verdict = str(row["verdict"])
        if verdict != "right":
            verdict = f"{verdict}: {row.get('why', '')}"
        elif row["found_by"] == "table":
            verdict += ", as its table" if not row["disagreements"] else ", but not as its table"
        yield f"| {row['type']} | {row['found_by']} | {parts} | {verdict.replace('|', '/')} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("architectures.jsonl"))
    parser.add_argument("--types", nargs="*")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="limit for each type")
    parser.add_argument("--gigabytes", type=int, default=GIGABYTES, help="limit of the process")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.gigabytes)
        return
    found: dict[str, Row] = {}
    if given.types is not None and given.out.exists():
        read = map(json.loads, given.out.read_text().splitlines())
        found = {row["type"]: row for row in read}
    for row in rows(given.types or types(), given.seconds, given.gigabytes):
        found[row["type"]] = row
        given.out.write_text("".join(f"{json.dumps(row)}\n" for row in found.values()))
        print(row["type"], row["verdict"], row.get("why", ""), flush=True)
    print(summary(list(found.values())))
    if given.docs:
        DOCS.write_text("\n".join(table(list(found.values()))) + "\n")


if __name__ == "__main__":
    main()

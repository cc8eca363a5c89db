"""Run benchmarks one after another; what cannot run or goes wrong is said, and the rest goes on."""

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from frostlab.bench.catalogue import Benchmark, NotAvailable, Scale
from frostlab.bench.peers import tidy
from frostlab.bench.workloads import Setting
from frostlab.devices import captures_graphs, device_name
from frostlab.errors import FrostlabError, first_line
from frostlab.records.environment import environment
from frostlab.timing.flops import FORMULA, Ceilings, Work, measure_ceilings
from frostlab.timing.interleave import Times

Result = dict[str, Any]


def result_of(
    setting: Setting,
    times: Times,
    work: Work,
    items: float,
    *,
    case: str,
    check: dict[str, Any],
    step: tuple[str, str],
    notes: tuple[str, ...] = (),
    whole: bool = False,
    extra: dict[str, Any] | None = None,
) -> Result:
    """Put a measurement together; `items` is what a step handles, in the benchmark's unit."""
    benchmark, ceilings = setting.benchmark, setting.ceilings
    timed = times.to_dict(whole)
    seconds = timed["ours_ms"] / 1e3
    least = work.least(ceilings)
    spec = ceilings.spec_flops
    result: Result = {
        "benchmark": benchmark.name,
        "case": case,
        "scale": "small" if setting.small else "full",
        "status": "measured",
        "work": benchmark.work,
        "against": benchmark.against,
        "precision": str(setting.precision).removeprefix("torch."),
        **timed,
        "unit": benchmark.unit,
        "ours_per_s": items / seconds,
        "theirs_per_s": items / (timed["theirs_ms"] / 1e3),
        "ours_step": step[0],
        "ours_step_reason": step[1],
        **least,
        "of_ceiling": least["ceiling_ms"] / timed["ours_ms"],
        "ceiling_is": FORMULA,
        "flops": work.flops,
        "trainable": work.parameters,
        "mfu": work.flops / seconds / ceilings.matmul_flops,
        "mfu_of_spec": None if spec is None else work.flops / seconds / spec,
        **check,
        **(extra or {}),
        "notes": list(notes),
    }
    result["target"] = str(benchmark.target)
    comparable = setting.on_gpu and not setting.small
    result["reached"] = benchmark.target.reached(result) if comparable else None
    return result


def run_benchmarks(
    benchmarks: Sequence[Benchmark],
    *,
    scale: Scale,
    rounds: int | None = None,
    seconds: float | None = None,
    data_dir: Path | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> Iterator[Result]:
    """Measure the ceilings, then each benchmark; yield results as they come."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    reasons = {b.name: b.missing(scale, data_dir, captures_graphs(device)) for b in benchmarks}
    where: dict[str, Any] = facts(device)
    ceilings: Ceilings | None = None
    for benchmark in benchmarks:
        reason = reasons[benchmark.name]
        if reason is not None:
            yield _absent(benchmark, scale, "skipped", reason) | where
            continue
        if ceilings is None:
            ceilings = measure_ceilings(device, scale == "small")
            where["ceilings"] = ceilings.to_dict()
            say(_ceiling_line(ceilings))
        small = "a small one of: " if scale == "small" else ""
        say(f"{benchmark.name}: {small}{benchmark.work}, against {benchmark.against}")
        setting = Setting(
            benchmark, device, scale == "small", rounds, seconds, data_dir, ceilings
        )  # fmt: skip
        for result in _guarded(setting, scale):
            yield result | where
        tidy()


def _guarded(setting: Setting, scale: Scale) -> Iterator[Result]:
    """The results of one benchmark, or the one line that says why there is none."""
    benchmark = setting.benchmark
    try:
        with _Quiet():
            yield from work_of(benchmark)(setting)
    except NotAvailable as error:
        yield _absent(benchmark, scale, "skipped", str(error))
    except FrostlabError as error:
        yield _absent(benchmark, scale, "failed", str(error))
    except Exception as error:  # whatever goes wrong in one, the others are still measured
        reason = f"{type(error).__name__}: {first_line(error)}"
        yield _absent(benchmark, scale, "failed", reason)


def work_of(benchmark: Benchmark) -> Callable[[Setting], Iterator[Result]]:
    """The function that measures it."""
    from frostlab.bench import cases  # it imports this module

    found: Callable[[Setting], Iterator[Result]] = getattr(cases, benchmark.function)
    return found


class _Quiet(warnings.catch_warnings):
    """Libraries keep their warnings and logs to themselves."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        warnings.simplefilter("ignore")
        self._disabled = logging.root.manager.disable
        logging.disable(logging.WARNING)
        return entered

    def __exit__(self, *error: Any) -> None:
        logging.disable(self._disabled)
        super().__exit__(*error)


def facts(device: torch.device) -> dict[str, Any]:
    """Where this was measured."""
    found = environment(str(device))
    gpu = found["gpu"] or {}
    host = f"{found['host']['cpu']}, {found['host']['torch_threads']} threads"
    return {
        "device": device_name(device) or host,
        "driver": gpu.get("driver"),
        "torch": torch.__version__,
        "transformers": found["versions"]["transformers"],
        "frostlab": found["versions"]["frostlab"],
        "commit": found["git"]["commit"],
        "dirty": found["git"]["dirty"],
        "time": found["time"],
    }


def append(path: Path, result: Result) -> None:
    """Add one line of JSON."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result, ensure_ascii=False) + "\n")
    except OSError as error:
        raise FrostlabError(f"{path} cannot be written: {error.strerror}") from None


def _absent(benchmark: Benchmark, scale: Scale, status: str, reason: str) -> Result:
    return {
        "benchmark": benchmark.name,
        "scale": scale,
        "status": status,
        "reason": reason,
        "work": benchmark.work,
        "against": benchmark.against,
        "target": str(benchmark.target),
        "reached": None,
    }


def _ceiling_line(ceilings: Ceilings) -> str:
    return (
        f"ceilings: {ceilings.matmul_flops / 1e12:.3g} TFLOP/s, "
        f"{ceilings.copy_bytes / 1e9:,.0f} GB/s ({ceilings.how})"
    )


_COLUMNS = (
    "benchmark",
    "ours ms",
    "theirs ms",
    "ours ÷ theirs",
    "faster",
    "to reach",
    "per s",
    "ceiling ms",
    "of ceiling",
    "MFU",
    "peak MB, ours / theirs",
)


def table(results: Sequence[dict[str, Any]]) -> Group:
    """Set what was measured in columns, then say what was not, and why."""
    shown = Table(
        title="ours ÷ theirs: times, below 1 ours is faster; [10th, 90th percentile of rounds]"
    )
    for name in _COLUMNS:
        shown.add_column(name, justify="left" if name == "benchmark" else "right")
    measured = [result for result in results if result["status"] == "measured"]
    for result in measured:
        shown.add_row(*_row(result))
    lines = [
        Text(f"{r['benchmark']}: {r['status']}: {r['reason']}")
        for r in results
        if r not in measured
    ]
    notes = [
        Text(f"{r['benchmark']} {r['case']}: {r['ours_step']} step ({r['ours_step_reason']}); "
             + "; ".join(r["notes"]))
        for r in measured
    ]  # fmt: skip
    return Group(*([shown] if measured else []), *notes, *lines)


def show(results: Sequence[dict[str, Any]]) -> None:
    """Print the table, as wide as it needs to be where nobody watches."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(table(results))


def _row(result: dict[str, Any]) -> list[str]:
    low, high = result["ratio_p10"], result["ratio_p90"]
    peaks = [result["ours_peak_bytes"], result["theirs_peak_bytes"]]
    mark = {True: " ✓", False: " ✗", None: ""}[result["reached"]]
    bound = result.get("flop_bound")
    faster = (
        f"{result['faster']:.3g}×" if bound is None else f"{result['faster']:.3f}× of {bound:.3f}×"
    )
    return [
        f"{result['benchmark']} {result['case']}",
        f"{result['ours_ms']:.4g}",
        f"{result['theirs_ms']:.4g}",
        f"{result['ratio']:.3g} [{low:.3g}, {high:.3g}]",
        faster,
        result["target"] + mark,
        f"{result['ours_per_s']:,.0f} {result['unit']}",
        f"{result['ceiling_ms']:.3g}",
        f"{result['of_ceiling']:.0%}",
        f"{result['mfu']:.0%}",
        "–" if None in peaks else " / ".join(f"{peak / 1e6:,.0f}" for peak in peaks),
    ]

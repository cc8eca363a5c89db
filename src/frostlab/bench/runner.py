"""The runner of the benchmarks, and the display and storage of their results.

A benchmark that fails or cannot run yields a result with the reason, and the others still run.
"""

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from frostlab.bench.catalogue import Benchmark, NotAvailable, Result, Scale
from frostlab.bench.peers import reset_torch
from frostlab.bench.workloads import BenchSettings
from frostlab.devices import captures_graphs, device_name, first_gpu
from frostlab.errors import FrostlabError, first_line
from frostlab.records.environment import environment
from frostlab.timing.flops import Ceilings, measure_ceilings

_COLUMNS = (
    "benchmark",
    "ours ms",
    "theirs ms",
    "ours ÷ theirs",
    "faster",
    "loop ms",
    "faster than loop",
    "target",
    "per s",
    "ceiling ms",
    "of ceiling",
    "MFU",
    "peak MB, ours / theirs",
)


def run_benchmarks(
    benchmarks: Sequence[Benchmark],
    *,
    scale: Scale,
    rounds: int | None = None,
    seconds: float | None = None,
    data_dir: Path | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> Iterator[Result]:
    """Measure the device's highest FLOP/s and bandwidth, then each benchmark; yield the results."""
    device = first_gpu()
    reasons = {b.name: b.missing(scale, data_dir, captures_graphs(device)) for b in benchmarks}
    machine: dict[str, Any] = machine_facts(device)
    ceilings: Ceilings | None = None
    for benchmark in benchmarks:
        reason = reasons[benchmark.name]
        if reason is not None:
            yield _not_measured(benchmark, scale, "skipped", reason) | machine
            continue
        if ceilings is None:
            ceilings = measure_ceilings(device, scale == "small")
            machine["ceilings"] = ceilings.to_dict()
            say(_ceiling_line(ceilings))
        small = "a small variant of " if scale == "small" else ""
        say(f"{benchmark.name}: {small}{benchmark.work}, against {benchmark.against}")
        settings = BenchSettings(
            benchmark, device, scale == "small", rounds, seconds, data_dir, ceilings
        )  # fmt: skip
        for result in _measure(settings, scale):
            yield result | machine
        reset_torch()


def _measure(settings: BenchSettings, scale: Scale) -> Iterator[Result]:
    """Yield the results of one benchmark; after an error, yield a result with the reason."""
    benchmark = settings.benchmark
    try:
        with _Quiet():
            yield from case_function(benchmark)(settings)
    except NotAvailable as error:
        yield _not_measured(benchmark, scale, "skipped", str(error))
    except FrostlabError as error:
        yield _not_measured(benchmark, scale, "failed", str(error))
    except Exception as error:  # continue with the other benchmarks
        reason = f"{type(error).__name__}: {first_line(error)}"
        yield _not_measured(benchmark, scale, "failed", reason)


def case_function(benchmark: Benchmark) -> Callable[[BenchSettings], Iterator[Result]]:
    """Return the function that measures a benchmark."""
    module, _, name = benchmark.function.rpartition(".")
    function: Callable[[BenchSettings], Iterator[Result]]
    function = getattr(import_module(f"frostlab.bench.{module}"), name)
    return function


class _Quiet(warnings.catch_warnings):
    """A context that silences warnings, and log messages below the level ERROR."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        warnings.simplefilter("ignore")
        self._disabled = logging.root.manager.disable
        logging.disable(logging.WARNING)
        return entered

    def __exit__(self, *error: Any) -> None:
        logging.disable(self._disabled)
        super().__exit__(*error)


def _not_measured(benchmark: Benchmark, scale: Scale, status: str, reason: str) -> Result:
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
        f"the device reaches {ceilings.matmul_flops / 1e12:.3g} TFLOP/s, "
        f"{ceilings.copy_bytes / 1e9:,.0f} GB/s ({ceilings.how})"
    )


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Return the device, the software versions and the time, which every result records."""
    facts = environment(str(device))
    gpu = facts["gpu"] or {}
    host = f"{facts['host']['cpu']}, {facts['host']['torch_threads']} threads"
    return {
        "device": device_name(device) or host,
        "driver": gpu.get("driver"),
        "torch": torch.__version__,
        "transformers": facts["versions"]["transformers"],
        "frostlab": facts["versions"]["frostlab"],
        "commit": facts["code"]["commit"],
        "code_digest": facts["code"]["digest"],
        "time": facts["time"],
    }


def append(path: Path, result: Result) -> None:
    """Append a result to a file, as one line of JSON."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result, ensure_ascii=False) + "\n")
    except OSError as error:
        raise FrostlabError(f"{path} cannot be written: {error.strerror}") from None


def table(results: Sequence[Result]) -> Group:
    """Return a table of the measured results, their notes, and the reasons for missing results."""
    grid = Table(
        title="ours ÷ theirs: ratio of times, below 1 if ours is faster, [10th and 90th percentile "
        "of the rounds' ratios]; faster: theirs ms ÷ ours ms; loop: a third side, with fused AdamW "
        "and torch.compile's reduce-overhead; faster than loop: loop ms ÷ ours ms; ceiling: the "
        "shortest time that the device's peak speed allows; of ceiling: ceiling ms ÷ "
        "ours ms; MFU: matmul FLOP/s of our step ÷ the highest that the device reached"
    )
    for name in _COLUMNS:
        grid.add_column(name, justify="left" if name == "benchmark" else "right")
    measured = [result for result in results if result["status"] == "measured"]
    for result in measured:
        grid.add_row(*_row(result))
    reasons = [
        Text(f"{r['benchmark']}: {r['status']}: {r['reason']}")
        for r in results
        if r not in measured
    ]
    notes = [
        Text(f"{r['benchmark']} {r['case']}: {r['ours_step']} step ({r['ours_step_reason']}); "
             + "; ".join(r["notes"]))
        for r in measured
    ]  # fmt: skip
    return Group(*([grid] if measured else []), *notes, *reasons)


def show(results: Sequence[Result]) -> None:
    """Print the table; it is 200 columns wide if the output is not a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(table(results))


def _row(result: Result) -> list[str]:
    low, high = result["ratio_p10"], result["ratio_p90"]
    peaks = [result["ours_peak_bytes"], result["theirs_peak_bytes"]]
    check = {True: " ✓", False: " ✗", None: ""}[result["reached"]]
    bound = result.get("flop_bound")
    faster = (
        f"{result['faster']:.3g}×"
        if bound is None
        else f"{result['faster']:.3f}× (FLOPs allow {bound:.3f}×)"
    )
    return [
        f"{result['benchmark']} {result['case']}",
        f"{result['ours_ms']:.4g}",
        f"{result['theirs_ms']:.4g}",
        f"{result['ratio']:.3g} [{low:.3g}, {high:.3g}]",
        faster,
        *_loop_cells(result),
        result["target"] + check,
        f"{result['ours_per_s']:,.0f} {result['unit']}",
        f"{result['ceiling_ms']:.3g}",
        f"{result['of_ceiling']:.0%}",
        f"{result['mfu']:.0%}",
        "–" if None in peaks else " / ".join(f"{peak / 1e6:,.0f}" for peak in peaks),
    ]


def _loop_cells(result: Result) -> tuple[str, str]:
    """Return the time of the reduce-overhead loop, and how much faster ours is."""
    if "loop_ms" not in result:
        return "–", "–"
    return f"{result['loop_ms']:.4g}", f"{result['faster_than_loop']:.3g}×"

"""Run benchmarks one after another; what cannot run or goes wrong is said, and the rest goes on."""

import importlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from frostlab.bench.catalogue import Benchmark, NotAvailable, Scale
from frostlab.bench.ceilings import Ceilings, measure_ceilings
from frostlab.bench.checking import tidy
from frostlab.bench.measuring import Result
from frostlab.bench.setting import Setting
from frostlab.errors import FrostlabError
from frostlab.models.pretrained import first_line
from frostlab.records.environment import environment


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
    reasons = {b.name: b.missing(scale, data_dir, device.type == "cuda") for b in benchmarks}
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
    module, _, name = benchmark.function.partition(":")
    found: Callable[[Setting], Iterator[Result]] = getattr(
        importlib.import_module(f"frostlab.bench.{module}"), name
    )
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
    cuda = device.type == "cuda"
    host = f"{found['host']['cpu']}, {found['host']['torch_threads']} threads"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else host,
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

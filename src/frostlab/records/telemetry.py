"""Telemetry: samples of GPU load, read through NVML, and of host load during a run."""

import importlib
import os
import resource
import statistics
import sys
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Self

import psutil  # type: ignore[import-untyped]

from frostlab.errors import BadInput

_VALUES_KEPT = 8192  # fewer values than this are kept per quantity, to compute its median


class NoGpu(Exception):
    """No GPU can be queried; the message gives the reason."""


def wanted_gpu(device: str) -> tuple[int | str, ...]:
    """Return the NVML indices or UUIDs that torch's device `cuda:N` can have.

    Call this on the training thread, because torch's current device belongs to a thread.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda":
        raise NoGpu(f"no CUDA device: the run is on {device}")
    if number and not number.isdecimal():
        raise NoGpu(f"no CUDA device: {device!r} is not a device name")
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        index = int(number) if number else torch.cuda.current_device()
        # CUDA may number GPUs by speed, NVML by bus position; both know the UUID.
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        if uuid is not None:
            return (f"GPU-{uuid}", f"MIG-{uuid}")
    index = int(number or 0)
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return (index,)
    visible: list[int | str] = []
    for word in (word.strip() for word in listed.split(",")):
        if not ((word.isdecimal() and len(word) < 10) or word.startswith(("GPU-", "MIG-"))):
            break  # as in CUDA, entries after an invalid one are not visible
        visible.append(int(word) if word.isdecimal() else word)
    if index >= len(visible):
        raise NoGpu(f"no CUDA device {index} in CUDA_VISIBLE_DEVICES={listed}")
    return (visible[index],)


class Gpu:
    """One GPU, read through NVML; a query that fails raises NVMLError."""

    def __init__(self, wanted: tuple[int | str, ...]) -> None:
        """Open the first GPU of `wanted` (indices or UUIDs) that NVML knows."""
        try:
            self.nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            raise NoGpu("nvidia-ml-py is not installed") from None
        try:
            self.nvml.nvmlInit()
        except self.nvml.NVMLError as error:
            raise NoGpu(f"NVML does not answer: {error}") from None
        handles = [handle for choice in wanted if (handle := self._handle(choice)) is not None]
        if not handles:
            raise NoGpu(f"NVML knows no GPU {wanted[0]}")
        self._device = handles[0]

    def _handle(self, choice: int | str) -> Any:
        nvml = self.nvml
        try:
            if isinstance(choice, int):
                return nvml.nvmlDeviceGetHandleByIndex(choice)
            if not choice.startswith("GPU-"):
                return nvml.nvmlDeviceGetHandleByUUID(choice)
            handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
            # CUDA accepts a prefix of a UUID if it matches only one GPU.
            matches = [h for h in handles if nvml.nvmlDeviceGetUUID(h).startswith(choice)]
            return matches[0] if len(matches) == 1 else None
        except nvml.NVMLError:
            return None

    def ask(self, question: str, *arguments: Any) -> Any:
        """Call the NVML function of this name for this GPU."""
        return getattr(self.nvml, question)(self._device, *arguments)

    def clock(self, domain: str = "SM", question: str = "nvmlDeviceGetClockInfo") -> float:
        """Return the clock of a domain, SM or MEM, in MHz."""
        return float(self.ask(question, getattr(self.nvml, f"NVML_CLOCK_{domain}")))

    def power(self) -> float:
        """Return the power in watts."""
        return float(self.ask("nvmlDeviceGetPowerUsage")) / 1000

    def temperature(self) -> float:
        """Return the temperature in degrees Celsius."""
        old = hasattr(self.nvml, "nvmlDeviceGetTemperature")  # deprecated: CUDA 14 removes it
        name = "nvmlDeviceGetTemperature" if old else "nvmlDeviceGetTemperatureV"
        return float(self.ask(name, self.nvml.NVML_TEMPERATURE_GPU))

    def utilisation(self) -> float:
        """Return the percentage of NVML's last sample period in which a kernel ran."""
        return float(self.ask("nvmlDeviceGetUtilizationRates").gpu)


class _Series:
    """Statistics of one quantity; the median is computed from a subset of evenly spaced values."""

    def __init__(self) -> None:
        self.n, self._sum, self._min, self._max = 0, 0.0, float("inf"), float("-inf")
        self._kept, self._stride = array("d"), 1

    def add(self, value: float) -> None:
        self.n += 1
        self._sum += value
        self._min, self._max = min(self._min, value), max(self._max, value)
        if self.n % self._stride == 0:
            self._kept.append(value)
            if len(self._kept) == _VALUES_KEPT:
                self._kept, self._stride = self._kept[1::2], self._stride * 2

    def summary(self) -> dict[str, Any]:
        if not self.n:
            return {"n": 0, "mean": None, "min": None, "p50": None, "max": None}
        mean, p50 = self._sum / self.n, statistics.median(self._kept)
        return {"n": self.n, "mean": mean, "min": self._min, "p50": p50, "max": self._max}


class Telemetry:
    """Context manager that samples GPU and host load on a thread; no error there stops the run."""

    def __init__(self, device: str = "cpu", interval: float = 1.0) -> None:
        if not interval > 0:
            raise BadInput(f"Telemetry: interval {interval} is not above 0 seconds; try 1.0")
        self._device, self._interval = device, interval
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._process = psutil.Process()
        self._read: dict[str, Callable[[], float]] = {
            "load_1min": lambda: os.getloadavg()[0],
            "process_rss_bytes": lambda: float(self._process.memory_info().rss),
        }
        self._percentages: dict[str, Callable[[], float]] = {  # since the previous reading
            "process_cpu_percent": lambda: float(self._process.cpu_percent(None)),
            "system_cpu_percent": lambda: float(psutil.cpu_percent(None)),
        }
        self._series = {name: _Series() for name in (*self._read, *self._percentages)}
        self._samples, self._errors, self._cost = 0, 0, 0.0
        self._last_error: str | None = None
        self._wanted: tuple[int | str, ...] = ()
        self._gpu_reason: str | None = None
        self._power: tuple[float, float] | None = None  # time and watts of the last reading
        self._joules, self._began, self._ended = 0.0, time.monotonic(), float("inf")

    def __enter__(self) -> Self:
        try:
            self._wanted = wanted_gpu(self._device)
        except Exception as error:
            self._gpu_reason = str(error)
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(1.0)
        self._ended = time.monotonic()
        if self._thread.is_alive():
            self._fail("sampling", "it was still waiting for an answer 1 s after the end")

    def summary(self) -> dict[str, Any]:
        """Summarise the samples so far in plain values, with the keys of `TelemetrySummary`."""
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        with self._lock:
            series = {name: series.summary() for name, series in self._series.items()}
            return {
                "interval_seconds": self._interval,
                "seconds": min(time.monotonic(), self._ended) - self._began,
                "samples": self._samples,
                "errors": self._errors,
                "last_error": self._last_error,
                "gpu_reason": self._gpu_reason,
                "gpu_energy_joules": None if self._power is None else self._joules,
                # the kernel updates its peak late, so a sample may be higher
                "host_peak_bytes": int(max(peak, series["process_rss_bytes"]["max"] or 0)),
                "sampling_cpu_seconds": self._cost,
                **series,
            }

    def _run(self) -> None:
        if self._wanted:
            self._open_gpu()
        self._sample(self._percentages, keep=False)  # the first one has no previous reading
        percentages_read, last = time.monotonic(), False
        while True:
            self._sample(self._read)
            # a percentage over a much shorter time would be noise
            if (now := time.monotonic()) - percentages_read >= self._interval / 2:
                self._sample(self._percentages)
                percentages_read = now
            with self._lock:
                self._samples += 1
                self._cost = time.thread_time()  # this thread's total, including opening NVML
            if last:
                return
            last = self._stop.wait(self._interval)

    def _open_gpu(self) -> None:
        try:
            gpu = Gpu(self._wanted)
        except Exception as error:
            self._gpu_reason = str(error) or type(error).__name__
            return
        readers: dict[str, Callable[[], float]] = {
            "gpu_utilisation_percent": gpu.utilisation,
            "gpu_power_watts": lambda: self._add_energy(gpu.power()),
            "gpu_temperature_c": gpu.temperature,
            "gpu_sm_clock_mhz": gpu.clock,
        }
        with self._lock:
            self._series |= {name: _Series() for name in readers}
            self._read |= readers

    def _add_energy(self, watts: float) -> float:
        """Add the energy since the last reading, by the trapezoidal rule; return the power."""
        now = time.monotonic()
        since, before = self._power or (now, watts)
        self._joules += (now - since) * (before + watts) / 2
        self._power = (now, watts)
        return watts

    def _sample(self, readers: dict[str, Callable[[], float]], keep: bool = True) -> None:
        for name, read in list(readers.items()):
            try:
                value = read()
            except Exception as error:
                self._fail(name, str(error) or type(error).__name__)
                if type(error).__name__ == "NVMLError_NotSupported":
                    del readers[name]  # it will fail every time: count it once
                continue
            if keep:
                with self._lock:
                    self._series[name].add(value)

    def _fail(self, name: str, reason: str) -> None:
        with self._lock:
            self._errors += 1
            self._last_error = f"{name}: {reason}"


_BUSY = 0.25  # number of cores that other processes may keep busy without a note


@dataclass(frozen=True)
class Watched:
    """The load that other processes put on the machine, and a summary of the telemetry."""

    cores: int  # number of the machine's logical cores
    cores_of_others: float | None  # mean number of cores busy with other processes; None: unknown
    # number of other processes on the GPU, the larger of the counts at the beginning and the end;
    # None: no GPU, or NVML does not answer
    others_on_gpu: int | None
    telemetry: dict[str, Any]

    def notes(self) -> list[str]:
        """Describe the load of other processes; empty if it was small."""
        notes = []
        if self.cores_of_others is not None and self.cores_of_others > _BUSY:
            notes.append(
                f"other processes kept {self.cores_of_others:.1f} of {self.cores} cores busy"
            )
        if self.others_on_gpu:
            notes.append(f"other processes on the GPU: {self.others_on_gpu}")
        return notes

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


class Watching:
    """Context manager that measures the load of other processes while it is open."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._telemetry = Telemetry(self._device)
        self._on_gpu: list[int | None] = []

    def __enter__(self) -> Self:
        self._on_gpu.append(others_on_gpu(self._device))
        self._telemetry.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._telemetry.__exit__(*error)
        self._on_gpu.append(others_on_gpu(self._device))

    def watched(self) -> Watched:
        """Return the measured load."""
        telemetry = self._telemetry.summary()
        cores = psutil.cpu_count() or 1
        ours, total = (telemetry[f"{key}_cpu_percent"]["mean"] for key in ("process", "system"))
        others = None
        if ours is not None and total is not None:
            others = max(0.0, (total * cores - ours) / 100)
        counts = [count for count in self._on_gpu if count is not None]
        return Watched(cores, others, max(counts, default=None), telemetry)


def others_on_gpu(device: str) -> int | None:
    """Return the number of other processes that compute on the GPU, or None if it is unknown.

    The count is reduced by one for this process, which cannot be found by its id: in a container,
    NVML reports another id for it.
    """
    try:
        gpu = Gpu(wanted_gpu(device))
        pids = {p.pid for p in gpu.ask("nvmlDeviceGetComputeRunningProcesses")}
    except Exception:  # drivers raise many types of errors
        return None
    return max(0, len(pids) - 1)

"""Telemetry adds up, ends at once, and outlives whatever it asks."""

import itertools
import subprocess
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import psutil  # type: ignore[import-untyped]
import pytest

from frostlab.errors import BadInput
from frostlab.records import telemetry as module
from frostlab.records.telemetry import Telemetry

HOST = ("load_1min", "process_rss_bytes", "process_cpu_percent", "system_cpu_percent")


class NVMLError_NotSupported(Exception):
    pass


class FakeNvml(ModuleType):
    """pynvml with one GPU whose power rises by 10 W a sample, and that says no clock."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1
    NVMLError = Exception
    asked = 0

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=97)

    def nvmlDeviceGetTemperatureV(self, handle: int, sensor: int) -> int:  # as after CUDA 14
        return 61

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        raise NVMLError_NotSupported("Not Supported")

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self.asked += 1
        if self.asked == 3:
            raise RuntimeError("GPU is lost")
        return 10_000 * self.asked


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_the_host_is_sampled() -> None:
    with Telemetry(interval=0.05) as telemetry:
        began = time.monotonic()
        while time.monotonic() - began < 0.6:  # busy
            sum(range(1000))
    found = telemetry.summary()
    assert found["errors"] == 0
    assert found["gpu_reason"] == "no CUDA device: the run is on cpu"
    assert found["gpu_energy_joules"] is None
    assert 0.6 <= found["seconds"] < 5
    assert found["samples"] >= 4
    for name in HOST:
        assert 1 <= found[name]["n"] <= found["samples"]
        assert found[name]["min"] <= found[name]["p50"] <= found[name]["max"]
        assert found[name]["min"] <= found[name]["mean"] <= found[name]["max"]
    assert found["process_rss_bytes"]["n"] == found["load_1min"]["n"] == found["samples"]
    assert found["process_cpu_percent"]["max"] > 10
    rss = psutil.Process().memory_info().rss
    assert 0.5 * rss < found["process_rss_bytes"]["p50"] <= found["host_peak_bytes"]
    assert 0 < found["sampling_cpu_seconds"] < 0.5
    assert telemetry.summary() == found  # nothing goes on


def test_it_ends_at_once_and_still_has_both_ends() -> None:
    before = set(threading.enumerate())  # other tests' threads may end meanwhile
    began = time.monotonic()
    with Telemetry(interval=60) as telemetry:
        (sampler,) = set(threading.enumerate()) - before
    assert time.monotonic() - began < 1
    assert not sampler.is_alive()
    found = telemetry.summary()
    assert found["samples"] == 2
    assert found["process_cpu_percent"] == dict.fromkeys(("mean", "min", "p50", "max")) | {"n": 0}


def test_the_gpu_is_sampled_and_a_failure_is_counted(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments: list[float] = []

    class Steady(Telemetry):
        """One whose power is asked at known moments."""

        def _add_energy(self, watts: float) -> float:
            moments.append(time.monotonic())
            return super()._add_energy(watts)

    with Steady("cuda:0", interval=0.05) as telemetry:
        time.sleep(0.4)
    found = telemetry.summary()
    count = found["samples"]
    assert count >= 4
    assert found["gpu_reason"] is None
    assert found["gpu_utilisation_percent"]["mean"] == 97
    assert found["gpu_temperature_c"]["n"] == count
    assert found["gpu_sm_clock_mhz"]["n"] == 0
    assert found["errors"] == 2  # one lost, and one clock that is never asked again
    assert found["last_error"] == "gpu_power_watts: GPU is lost"
    power = found["gpu_power_watts"]
    assert (power["n"], power["min"], power["max"]) == (count - 1, 10, 10 * count)
    watts = [10.0 * i for i in range(1, count + 1) if i != 3]
    joules = sum(
        (after - before) * (watts[i] + watts[i + 1]) / 2
        for i, (before, after) in enumerate(itertools.pairwise(moments))
    )
    assert found["gpu_energy_joules"] == pytest.approx(joules, rel=0.02)
    assert joules > 0


def test_what_hangs_does_not_hold_up_the_run(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(nvml, "nvmlInit", lambda: release.wait(20))
    began = time.monotonic()
    with Telemetry("cuda") as telemetry:
        pass
    assert time.monotonic() - began < 3
    found = telemetry.summary()
    release.set()
    assert (found["errors"], found["samples"]) == (1, 0)
    assert found["last_error"] == "sampling: it was still waiting for an answer 1 s after the end"


def test_an_error_of_the_run_passes_and_sampling_ends() -> None:
    earlier = set(threading.enumerate())  # a thread of another test may not have ended yet

    def sampling() -> bool:
        return "telemetry" in {thread.name for thread in set(threading.enumerate()) - earlier}

    with Telemetry():
        assert sampling()
    with pytest.raises(KeyError), Telemetry():
        raise KeyError("the run's own")
    assert not sampling()


def test_a_long_run_keeps_few_values_and_an_honest_median(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_VALUES_KEPT", 64)
    series = module._Series()
    for value in range(10_000):
        series.add(float(value))
        assert len(series._kept) < 64
    found = series.summary()
    assert (found["n"], found["mean"], found["min"], found["max"]) == (10_000, 4999.5, 0, 9999)
    assert found["p50"] == pytest.approx(5000, abs=300)


@pytest.mark.parametrize("interval", [0, -1.0, float("nan")])
def test_an_interval_that_is_none_is_refused(interval: float) -> None:
    with pytest.raises(BadInput, match=f"interval {interval} is not above 0 seconds; try 1.0"):
        Telemetry(interval=interval)


def test_torch_is_not_imported_for_it() -> None:
    code = "import sys; from frostlab.records.telemetry import Telemetry\n"
    code += "with Telemetry('cuda:0', 0.1): pass\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_others_on_the_gpu_are_all_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container our process has another id there, so our own id is not searched for."""
    assert module.others_on_gpu("cpu") is None

    class FakeGpu:
        def __init__(self, wanted: object) -> None:
            pass

        def ask(self, question: str) -> list[SimpleNamespace]:
            assert question == "nvmlDeviceGetComputeRunningProcesses"
            return [SimpleNamespace(pid=pid) for pid in pids]

    monkeypatch.setattr(module, "Gpu", FakeGpu)
    monkeypatch.setattr(module, "wanted_gpu", lambda device: (0,))
    pids: list[int] = []
    assert module.others_on_gpu("cuda:0") == 0
    pids.append(7)
    assert module.others_on_gpu("cuda:0") == 0
    pids += [8, 8]
    assert module.others_on_gpu("cuda:0") == 1

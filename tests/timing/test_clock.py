"""Clocks: phases and overlap of a run, blocks on the device, waiting for a device."""

import subprocess
import sys
import time

import pytest
import torch

from frostlab.devices import synchronize
from frostlab.timing import clock
from frostlab.timing.clock import BlockClock, BlockSeconds, Stopwatch, WallClock
from frostlab.training.step_log import clocks, wall_record

CPU = torch.device("cpu")


def test_a_process_knows_when_it_began() -> None:
    program = (
        "import time; time.sleep(0.3)\n"
        "from frostlab.timing.clock import WallClock, process_began\n"
        "clock = WallClock(process_began()); time.sleep(0.1); clock.end_part('a')\n"
        "print(clock.seconds['starting'], clock.seconds['a'], clock.total)"
    )
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    taken = time.perf_counter() - began
    starting, part, total = map(float, done.stdout.split())
    assert 0.3 <= starting <= total - part <= taken
    assert part >= 0.1


@pytest.mark.parametrize(("device", "overlaps"), [("cpu", False), ("mps", True)])
def test_host_work_that_overlaps_the_devices_counts_as_training(
    device: str, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.mps, "synchronize", lambda: None)
    watch = Stopwatch(torch.device(device))
    watch.start()
    with watch.phase("data", device=True):
        now[0] += 1.0
    for _ in range(10):  # batches are made while a GPU is busy
        with watch.phase("data"):
            now[0] += 0.25
        now[0] += 0.5
    with watch.phase("validation", device=True):
        now[0] += 4.0
    watch.stop()
    assert watch.training_seconds() == 5.0 + 2.5 * overlaps
    seconds = clocks([], watch.seconds, wall_record(WallClock(), watch))
    assert seconds.total_seconds == 12.5
    assert seconds.train_seconds == 5.0 + 2.5 * overlaps
    assert seconds.data_seconds == 3.5
    assert seconds.data_overlapped_seconds == 2.5 * overlaps


def test_synchronize_waits_for_every_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(str(device)))
    for name in ("cpu", "mps", "cuda:1"):
        synchronize(torch.device(name))
    assert waited == ["mps", "cuda:1"]


def test_a_block_clock_counts_the_hosts_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([10.0, 10.25])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(moments))
    assert BlockClock(CPU).time(lambda: None) == BlockSeconds(0.25, 0.25)


def test_a_block_clock_on_cuda_times_between_events_on_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            calls.append(f"record on {stream}")

        def elapsed_time(self, other: "Event") -> float:
            calls.append("read")
            return 40.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "its stream")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    moments = iter([10.0, 10.25])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(moments))
    spent = BlockClock(torch.device("cuda", 0)).time(lambda: calls.append("work"))
    assert spent == BlockSeconds(0.04, 0.25)
    record = "record on its stream"
    assert calls == ["wait", record, "work", record, "wait", "read"]

"""Devices of a queue: names, others that use them, how many runs share one. NVML is pretended."""

import os
import types
from typing import Any

import pytest

import frostlab as fl
from frostlab.matrix import mps, slots
from frostlab.matrix.places import Places
from frostlab.matrix.slots import (
    IdleDevices,
    advised,
    described,
    free_devices,
    make_slots,
    parse_devices,
    parse_per_device,
    taken_by,
)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """Two GPUs of 10 GB; returns the processes that use each."""
    users: dict[int, list[int]] = {0: [], 1: []}

    class Fake:
        nvml = types.SimpleNamespace(nvmlDeviceGetCount=lambda: 2)

        def __init__(self, wanted: tuple[int | str, ...]) -> None:
            self.index = int(wanted[0])

        def ask(self, question: str) -> Any:
            if "Memory" in question:
                used = 10**9 * len(users[self.index])
                return types.SimpleNamespace(used=used, total=10**10)
            return [types.SimpleNamespace(pid=pid) for pid in users[self.index]]

        def utilisation(self) -> float:
            return 0.0

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(slots, "Gpu", Fake)
    return users


def test_devices_are_named_and_checked(two_gpus: dict[int, list[int]]) -> None:
    assert parse_devices(None) == ["cuda:0", "cuda:1"]
    assert parse_devices("cuda, cpu") == ["cuda:0", "cpu"]
    with pytest.raises(fl.BadInput, match=r"'cuda:2' is not a device .*did you mean `cuda:1`"):
        parse_devices("cuda:2")
    with pytest.raises(fl.BadInput, match="names a device twice; use --per-device"):
        parse_devices("cuda:1,cuda:1")


@pytest.mark.parametrize("visible", ["1,-1,0", "1,,0", "1,none,0"])
def test_gpus_after_an_invalid_entry_are_not_visible(
    two_gpus: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert parse_devices(None) == ["cuda:0"]
    with pytest.raises(fl.BadInput, match="'cuda:1' is not a device of this machine"):
        parse_devices("cuda:1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert parse_devices(None) == ["cuda:0", "cuda:1"]


def test_without_a_gpu_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "count_gpus", lambda: 0)
    assert parse_devices(None) == ["cpu"]
    with pytest.raises(
        fl.BadInput, match="'cuda:0' is not a device of this machine; there are cpu"
    ):
        parse_devices("cuda:0")


def test_devices_that_others_use_are_left_alone(two_gpus: dict[int, list[int]]) -> None:
    both = ["cuda:0", "cuda:1"]
    assert free_devices(both, chosen=False, when_idle=False) == both
    two_gpus[0] = [1]  # process 1 is not ours
    assert free_devices(both, chosen=False, when_idle=False) == ["cuda:1"]
    with pytest.raises(
        fl.BadInput, match=r"cuda:0 is in use \(by process 1, 1.0 GB\); wait .*idle"
    ):
        free_devices(both, chosen=True, when_idle=False)
    two_gpus[0] = [os.getpid()]
    assert free_devices(both, chosen=True, when_idle=False) == both
    two_gpus[0] = two_gpus[1] = [1]
    with pytest.raises(fl.BadInput, match="every GPU is in use"):
        free_devices(both, chosen=False, when_idle=False)
    assert free_devices(both, chosen=True, when_idle=True) == both


def test_ids_of_workers_outside_a_container_do_not_block_their_own_matrix(
    two_gpus: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container, NVML may report ids of another namespace: no such process is here."""
    two_gpus[0] = [2**30]
    assert taken_by("cuda:0") == "by process 1073741824, 1.0 GB"
    monkeypatch.setattr(slots, "_has_children", lambda: True)
    assert taken_by("cuda:0") is None
    two_gpus[0] = [2**30, 1]
    assert taken_by("cuda:0") == "by process 1, 2.0 GB"


def test_idle_devices_are_asked_again(
    two_gpus: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus[0] = [1]
    idle = IdleDevices()
    assert (idle("cuda:0"), idle("cuda:1"), idle("cpu")) == (False, True, True)
    two_gpus[0] = []
    assert not idle("cuda:0"), "not asked at every turn"
    monkeypatch.setattr(slots, "_IDLE_SECONDS", 0.0)
    assert idle("cuda:0")


def test_a_worker_sees_only_its_own_device(
    two_gpus: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    made = make_slots(["cuda:1", "cpu"], 3, mps={"CUDA_MPS_PIPE_DIRECTORY": "x"})
    assert [slot.at_once for slot in made] == [3, 3]
    assert dict(made[0].variables) == {
        "CUDA_VISIBLE_DEVICES": "1", "CUDA_MPS_PIPE_DIRECTORY": "x", "OMP_NUM_THREADS": "5",
    }  # fmt: skip
    assert dict(made[1].variables) == {"CUDA_VISIBLE_DEVICES": ""}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert dict(make_slots(["cuda:1"], 1)[0].variables) == {"CUDA_VISIBLE_DEVICES": "5"}
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert dict(make_slots(["cuda:1"], 2)[0].variables) == {"CUDA_VISIBLE_DEVICES": "5"}


def test_auto_fits_memory_and_cores(
    two_gpus: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    one, several, more = slots._TRAINING, slots._TRAINING_WITH_MPS, slots._STARTING
    assert advised("cuda:0", None, with_mps=False) == (one + more, one)
    assert advised("cuda:0", None, with_mps=True) == (several + more, several)
    assert advised("cuda:0", 3 * 10**9, with_mps=True) == (3, None)  # 9 of 10 GB
    assert advised("cuda:0", 3 * 10**10, with_mps=True) == (1, None)
    assert advised("cpu", None, with_mps=True) == (1, None)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert advised("cuda:0", None, with_mps=False) == (2, one)
    (slot,) = make_slots(["cuda:0"], None)
    assert (slot.at_once, slot.training) == (2, one)
    assert described([slot]) == "cuda:0 (2 runs at once, 1 of them training)"


@pytest.mark.parametrize("text", ["0", "-1", "257", "1.5", "two", "١", ""])
def test_a_wrong_number_per_device_is_refused(text: str) -> None:
    with pytest.raises(fl.BadInput, match="should be auto or a whole number from 1 to 256"):
        parse_per_device(text)
    with pytest.raises(fl.BadInput, match="--per-device"):
        Places("cpu", text).check()


def test_the_refusal_of_mps_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with mps.multi_process_service() as service:
        assert service.refusal == "nvidia-cuda-mps-control is not installed"
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text("#!/bin/sh\necho 'no permission' >&2\nexit 1\n")
    control.chmod(0o755)
    with mps.multi_process_service() as service:
        assert service.refusal == "no permission"
    log = tmp_path / "asked"
    control.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\nwhile read line; do echo $line >> {log}; done\n'
    )
    with mps.multi_process_service() as service:
        assert service.refusal is None
        assert set(service.variables) == {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"}
    assert log.read_text().split() == ["-d", "get_server_list", "quit"]

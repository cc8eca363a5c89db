"""The choice of where runs train: on this machine's devices, on a Ray cluster or through Slurm.

`executor_in` returns the executor for a choice: the object that starts runs there.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from frostlab.errors import BadInput
from frostlab.matrix.mps import multi_process_service, used_by_cuda
from frostlab.matrix.queue import Executor
from frostlab.matrix.slots import (
    IdleDevices,
    described,
    free_devices,
    make_slots,
    parse_devices,
    parse_per_device,
)
from frostlab.matrix.workers import LocalWorkers


@dataclass(frozen=True)
class Places:
    """The user's choice of places; the default is one run at a time on every free GPU."""

    devices: str | None = None  # such as cuda:0,cuda:1; None: every free GPU, or else the CPU
    per_device: str = "1"  # runs at the same time on one device, or auto
    when_idle: bool = False  # wait until no other program uses a device
    ray: str | None = None  # address of a cluster's head
    slurm: str | None = None  # options of sbatch, such as partition=gpu,time=4:00:00

    def check(self) -> None:
        """Refuse contradictory or impossible choices, before anything is started."""
        parse_per_device(self.per_device)
        clusters = [name for name in ("ray", "slurm") if getattr(self, name) is not None]
        if len(clusters) > 1:
            raise BadInput("--ray and --slurm exclude each other")
        if clusters and replace(self, ray=None, slurm=None) != Places():
            raise BadInput(
                f"--{clusters[0]} chooses the devices itself, so --devices, --per-device and "
                "--when-idle have no meaning with it"
            )
        if self.ray is not None:
            from frostlab.matrix.ray_tasks import check_address

            check_address(self.ray)
            return
        if self.slurm is not None:
            from frostlab.matrix.slurm_jobs import check_options

            check_options(self.slurm)
            return
        names = parse_devices(self.devices)
        free_devices(names, self.devices is not None, self.when_idle)

    def for_one_run(self) -> "Places":
        """Return the choice for runs that are timed one at a time: the first device alone."""
        return Places(self.first_device())

    def first_device(self) -> str:
        """Return the first device that was chosen."""
        return parse_devices(self.devices)[0]


@dataclass(frozen=True)
class Opened:
    """An executor, and facts about it for the user."""

    executor: Executor
    about: str  # a description, such as cuda:0, cuda:1
    at_once: int  # how many runs can train at the same time


@contextmanager
def executor_in(
    places: Places,
    data_dir: Path | None,
    logs: Path,
    *,
    say: Callable[[str], None] = lambda line: None,
    memory: int | None = None,
) -> Iterator[Opened]:
    """Open the executor of a choice of places.

    Args:
        logs: a folder for the output of every run; Slurm's files are next to it.
        memory: bytes of GPU memory that the largest run needs, if that is known; if `per_device`
            is auto, it limits the number of runs that share a device.
    """
    if places.ray is not None:
        from frostlab.matrix.ray_tasks import RayTasks

        cluster = RayTasks(places.ray, data_dir, logs)
        yield Opened(cluster, f"Ray at {places.ray}", cluster.free())
        return
    if places.slurm is not None:
        from frostlab.matrix.slurm_jobs import SlurmJobs

        jobs = SlurmJobs(places.slurm, data_dir, logs, say)
        yield Opened(jobs, f"Slurm ({places.slurm})", jobs.free())
        return
    chosen = places.devices is not None
    names = free_devices(parse_devices(places.devices), chosen, places.when_idle)
    per_device = parse_per_device(places.per_device)
    with ExitStack() as stack:
        mps = None
        if per_device is None and any(name != "cpu" for name in names):
            service = stack.enter_context(multi_process_service())
            refusal = service.refusal or used_by_cuda(service.variables)
            mps = None if refusal else service.variables
            say(f"CUDA MPS is not used: {refusal}" if refusal else "runs share GPUs with CUDA MPS")
        slots = make_slots(names, per_device, memory=memory, mps=mps)
        usable = IdleDevices() if places.when_idle else _any_device
        at_once = sum(slot.at_once for slot in slots)
        yield Opened(LocalWorkers(slots, data_dir, logs, usable), described(slots), at_once)


def _any_device(device: str) -> bool:
    return True

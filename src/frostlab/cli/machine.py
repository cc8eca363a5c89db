"""`frostlab check`: what this machine has for training, and what would stop a run."""

import importlib.metadata
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import typer

from frostlab.cli.options import AsJson, RunsFolder, echo, width_of
from frostlab.errors import BadInput, first_line
from frostlab.storage import cache_folder
from frostlab.text import columns, plain, size_text, wrapped

# What needs the packages of an extra; `pip install 'frostlab[NAME]'` installs them.
EXTRAS = {
    "data": "Parquet files, data sets of the Hugging Face hub, data frames",
    "eeg": "EEG files and scalp maps",
    "gpu": "load, temperature and memory of GPUs",
    "peft": "LoRA and other adapters",
    "ray": "matrix --ray, compare --ray",
    "report": "report, figures",
    "slurm": "matrix --slurm, compare --slurm",
    "tensorboard": "run --tensorboard",
}
_SLURM_SECONDS = 5.0  # time for Slurm to answer
_LITTLE_DISK = 1 << 30  # bytes; the checkpoints of one BERT-base take more


@dataclass(frozen=True)
class Device:
    """A device that runs can use."""

    name: str  # such as cuda:0
    model: str
    memory_total: int | None  # bytes
    memory_free: int | None
    used_by: str | None = None  # which other programs use it
    driver: str | None = None


@dataclass(frozen=True)
class Package:
    """A package that frostlab needs; the version is None if it is not installed."""

    name: str
    version: str | None
    wanted: str  # such as >=2.11
    fits: bool


@dataclass(frozen=True)
class Extra:
    """Packages that only some commands need."""

    name: str
    purpose: str
    packages: list[Package]

    @property
    def installed(self) -> bool:
        """Whether every package is installed in a version that fits."""
        return all(package.fits for package in self.packages)


@dataclass(frozen=True)
class Folder:
    """A folder that runs write to."""

    purpose: str
    path: str
    free: int | None  # bytes
    problem: str | None  # why it cannot be written


@dataclass(frozen=True)
class Machine:
    """What this machine has, and the problems that would stop a run.

    If a package is missing that frostlab needs, only the packages are known.
    """

    host: str = "unknown"
    memory_total: int | None = None
    memory_free: int | None = None
    devices: list[Device] = field(default_factory=list)
    steps: str = "unknown"  # how training steps are taken here
    queues: dict[str, str] = field(default_factory=dict)  # MPS, Slurm → "available", or why not
    packages: list[Package] = field(default_factory=list)
    extras: list[Extra] = field(default_factory=list)
    folders: list[Folder] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON values."""
        values = asdict(self)
        for values_of, extra in zip(values["extras"], self.extras, strict=True):
            values_of["installed"] = extra.installed
        return values


def look(runs: Path) -> Machine:
    """Look at this machine; `runs` is the folder in which runs would be stored."""
    problems: list[str] = []
    packages, extras = _packages(problems)
    if any(package.version is None for package in packages):
        return Machine(packages=packages, extras=extras, problems=problems)
    from frostlab.records.environment import environment, machine_line

    steps = _steps(problems)  # imports torch, so that what follows knows its version
    found = environment("cpu")
    folders, devices = list(_folders(runs, problems)), list(_devices())
    return Machine(
        machine_line(found), found["host"]["memory_bytes"],
        found["host"]["memory_available_bytes"], devices, steps, _queues(bool(devices)), packages,
        extras, folders, problems,
    )  # fmt: skip


def _packages(problems: list[str]) -> tuple[list[Package], list[Extra]]:
    """Return the packages that frostlab's own metadata asks for."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        problems.append("packaging is not installed: pip install frostlab")
        return [], []
    try:
        texts = importlib.metadata.requires("frostlab") or []
    except importlib.metadata.PackageNotFoundError:
        problems.append("frostlab is not installed as a package, so its needs are not known")
        return [], []
    requirements = [Requirement(text) for text in texts]
    packages = [_package(r) for r in requirements if r.marker is None or _asked(r, "")]
    for package in packages:
        if package.version is None:
            problems.append(f"{package.name} is not installed: pip install frostlab")
        elif not package.fits:
            problems.append(
                f"{package.name} {package.version} is installed, but frostlab needs "
                f"{package.name}{package.wanted}"
            )
    extras = []
    for name, purpose in EXTRAS.items():
        needed = [r for r in requirements if r.marker is not None and not _asked(r, "")]
        extras.append(Extra(name, purpose, [_package(r) for r in needed if _asked(r, name)]))
    return packages, extras


def _asked(requirement: Any, extra: str) -> bool:
    """Return whether a requirement holds on this machine if this extra is asked for."""
    return bool(requirement.marker.evaluate({"extra": extra}))


def _package(requirement: Any) -> Package:
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return Package(requirement.name, None, str(requirement.specifier), False)
    fits = requirement.specifier.contains(version, prereleases=True)
    return Package(requirement.name, version, str(requirement.specifier), fits)


def _steps(problems: list[str]) -> str:
    """Say how training steps are taken on the first device, which is the fastest way it allows."""
    try:
        import torch

        from frostlab import devices
    except Exception as error:  # a broken installation can raise anything
        problems.append(f"torch cannot be imported: {first_line(error)}")
        return "none"
    device = devices.first_gpu()
    if not devices.captures_graphs(device):
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
        if os.path.exists("/dev/nvidiactl") and not hidden:
            built = torch.version.cuda
            why = f"perhaps the driver is too old for CUDA {built}"
            why = why if built else "it is built without CUDA"
            problems.append(f"torch {torch.__version__} cannot use this machine's GPU: {why}")
        return "eager, float32"
    kernels = "with" if devices.runs_triton(device) else "without"
    return f"captured in CUDA graphs, bf16, {kernels} Triton kernels"


def _devices() -> Iterator[Device]:
    from frostlab.matrix.slots import count_gpus, gpu_use, taken_by
    from frostlab.records.environment import environment

    for number in range(count_gpus()):
        name = f"cuda:{number}"
        found = environment(name)
        facts: Mapping[str, Any] = found["gpu"] or {}
        use = gpu_use(name)
        free = None if use is None else use.memory_total - use.memory_used
        yield Device(
            name, facts.get("name") or found["device_name"] or "a GPU",
            facts.get("memory_total_bytes"), free, taken_by(name), facts.get("driver"),
        )  # fmt: skip


def _queues(gpus: bool) -> dict[str, str]:
    """Say whether runs can share a GPU through CUDA MPS, and whether Slurm is here."""
    mps = "no GPU"
    if gpus:
        from frostlab.matrix.mps import multi_process_service

        with multi_process_service() as service:
            mps = service.refusal or "available"
    return {"CUDA MPS": mps, "Slurm": _slurm()}


def _slurm() -> str:
    for name in ("sbatch", "squeue", "sinfo"):
        if shutil.which(name) is None:
            return f"{name} is not installed"
    try:
        done = subprocess.run(
            ["sinfo", "--noheader"], capture_output=True, text=True, timeout=_SLURM_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"it does not answer: {first_line(error)}"
    if done.returncode:
        return f"it does not answer: {plain(done.stderr.strip().partition(chr(10))[0])}"
    return "available"


def _folders(runs: Path, problems: list[str]) -> Iterator[Folder]:
    from frostlab.matrix.task import disk_problem

    try:
        cache = cache_folder(None)
    except BadInput as error:
        problems.append(str(error))
        cache = None
    places = {"runs": runs, "cache": cache}
    for purpose, path in places.items():
        if path is None:
            continue
        path = Path(os.path.abspath(path))
        there = next(parent for parent in (path, *path.parents) if os.path.exists(parent))
        problem, free = disk_problem(there), None
        try:
            free = shutil.disk_usage(there).free
        except OSError as error:
            problem = problem or error.strerror
        if problem is not None:
            problems.append(f"{purpose}: nothing can be written in {there}: {problem}")
        elif free is not None and free < _LITTLE_DISK:
            problems.append(f"{purpose}: the disk of {there} has only {free / 1e6:.0f} MB free")
        yield Folder(purpose, str(path), free, problem)


def check(runs: RunsFolder = Path("runs"), as_json: AsJson = False) -> None:
    """Show what this machine has for training: devices, disks, packages, queues.

    The exit code is 1 if something would stop a run. `data check` shows which data are at hand, and
    `run --check` tries a recipe.
    """
    machine = look(runs)
    if as_json:
        echo(json.dumps(machine.to_dict(), indent=1))
    else:
        echo("\n".join(_lines(machine)))
    if machine.problems:
        raise typer.Exit(1)


def _lines(machine: Machine) -> list[str]:
    memory = f"{size_text(machine.memory_total)}, {size_text(machine.memory_free)} available"
    rows = [("machine", machine.host), ("memory", memory)]
    rows += [(device.name, _device(device)) for device in machine.devices] or [("GPU", "none")]
    rows.append(("steps", machine.steps))
    rows += [(folder.purpose, f"{folder.path}, {size_text(folder.free)} free")
             for folder in machine.folders]  # fmt: skip
    rows += list(machine.queues.items())
    core = ", ".join(f"{package.name} {package.version}" for package in machine.packages)
    rows.append(("packages", core or "unknown"))
    width = width_of() or 80
    lines = []
    for name, text in rows:
        first, *others = wrapped(text, width - 11)
        lines += [f"{name:<9}  {first}", *(f"{'':<11}{line.strip()}" for line in others)]
    lines += ["", *columns([("extra", "installed", "needed by"), *map(_extra, machine.extras)])]
    missing = [extra.name for extra in machine.extras if not extra.installed]
    if missing:
        lines.append(f"to install the others: pip install 'frostlab[{','.join(missing)}]'")
    for problem in machine.problems:
        lines += wrapped(f"problem: {problem}", width)
    return lines


def _device(device: Device) -> str:
    parts = [device.model, size_text(device.memory_total), f"{size_text(device.memory_free)} free"]
    parts += [f"driver {device.driver}"] if device.driver else []
    parts += [f"in use ({device.used_by})"] if device.used_by else []
    return ", ".join(parts)


def _extra(extra: Extra) -> tuple[str, str, str]:
    lacking = [f"{package.name}{package.wanted}" for package in extra.packages if not package.fits]
    return extra.name, f"no: {', '.join(lacking)}" if lacking else "yes", extra.purpose

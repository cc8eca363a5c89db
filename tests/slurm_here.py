"""A real Slurm on this machine for tests: munge, slurmctld and slurmd, on 127.0.0.1, no systemd."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "sinfo", "scontrol", "scancel")
# A requeued job waits until its credential has expired (cred_expire); the default is two minutes.
CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmdPort={daemon}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MinJobAge=600
KillWait=5
JobRequeue=1
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=tests Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why Slurm cannot be started here; None if it can."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if lacking:
        return (
            f"Slurm is not installed here ({', '.join(lacking)}): apt-get install slurm-wlm munge"
        )
    return None if os.getuid() == 0 else "only root can start Slurm here"


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Start Slurm with one node; yield the environment in which its programs find it."""
    folder.mkdir(mode=0o755)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    cpus = os.cpu_count() or 1
    ports = {"control": _free_port(), "daemon": _free_port()}
    (folder / "slurm.conf").write_text(CONF.format(host=host, folder=folder, cpus=cpus, **ports))
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={key}",
         f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid",
         f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"],
        ["slurmctld", "-D", "-L", str(folder / "slurmctld.log")],
        ["slurmd", "-D", "-N", host, "-L", str(folder / "slurmd.log")],
    ]  # fmt: skip
    started = []
    try:
        for command in commands:
            with (folder / f"{command[0]}.out").open("wb") as log:
                started.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
                )
            time.sleep(1.0)
        _wait_until_idle(environment, folder)
        yield environment
    finally:
        subprocess.run(["scancel", "--user=root"], env=environment, capture_output=True)
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_idle(environment: dict[str, str], folder: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%T"], env=environment, capture_output=True, text=True
        )
        if done.stdout.strip() in ("idle", "mixed"):
            return
        time.sleep(0.5)
    logs = {path.name: path.read_text(errors="replace")[-1500:] for path in folder.glob("*.log")}
    raise RuntimeError(f"Slurm did not start: {done.stdout} {done.stderr} {logs}")

"""A flow under DDP and FSDP2, in two real processes, is that of one process."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_two_processes(free_port: int) -> None:
    result = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
            "--master_addr=127.0.0.1", f"--master_port={free_port}",
            str(HERE / "distributed_program.py"),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
        },
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.count("fine") == 2

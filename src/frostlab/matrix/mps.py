"""CUDA MPS: a daemon that lets the kernels of several processes run on one GPU at once.

Without it, processes take turns on the GPU. Many machines do not allow the daemon to start; then
the reason is kept, to be shown to the user.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

_CONTROL = "nvidia-cuda-mps-control"
_TIMEOUT = 20.0  # seconds to wait for the daemon to answer


@dataclass(frozen=True)
class Mps:
    """A running MPS daemon, or the reason why it did not start."""

    variables: dict[str, str] = field(default_factory=dict)  # environment of processes that use it
    refusal: str | None = None


@contextmanager
def multi_process_service() -> Iterator[Mps]:
    """Start the daemon of CUDA MPS with its own pipes, and stop it at the end."""
    if shutil.which(_CONTROL) is None:
        yield Mps(refusal=f"{_CONTROL} is not installed")
        return
    # The folder of the pipes needs a short path: a Unix socket's has at most about 100 characters.
    with tempfile.TemporaryDirectory(prefix="mps-") as own:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": own, "CUDA_MPS_LOG_DIRECTORY": own}
        refusal = _start(variables)
        if refusal is not None:
            yield Mps(refusal=refusal)
            return
        try:
            yield Mps(variables)
        finally:
            with suppress(OSError, subprocess.SubprocessError):
                _ask("quit", variables)


def _start(variables: dict[str, str]) -> str | None:
    """Start the daemon; return why it refused, or None if it answers."""
    try:
        done = subprocess.run(
            [_CONTROL, "-d"], env={**os.environ, **variables}, timeout=_TIMEOUT,
            capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        if done.returncode:
            return (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        answer = _ask("get_server_list", variables)
        if answer.returncode:
            return (answer.stderr or answer.stdout).strip() or f"exit code {answer.returncode}"
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return None


def _ask(command: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [_CONTROL], input=f"{command}\n", env={**os.environ, **variables}, timeout=_TIMEOUT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def used_by_cuda(variables: dict[str, str]) -> str | None:
    """Return why a process that uses the daemon cannot start CUDA; None if it can.

    To find out, this starts a process that uses CUDA: the daemon may answer although the server
    that it starts for CUDA cannot run.
    """
    program = "import torch; torch.zeros(1, device='cuda').add_(1).item()"
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, **variables}, timeout=120,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    lines = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else (lines[-1] if lines else "CUDA did not start")

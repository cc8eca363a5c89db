"""A flow under DDP and FSDP2, in two real processes, is that of one process."""

from pathlib import Path

import pytest

from forked import Program


@pytest.mark.slow
def test_two_processes(free_port: int) -> None:
    program = str(Path(__file__).parent / "distributed_program.py")
    result = Program(program, processes=2, port=free_port).wait()
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.count("fine") == 2

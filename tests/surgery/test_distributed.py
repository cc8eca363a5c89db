"""Frozen models under DDP and FSDP2, in two real processes."""

from pathlib import Path

import pytest

from forked import Program


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_two_processes(name: str, free_port: int) -> None:
    program = str(Path(__file__).parent / "distributed_program.py")
    result = Program(program, name, processes=2, port=free_port).wait()
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.count("fine") == 2

"""Gradients that are summed without DDP, in two real processes, give the weights of DDP."""

from pathlib import Path

from forked import Program


def test_two_processes_sum_gradients_as_ddp_does(free_port: int) -> None:
    program = str(Path(__file__).parent / "gradient_sum_program.py")
    result = Program(program, processes=2, port=free_port).wait(60)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.count("fine") == 2

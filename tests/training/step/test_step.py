"""Which kind of step is chosen, and who is told."""

from pathlib import Path

import pytest
import torch

import frostlab as fl
from frostlab.recipe.settings import StepKind
from frostlab.training.distributed import Compute, World
from frostlab.training.step import choose_kind
from tiny import tiny


@pytest.mark.parametrize(
    ("wanted", "device", "processes", "steps", "kind", "compiles", "said"),
    [
        ("auto", "cpu", 1, 10, "eager", False, "graphs are captured on CUDA, not on cpu"),
        ("captured", "cpu", 1, 10, "eager", False, "graphs are captured on CUDA, not on cpu"),
        ("captured", "mps", 1, 10, "eager", False, "not on mps"),
        ("auto", "cuda", 2, 10, "eager", False, "with 2 processes steps are neither"),
        ("compiled", "cpu", 2, 10, "eager", False, "with 2 processes steps are neither"),
        ("auto", "cuda", 1, 5000, "captured", True, "the fastest on CUDA"),
        ("auto", "cuda", 1, 2999, "captured", False, "2999 steps are too few to compile for"),
        ("captured", "cuda", 1, 10, "captured", False, "10 steps are too few to compile for"),
        ("captured", "cuda", 1, 5000, "captured", True, "asked for"),
        ("compiled", "cpu", 1, 10, "compiled", True, "asked for"),
        ("eager", "cuda", 1, 5000, "eager", False, "asked for"),
    ],
)
def test_the_kind_that_is_chosen(
    wanted: StepKind, device: str, processes: int, steps: int, kind: str, compiles: bool, said: str
) -> None:
    choice = choose_kind(
        wanted, Compute(torch.device(device), torch.float32, World(0, processes, 0)), steps
    )
    assert (choice.kind, choice.compiles) == (kind, compiles)
    assert said in choice.reason


def test_a_run_says_and_records_which_kind_it_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = fl.run(tiny(train__step="captured"), runs=tmp_path, progress=True)
    reason = "graphs are captured on CUDA, not on cpu"
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "steps:" in line] == [f"eager steps: {reason}"]
    (event,) = record.result.stepping
    assert (event.how, event.reason) == ("eager", reason)

"""Deep supervision in real CUDA graphs, compiled and not, and its copies in bf16."""

import pytest
import torch

from frostlab.recipe.settings import Optim, StepKind, Supervise, Train
from frostlab.training.distributed import Compute
from frostlab.training.step import build_step
from frostlab.training.step.eager import EagerStep
from frostlab.training.step.objective import Objective, resolve_supervision
from packed import build
from stepping import epochs, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # the compiler's own
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]
CUDA = torch.device("cuda", 0)
DEEP = Supervise(layers="all", weights=(0.5, 1.5))


def make(name: str, kind: StepKind, precision: torch.dtype, steps: int) -> EagerStep:
    objective = Objective(build(name).eval().to(CUDA))
    objective.supervision = resolve_supervision(DEEP, objective.model)
    return build_step(objective, Optim(lr=1e-3), Train(step=kind), Compute(CUDA, precision),
                      steps=steps)  # fmt: skip


@pytest.mark.parametrize("compiles", [False, True], ids=["captured", "compiled and captured"])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", ["gpt", "decoder", "gpt2", "llama"])
def test_supervised_steps_in_graphs_equal_eager_ones(
    name: str, precision: torch.dtype, compiles: bool
) -> None:
    """At the end the last layer alone is supervised: a graph must not go on with both losses."""
    steps = epochs(name, 60, packed=True)
    losses = []
    for kind in ("eager", "captured"):
        step = make(name, kind, precision, 10**4 if compiles else 10)  # type: ignore[arg-type]
        found = train(step, steps)
        step.objective.supervision = None  # type: ignore[assignment]
        losses.append(found + train(step, steps[:8]))
        assert step.kind == kind, step.reason
        assert getattr(step, "compiles", False) == (compiles and kind == "captured"), step.reason
    tolerance = 2e-3 if precision == torch.float32 else 3e-2
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)
    assert losses[0][59] < losses[0][0]

"""Captured steps whose graphs hold NCCL's all-reduce, in a group of one process.

NCCL takes no two processes on one GPU, so this is as far as one GPU goes. In a group of one
process, NCCL leaves a sum as it is; a mean runs a kernel, so both are recorded here.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import frostlab as fl
from frostlab.recipe.settings import Optim, Train
from frostlab.records.schema import StepEvent
from frostlab.training.distributed import Compute, World
from frostlab.training.step import build_step
from frostlab.training.step.captured import CapturedStep
from frostlab.training.step.objective import Objective
from packed import build
from stepping import epochs, train
from tiny import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # the compiler's own
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:Waiting for pending NCCL work"),
]
CUDA = torch.device("cuda", 0)
HALF, FULL = torch.bfloat16, torch.float32
# Of the largest weight, after 40 steps, where a model's own kernels do not repeat their bits.
ROUNDING = {HALF: 3e-2, FULL: 1e-4}


@pytest.fixture
def group() -> Iterator[None]:
    """A group of NCCL with this process alone; it must end, so its graphs must be freed before."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=CUDA)
    yield
    dist.destroy_process_group()


@pytest.fixture
def reductions(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[bool]:
    """Every all-reduce: whether a graph recorded it. The parameter is its operation."""
    reduce, made = dist.all_reduce, list[bool]()

    def counted(tensor: Tensor) -> None:
        made.append(torch.cuda.is_current_stream_capturing())
        reduce(tensor, op=getattr(request, "param", dist.ReduceOp.SUM))

    monkeypatch.setattr(dist, "all_reduce", counted)
    return made


def weights_after(
    name: str, precision: torch.dtype, steps: int, world: World, freeze: str
) -> tuple[dict[str, Tensor], CapturedStep]:
    """The weights after 40 captured steps, which are compiled if `steps` are many."""
    model = build(name).eval()  # no dropout
    if freeze:
        fl.freeze(model, freeze)
    # with a tiny eps, AdamW would turn the rounding in the gradient of a key's bias into steps as
    # long as those of other weights
    optim = Optim(eps=1e-3)
    step = build_step(Objective(model.to(CUDA)), optim, Train(step="captured"),
                      Compute(CUDA, precision, world), steps=steps)  # fmt: skip
    assert isinstance(step, CapturedStep)
    train(step, epochs(name, 40, packed=True))
    assert (step.kind, step.compiles) == ("captured", steps > 1000), step.reason
    return {n: p.detach().clone() for n, p in model.named_parameters()}, step


def furthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference relative to a parameter's largest entry.

    The bias of a key only adds the same number to all scores of a query, so its gradient is
    rounding; it is compared with 1 instead of with itself.
    """
    return max(
        float((found[n] - p).abs().max() / (1 if n.endswith("key.bias") else p.abs().max()))
        for n, p in wanted.items()
    )


@pytest.mark.parametrize("reductions", [dist.ReduceOp.SUM, dist.ReduceOp.AVG], indirect=True,
                         ids=["sum", "mean"])  # fmt: skip
@pytest.mark.parametrize("precision", [HALF, FULL], ids=["bf16", "float32"])
@pytest.mark.parametrize(
    ("name", "freeze"), [("gpt classifier", "query"), ("gpt", ""), ("bert classifier", "")]
)
def test_a_group_of_one_gives_the_weights_of_no_group(
    name: str, freeze: str, precision: torch.dtype, group: None, reductions: list[bool]
) -> None:
    """Equal bits, if two trainings without a group have equal bits."""
    wanted, _ = weights_after(name, precision, 10, World(), freeze)
    again, _ = weights_after(name, precision, 10, World(), freeze)
    assert not reductions
    found, step = weights_after(name, precision, 10, World(nccl=True), freeze)
    graphs = len(step._graphs)
    step.close()
    assert reductions.count(True) == graphs > 0, "a graph records its all-reduce"
    assert 0 < reductions.count(False) < 40 - graphs, "a replay does not call it"
    off, own = furthest(found, wanted), furthest(again, wanted)
    print(name, precision, "with a group", off, "without, again", own)
    assert off == 0 if own == 0 else off < ROUNDING[precision]


@pytest.mark.parametrize("name", ["gpt", "bert classifier"])
def test_compiled_layers_in_a_group(name: str, group: None, reductions: list[bool]) -> None:
    wanted, _ = weights_after(name, FULL, 10**5, World(), "")
    found, step = weights_after(name, FULL, 10**5, World(nccl=True), "")
    assert reductions.count(True) == len(step._graphs) > 0
    step.close()
    assert furthest(found, wanted) < ROUNDING[FULL]


def test_a_sum_that_is_lost_is_seen(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph uses what the all-reduce leaves in its buffer, not the gradients before it."""
    wanted, _ = weights_after("gpt", FULL, 10, World(), "")

    def lose(tensor: Tensor) -> None:
        tensor.zero_()

    monkeypatch.setattr(dist, "all_reduce", lose)
    found, step = weights_after("gpt", FULL, 10, World(nccl=True), "")
    step.close()
    assert furthest(found, wanted) > ROUNDING[FULL]


def test_a_run_in_a_group_of_one(group: None, reductions: list[bool], tmp_path: Path) -> None:
    recipe = tiny(train__step="captured", train__epochs=4, train__precision="float32")
    recipe["watch"] = {"every_n_steps": 5}

    def losses(record: fl.RunRecord) -> list[float]:
        return [x for e in record.events(StepEvent) for x in e.loss]

    grouped = fl.run(recipe, runs=tmp_path)
    assert grouped.result.stepping[-1].how == "captured"
    assert True in reductions
    count = len(reductions)
    dist.destroy_process_group()  # while nothing but the record is left of the run
    alone = fl.run(recipe, runs=tmp_path)
    assert len(reductions) == count
    assert losses(grouped) == pytest.approx(losses(alone), rel=1e-4, abs=1e-5)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=CUDA)


class _Looks(nn.Module):
    """A model that looks at its numbers while it computes, which no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(90, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Any = None) -> Tensor:
        x = self.embed(input_ids).mean(1)
        return self.head(x if float(x.detach().sum()) > -1e9 else -x)


def test_what_cannot_be_captured_falls_back_in_a_group(group: None) -> None:
    step = build_step(Objective(_Looks().to(CUDA)), Optim(), Train(step="captured"),
                      Compute(CUDA, FULL, World(nccl=True)), steps=10)  # fmt: skip
    losses = train(step, epochs("gpt classifier", 30, packed=False))
    assert step.kind == "eager"
    assert step.reason.startswith("capturing failed: ")
    assert sum(losses[-8:]) < sum(losses[:8]), "it learns all the same"
    step.close()

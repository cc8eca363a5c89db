"""Choose and build the kind of step a run takes: eager, compiled, or captured in a CUDA graph."""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from frostlab.devices import captures_graphs, runs_ahead
from frostlab.recipe.settings import Optim, StepKind, Train
from frostlab.storage import cache_folder
from frostlab.training.distributed import Compute, GradientSum, World, blocks, wrap_model
from frostlab.training.step.captured import CapturedStep
from frostlab.training.step.compiled import CompiledStep
from frostlab.training.step.eager import EagerStep
from frostlab.training.step.head_loss import has_kernel
from frostlab.training.step.objective import Objective
from frostlab.training.step.optimizer import Bf16Copies, build_optimizer

# Measured by benchmarks/kinds.py on an H200 (docs/measurements.md, "Kinds of step"). Compiling a
# captured step saves elementwise work: 71 picoseconds per token, layer and unit of the width in
# BERT. In frostlab's GPT it saved 58 to 69, but fused kernels (frostlab.models.fused) now save much
# of this without compiling (benchmarks/residual_norm.py), so that compiling saves 33. Compiling
# adds `_COMPILE_SECONDS` to the start of a run.
_SAVED_PER_UNIT = {"GPT": 33e-12}  # class of the model → seconds
_OTHER_SAVED_PER_UNIT = 60e-12
_COMPILE_SECONDS = {"GPT": 4.0, "Decoder": 4.0, "Conformer": 15.0}  # class of the model → seconds
_OTHER_COMPILE_SECONDS = 8.0  # seconds for every other class, as measured with BERT
_USUAL_SAVED = 2e-3  # seconds per step, where the size of a step is not known
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
# Further shapes of batches are compiled in about half the time of the first: with the 7 widths of
# imdb-gpt, setting up and preparing new shapes took 21 s at commit aab3973 (docs/measurements.md,
# "A whole run on an H200").
_FURTHER_SHAPE = 0.5
_SHARED_BY = 2  # assumed number of runs that share compiled code, such as two arms or two seeds


@dataclass(frozen=True)
class CompileCost:
    """The seconds that compiling saves in every captured step, and those that it takes once."""

    saved: float
    taken: float

    def pays(self, steps: int) -> bool:
        """Return whether compiling saves time over `_SHARED_BY` runs of `steps` steps each."""
        return _SHARED_BY * steps * self.saved > self.taken

    def describe(self, steps: int) -> str:
        """Return how many seconds compiling takes and saves, as text."""
        saved = f"{steps * self.saved:.2g} s a run"
        return f"compiling would take about {self.taken:.0f} s to save {saved}"


def compile_cost(model: nn.Module, tokens: float | None, shapes: int = 1) -> CompileCost:
    """Estimate what compiling a model's steps takes and saves.

    `tokens` is the mean number of tokens that a process reads in a step (None: unknown), and
    `shapes` the number of different batch shapes. The estimate depends only on the model and its
    batches, not on times or caches of this machine: compiled layers round differently, and the same
    recipe should give the same numbers.
    """
    kind = type(model).__name__
    first = _COMPILE_SECONDS.get(kind, _OTHER_COMPILE_SECONDS)
    taken = first * (1 + _FURTHER_SHAPE * (shapes - 1))
    widths = [_width(block) for block in blocks(model)]
    if tokens is None or not any(widths):
        return CompileCost(_USUAL_SAVED, taken)
    saved = _SAVED_PER_UNIT.get(kind, _OTHER_SAVED_PER_UNIT)
    return CompileCost(saved * tokens * sum(widths), taken)


def _width(block: nn.Module) -> int:
    """Return the width of a layer: the size of its largest norm, or 0 without one."""
    norms = (module for module in block.modules() if "Norm" in type(module).__name__)
    weights = (getattr(norm, "weight", None) for norm in norms)
    return max((w.numel() for w in weights if isinstance(w, Tensor)), default=0)


@dataclass(frozen=True)
class Choice:
    """A kind of step and the reason for it."""

    kind: StepKind
    compiles: bool  # whether the layers are compiled; in a captured step, they need not be
    reason: str


@dataclass(frozen=True)
class Sharing:
    """How a model and its batches are divided among several processes."""

    sharded: bool = False  # whether FSDP shards the model
    shares_norms: bool = False  # whether there is a SyncBatchNorm
    one_shape: bool = False  # whether all micro-batches of all processes have the same shape

    def obstacle(self, wanted: StepKind, world: World) -> str | None:
        """Return why these processes cannot take the wanted steps; None if they can."""
        # FSDP and SyncBatchNorm exchange tensors in the forward pass, so all processes would
        # have to compile at the same step
        if self.sharded:
            return "steps with parallel fsdp are neither compiled nor captured"
        if self.shares_norms:
            return "norms with statistics over all processes need eager steps"
        if wanted == "compiled":
            return None
        if not world.nccl:
            return f"CUDA graphs of {world.size} processes need NCCL, and a GPU for each of them"
        if not self.one_shape:
            return (
                f"CUDA graphs of {world.size} processes need batches of one shape, as with "
                "batching fixed and drop_last"
            )
        return None


def choose_kind(
    wanted: StepKind,
    compute: Compute,
    steps: int,
    cost: CompileCost,
    watches_inside: bool = False,
    sharing: "Sharing | None" = None,
) -> Choice:
    """Return the wanted kind of step, or eager if that kind cannot work.

    `auto` means captured or, with several processes, eager. A captured step is compiled if that
    saves time in stages of `steps` steps, counted over the runs that are assumed to share the
    compiled code (`CompileCost.pays`). `watches_inside`: whether the gradient-flow measurement
    reads activations of the forward pass. `sharing` matters only with several processes.
    """
    if wanted == "eager":
        return Choice("eager", False, "asked for")
    obstacle = None
    if watches_inside:
        obstacle = "watch.dead_units and watch.attention_entropy need eager steps"
    elif compute.world.size > 1 and wanted == "auto":
        obstacle = (
            f"with {compute.world.size} processes steps are eager unless another kind is asked for"
        )
    elif not captures_graphs(compute.device) and wanted != "compiled":
        obstacle = f"CUDA graphs are captured on CUDA, not on {compute.device.type}"
    elif compute.world.size > 1:
        obstacle = (sharing or Sharing()).obstacle(wanted, compute.world)
    if obstacle is not None:
        return Choice("eager", False, obstacle)
    if wanted == "compiled":
        return Choice("compiled", True, "asked for")
    reason = "the fastest on CUDA" if wanted == "auto" else "asked for"
    if not cost.pays(steps):
        return Choice("captured", False, f"{reason}; {cost.describe(steps)}")
    return Choice("captured", True, reason)


@dataclass(frozen=True)
class Batches:
    """The batches that a process will read, as far as their form is known before training."""

    tokens: float | None = None  # tokens, or EEG samples, in a step on average; None: unknown
    shapes: int = 1  # number of different shapes
    one_shape: bool = False  # whether all micro-batches of all processes have the same shape


_UNKNOWN = Batches()


def build_step(
    objective: Objective,
    optim: Optim,
    train: Train,
    compute: Compute,
    *,
    steps: int,
    batches: Batches = _UNKNOWN,
    unused: bool = False,
    lr_scales: Mapping[str, float] | None = None,
    watches_inside: bool = False,
) -> EagerStep:
    """Build the step that `choose_kind` chooses, and its optimizer, for a stage of `steps` steps.

    Args:
        unused: whether some trainable parameters get no gradient.
        lr_scales: factors of the learning rate by parameter name; the default factor is 1.
        watches_inside: whether the gradient-flow measurement reads activations.
    """
    world = compute.world
    sharded = world.size > 1 and train.parallel == "fsdp"
    shares_norms = any(isinstance(m, nn.SyncBatchNorm) for m in objective.modules())
    sharing = Sharing(sharded, shares_norms, batches.one_shape)
    cost = compile_cost(objective.model, batches.tokens, batches.shapes)
    choice = choose_kind(train.step, compute, steps, cost, watches_inside, sharing)
    if choice.compiles:
        keep_compiled_code()
    sums = choice.kind == "captured" and world.nccl
    wrapped = objective if sums else wrap_model(objective, world, train.parallel, unused)
    copies = None
    if (sums or world.size == 1) and compute.half and has_kernel(compute.device, compute.precision):
        copies = _bf16_copies(objective.model)
    optimizer = build_optimizer(
        objective.model,
        optim,
        fused=runs_ahead(compute.device) or not sharded,  # the CPU has no fused kernel for shards
        capturable=choice.kind == "captured",
        copies=copies,
        lr_scales=lr_scales,
    )
    if choice.kind == "captured":
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        gradient_sum = GradientSum(objective, trained, world) if sums else None
        return CapturedStep(
            wrapped, optimizer, compute, optim.clip, choice.reason, copies, gradient_sum,
            compiles=choice.compiles,
        )  # fmt: skip
    if choice.kind == "compiled":
        return CompiledStep(wrapped, optimizer, compute, optim.clip, choice.reason, copies)
    return EagerStep(wrapped, optimizer, compute, optim.clip, choice.reason, copies)


def keep_compiled_code() -> None:
    """Let torch store compiled code in frostlab's cache, so that later runs need not compile again.

    A folder that the user has chosen, in TORCHINDUCTOR_CACHE_DIR, stays. Torch sets this variable
    to a temporary folder as soon as its compiler is imported; that folder is replaced.
    """
    chosen = Path(os.environ.get(_COMPILED, ""))
    temporary = Path(tempfile.gettempdir()).resolve()
    is_default = chosen.name.startswith("torchinductor_") and chosen.parent.resolve() == temporary
    if _COMPILED not in os.environ or is_default:
        os.environ[_COMPILED] = str(cache_folder(None) / "compiled")


def _bf16_copies(model: nn.Module) -> Bf16Copies | None:
    """Return bf16 copies of weights, or None if there is nothing to copy.

    Also return None if a trainable parameter is not contiguous float32, as `KernelAdamW` requires.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if any(p.dtype != torch.float32 or not p.is_contiguous() for p in trainable):
        return None
    return Bf16Copies(model) or None

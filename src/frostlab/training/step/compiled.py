"""The step with compiled layers; on CUDA, linear maps of the same input are joined into one.

If compiling fails, all layers run eagerly, and the step's `reason` says why.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from frostlab.devices import captures_graphs
from frostlab.errors import first_line
from frostlab.models.stack import take_apart
from frostlab.surgery.stale import changes
from frostlab.training.batches.batch import Batch
from frostlab.training.distributed import Compute, GradientSum, blocks
from frostlab.training.step.eager import EagerStep
from frostlab.training.step.fusion import (
    fuse_attention,
    fuse_embeddings,
    fuse_gelus,
    fuse_norms,
    fuse_sums,
    share_seeds,
)
from frostlab.training.step.joining import join_linears
from frostlab.training.step.objective import Objective
from frostlab.training.step.optimizer import Bf16Copies

_RECOMPILE_LIMIT = 64  # torch's own limit, 8, would leave some modules of a Conformer uncompiled


class CompiledStep(EagerStep):
    """A step whose layers are compiled, forward and backward; the optimizer runs eagerly."""

    kind = "compiled"

    def __init__(
        self,
        objective: nn.Module,
        optimizer: torch.optim.Optimizer,
        compute: Compute,
        clip: float | None,
        reason: str = "",
        copies: Bf16Copies | None = None,
        gradient_sum: GradientSum | None = None,
        compiles: bool = True,
    ) -> None:
        super().__init__(objective, optimizer, compute, clip, reason, copies, gradient_sum)
        self._all_parameters = list(self.objective.parameters())
        self._state_at_compile = self._guarded_state()
        self.compiles, self._tried_shapes = compiles, set[Any]()
        if compiles:
            compile_layers(self.objective)

    def warm_up(self, parts: list[Batch], scored: int) -> None:
        """Compile for the first shape, then warm up as an eager step does."""
        self._try_compiling([part.to(self.device) for part in parts], scored)
        super().warm_up(parts, scored)

    def work(self, parts: list[Batch], scored: int | Tensor) -> Tensor:
        self._recompile_if_changed()
        self._try_compiling(parts, scored)
        return super().work(parts, scored)

    @property
    def prepared_shapes(self) -> int:
        return len(self._tried_shapes)

    def _try_compiling(self, parts: list[Batch], scored: int | Tensor) -> None:
        """Compile for a new shape in a dry run, and fall back to eager layers if that fails.

        The dry run leaves out DDP, which waits for all processes, because each process meets new
        shapes at its own steps.
        """
        shape = shape_key(parts)
        if not self.compiles or shape in self._tried_shapes:
            return
        try:
            with _compiler_settings():
                self.dry_run(parts, scored, local=True)
        except Exception as error:  # compilers raise errors of many types
            uncompile(self.objective)
            self.compiles = False
            self.fall_back(f"compiling failed: {first_line(error)}")
        self.optimizer.zero_grad(set_to_none=True)
        self._tried_shapes.add(shape)

    def fall_back(self, reason: str) -> None:
        """Continue with eager steps, and record the reason."""
        self.kind, self.reason = "eager", reason

    def _guarded_state(self) -> tuple[Any, ...]:
        """Return the state that compiled or captured code depends on, e.g. which weights learn."""
        # the supervision (which layers have a loss) determines which weights get a gradient
        objective = self.local_objective
        supervision = getattr(objective, "supervision", None)
        trainable = (p.requires_grad for p in self._all_parameters)
        return (changes(objective), objective.training, supervision, *trainable)

    def _recompile_if_changed(self) -> bool:
        """Compile again and return True if the guarded state changed, as when a weight is thawed.

        Code that was compiled for a frozen weight computes no gradient for it after a thaw.
        """
        if self._guarded_state() == self._state_at_compile:
            return False
        self._all_parameters = list(self.objective.parameters())
        self._state_at_compile, self._tried_shapes = self._guarded_state(), set()
        if self.gradient_sum is not None:
            self.gradient_sum.reset()
        if self.compiles:
            uncompile(self.objective)
            compile_layers(self.objective)
        return True


def shape_key(parts: list[Batch]) -> Any:
    """Return the shapes of micro-batches as a key: input names, tensor shapes, longest example."""
    return tuple(
        (*part.inputs, *(t.shape for t in part.tensors()), part.packing and part.packing.longest)
        for part in parts
    )


def compile_layers(objective: nn.Module) -> None:
    """Compile every layer separately: equal layers share the compiled code, which saves time.

    The modules that a model names in `compiled_parts` are compiled separately, too, and on CUDA the
    modules before its layers that its stack names in `parts`. A model whose layers are not known is
    compiled as a whole.
    """
    for module in objective.modules():
        if isinstance(module, Objective):
            model = module.model
            names: tuple[str, ...] = getattr(model, "compiled_parts", ())
            parts = [getattr(model, name) for name in names if hasattr(model, name)]
            on_cuda = any(captures_graphs(p.device) for p in model.parameters())
            stack = take_apart(model) if on_cuda else None
            before = [] if stack is None else stack.parts
            for part in [*parts, *before, *blocks(model)] or [model]:
                part.compile(backend=joining_backend if on_cuda else "inductor")


@contextmanager
def _compiler_settings() -> Iterator[None]:
    """Raise torch's limit of recompilations, and compile numbers such as a dropout as constants.

    The limit counts the recompilations of all modules together. By default, the second dropout
    that a process compiles becomes an input of the code, which cannot be fused then.
    """
    import torch._dynamo  # imported here because it takes seconds

    limit = max(torch._dynamo.config.recompile_limit, _RECOMPILE_LIMIT)
    with torch._dynamo.config.patch(recompile_limit=limit, specialize_float=True):
        yield


def forget_compiled_code() -> None:
    """Drop all compiled code of this process, on which the numbers of a run would depend.

    Torch compiles the first shape of a function for itself and the second one for many, which
    rounds differently, and after many recompilations it stops compiling a function.
    """
    if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing this takes seconds
        torch.compiler.reset()


def uncompile(objective: nn.Module) -> None:
    """Undo `compile_layers`, and drop all compiled code of this process."""
    torch.compiler.reset()
    for module in objective.modules():
        module._compiled_call_impl = None


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled modules eagerly: for evaluations, compiling takes more time than it saves."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing this takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def joining_backend(module: GraphModule, inputs: Sequence[Any]) -> Any:
    """A backend of torch.compile: fuse operations, join linear maps, compile with inductor.

    `fallback_random` makes torch's own kernels draw the dropout masks that are not fused, because
    drawing them inside inductor's fused kernels doubles the time of these kernels.
    """
    from torch._inductor.compile_fx import compile_fx

    fuse_norms(module.graph)
    fuse_sums(module.graph)
    fuse_gelus(module.graph)
    join_linears(module.graph)
    fuse_attention(module.graph)
    fuse_embeddings(module.graph)
    share_seeds(module.graph)
    module.recompile()
    return compile_fx(module, inputs, config_patches={"fallback_random": True})

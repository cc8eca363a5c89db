"""The step with compiled layers; on CUDA, linear maps of the same input are joined into one.

If compiling fails, all layers run eagerly, and the step's `reason` says why.
"""

import operator
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from frostlab.devices import captures_graphs
from frostlab.errors import first_line
from frostlab.surgery.stale import changes
from frostlab.training.batches.batch import Batch
from frostlab.training.distributed import Compute, GradientSum, blocks
from frostlab.training.step.eager import EagerStep
from frostlab.training.step.fusion import fuse_gelus, fuse_norms, writes_in_place
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
            with _raised_recompile_limit():
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

    The modules that a model names in `compiled_parts`, such as those before its layers, are
    compiled separately, too. A model whose layers are not known is compiled as a whole.
    """
    for module in objective.modules():
        if isinstance(module, Objective):
            model = module.model
            names: tuple[str, ...] = getattr(model, "compiled_parts", ())
            parts = [getattr(model, name) for name in names if hasattr(model, name)]
            for part in [*parts, *blocks(model)] or [model]:
                on_cuda = any(captures_graphs(p.device) for p in part.parameters())
                part.compile(backend=joining_backend if on_cuda else "inductor")


@contextmanager
def _raised_recompile_limit() -> Iterator[None]:
    """Raise torch's limit of recompilations, which counts those of all modules together."""
    import torch._dynamo  # imported here because it takes seconds

    limit = max(torch._dynamo.config.recompile_limit, _RECOMPILE_LIMIT)
    with torch._dynamo.config.patch(recompile_limit=limit):
        yield


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
    """A backend of torch.compile: fuse norms and GELUs, join linear maps, compile with inductor.

    A GPU multiplies by one wide matrix faster than by three narrow ones, such as query, key and
    value. `fallback_random` makes torch's own kernels draw the dropout masks, as in an eager step,
    because drawing them inside inductor's fused kernels doubles the time of these kernels.
    """
    from torch._inductor.compile_fx import compile_fx

    fuse_norms(module.graph)
    fuse_gelus(module.graph)
    join_linears(module.graph)
    module.recompile()
    return compile_fx(module, inputs, config_patches={"fallback_random": True})


@dataclass(frozen=True)
class _Linear:
    """A linear map in a graph, with a weight and perhaps a bias that are inputs of the graph."""

    node: Node
    x: Node  # the map's input
    weights: tuple[Node, ...]  # the weight, and the bias if there is one
    learns: bool  # whether weight and bias are trainable

    @property
    def rows(self) -> int:
        """Return the number of outputs."""
        return int(self.weights[0].meta["example_value"].shape[0])


def join_linears(graph: Graph) -> None:
    """Join linear maps of the same input into one product; only trainable rows get a gradient."""
    by_input: dict[Any, list[_Linear]] = defaultdict(list)
    for node in list(graph.nodes):
        if writes_in_place(node):  # may change an input, so maps before and after it stay apart
            _join_groups(graph, by_input.values())
            by_input.clear()
        linear = _as_linear(node)
        if linear is not None:
            # maps with a bias are joined separately from maps without
            by_input[linear.x, len(linear.weights)].append(linear)
    _join_groups(graph, by_input.values())
    graph.lint()


def _as_linear(node: Node) -> _Linear | None:
    """Return a node as a linear map; None if it is not one that can be joined with others.

    Weight and bias must be inputs of the graph, and both learn or neither does.
    """
    if node.op != "call_function" or node.target is not F.linear or node.kwargs:
        return None
    x, *rest = node.args
    weights = tuple(argument for argument in rest if isinstance(argument, Node))
    learns = {weight.meta["example_value"].requires_grad for weight in weights}
    if not isinstance(x, Node) or any(w.op != "placeholder" for w in weights) or len(learns) > 1:
        return None
    return _Linear(node, x, weights, learns.pop())


def _join_groups(graph: Graph, groups: Iterable[list[_Linear]]) -> None:
    for linears in groups:
        if len(linears) > 1:
            _join(graph, linears)


def _join(graph: Graph, linears: list[_Linear]) -> None:
    """Replace linear maps of one input with one product, split into the outputs of the maps."""
    first = linears[0]
    ordered = sorted(linears, key=lambda linear: linear.learns)  # frozen maps first
    groups = [[linear for linear in ordered if linear.learns == learns] for learns in (False, True)]
    groups = [group for group in groups if group]
    with graph.inserting_before(first.node):
        stacked = [
            _cat(graph, [linear.weights[place] for linear in group])
            for place in range(len(first.weights))
            for group in groups
        ]
        target = F.linear if len(groups) == 1 else partly_frozen_linear
        product = graph.call_function(target, (first.x, *stacked))
        rows = [linear.rows for linear in ordered]
        outputs = graph.call_function(torch.split, (product, rows, -1))
        for i, linear in enumerate(ordered):
            output = graph.call_function(operator.getitem, (outputs, i))
            linear.node.replace_all_uses_with(output)
    for linear in ordered:
        graph.erase_node(linear.node)


def _cat(graph: Graph, nodes: list[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else graph.call_function(torch.cat, (nodes,))


def partly_frozen_linear(x: Tensor, frozen: Tensor, learning: Tensor, *biases: Tensor) -> Tensor:
    """Apply a linear map with the frozen rows first and the trainable rows after them.

    `biases` is empty, or holds the bias of the frozen and the bias of the trainable rows. There is
    one product in the forward pass, and two in the backward pass: the input's gradient, and the
    gradient of the weight's trainable rows.
    """
    device = x.device.type
    autocasts = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocasts else x.dtype
    weight, x = torch.cat([frozen, learning]).to(dtype), x.to(dtype)
    bias = torch.cat(biases).to(dtype).detach() if biases else None
    trainable = [learning, *biases[1:]]
    with torch.autocast(device, enabled=False):
        return _PartlyFrozen.apply(x, weight.detach(), bias, *(t.to(dtype) for t in trainable))


class _PartlyFrozen(torch.autograd.Function):
    """The autograd function of `partly_frozen_linear`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *learning: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # the number of frozen rows, and of trainable tensors: the weight, and the bias if any
        ctx.frozen, ctx.count = len(weight) - len(learning[0]), len(learning)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = upstream[..., ctx.frozen :].flatten(0, -2)
        gradients = (rows.t() @ x.flatten(0, -2), rows.sum(0))
        return upstream @ weight, None, None, *gradients[: ctx.count]

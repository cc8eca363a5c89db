"""The step with its layers compiled; what cannot be compiled runs as it is, and says why."""

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from frostlab.errors import first_line
from frostlab.surgery.stale import changes
from frostlab.training.batches.batch import Batch
from frostlab.training.distributed import Compute, blocks
from frostlab.training.step.eager import EagerStep
from frostlab.training.step.objective import Objective
from frostlab.training.step.optimizer import Bf16Copies


def compile_layers(objective: nn.Module) -> None:
    """Compile every layer, all with the same code.

    Layers are alike, so one compilation serves them all: seconds where a whole model takes a
    minute.
    """
    for module in objective.modules():
        if isinstance(module, Objective):
            for block in blocks(module.model) or [module.model]:
                on_cuda = any(p.is_cuda for p in block.parameters())
                block.compile(backend=joined if on_cuda else "inductor")


def uncompile(objective: nn.Module) -> None:
    """Undo it, and forget what was compiled."""
    torch.compiler.reset()
    for module in objective.modules():
        module._compiled_call_impl = None


@contextmanager
def uncompiled() -> Iterator[None]:
    """Within this, compiled modules run as they were written: evaluations are not worth it."""
    with torch.compiler.set_stance("force_eager"):
        yield


def shape_of(parts: list[Batch]) -> Any:
    """All that compiled or captured code may rely on: which tensors, their shapes, the longest."""
    return tuple(
        (*part.inputs, *(t.shape for t in part.tensors()), part.packing and part.packing.longest)
        for part in parts
    )


class CompiledStep(EagerStep):
    """Forward and backward compiled layer by layer; the update is the plain one."""

    kind = "compiled"

    def __init__(
        self,
        objective: nn.Module,
        optimizer: torch.optim.Optimizer,
        compute: Compute,
        clip: float | None,
        reason: str = "",
        copies: Bf16Copies | None = None,
        compiles: bool = True,
    ) -> None:
        super().__init__(objective, optimizer, compute, clip, reason, copies)
        self._known = list(self.objective.parameters())
        self._learning = self._what_learns()
        self.compiles, self._proven = compiles, set[Any]()
        if compiles:
            compile_layers(self.objective)

    def warm_up(self, parts: list[Batch], scored: int) -> None:
        """Compile for the first shape; then as any step."""
        self._prove([part.to(self.device) for part in parts], scored)
        super().warm_up(parts, scored)

    def work(self, parts: list[Batch], scored: int | Tensor) -> Tensor:
        self._look_for_changes()
        self._prove(parts, scored)
        return super().work(parts, scored)

    def _prove(self, parts: list[Batch], scored: int | Tensor) -> None:
        """Try a new shape out: compiling may fail."""
        shape = shape_of(parts)
        if not self.compiles or shape in self._proven:
            return
        try:
            self.dry_run(parts, scored)
        except Exception as error:  # a compiler fails in ways of its own
            uncompile(self.objective)
            self.compiles = False
            self.fall_back(f"compiling failed: {first_line(error)}")
        self.optimizer.zero_grad(set_to_none=True)
        self._proven.add(shape)

    def fall_back(self, reason: str) -> None:
        """Go on in a plainer way, and say why."""
        self.kind, self.reason = "eager", reason

    def _what_learns(self) -> tuple[Any, ...]:
        supervision = getattr(self.objective, "supervision", None)  # decides who gets a gradient
        learning = (p.requires_grad for p in self._known)
        return (changes(self.objective), self.objective.training, supervision, *learning)

    def _look_for_changes(self) -> bool:
        """Compile anew when other weights learn than before, or from other layers: code made for
        a frozen one would go on leaving it out."""
        now = self._what_learns()
        if now == self._learning:
            return False
        self._known = list(self.objective.parameters())
        self._learning, self._proven = self._what_learns(), set()
        if self.compiles:
            uncompile(self.objective)
            compile_layers(self.objective)
        return True


_IN_PLACE = {"setitem", *(name for name in dir(operator) if name[:1] == "i")}


def joined(module: GraphModule, inputs: Sequence[Any]) -> Any:
    """A backend for torch.compile.

    A GPU multiplies one wide matrix faster than three narrow ones. Dropout that the compiler
    draws itself takes as long as what it is fused with; torch's own also gives an eager step's
    masks.
    """
    from torch._inductor.compile_fx import compile_fx

    join_products(module.graph)
    module.recompile()
    return compile_fx(module, inputs, config_patches={"fallback_random": True})


@dataclass(frozen=True)
class _Linear:
    """A linear map in a graph, its weight and its bias inputs of the graph."""

    node: Node
    x: Node
    weights: tuple[Node, ...]  # the weight, and the bias if there is one
    learns: bool

    @property
    def rows(self) -> int:
        return int(self.weights[0].meta["example_value"].shape[0])


def _read(node: Node) -> _Linear | None:
    if node.op != "call_function" or node.target is not F.linear or node.kwargs:
        return None
    x, *rest = node.args
    weights = tuple(given for given in rest if isinstance(given, Node))
    learns = {given.meta["example_value"].requires_grad for given in weights}
    if not isinstance(x, Node) or any(w.op != "placeholder" for w in weights) or len(learns) > 1:
        return None
    return _Linear(node, x, weights, learns.pop())


def join_products(graph: Graph) -> None:
    """Join linear maps of one input; of a joined one, only rows that learn get a gradient."""
    alike: dict[Any, list[_Linear]] = defaultdict(list)
    for node in list(graph.nodes):
        if _writes(node):  # what was read before may be another value by now
            _join_all(graph, alike.values())
            alike.clear()
        linear = _read(node)
        if linear is not None:
            alike[linear.x, len(linear.weights)].append(linear)
    _join_all(graph, alike.values())
    graph.lint()


def _writes(node: Node) -> bool:
    """Whether it may change a value in its place."""
    if node.op == "call_method":
        return str(node.target).endswith("_")
    name = getattr(node.target, "__name__", "")
    named = name.endswith("_") or name in _IN_PLACE or bool({"out", "inplace"} & set(node.kwargs))
    return node.op == "call_function" and named


def _join_all(graph: Graph, groups: Iterable[list[_Linear]]) -> None:
    for linears in groups:
        if len(linears) > 1:
            _join(graph, linears)


def _join(graph: Graph, linears: list[_Linear]) -> None:
    first = linears[0]
    ordered = sorted(linears, key=lambda linear: linear.learns)  # the frozen ones first
    kinds = [[one for one in ordered if one.learns == learns] for learns in (False, True)]
    kinds = [kind for kind in kinds if kind]
    with graph.inserting_before(first.node):
        stacked = [
            _cat(graph, [one.weights[place] for one in kind])
            for place in range(len(first.weights))
            for kind in kinds
        ]
        target = F.linear if len(kinds) == 1 else partly_frozen
        whole = graph.call_function(target, (first.x, *stacked))
        parts = graph.call_function(torch.split, (whole, [one.rows for one in ordered], -1))
        for i, one in enumerate(ordered):
            one.node.replace_all_uses_with(graph.call_function(operator.getitem, (parts, i)))
    for one in ordered:
        graph.erase_node(one.node)


def _cat(graph: Graph, nodes: list[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else graph.call_function(torch.cat, (nodes,))


def partly_frozen(x: Tensor, frozen: Tensor, learning: Tensor, *biases: Tensor) -> Tensor:
    """A linear map whose first rows are frozen: one product forward, one back, and for the
    weights' gradient one over the rows that learn."""
    device = x.device.type
    half = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if half else x.dtype
    weight, given = torch.cat([frozen, learning]).to(dtype), x.to(dtype)
    bias = torch.cat(biases).to(dtype).detach() if biases else None
    learns = [learning, *biases[1:]]
    with torch.autocast(device, enabled=False):
        return _PartlyFrozen.apply(given, weight.detach(), bias, *(t.to(dtype) for t in learns))


class _PartlyFrozen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *learning: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.frozen, ctx.count = len(weight) - len(learning[0]), len(learning)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = slope[..., ctx.frozen :].flatten(0, -2)
        made = (rows.t() @ x.flatten(0, -2), rows.sum(0))
        return slope @ weight, None, None, *made[: ctx.count]

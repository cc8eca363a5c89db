"""The step with its layers compiled; what cannot be compiled runs as it is, and says why."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from frostlab.models.pretrained import first_line
from frostlab.surgery.stale import changes
from frostlab.training.batching import Batch
from frostlab.training.distributed import blocks
from frostlab.training.joining import joined
from frostlab.training.objective import Objective
from frostlab.training.step import EagerStep


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

    def __init__(self, *settings: Any, compiles: bool = True, **more: Any) -> None:
        super().__init__(*settings, **more)
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
            self.try_out(parts, scored)
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
        return (changes(), self.objective.training, supervision, *learning)

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

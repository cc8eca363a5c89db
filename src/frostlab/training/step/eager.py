"""One optimizer step: forward, backward over every part, clipping, update."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from frostlab.errors import FrostlabError
from frostlab.flow.watch import LiveFlow
from frostlab.storage import derive_seed
from frostlab.training.batches.batch import Batch
from frostlab.training.distributed import World, accumulating, same_buffers, whole
from frostlab.training.step.optimizer import Halves


class Diverged(FrostlabError):
    """A loss or a gradient is no longer a number."""

    def __init__(self, step: int, what: str, loss: float) -> None:
        super().__init__(
            f"step {step}: {what} is not finite (loss {loss:.4g}); "
            "a lower optim.lr or a longer optim.warmup may help"
        )


@dataclass(frozen=True)
class Outcome:
    """What a step leaves on the device: read later, so that nothing waits."""

    values: Tensor  # (3,): the three below

    @property
    def loss(self) -> Tensor:
        """This process's share of the mean loss."""
        return self.values[0]

    @property
    def norm(self) -> Tensor:
        """The norm of the whole gradient, before clipping."""
        return self.values[1]

    @property
    def broken(self) -> Tensor:
        """Index of the first parameter whose gradient is not finite, or −1."""
        return self.values[2]


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Make dropout a pure function of seed, step and process, so that resuming repeats it.

    The generators are seeded one by one: torch.manual_seed takes a millisecond.
    """
    number = derive_seed(seed, step, rank)
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(number)
    elif device.type == "mps":
        torch.mps.manual_seed(number)


class EagerStep:
    """The plain step, one operation after another."""

    kind = "eager"

    def __init__(
        self,
        objective: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: torch.dtype,
        clip: float | None,
        world: World,
        reason: str = "",
        halves: Halves | None = None,
    ) -> None:
        self.objective, self.optimizer, self.world = objective, optimizer, world
        self.clip, self.precision, self.reason, self.halves = clip, precision, reason, halves
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.reached = self.parameters
        self.flow: LiveFlow | None = None  # measures some of the steps
        self.device = self.parameters[0].device

    def __call__(self, parts: list[Batch], scored: int, rate: float) -> Outcome:
        """Take a step over this process's parts of a batch with `scored` targets in all."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("share", 1.0)
        return Outcome(self.work([part.to(self.device) for part in parts], scored))

    def work(self, parts: list[Batch], scored: int | Tensor) -> Tensor:
        """The step itself, over parts on the device: its outcome's three values."""
        loss = self.gradients(parts, scored)
        norm, share, broken = self._measure()
        self._update(share, broken)
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack([loss, norm, broken.to(norm.dtype)])

    def warm_up(self, parts: list[Batch], scored: int) -> None:
        """Take a step that moves nothing on a GPU, which loads kernels when they are first used.

        Weights, moments, statistics and the generator are afterwards what they were.
        """
        if self.device.type != "cuda":
            return
        self.try_out([part.to(self.device) for part in parts], scored)
        _, share, _ = self._measure()
        fused: Any = self.optimizer
        fused.grad_scale = None if self.clip is None else 1.0 / share
        fused.found_inf = torch.ones((), device=self.device)  # the kernel stops
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def try_out(self, parts: list[Batch], scored: int | Tensor) -> None:
        """Compute gradients of parts on the device; the step that follows sees the same dropout."""
        on = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(on), same_buffers(self.objective):
            self.gradients(parts, scored)

    def gradients(self, parts: list[Batch], scored: int | Tensor) -> Tensor:
        """Add up the gradients of the mean loss; return this process's share of it."""
        if self.halves is not None and len(parts) == 1:  # several are added up in float32
            with self.halves.in_place():
                return self._add_up(parts, scored)
        return self._add_up(parts, scored)

    def _add_up(self, parts: list[Batch], scored: int | Tensor) -> Tensor:
        total = torch.zeros((), device=self.device)
        for i, part in enumerate(parts):
            with accumulating(self.objective, last=i == len(parts) - 1):
                half = self.precision == torch.bfloat16
                with torch.autocast(self.device.type, torch.bfloat16, half), self._listening():
                    loss = self.objective(part) / scored
                (loss * self.world.size).backward()  # processes average their gradients
            total += loss.detach()
        return total

    def _measure(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient's norm, the share of it that clipping keeps, and the first broken one."""
        kinds: dict[torch.dtype, list[tuple[nn.Parameter, Tensor]]] = {}
        for p in self.parameters:
            if (gradient := self._gradient(p)) is not None:
                kinds.setdefault(gradient.dtype, []).append((p, gradient))
        self.reached = [p for pairs in kinds.values() for p, _ in pairs]
        made: list[Tensor] = []
        for dtype, pairs in kinds.items():  # one kernel for those of a kind
            wide = torch.float32 if dtype.itemsize < 4 else None
            made += torch._foreach_norm([g for _, g in pairs], dtype=wide)
        norms = whole(torch.stack(made))
        total = torch.linalg.vector_norm(norms)
        bad = ~norms.isfinite()
        broken = torch.where(bad.any(), bad.int().argmax(), -1)
        return total, torch.clamp((self.clip or torch.inf) / (total + 1e-6), max=1.0), broken

    def _gradient(self, p: nn.Parameter) -> Tensor | None:
        return p.grad if self.halves is None else self.halves.gradient(p)

    def _update(self, share: Tensor, broken: Tensor) -> None:
        """Step, unless a gradient is not finite: weights are never spoilt.

        On a GPU the optimizer's one kernel also clips, and looks whether to step.
        """
        fused: Any = self.optimizer
        if self.device.type == "cuda":
            fused.grad_scale = None if self.clip is None else 1.0 / share
            fused.found_inf = (broken >= 0).float()
        elif int(broken) >= 0:
            return
        self._before_step(share)  # gradients are not clipped yet
        if self.device.type != "cuda" and float(share) < 1.0:
            gradients: list[Any] = [p.grad for p in self.reached]
            torch._foreach_mul_(gradients, share)
        self.optimizer.step()
        self._after_step()

    def _listening(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.flow is None else self.flow.listening()

    def _before_step(self, share: Tensor) -> None:
        if self.flow is not None:
            self.flow.before_step(share)

    def _after_step(self) -> None:
        if self.flow is not None:
            self.flow.after_step()

    def name_of(self, index: int) -> str:
        """The name of the parameter whose gradient has this place."""
        names = {id(p): name for name, p in self.objective.named_parameters()}
        found = names[id(self.reached[index])]
        return found.removeprefix("module.").removeprefix("model.")

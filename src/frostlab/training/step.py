"""One optimizer step: forward, backward over every part, clipping, update."""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from frostlab.errors import FrostlabError
from frostlab.training.batching import Batch
from frostlab.training.distributed import World, accumulating, whole
from frostlab.training.metrics import logits_of, summed_loss


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

    loss: Tensor  # this process's share of the mean loss
    norm: Tensor  # of the whole gradient, before clipping
    broken: Tensor  # index of the first parameter whose gradient is not finite, or −1


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Make dropout a pure function of seed, step and process, so that resuming repeats it.

    The generators are seeded one by one: torch.manual_seed takes a millisecond.
    """
    text = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    number = int.from_bytes(text[:8], "little") >> 1
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(number)
    elif device.type == "mps":
        torch.mps.manual_seed(number)


class EagerStep:
    """The plain step, one operation after another."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: torch.dtype,
        clip: float | None,
        world: World,
    ) -> None:
        self.model, self.optimizer, self.world = model, optimizer, world
        self.clip, self.precision = clip, precision
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.reached = self.parameters
        self.device = self.parameters[0].device

    def __call__(self, parts: list[Batch], scored: int, rate: float) -> Outcome:
        """Take a step over this process's parts of a batch with `scored` targets in all."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.gradients(parts, scored)
        norm, broken = self._clip()
        self._update(broken)
        self.optimizer.zero_grad(set_to_none=True)
        return Outcome(loss, norm, broken)

    def gradients(self, parts: list[Batch], scored: int) -> Tensor:
        """Add up the gradients of the mean loss; return this process's share of it."""
        total = torch.zeros((), device=self.device)
        for i, part in enumerate(parts):
            part = part.to(self.device)
            with accumulating(self.model, last=i == len(parts) - 1):
                with torch.autocast(
                    self.device.type, torch.bfloat16, enabled=self.precision == torch.bfloat16
                ):
                    logits = logits_of(self.model, part.inputs)
                loss = summed_loss(logits, part.targets) / scored
                (loss * self.world.size).backward()  # processes average their gradients
            total += loss.detach()
        return total

    def _clip(self) -> tuple[Tensor, Tensor]:
        """Scale the gradient down to `clip`; find the first parameter that is not finite."""
        self.reached = [p for p in self.parameters if p.grad is not None]
        gradients: list[Any] = [p.grad for p in self.reached]
        norms = whole(torch.stack(torch._foreach_norm(gradients)))
        total = torch.linalg.vector_norm(norms)
        bad = ~norms.isfinite()
        broken = torch.where(bad.any(), bad.int().argmax(), -1)
        if self.clip is not None:
            scale = torch.clamp(self.clip / (total + 1e-6), max=1.0)
            if self.device.type != "cpu" or float(scale) < 1.0:
                torch._foreach_mul_(gradients, scale)
        return total, broken

    def _update(self, broken: Tensor) -> None:
        """Step, unless a gradient is not finite: weights are never spoilt."""
        if self.device.type == "cuda":
            setattr(self.optimizer, "found_inf", (broken >= 0).float())  # noqa: B010
            self.optimizer.step()
        elif int(broken) < 0:
            self.optimizer.step()

    def name_of(self, index: int) -> str:
        """The name of the parameter whose gradient has this place."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        return names[id(self.reached[index])].removeprefix("module.")

"""One optimizer step: forward and backward of every micro-batch, clipping and update."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from frostlab.devices import forked_devices, prepares_kernels, seed_generators
from frostlab.errors import FrostlabError
from frostlab.flow.probe import Gradient
from frostlab.flow.watch import LiveFlow
from frostlab.storage import derive_seed
from frostlab.training.batches.batch import Batch
from frostlab.training.distributed import (
    Compute,
    GradientSum,
    accumulate_gradients,
    full_tensor,
    preserve_buffers,
)
from frostlab.training.step.head_loss import expect_gradient
from frostlab.training.step.optimizer import (
    Bf16Copies,
    KernelAdamW,
    apply_update,
    prepare_update,
    skip_update,
)


class Diverged(FrostlabError):
    """Raised when a gradient, or the loss of an evaluation, is not finite."""

    def __init__(self, step: int, what: str, loss: float) -> None:
        super().__init__(
            f"step {step}: {what} is not finite (loss {loss:.4g}); "
            "a lower optim.lr or a longer optim.warmup may help"
        )


@dataclass(frozen=True)
class Outcome:
    """Three numbers of a step, kept on the device so that no step waits for them."""

    values: Tensor  # (3,): `loss`, `norm` and `broken`

    @property
    def loss(self) -> Tensor:
        """Return this process's summand of the mean loss over all targets that have a loss."""
        return self.values[0]

    @property
    def norm(self) -> Tensor:
        """Return the norm of the whole gradient, before clipping."""
        return self.values[1]

    @property
    def broken(self) -> Tensor:
        """Return the index in `EagerStep.reached` of the first non-finite gradient, or −1."""
        return self.values[2]


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed dropout from run seed, step and rank, so that a resumed run draws the same masks."""
    seed_generators(derive_seed(seed, step, rank), device)


def _clip_factor(norm: Tensor, clip: float | None) -> Tensor:
    """Return the factor, at most 1, that clips gradients of this norm."""
    return torch.clamp((clip or torch.inf) / (norm + 1e-6), max=1.0)


def is_clipped(norms: Tensor, clip: float | None) -> Tensor:
    """Return whether gradients of each norm are clipped."""
    return _clip_factor(norms, clip) < 1.0


class EagerStep:
    """A step without compilation: PyTorch runs one operation after another."""

    kind = "eager"

    def __init__(
        self,
        objective: nn.Module,
        optimizer: torch.optim.Optimizer,
        compute: Compute,
        clip: float | None,
        reason: str = "",
        copies: Bf16Copies | None = None,
        gradient_sum: GradientSum | None = None,
    ) -> None:
        self.objective, self.optimizer, self.compute = objective, optimizer, compute
        # the objective without DDP: its gradients are not averaged over processes
        self.local_objective = objective.module if isinstance(objective, DDP) else objective
        self.clip, self.reason, self.copies = clip, reason, copies
        # sums gradients over processes; None: DDP or FSDP does so, or there is only one process
        self.gradient_sum = gradient_sum
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.reached = self.parameters  # parameters that got a gradient in the last step
        self.flow: LiveFlow | None = None  # measures norms of gradients and updates in some steps
        self.device = self.parameters[0].device

    def __call__(self, parts: list[Batch], scored: int, rate: float) -> Outcome:
        """Take a step over this process's micro-batches.

        `scored` is the number of targets that have a loss (for EEG, of windows), in all processes;
        `rate` is the learning rate.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        return Outcome(self.work([part.to(self.device) for part in parts], scored))

    def work(self, parts: list[Batch], scored: int | Tensor) -> Tensor:
        """Take the step over micro-batches on the device; return the outcome's three values."""
        loss = self.gradients(parts, scored)
        self._sum_gradients()
        norm, clip_factor, broken = self._measure()
        self._update(clip_factor, broken)
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack([loss, norm, broken.to(norm.dtype)])

    @property
    def prepared_shapes(self) -> int:
        """Return a number that changes when a step compiles or captures a new batch shape."""
        return 0

    def warm_up(self, parts: list[Batch], scored: int) -> None:
        """On CUDA, take a step that changes nothing, so that kernels are loaded before training.

        Weights, moments, buffers and random generators are unchanged afterwards.
        """
        if not prepares_kernels(self.device):
            return
        self.dry_run([part.to(self.device) for part in parts], scored)
        self._sum_gradients()
        _, clip_factor, broken = self._measure()
        clipping = None if self.clip is None else clip_factor
        skip_update(self.optimizer, self.device, clipping, broken)
        self.optimizer.zero_grad(set_to_none=True)

    def dry_run(self, parts: list[Batch], scored: int | Tensor, local: bool = False) -> None:
        """Compute gradients and keep them, but restore random generators and buffers.

        With `local`, DDP is left out, so that processes need not call this at the same step.
        Without DDP or FSDP, the gradients are those of this process alone.
        """
        with torch.random.fork_rng(forked_devices(self.device)), preserve_buffers(self.objective):
            self.gradients(parts, scored, local)

    @contextmanager
    def gradients_now(self, parts: list[Batch], scored: int) -> Iterator[Gradient]:
        """Compute gradients without taking a step; yield a function from parameter to gradient.

        The gradients are computed from this batch with the current weights, and are not clipped.
        Graphs of captured steps are not used, because their gradients lie in memory that other
        kernels overwrite.
        """
        flow, self.flow = self.flow, None  # this is not a step to measure
        try:
            self.dry_run([part.to(self.device) for part in parts], scored)
            self._sum_gradients()
            yield self._gradient
        finally:
            self.flow = flow
            self.optimizer.zero_grad(set_to_none=True)

    def gradients(self, parts: list[Batch], scored: int | Tensor, local: bool = False) -> Tensor:
        """Accumulate the gradients of the mean loss; return this process's summand of that loss.

        `local` leaves out DDP.
        """
        objective = self.local_objective if local else self.objective
        # bf16 copies of weights get bf16 gradients, whose sum over micro-batches would be inexact
        if self.copies is not None and len(parts) == 1:
            with self.copies.in_place():
                return self._backward(objective, parts, scored)
        return self._backward(objective, parts, scored)

    def _backward(self, objective: nn.Module, parts: list[Batch], scored: int | Tensor) -> Tensor:
        total = torch.zeros((), device=self.device)
        # DDP and FSDP average gradients, so each process multiplies by the number of processes
        averaged = self.compute.world.size if self.gradient_sum is None else 1
        factor = torch.full((), float(averaged), device=self.device) / scored
        for i, part in enumerate(parts):
            with accumulate_gradients(objective, last=i == len(parts) - 1):
                with self.compute.autocast(), self._listening(), expect_gradient(factor):
                    loss = objective(part)
                loss.backward(factor.to(loss.dtype))
            total += loss.detach() / scored
        return total

    def _sum_gradients(self) -> None:
        if self.gradient_sum is not None:
            self.gradient_sum([self._gradients(p) for p in self.parameters])

    def _measure(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradient norm, the clip factor, and the index for `Outcome.broken`."""
        if isinstance(self.optimizer, KernelAdamW):
            self.reached, norm, clip_factor, broken = self.optimizer.measure(self.clip)
            return norm, clip_factor, broken
        by_dtype: dict[torch.dtype, list[tuple[nn.Parameter, Tensor]]] = {}
        for p in self.parameters:
            for gradient in self._gradients(p):
                by_dtype.setdefault(gradient.dtype, []).append((p, gradient))
        self.reached = [p for pairs in by_dtype.values() for p, _ in pairs]
        tensor_norms: list[Tensor] = []
        for dtype, pairs in by_dtype.items():  # one kernel for each dtype
            norm_dtype = torch.float32 if dtype.itemsize < 4 else None
            tensor_norms += torch._foreach_norm([g for _, g in pairs], dtype=norm_dtype)
        norms = full_tensor(torch.stack(tensor_norms))
        total = torch.linalg.vector_norm(norms)
        not_finite = ~norms.isfinite()
        broken = torch.where(not_finite.any(), not_finite.int().argmax(), -1)
        return total, _clip_factor(total, self.clip), broken

    def _gradients(self, p: nn.Parameter) -> list[Tensor]:
        """Return a parameter's gradient in pieces: joining them would take a kernel."""
        if self.copies is not None:
            return [gradient for gradient, _ in self.copies.pieces(p)]
        return [] if p.grad is None else [p.grad]

    def _gradient(self, p: nn.Parameter) -> Tensor | None:
        return p.grad if self.copies is None else self.copies.gradient(p)

    def _update(self, clip_factor: Tensor, broken: Tensor) -> None:
        """Update the weights, unless a gradient is not finite."""
        clipping = None if self.clip is None else clip_factor
        if not prepare_update(self.optimizer, self.device, clipping, broken):
            return
        self._before_step(clip_factor)  # gradients are not clipped yet
        apply_update(self.optimizer, self.device, self.reached, clip_factor)
        self._after_step()

    def _listening(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.flow is None else self.flow.listening()

    def _before_step(self, clip_factor: Tensor) -> None:
        if self.flow is not None:
            self.flow.before_step(clip_factor)

    def _after_step(self) -> None:
        if self.flow is not None:
            self.flow.after_step()

    def close(self) -> None:
        """Free what a step holds besides model and optimizer, such as CUDA graphs."""

    def name_of(self, index: int) -> str:
        """Return the name of the parameter to which `Outcome.broken` points."""
        names = {id(p): name for name, p in self.objective.named_parameters()}
        name = names[id(self.reached[index])]
        return name.removeprefix("module.").removeprefix("model.")

"""The training loops of all sides (frostlab, competitors), and a check that their losses agree."""

import gc
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostlab.bench.catalogue import NotAvailable
from frostlab.bench.workloads import BenchSettings, Feed
from frostlab.devices import release_cached_memory
from frostlab.errors import FrostlabError
from frostlab.recipe.settings import Optim, StepKind, Train
from frostlab.timing.interleave import AfterStep
from frostlab.training.batches.batch import IGNORED, Batch
from frostlab.training.batches.prefix import Prefix
from frostlab.training.step import build_step
from frostlab.training.step.eager import seed_step
from frostlab.training.step.objective import Objective, logits_of
from frostlab.training.step.optimizer import build_optimizer

CompileMode = Literal["default", "reduce-overhead"]
_MANY_STEPS = 10**5  # more steps than any benchmark takes
CHECKED_STEPS = 4  # number of first steps whose losses are compared
# Relative tolerances of the first loss and of later losses, in which rounding errors add up.
_FIRST_TOLERANCE = {torch.bfloat16: 0.015, torch.float32: 1e-4}
_LATER_TOLERANCE = {torch.bfloat16: 0.05, torch.float32: 0.005}
_HEAD_FACTOR = 10.0  # the factor of `enlarge_head`


class FrostlabLoop:
    """A loop of frostlab's training steps.

    `feed` returns the batch of a step. `model` may be an `Objective`, which has a loss of its own.
    `prefix` holds the cached outputs of the model's lowest layers, if these are frozen.
    """

    def __init__(
        self,
        model: nn.Module,
        feed: Feed,
        optim: Optim,
        settings: BenchSettings,
        kind: StepKind = "captured",
        prefix: Prefix | None = None,
    ) -> None:
        self.feed, self.device, self.taken = feed, settings.device, 0
        objective = model if isinstance(model, Objective) else Objective(model)
        objective.to(settings.device).train()
        objective.prefix, self.rate = prefix, optim.lr
        self._step = build_step(
            objective, optim, Train(step=kind), settings.compute, steps=_MANY_STEPS
        )

    def step(self) -> Tensor:
        """Take the next step; the loss stays on the device."""
        batch = self.feed(self.taken)
        seed_step(0, self.taken, 0, self.device)
        self.taken += 1
        return self._step([batch], batch.scored, self.rate).loss

    def warm_up(self, steps: Sequence[int]) -> None:
        """Take each of these steps three times, so that their batches' shapes are captured."""
        for number in steps:
            for _ in range(3):
                self.taken = number
                self.step()
        self.taken = 0

    @property
    def kind_and_reason(self) -> tuple[str, str]:
        """The kind of step that the loop takes, and the reason for it."""
        return self._step.kind, self._step.reason


class _WithLoss(nn.Module):
    """A model that returns its mean loss, so that torch.compile also compiles the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        logits = logits_of(self.model, inputs)
        return F.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=IGNORED
        )


class PlainLoop:
    """A loop of a few lines: SDPA, clipping, fused AdamW, the next batch copied ahead of its step.

    It uses autocast if the precision is bf16. On a GPU, the model and its loss are compiled with
    torch.compile's `mode`: `default` makes it nanoGPT's loop, and with `reduce-overhead` torch
    replays CUDA graphs. If `mode` is None, or on a CPU, nothing is compiled.
    """

    def __init__(
        self,
        model: nn.Module,
        feed: Feed,
        optim: Optim,
        settings: BenchSettings,
        mode: CompileMode | None,
        dynamic: bool | None = None,
    ) -> None:
        self.feed, self.optim, self.device, self.taken = feed, optim, settings.device, 0
        self.autocast = settings.precision == torch.bfloat16
        self.raw = model.to(settings.device).train()
        self.optimizer = build_optimizer(self.raw, optim, fused=True)
        self.model: Any = _WithLoss(self.raw)
        if settings.on_gpu and mode is not None:
            self.model = torch.compile(self.model, mode=mode, dynamic=dynamic)
        self.next_batch = self._fetch()

    def _fetch(self) -> Batch:
        batch = self.feed(self.taken).to(self.device)
        self.taken += 1
        return batch

    def step(self) -> Tensor:
        """Take the next step; the loss stays on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.optim.lr
        batch = self.next_batch
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            loss = self.model(batch.inputs, batch.targets)
        self.next_batch = self._fetch()
        loss.backward()
        if self.optim.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.raw.parameters(), self.optim.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def warm_up(self, steps: Sequence[int]) -> None:
        """Take each of these steps three times: torch records a graph the second time."""
        for number in steps:
            for _ in range(3):
                self.taken = number
                self.next_batch = self._fetch()
                self.step()
        self.taken = 0
        self.next_batch = self._fetch()


class FeedDataset(torch.utils.data.IterableDataset[Any]):
    """The complete batches of a feed, for a Trainer that must not batch examples itself."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number in range(_MANY_STEPS):
            batch = self.feed(number)
            yield {**batch.inputs, "labels": batch.targets}


class TrainerLoop:
    """The Hugging Face Trainer, with a callback after every step that can stop it."""

    def __init__(
        self,
        model: nn.Module,
        dataset: Any,
        optim: Optim,
        settings: BenchSettings,
        *,
        collator: Callable[[list[Any]], dict[str, Tensor]] | None = None,
        batch: int = 1,
        **arguments: Any,
    ) -> None:
        from transformers import PrinterCallback, Trainer, TrainingArguments

        if settings.on_gpu and torch.cuda.device_count() > 1:
            raise NotAvailable("the Trainer would use all GPUs; set CUDA_VISIBLE_DEVICES=0")
        _clear_dynamo_environment()
        self.losses: list[Tensor] = []  # holds only the loss of the last step
        losses = self.losses

        class LossKeeper(Trainer):
            def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
                losses[:] = [super().training_step(*args, **kwargs)]
                return losses[0]

        self.folder = tempfile.TemporaryDirectory()
        bf16 = settings.precision == torch.bfloat16
        training_arguments = TrainingArguments(
            self.folder.name, max_steps=_MANY_STEPS, learning_rate=optim.lr,
            weight_decay=optim.decay, lr_scheduler_type="constant", optim="adamw_torch_fused",
            max_grad_norm=optim.clip or 0, logging_strategy="no", save_strategy="no",
            report_to=[], disable_tqdm=True, use_cpu=not settings.on_gpu, bf16=bf16,
            per_device_train_batch_size=batch, dataloader_pin_memory=settings.on_gpu, **arguments,
        )  # fmt: skip
        self.trainer = LossKeeper(
            model,
            training_arguments,
            train_dataset=dataset,
            data_collator=collator or (lambda rows: rows[0]),
        )
        self.trainer.remove_callback(PrinterCallback)
        compiles = self.trainer.accelerator.state.dynamo_plugin.backend.value != "NO"
        if compiles != bool(arguments.get("torch_compile")):
            fault = "compiles, but should not" if compiles else "does not compile, but should"
            raise FrostlabError(f"the Trainer {fault}")

    def drive(self, after_step: AfterStep) -> None:
        """Train until `after_step` returns True."""
        from transformers import TrainerCallback

        class StepCallback(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
                control.should_training_stop = after_step()
                return control

        self.trainer.add_callback(StepCallback())
        self.trainer.train()
        self.folder.cleanup()

    def first_losses(self, count: int) -> list[float]:
        """Return the losses of the first steps."""
        losses: list[float] = []

        def after_step() -> bool:
            losses.append(float(self.losses[0]))
            return len(losses) == count

        self.drive(after_step)
        return losses


def group_by_length() -> dict[str, Any]:
    """Return the argument that makes a Trainer group by length; its name depends on the version."""
    from transformers import TrainingArguments

    if "train_sampling_strategy" in TrainingArguments.__dataclass_fields__:
        return {"train_sampling_strategy": "group_by_length"}
    return {"group_by_length": True}


def _clear_dynamo_environment() -> None:
    """Remove the environment variables by which one compiling Trainer makes the next compile."""
    for name in [name for name in os.environ if name.startswith("ACCELERATE_DYNAMO_")]:
        del os.environ[name]


class LossesDiffer(FrostlabError):
    """Raised when the losses of two sides differ, so their times cannot be compared."""


def enlarge_head(model: nn.Module, head: str) -> nn.Module:
    """Scale up an untrained head's weights, so that the loss depends on the rest of the model."""
    with torch.no_grad():
        model.get_submodule(head).weight.mul_(_HEAD_FACTOR)  # type: ignore[operator]
    return model


def first_losses(step: Callable[[], Any]) -> list[float]:
    """Return the losses of a side's first steps."""
    return [float(step()) for _ in range(CHECKED_STEPS)]


def check_losses(
    ours: Sequence[float], precision: torch.dtype, **others: Sequence[float]
) -> dict[str, Any]:
    """Refuse sides with different losses in their first steps, on one batch without dropout.

    `others`: name of another side, such as `theirs` → its losses. The first loss checks the
    forward pass; the later losses check the backward pass and the update. Tolerances are relative
    to the larger of the other side's first and current loss. Return the losses for the record.
    """
    first, later = _FIRST_TOLERANCE[precision], _LATER_TOLERANCE[precision]
    for name, losses in others.items():
        for number, (our_loss, other_loss) in enumerate(zip(ours, losses, strict=True)):
            allowed = max(abs(losses[0]), abs(other_loss)) * (later if number else first)
            if not abs(our_loss - other_loss) <= allowed:
                raise LossesDiffer(
                    f"the losses differ at step {number + 1} on the first batch: {our_loss:.6g} "
                    f"(ours) and {other_loss:.6g} ({name}); a difference of "
                    f"{allowed:.2g} is allowed; nothing was timed"
                )
    reset_torch()
    sides = {"ours": ours, **others}
    return {
        **{f"{name}_losses": [round(x, 6) for x in losses] for name, losses in sides.items()},
        "loss_tolerance": [first, later],
    }


def reset_torch() -> None:
    """Drop compiled code and cached memory, so that a measurement does not affect the next one."""
    torch._dynamo.reset()  # also resets the count of compilations, which torch limits
    gc.collect()
    release_cached_memory()

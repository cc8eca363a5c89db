"""The sides: our step, the loop that one writes by hand, the Hugging Face Trainer."""

import gc
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostlab.bench.catalogue import NotAvailable
from frostlab.bench.workloads import Feed, Setting
from frostlab.devices import release_cached_memory
from frostlab.errors import FrostlabError
from frostlab.recipe.settings import Optim, StepKind, Train
from frostlab.timing.interleave import After
from frostlab.training.batches.batch import IGNORED, Batch
from frostlab.training.batches.prefix import Prefix
from frostlab.training.step import build_step
from frostlab.training.step.eager import seed_step
from frostlab.training.step.objective import Objective
from frostlab.training.step.optimizer import build_optimizer

_PLENTY = 10**5  # steps a schedule may count on


class Ours:
    """frostlab's step over a feed."""

    def __init__(
        self,
        model: nn.Module,  # or its objective
        feed: Feed,
        optim: Optim,
        setting: Setting,
        wanted: StepKind = "captured",
        prefix: Prefix | None = None,
    ) -> None:
        self.feed, self.device, self.taken = feed, setting.device, 0
        objective = model if isinstance(model, Objective) else Objective(model)
        objective.to(setting.device).train()
        objective.prefix, self.rate = prefix, optim.lr
        self._step = build_step(
            objective, optim, Train(step=wanted), setting.compute, steps=_PLENTY
        )

    def step(self) -> Tensor:
        """Take the next step; the loss stays on the device."""
        batch = self.feed(self.taken)
        seed_step(0, self.taken, 0, self.device)
        self.taken += 1
        return self._step([batch], batch.scored, self.rate).loss

    def warm_up(self, places: Sequence[int]) -> None:
        """Meet every shape: once to see it, once to capture it, once to replay it."""
        for place in places:
            for _ in range(3):
                self.taken = place
                self.step()
        self.taken = 0

    @property
    def how(self) -> tuple[str, str]:
        """Which kind of step is taken, and why."""
        return self._step.kind, self._step.reason


class _WithLoss(nn.Module):
    """A language model that answers with its loss, as nanoGPT's does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids)
        return F.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=IGNORED
        )


class Plain:
    """nanoGPT's loop: torch.compile, SDPA, autocast, clipping, fused AdamW, batches ahead."""

    def __init__(self, model: nn.Module, feed: Feed, optim: Optim, setting: Setting) -> None:
        self.feed, self.optim, self.device, self.taken = feed, optim, setting.device, 0
        self.autocast = setting.precision == torch.bfloat16
        self.raw = model.to(setting.device).train()
        self.optimizer = build_optimizer(self.raw, optim, fused=True)
        self.model: Any = _WithLoss(self.raw)
        if setting.on_gpu:
            self.model = torch.compile(self.model)
        self.ahead = self._next()

    def _next(self) -> Batch:
        batch = self.feed(self.taken).to(self.device)
        self.taken += 1
        return batch

    def step(self) -> Tensor:
        """Take the next step; the loss stays on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.optim.lr
        batch = self.ahead
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            loss = self.model(batch.inputs["input_ids"], batch.targets)
        self.ahead = self._next()
        loss.backward()
        if self.optim.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.raw.parameters(), self.optim.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


class FedBatches(torch.utils.data.IterableDataset[Any]):
    """The batches of a feed, whole, for a Trainer that is not to make its own."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number in range(_PLENTY):
            batch = self.feed(number)
            yield {**batch.inputs, "labels": batch.targets}


class HuggingFace:
    """A Trainer that tells after every step, and stops when told."""

    def __init__(
        self,
        model: nn.Module,
        dataset: Any,
        optim: Optim,
        setting: Setting,
        *,
        collator: Callable[[list[Any]], dict[str, Tensor]] | None = None,
        batch: int = 1,
        **arguments: Any,
    ) -> None:
        from transformers import PrinterCallback, Trainer, TrainingArguments

        if setting.on_gpu and torch.cuda.device_count() > 1:
            raise NotAvailable("a Trainer takes every GPU it sees; set CUDA_VISIBLE_DEVICES=0")
        _forget_compiling()
        self.losses: list[Tensor] = []
        losses = self.losses

        class Watched(Trainer):
            def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
                losses[:] = [super().training_step(*args, **kwargs)]
                return losses[0]

        self.folder = tempfile.TemporaryDirectory()
        bf16 = setting.precision == torch.bfloat16
        given = TrainingArguments(
            self.folder.name, max_steps=_PLENTY, learning_rate=optim.lr, weight_decay=optim.decay,
            lr_scheduler_type="constant", optim="adamw_torch_fused", max_grad_norm=optim.clip or 0,
            logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True,
            use_cpu=not setting.on_gpu, bf16=bf16, per_device_train_batch_size=batch,
            dataloader_pin_memory=setting.on_gpu, **arguments,
        )  # fmt: skip
        self.trainer = Watched(
            model,
            given,
            train_dataset=dataset,
            data_collator=collator or (lambda rows: rows[0]),
        )
        self.trainer.remove_callback(PrinterCallback)
        compiles = self.trainer.accelerator.state.dynamo_plugin.backend.value != "NO"
        if compiles != bool(arguments.get("torch_compile")):
            raise FrostlabError(f"the Trainer {'compiles' if compiles else 'does not compile'}")

    def drive(self, after: After) -> None:
        """Train until there is enough."""
        from transformers import TrainerCallback

        class Following(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
                control.should_training_stop = after()
                return control

        self.trainer.add_callback(Following())
        self.trainer.train()
        self.folder.cleanup()

    def first_losses(self, count: int) -> list[float]:
        """The losses of its first steps."""
        found: list[float] = []

        def after() -> bool:
            found.append(float(self.losses[0]))
            return len(found) == count

        self.drive(after)
        return found


def grouped() -> dict[str, Any]:
    """What tells a Trainer to group by length, which changed its name."""
    from transformers import TrainingArguments

    if "train_sampling_strategy" in TrainingArguments.__dataclass_fields__:
        return {"train_sampling_strategy": "group_by_length"}
    return {"group_by_length": True}


def _forget_compiling() -> None:
    """A Trainer that compiles leaves word of it in the environment, and the next would obey."""
    for name in [name for name in os.environ if name.startswith("ACCELERATE_DYNAMO_")]:
        del os.environ[name]


STEPS = 4
_FIRST = {torch.bfloat16: 0.015, torch.float32: 1e-4}
_LATER = {torch.bfloat16: 0.05, torch.float32: 0.005}


class SidesDiffer(FrostlabError):
    """The two sides do not compute the same: their times mean nothing."""


def sharpened(model: nn.Module, head: str, factor: float = 10.0) -> nn.Module:
    """Make a fresh head's answers far apart, so that a loss depends on what it is given."""
    with torch.no_grad():
        model.get_submodule(head).weight.mul_(factor)  # type: ignore[operator]
    return model


def step_losses(step: Callable[[], Any]) -> list[float]:
    """The losses of a side's first steps."""
    return [float(step()) for _ in range(STEPS)]


def agree(ours: Sequence[float], theirs: Sequence[float], precision: torch.dtype) -> dict[str, Any]:
    """Compare the losses of the first steps over one batch, dropout off; refuse what differs.

    The first loss shows that the forward pass is the same, those after it the backward pass and
    the update. Tolerances are shares of the first loss, or of the present one where that is larger.
    """
    first, later = _FIRST[precision], _LATER[precision]
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        allowed = max(abs(theirs[0]), abs(other)) * (later if number else first)
        if not abs(one - other) <= allowed:
            raise SidesDiffer(
                f"the sides differ: loss {one:.6g} and {other:.6g} at step {number + 1} on the "
                f"first batch, {allowed:.2g} is allowed; nothing was timed"
            )
    tidy()
    return {
        "ours_losses": [round(value, 6) for value in ours],
        "theirs_losses": [round(value, 6) for value in theirs],
        "loss_tolerance": [first, later],
    }


def tidy() -> None:
    """Forget compiled code and give memory back, so that one measurement leaves the next alone."""
    torch._dynamo.reset()  # it also forgets how often it compiled, which has a limit
    gc.collect()
    release_cached_memory()

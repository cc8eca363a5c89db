"""The callbacks see in foreign trainers what a plain loop would."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

import frostlab as fl
from zoo import CASES

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


def examples(count: int = 48) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 99, (count, 6), generator=generator)
    return [{"input_ids": row, "labels": row[0] % 2} for row in ids]


def model_of(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = CASES[name].make_config()
    config.pad_token_id = 0
    for key in ("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop"):
        setattr(config, key, 0.0)
    config.attn_pdrop = config.classifier_dropout = 0.0
    return AutoModelForSequenceClassification.from_config(config)


def in_order(folder: Path, **more: object) -> TrainingArguments:
    return TrainingArguments(
        folder, num_train_epochs=1, per_device_train_batch_size=4, learning_rate=1e-3,
        lr_scheduler_type="constant", use_cpu=True, report_to="none", save_strategy="no",
        disable_tqdm=True, train_sampling_strategy="sequential", **more,
    )  # fmt: skip


def plain(model: torch.nn.Module, clip: float) -> fl.Flow:
    """Batches of 4, gradients of two added up, in a loop of one's own."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    batches = list(DataLoader(examples(), batch_size=4))
    with fl.watch(model, optimizer, every_n_steps=2) as flow:
        for i in range(0, len(batches), 2):
            for batch in batches[i : i + 2]:
                (model(**batch).loss / 2).backward()
            flow.before_clip()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return flow


def same(found: fl.Flow, expected: fl.Flow, *quantities: str) -> None:
    assert [r.step for r in found.reports] == [r.step for r in expected.reports] == [1, 3, 5]
    for mine, theirs in zip(found.reports, expected.reports, strict=True):
        for quantity in quantities:
            assert mine.values[quantity] == pytest.approx(
                theirs.values[quantity], rel=2e-2, abs=1e-5, nan_ok=True
            ), (mine.step, quantity)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_the_hugging_face_trainer(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    fl.freeze(model, "query")
    callback = fl.GradFlowCallback(every_n_steps=2, path=tmp_path / "flow.json")
    arguments = in_order(tmp_path / "out", gradient_accumulation_steps=2, max_grad_norm=0.05)
    Trainer(model, arguments, train_dataset=examples(), callbacks=[callback]).train()
    other = model_of(name)
    fl.freeze(other, "query")
    same(callback.flow, plain(other, 0.05), "gradient", "weight", "update")
    assert callback.flow.norms()[1] == pytest.approx(0.05, rel=1e-3)
    assert not callback.flow.frozen_by_accident()
    saved = fl.load_flow(tmp_path / "flow.json")
    assert saved.table() == callback.flow.table()
    assert saved.verdicts()["layers[0].query"].word == "frozen on purpose"


def test_lightning_sees_both_sides_of_clipping(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from frostlab.integrations.lightning import GradFlowCallback

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = model_of("bert")

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.inner(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.0)

    callback = GradFlowCallback(every_n_steps=2, path=tmp_path / "flow.json")
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        accumulate_grad_batches=2, gradient_clip_val=0.05, callbacks=[callback],
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(examples(), batch_size=4))
    expected = plain(model_of("bert"), 0.05)
    same(callback.flow, expected, "gradient", "before_clip", "weight", "update")
    assert callback.flow.norms("before_clip")[1] > 2 * callback.flow.norms()[1]
    assert fl.load_flow(tmp_path / "flow.json").norms() == callback.flow.norms()


def test_lightning_that_fails_is_watched_no_more(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from frostlab.integrations.lightning import GradFlowCallback

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = model_of("bert")

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            if index == 2:
                raise ValueError("spoilt")
            return self.inner(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            self.made = torch.optim.AdamW(self.parameters(), lr=1e-3)
            return self.made

    callback, module = GradFlowCallback(every_n_steps=1, path=tmp_path / "flow.json"), Module()
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        callbacks=[callback],
    )  # fmt: skip
    with pytest.raises(ValueError, match="spoilt"):
        trainer.fit(module, DataLoader(examples(), batch_size=4))
    assert not module.made._optimizer_step_pre_hooks
    assert [report.step for report in fl.load_flow(tmp_path / "flow.json").reports] == [1, 2]

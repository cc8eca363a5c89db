"""Train with anything: the Hugging Face Trainer and Lightning keep frozen weights frozen."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

import frostlab as fl
from zoo import CASES

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


def examples(count: int = 32) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 99, (count, 6), generator=generator)
    return [{"input_ids": row, "labels": row[0] % 2} for row in ids]


@pytest.fixture(params=["bert", "gpt2"])
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    config = CASES[request.param].make_config()
    config.pad_token_id = 0
    model = AutoModelForSequenceClassification.from_config(config)
    fl.orthogonalize(model, "query", "key")
    fl.freeze(model, "query", "key")
    return model


def test_the_hugging_face_trainer(model: torch.nn.Module, tmp_path: Path) -> None:
    proof = fl.audit(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    arguments = TrainingArguments(
        tmp_path / "out",
        num_train_epochs=2,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        weight_decay=0.1,
        use_cpu=True,
        report_to="none",
        save_strategy="epoch",
        disable_tqdm=True,
    )
    Trainer(model, arguments, train_dataset=examples()).train()
    proof.verify(model)
    assert any(not torch.equal(before[k], v) for k, v in model.state_dict().items())
    saved = sorted((tmp_path / "out").glob("checkpoint-*"))[-1]
    plain = type(model).from_pretrained(saved)
    proof.verify(plain)
    for key, value in model.state_dict().items():
        assert torch.equal(plain.state_dict()[key], value), key
    arguments.num_train_epochs = 3
    Trainer(model, arguments, train_dataset=examples()).train(resume_from_checkpoint=str(saved))
    proof.verify(model)


def test_lightning(model: torch.nn.Module, tmp_path: Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.inner(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)

    proof = fl.audit(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Module(model), DataLoader(examples(), batch_size=8))
    proof.verify(model)
    learned = [k for k, v in model.state_dict().items() if not torch.equal(before[k], v)]
    assert len(learned) > 10

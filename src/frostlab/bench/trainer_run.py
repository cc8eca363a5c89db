"""A whole run by the Hugging Face Trainer: `python -m frostlab.bench.trainer_run JOB`.

The job is a folder with `job.json` and the token arrays of each split. The program trains,
evaluates every epoch on the `tune` (validation) split, keeps the best checkpoint, evaluates its
weights on the `report` (test) split, and writes `outcome.json` to the folder. Of frostlab, it
uses only the models.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostlab.models.gpt import GPT, GPTConfig


class Examples(torch.utils.data.Dataset[dict[str, Any]]):
    """A split's examples, as rows of token ids and a label."""

    def __init__(self, path: Path) -> None:
        arrays = np.load(path)
        self.ids, self.labels = arrays["ids"].astype(np.int64), arrays["labels"]
        self.starts, self.stops = arrays["starts"], arrays["stops"]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> dict[str, Any]:
        ids = self.ids[self.starts[row] : self.stops[row]]
        return {"input_ids": ids, "label": int(self.labels[row])}


def padding(pad: int, most: int) -> Callable[[list[dict[str, Any]]], dict[str, Tensor]]:
    """Return a function that pads rows to the longest, rounded up to a multiple of 8.

    Rows are not padded to more than `most` tokens.
    """

    def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        lengths = np.array([len(row["input_ids"]) for row in rows])
        width = min(-(-int(lengths.max()) // 8) * 8, most)
        ids = np.full((len(rows), width), pad)
        for number, row in enumerate(rows):
            ids[number, : lengths[number]] = row["input_ids"]
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy((np.arange(width) < lengths[:, None]).astype(int)),
            "labels": torch.tensor([row["label"] for row in rows]),
        }

    return collate


class Classifier(nn.Module):
    """frostlab's GPT, with the outputs that the Trainer expects."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        logits = self.model(input_ids, attention_mask)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}


def _accuracy(predictions: Any) -> dict[str, float]:
    return {"accuracy": float((predictions.predictions.argmax(-1) == predictions.label_ids).mean())}


def main(folder: Path) -> None:
    """Do the job of a folder."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    job = json.loads((folder / "job.json").read_text())
    torch.manual_seed(job["seed"])
    model = Classifier(GPT(GPTConfig(**job["model"])))
    arguments = TrainingArguments(
        str(folder / "trainer"), eval_strategy="epoch", save_strategy="epoch", save_total_limit=2,
        load_best_model_at_end=True, metric_for_best_model="accuracy", greater_is_better=True,
        optim="adamw_torch_fused", lr_scheduler_type="linear", logging_steps=50, report_to=[],
        disable_tqdm=True, label_names=["labels"], remove_unused_columns=False,
        **job["arguments"],
    )  # fmt: skip
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Examples(folder / "train.npz"),
        eval_dataset=Examples(folder / "tune.npz"),
        data_collator=padding(job["pad"], job["model"]["positions"]),
        compute_metrics=_accuracy,
    )
    trainer.remove_callback(PrinterCallback)
    began: list[float] = []

    class Began(TrainerCallback):
        """A callback that notes when training begins."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            began.append(time.time())

    trainer.add_callback(Began())
    trainer.train()
    report = Examples(folder / "report.npz")
    metrics = trainer.evaluate(report)
    outcome = {
        "steps": trainer.state.global_step,
        "accuracy": metrics["eval_accuracy"],
        "examples": len(report),
        # all but the last evaluation, which is that on `report`
        "evaluations": sum("eval_accuracy" in entry for entry in trainer.state.log_history) - 1,
        "best": trainer.state.best_model_checkpoint,
        "began": began[0],
    }
    (folder / "outcome.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

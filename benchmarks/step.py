"""Time a whole training step with Q and K frozen against the same step with all trained.

BERT-base (separate projections) and GPT-2 small (fused ones), 32 × 128 tokens, AdamW.

    python benchmarks/step.py [--layers 12] [--batch 32]
"""

import argparse
from collections.abc import Callable

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import frostlab as fl
from common import device, interleaved, repeated, report
from frostlab.timing.flops import savings


def build(name: str, layers: int) -> nn.Module:
    torch.manual_seed(0)
    if name == "bert":
        return BertForSequenceClassification(BertConfig(num_hidden_layers=layers, num_labels=3))
    return GPT2LMHeadModel(GPT2Config(n_layer=layers))


def step_of(model: nn.Module, ids: torch.Tensor, autocast: bool) -> Callable[[], None]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-5, fused=ids.is_cuda)
    is_bert = isinstance(model, BertForSequenceClassification)
    labels = torch.zeros(len(ids), dtype=torch.long, device=ids.device) if is_bert else ids

    def step() -> None:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
            loss = model(ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    where, length = device(), 128
    cuda = where.type == "cuda"
    ids = torch.randint(1000, 20000, (options.batch, length), device=where)
    for name in ("bert", "gpt2"):
        for autocast in (True, False) if cuda else (False,):
            plain, frozen = (build(name, options.layers).to(where) for _ in range(2))
            anatomy = fl.freeze(frozen, "query", "key")
            times = 10 if cuda else 1
            sides = [step_of(m, ids, autocast) for m in (frozen, plain)]
            ours, theirs = (repeated(side, times) for side in sides)
            result = interleaved(ours, theirs, 11 if cuda else 5, where)
            for key in ("ours_ms", "theirs_ms"):
                result[key] = round(result[key] / times, 3)
            report(
                "step",
                {
                    "model": name,
                    "precision": "autocast bf16" if autocast else "float32",
                    "ceiling": round(1 / savings(anatomy, length).speed_up, 3),
                }
                | result,
            )


if __name__ == "__main__":
    main()

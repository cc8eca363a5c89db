"""Time how long it takes to read the anatomy of a model with about 1,000 parameter tensors.

python benchmarks/anatomy.py
"""

import gc
import statistics
import time

import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from common import report
from frostlab.roles.read import anatomy


def main() -> None:
    with torch.device("meta"):
        models = {
            "bert, 62 layers": BertModel(BertConfig(num_hidden_layers=62)),
            "gpt2, 83 layers": GPT2LMHeadModel(GPT2Config(n_layer=83)),
        }
    for name, model in models.items():
        times = []
        gc.collect()  # so that no collection of older objects is timed
        for _ in range(9):
            started = time.perf_counter()
            parts = anatomy(model).parts
            times.append(time.perf_counter() - started)
        report(
            "anatomy",
            {
                "model": name,
                "tensors": len(list(model.parameters())),
                "parts": len(parts),
                "median_s": round(statistics.median(times), 4),
                "slowest_s": round(max(times), 4),
                "limit_s": 0.1,
            },
        )


if __name__ == "__main__":
    main()

"""Time generation with the key/value cache against without, and against Hugging Face's generate.

A `gpt` of GPT Medium-512's size writes 100 tokens for each of 1, 5 and 32 rows, by sampling with
top-p. Without the cache, the model reads all tokens again for every new one. Hugging Face's side is
the exported GPT-2 with its own sampling.

    python benchmarks/generate.py [--rounds 10] [--layers 6] [--tokens 100] [--rows 1 5 32]
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import frostlab as fl
from common import device, interleaved, report
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.models.sampling import Sampling, choose, continue_prompts

PROMPT = list(range(100, 132))


@torch.no_grad()
def uncached(model: GPT, rows: int, sampling: Sampling) -> torch.Tensor:
    """Generate by reading all tokens again at every step."""
    where = next(model.parameters()).device
    ids = torch.tensor([PROMPT] * rows, device=where)
    draws = torch.stack([torch.from_numpy(sampling.draws(row)) for row in range(rows)])
    for step in range(sampling.max_tokens):
        chosen = choose(model(ids)[:, -1], sampling, draws[:, step])
        ids = torch.cat([ids, chosen[:, None]], 1)
    return ids


def hugging_face(model: Any, rows: int, sampling: Sampling) -> Callable[[], Any]:
    """Return a call of Hugging Face's generate for the same work."""
    ids = torch.tensor([PROMPT] * rows, device=model.device)
    settings = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p}

    def run() -> Any:
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=sampling.max_tokens,
            top_k=0, eos_token_id=None, **settings,
        )  # fmt: skip

    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 5, 32])
    options = parser.parse_args()
    where, sampling = device(), Sampling(max_tokens=options.tokens)
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=options.layers)).eval()
    with tempfile.TemporaryDirectory() as folder:
        fl.export(model, folder)
        theirs = AutoModelForCausalLM.from_pretrained(folder).eval().to(where)
    model.to(where)
    for rows in options.rows:

        def cached(rows: int = rows) -> Any:
            return continue_prompts(model, [PROMPT], replace(sampling, samples=rows))

        def again(rows: int = rows) -> Any:
            return uncached(model, rows, sampling)

        made = torch.tensor([sample.tokens for sample in cached()[0]])
        equal = float((made == again()[:, len(PROMPT) :].cpu()).double().mean())
        result = interleaved(cached, again, options.rounds, where)
        report(f"cached against uncached, {rows} rows", result | {"equal_tokens": equal})
        peer = hugging_face(theirs, rows, sampling)
        report(
            f"against Hugging Face's generate, {rows} rows",
            interleaved(cached, peer, options.rounds, where),
        )


if __name__ == "__main__":
    main()

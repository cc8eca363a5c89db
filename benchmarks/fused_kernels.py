"""Time attention over a joined product and embeddings' gradients against torch's; CUDA only.

Each side is captured in a graph, forward and backward, and both are replayed in turn. Torch's side
of the attention includes what its kernels need around them: the heads as views of the product, and
one gradient of the whole product with its sum over tokens.

    python benchmarks/fused_kernels.py [--rounds 12] [--only attention]
"""

import argparse
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common import device_name, report
from frostlab.models.fused.embedding import embed
from frostlab.models.fused.joined_attention import attend
from kinds import CUDA
from residual_norm import captured, milliseconds

# rows, tokens, heads, columns of a head, dropout, causal
ATTENTION = [
    (32, 128, 12, 64, 0.1, False), (256, 128, 12, 64, 0.1, False), (8, 512, 8, 64, 0.0, True),
    (64, 512, 8, 64, 0.0, True), (16, 512, 8, 64, 0.1, False), (8, 512, 16, 32, 0.0, True),
    (32, 128, 6, 128, 0.1, False), (8, 512, 4, 128, 0.0, True), (8, 1024, 8, 64, 0.0, True),
]  # fmt: skip
# rows, vocabulary, columns, the share of ids that are one id
EMBEDDINGS = [(4096, 30522, 768, 0.0), (4096, 2, 768, 1.0), (32768, 50304, 512, 0.5)]


def compare(
    name: str, facts: dict[str, object], ways: dict[str, Callable[[], object]], rounds: int
) -> None:
    """Time two ways in turn; the ratio is the first over the second."""
    replays = {way: captured(work) for way, work in ways.items()}  # type: ignore[arg-type]
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        order = list(replays) if number % 2 else list(replays)[::-1]
        for way in order:
            times[way].append(1e3 * milliseconds(replays[way], 20))
    ours, theirs = (np.array(values[1:]) for values in times.values())
    report(name, facts | {
        "us": round(float(np.median(ours)), 1), "torch_us": round(float(np.median(theirs)), 1),
        "ratio": round(float(np.median(ours / theirs)), 3),
        "ratio_p10_p90": [round(float(np.quantile(ours / theirs, q)), 3) for q in (0.1, 0.9)],
        "device": device_name(CUDA), "torch": torch.__version__,
    })  # fmt: skip


def compare_attention(
    rows: int, tokens: int, heads: int, size: int, dropout: float, causal: bool, rounds: int
) -> None:
    width = heads * size
    joined = torch.randn(rows, tokens, 3 * width, device=CUDA, dtype=torch.bfloat16)
    joined.requires_grad_()
    bias = torch.zeros(3 * width, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(rows, tokens, width, device=CUDA, dtype=torch.bfloat16)

    def ours() -> tuple[Tensor, ...]:
        starts = (0, width, 2 * width)
        mixed = attend(joined, [bias], starts, size, size**-0.5, dropout, causal)
        return torch.autograd.grad(mixed.flatten(2), [joined, bias], upstream)

    def theirs() -> tuple[Tensor, ...]:
        query, key, value = (
            part.unflatten(-1, (heads, size)).transpose(1, 2) for part in joined.split(width, -1)
        )
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=causal
        )
        (gradient,) = torch.autograd.grad(mixed.transpose(1, 2).flatten(2), joined, upstream)
        return gradient, gradient.sum((0, 1))

    facts: dict[str, object] = {
        "rows": rows, "tokens": tokens, "heads": heads, "size": size, "dropout": dropout,
        "causal": causal,
    }  # fmt: skip
    compare("attention over a joined product", facts, {"ours": ours, "theirs": theirs}, rounds)


def compare_embeddings(rows: int, vocabulary: int, width: int, share: float, rounds: int) -> None:
    weight = torch.randn(vocabulary, width, device=CUDA, requires_grad=True)
    ids = torch.randint(vocabulary, (rows,), device=CUDA)
    ids[: int(share * rows)] = 0
    upstream = torch.randn(rows, width, device=CUDA)
    facts: dict[str, object] = {
        "rows": rows, "vocabulary": vocabulary, "width": width, "share_of_one_id": share,
    }  # fmt: skip
    compare("gradient of an embedding", facts, {
        "ours": lambda: torch.autograd.grad(embed(ids, weight, -1), weight, upstream),
        "theirs": lambda: torch.autograd.grad(F.embedding(ids, weight), weight, upstream),
    }, rounds)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", choices=["attention", "embeddings"])
    options = parser.parse_args()
    if options.only != "embeddings":
        for shape in ATTENTION:
            compare_attention(*shape, options.rounds)
    if options.only != "attention":
        for case in EMBEDDINGS:
            compare_embeddings(*case, options.rounds)


if __name__ == "__main__":
    main()

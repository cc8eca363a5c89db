"""Time orthonormal bases for the Q and K of a Llama-7B shape, against a QR loop over heads.

python benchmarks/factorise.py [--layers 32]
"""

import argparse

import torch
from torch import Tensor

from common import device, interleaved, report
from frostlab.surgery.orthogonal import orthonormal_each

HEADS, SIZE, WIDTH = 32, 128, 4096


def loop(weight: Tensor, out: Tensor) -> Tensor:
    """Call torch.linalg.qr once per head and fix the signs."""
    for head, target in zip(heads_of(weight), heads_of(out), strict=True):
        q, r = torch.linalg.qr(head.T)
        target.copy_((q * torch.where(r.diagonal() < 0, -1.0, 1.0)).T)
    return out


def ours(weights: list[Tensor], out: Tensor) -> Tensor:
    for bases in orthonormal_each(map(heads_of, weights)):
        heads_of(out).copy_(bases)
    return out


def heads_of(weight: Tensor) -> Tensor:
    return weight.unflatten(0, (HEADS, SIZE))


def error(weight: Tensor) -> float:
    heads = heads_of(weight).double()
    return float((heads @ heads.mT - torch.eye(SIZE).to(heads)).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    where = device()
    torch.manual_seed(0)
    weights = [
        torch.randn(HEADS * SIZE, WIDTH, device=where) * 0.02 for _ in range(2 * options.layers)
    ]
    out = torch.empty_like(weights[0])
    result = interleaved(
        lambda: ours(weights, out),
        lambda: [loop(w, out) for w in weights],
        options.rounds,
        where,
    )
    bases = ours(weights[:1], torch.empty_like(out))
    report(
        "factorise",
        result
        | {
            "matrices": len(weights),
            "times_faster": round(1 / result["ratio"], 2),
            "orthogonality_error": error(bases),
            "difference_from_loop": float((bases - loop(weights[0], out)).abs().max()),
        },
    )


if __name__ == "__main__":
    main()

"""Six faults planted in small models, and the verdicts of `fl.watch` on each.

Prints their section of docs/gradient-flow.md and writes one heat map per fault to OUT; `--pages`
also writes the whole page of each.

python benchmarks/planted_faults.py OUT [--pages]
"""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import frostlab as fl
from frostlab.flow.diagnosis import sentence_of
from frostlab.flow.figures import heat_png
from frostlab.flow.show import flow_map_text, flow_page
from frostlab.models.gpt import GPT, GPTConfig

SYMBOLS, STEPS, EVERY = 50, 40, 2


def small_gpt() -> GPT:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"width": 32, "layers": 3, "heads": 4, "hidden": 64, "positions": 16}
    return GPT(GPTConfig(vocabulary=SYMBOLS, classes=2, dropout=0.0, **sizes))


class Sigmoids(nn.Module):
    """A stack without a residual path and without a known anatomy: a part is a module."""

    def __init__(self, layers: int, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Sigmoid()) for _ in range(layers)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> fl.Flow:
    """Take forty steps on a task that can be learned, and measure every second one."""
    generator = torch.Generator().manual_seed(0)
    with fl.watch(model, optimizer, every_n_steps=EVERY, **options) as flow:
        for _ in range(STEPS):
            if isinstance(model, GPT):
                x = torch.randint(0, SYMBOLS, (16, 16), generator=generator)
                classes = x[:, 0] % 2
            else:
                x = torch.randn(16, 16, generator=generator)
                classes = (x[:, 0] > 0).long()
            F.cross_entropy(model(x), classes).backward()
            optimizer.step()
            optimizer.zero_grad()
    return flow


def without(model: nn.Module, left_out: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    ids = {id(p) for p in left_out}
    return [p for p in model.parameters() if id(p) not in ids]


def detached() -> fl.Flow:
    model = small_gpt()
    forward = model.blocks[1].forward
    model.blocks[1].forward = lambda x, *more: x + (forward(x, *more) - x).detach()
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def rate_zero() -> fl.Flow:
    model = small_gpt()
    last = list(model.blocks[2].parameters())
    groups = [{"params": without(model, last)}, {"params": last, "lr": 0.0}]
    return train(model, torch.optim.AdamW(groups, lr=1e-3))


def vanishing() -> fl.Flow:
    model = Sigmoids(layers=40)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def saturated() -> fl.Flow:
    model = Sigmoids(layers=3)
    with torch.no_grad():
        for parameter in model.layers[1].parameters():
            parameter.mul_(3000.0)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), dead_units=True)


def missing() -> fl.Flow:
    model = small_gpt()
    kept = without(model, model.blocks[0].down.parameters())
    return train(model, torch.optim.AdamW(kept, lr=1e-3))


def masked() -> fl.Flow:
    model = small_gpt()
    qkv = model.blocks[1].qkv
    for parameter in (qkv.weight, qkv.bias):
        parameter.register_hook(lambda g: torch.cat([torch.zeros_like(g[:32]), g[32:]]))
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1))


@dataclass(frozen=True)
class Fault:
    """A fault: its description, how to train with it, and the parts to show."""

    name: str
    description: str
    flow: Callable[[], fl.Flow]
    show: tuple[str, ...]


FAULTS = (
    Fault("detached", "A detached layer: `x + (layer(x) - x).detach()` in layer 1", detached,
          ("layers[0].value", "layers[1].norm", "layers[1].value", "layers[1].down",
           "layers[2].value")),
    Fault("rate-zero", "Layer 2 in an optimizer group with learning rate 0", rate_zero,
          ("layers[1].up", "layers[2].query", "layers[2].up", "head")),
    Fault("vanishing", "Forty sigmoid layers without a residual path, SGD", vanishing,
          ("layers.0.0", "layers.20.0", "layers.30.0", "layers.35.0", "layers.38.0", "layers.39.0",
           "head")),
    Fault("saturated", "A sigmoid whose inputs are 3000 × too large, SGD, `dead_units=True`",
          saturated,
          ("layers.0.0", "layers.1.0", "layers.2.0", "head")),
    Fault("missing", "`layers[0].down` missing from the optimizer", missing,
          ("layers[0].up", "layers[0].down", "layers[1].down")),
    Fault("masked", "Query rows of layer 1 masked by a gradient hook, under AdamW's weight decay",
          masked, ("layers[0].query", "layers[1].query", "layers[1].key", "layers[2].query")),
)  # fmt: skip


def excerpt(text: str, flow: fl.Flow, show: tuple[str, ...]) -> str:
    """Return the lines of some parts, with dots for the others."""
    names, kept = {part.name for part in flow.parts}, []
    for line in text.splitlines():
        first = line.split("  ")[0].strip()
        if first not in names or first in show:
            kept.append(line)
        elif kept[-1] != "…":
            kept.append("…")
    return "\n".join(kept)


def section(fault: Fault, flow: fl.Flow) -> str:
    """Return the section of the document on a fault."""
    return "\n".join([
        f"### {fault.description}", "", f"> {sentence_of(flow)}", "",
        "```", excerpt(flow.table(), flow, fault.show), "```", "",
        "```", excerpt(flow_map_text(flow, 96), flow, fault.show), "```", "",
        f"![heat maps](images/flow-{fault.name}.png)", "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="a folder for the pictures")
    parser.add_argument("--pages", action="store_true", help="also write a page per fault")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for fault in FAULTS:
        flow = fault.flow()
        print(section(fault, flow))
        (options.out / f"flow-{fault.name}.png").write_bytes(heat_png(flow, scale=1.0))
        if options.pages:
            flow_page(flow, options.out / fault.name)


if __name__ == "__main__":
    main()

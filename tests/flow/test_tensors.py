"""Models without an anatomy are divided by their modules."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowing import adamw, watched
from frostlab.flow.tensors import read_layout


def test_what_no_anatomy_knows_is_watched_by_module() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    model[2].requires_grad_(False)

    def loss(step: int) -> Tensor:
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        return F.cross_entropy(model(x), (x[:, 0] > 0).long())

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    flow = watched(model, optimizer, loss)
    assert [part.name for part in flow.parts] == ["0", "2", "4"]
    words = [verdict.word for verdict in flow.verdicts().values()]
    assert words == ["learning", "frozen on purpose", "learning"]
    assert "its bits did not change" in flow.verdicts()["2"].why
    assert flow.depth_ratios().output > 0


def test_layers_with_activations_between_them_are_counted_as_layers() -> None:
    made = [nn.Linear(4, 4) if i % 2 == 0 else nn.ReLU() for i in range(9)]
    model = nn.Sequential(*made)
    found = read_layout(model, [adamw(model)])
    names = [[found.names[i] for i in end] for end in (found.front, found.back, found.output)]
    assert [name for end in names for name in end if name.endswith("weight")] == [
        "0.weight", "2.weight", "4.weight", "6.weight", "8.weight",
    ]  # fmt: skip

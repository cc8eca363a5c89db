"""Models whose fused weights are in odd places; `labelled.decoys.Model` is around each."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labelled.decoys import HEADS, SIZE, WIDTH, Model, apart, attend, together
from labelled.truth import made


def mixed(fused: Tensor) -> Tensor:
    """Return what attention mixes, for queries, keys and values side by side."""
    q, k, v = (apart(part) for part in fused.chunk(3, -1))
    return together(attend(q, k, v))


class Raw(nn.Module):
    """A weight stored (in, out) and a bias, both raw parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH) * 0.1)
        self.b = nn.Parameter(torch.zeros(3 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return mixed(x @ self.w + self.b)


class RoleAxis(nn.Module):
    """A parameter with an axis of roles: (3, in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, WIDTH, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return mixed(torch.cat(list(torch.einsum("btc,rcd->rbtd", x, self.w)), -1))


class HeadAxis(nn.Module):
    """A parameter with an axis of heads, and the roles along the last axis: (heads, in, 3·size)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(HEADS, WIDTH, 3 * SIZE) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("btc,hcd->bhtd", x, self.w).chunk(3, -1)
        return together(attend(q, k, v))


class Convolution(nn.Module):
    """A convolution over one token."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, 3 * WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return mixed(self.conv(x.mT).mT)


class Scaled(nn.Linear):
    """A linear module with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OwnForward(nn.Module):
    """A linear module whose forward is not torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = Scaled(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return mixed(self.qkv(x))


class NotCalled(nn.Module):
    """A linear module whose weight is multiplied by hand, the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return mixed(x @ self.qkv.weight)


class Listed(nn.Module):
    """A weight in a list of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(WIDTH, 3 * WIDTH) * 0.1])

    def forward(self, x: Tensor) -> Tensor:
        return mixed(x @ self.weights[0])


class JoinedExperts(nn.Module):
    """Experts in one parameter, gates before ups along the second axis; an attention after."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gate_up = nn.Parameter(torch.randn(4, 80, WIDTH) * 0.1)
        self.back = nn.Parameter(torch.randn(4, WIDTH, 40) * 0.1)
        self.choose = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        shares = torch.softmax(self.choose(x), -1).permute(0, 2, 1).unsqueeze(-1)
        gate, up = torch.einsum("btc,eic->beti", x, self.gate_up).chunk(2, -1)
        each = torch.einsum("beti,eci->betc", F.silu(gate) * up, self.back)
        x = x + (shares * each).sum(1)
        return together(attend(apart(self.q(x)), apart(self.k(x)), apart(self.v(x))))


class NormalisedBefore(nn.Module):
    """A weight that torch's former weight_norm computes before every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.utils.weight_norm(nn.Linear(WIDTH, 3 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return mixed(self.qkv(x))


class Normalised(nn.Module):
    """A weight that a parametrization computes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 3 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return mixed(self.qkv(x))


class Tied(nn.Module):
    """Two modules with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return mixed(self.a(x)) + mixed(self.b(x))


def around(mix: Callable[[], nn.Module]) -> nn.Module:
    """Return a model of two layers that mix tokens in this way."""
    return made(lambda: Model(mix))()


# Each with the roles to freeze, the split parameter of a layer, and the axis of its rows.
SPLIT: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], str, int]] = {
    "raw": (Raw, ("query", "key"), "w", 1),
    "axis-of-roles": (RoleAxis, ("query", "key"), "w", 0),
    "axis-of-heads": (HeadAxis, ("query",), "w", 2),
    "convolution": (Convolution, ("query", "key"), "conv.weight", 0),
    "own-forward": (OwnForward, ("key",), "qkv.weight", 0),
    "not-called": (NotCalled, ("query", "key"), "qkv.weight", 1),
    "listed": (Listed, ("query", "key"), "weights.0", 1),
    "experts": (JoinedExperts, ("up",), "gate_up", 1),
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "weight-norm-before": (NormalisedBefore, "qkv.weight_g"),
    "weight-norm": (Normalised, "qkv.parametrizations.weight.original0"),
    "tied": (Tied, "a.weight"),
}

"""A forward pass writes into weights, into its inputs, or through hooks: all stays as it was."""

import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import frostlab as fl
from frostlab.roles import read
from frostlab.roles.copies import may_return

WIDTH, LARGE = 16, 272  # a weight of 272 x 272 is shared with the copy that runs
IDS = torch.arange(12).view(2, 6) * 7 + 3


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(9.0))

    def prepare(self) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        self.prepare()
        sides = [part(x).unflatten(-1, (2, -1)) for part in (self.query, self.key, self.value)]
        query, key, value = (side.transpose(1, 2) for side in sides)
        mixed = F.scaled_dot_product_attention(query * self.scale, key, value)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, kind: type[Attention] = Attention, width: int = WIDTH) -> None:
        super().__init__()
        self.words = nn.Embedding(100, width)
        self.layers = nn.ModuleList(kind(width) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.words(ids)
        for layer in self.layers:
            x = x + layer(x)
        return x


def roles(model: nn.Module, batch: Any = None) -> dict[str, str]:
    return {part.name: part.role for part in fl.anatomy(model, batch).parts}


def state(model: nn.Module) -> list[Any]:
    """Return the bits, the memory and the version of each parameter."""
    return [
        (name, p.detach().numpy().tobytes(), p.data_ptr(), p._version)
        for name, p in model.named_parameters()
    ]


def of_data(attention: Any) -> None:
    for part in (attention.query, attention.key):
        part.weight.data.copy_(F.normalize(part.weight.data, dim=-1))


def of_new_data(attention: Any) -> None:
    attention.query.weight.data = F.normalize(attention.query.weight.data, dim=-1)


def of_weights(attention: Any) -> None:
    with torch.no_grad():
        attention.key.weight.div_(attention.key.weight.norm(dim=-1, keepdim=True))


def of_rows(attention: Any) -> None:
    with torch.no_grad():
        attention.value.weight[3] = 1.0
        attention.query.weight.data[:2] *= 0.5


def into_an_argument(attention: Any) -> None:
    F.normalize(attention.query.weight.data, dim=-1, out=attention.query.weight.data)


def of_several(attention: Any) -> None:
    torch._foreach_mul_([attention.query.weight.data, attention.key.bias.data], 0.9)


def of_a_limit(attention: Any) -> None:
    attention.scale.data.clamp_(max=4.6)


WRITES = (
    of_data, of_new_data, of_weights, of_rows, into_an_argument, of_several, of_a_limit,
)  # fmt: skip


@pytest.mark.parametrize("width", [WIDTH, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_weights_that_a_pass_writes_into_stay(write: Callable[[Any], None], width: int) -> None:
    model = Model(type("Writes", (Attention,), {"prepare": write}), width)
    before = state(model)
    found = roles(model)
    assert state(model) == before
    assert found == roles(Model(width=width))
    model(IDS)
    assert state(model) != before, "the model itself writes"


def test_an_embedding_that_limits_its_norms_stays() -> None:
    model = Model()
    model.words = nn.Embedding(5000, WIDTH, max_norm=0.5)
    before = state(model)
    assert roles(model) == roles(Model())
    assert state(model) == before


class Fills(Model):
    """It writes into its inputs: ids, a dict, and floats."""

    def forward(self, ids: Tensor, more: Any = None, factors: Any = None) -> Tensor:
        ids[ids == 99] = 0
        ids[:, 0] = 1
        if more is not None:
            more.pop("unused")
            more["list"].append(more["list"][0].add_(1))
        if factors is not None:
            factors.mul_(2.0)
            return super().forward(ids) * factors
        return super().forward(ids)


def test_inputs_that_a_pass_writes_into_stay() -> None:
    ids, more = IDS.clone(), {"unused": 1, "list": [torch.zeros(2, dtype=torch.long)]}
    factors = torch.randn(2, 6, 1)
    before = factors.clone()
    assert roles(Fills(), (ids, more, factors)) == roles(Model())
    assert torch.equal(ids, IDS)
    assert torch.equal(factors, before)
    assert list(more) == ["unused", "list"]
    assert [item.tolist() for item in more["list"]] == [[0, 0]]  # type: ignore[attr-defined]


def test_a_batch_that_its_owner_changes_later_is_kept_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read, "_BATCHES", {})

    class Needs(Model):
        def forward(self, graph: Any, ids: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(ids[graph["order"]])

    batch = {"graph": {"order": torch.tensor([1, 0])}, "ids": IDS.clone()}
    fl.anatomy(Needs(), batch)
    batch["ids"].fill_(10**6)  # type: ignore[attr-defined]
    batch["graph"].clear()  # type: ignore[attr-defined]
    assert roles(Needs()) == roles(Model())


class Itself(Attention):
    def __deepcopy__(self, memo: Any) -> "Itself":
        return self


def test_a_module_that_is_its_own_copy_is_refused_and_stays() -> None:
    model: Any = Model(Itself).train()
    model.layers[1].register_forward_hook(print)
    said = r"a copy of `layers.0` \(Itself\) is the module itself, because of its `__deepcopy__`"
    with pytest.raises(fl.UnknownArchitecture, match=said):
        fl.anatomy(model)
    assert all(module.training for module in model.modules())
    assert list(model.layers[1]._forward_hooks.values()) == [print]


class Holds(Attention):
    """It holds what cannot be copied."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.tools: Any = {"lock": threading.Lock(), "file": io.StringIO(), "event": [1]}
        self.numbers = (number for number in range(1000))
        self.done = threading.Event()

    def prepare(self) -> None:
        with self.tools["lock"]:
            self.tools["event"].append(self.out.weight * 2)


def test_what_cannot_be_copied_is_shared() -> None:
    model: Any = Model(Holds)
    model.layers[0].tools["event"].append(model.layers[0].out.weight * 2)  # a computed tensor
    found = roles(model)
    assert found == roles(Model())
    assert [len(layer.tools["event"]) for layer in model.layers] == [2, 1]
    assert next(model.layers[0].numbers) == 0


class Stubborn:
    def __deepcopy__(self, memo: Any) -> Any:
        raise KeyError("no copies\nhere")


class HoldsModule(Attention):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.inner = [nn.Identity()]
        self.inner[0].forward = None  # type: ignore[method-assign, assignment]
        self.inner[0].__dict__["__deepcopy__"] = Stubborn().__deepcopy__


def test_an_attribute_that_cannot_be_copied_is_named() -> None:
    said = r"it cannot be copied, because of `layers.0.inner` \(KeyError: .*no copies"
    with pytest.raises(fl.UnknownArchitecture, match=said) as error:
        fl.anatomy(Model(HoldsModule))
    assert "\n" not in str(error.value)


SEEN: list[Any] = []


def test_hooks_that_return_values_run_in_the_copy() -> None:
    model: Any = Model()
    for layer in model.layers:
        query, key = layer.query, layer.key

        def swapped(module: nn.Module, args: Any, result: Any, q: Any = query, k: Any = key) -> Any:
            other = k if module is q else q
            return F.linear(args[0], other.weight, other.bias)

        query.register_forward_hook(swapped)
        key.register_forward_hook(swapped)
        layer.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
        layer.out.register_forward_hook(lambda *_: SEEN.append(len(SEEN)))
    found = roles(model)
    assert (found["layers.1.query.weight"], found["layers.1.key.weight"]) == ("key", "query")
    assert found["layers.1.value.weight"] == "value"
    assert SEEN == []
    model(IDS)
    assert SEEN == [0, 1]
    SEEN.clear()


def test_a_hook_that_reads_itself_from_elsewhere_is_refused() -> None:
    model: Any = Model()

    class Elsewhere:
        layer = model.layers[0]

    model.layers[1].register_forward_hook(lambda m, args, result: Elsewhere.layer.out(result))
    with pytest.raises(fl.UnknownArchitecture, match="runs a Linear of the model itself"):
        fl.anatomy(model)


class Observer:
    def __call__(self, module: nn.Module, args: Any, result: Any) -> None:
        if args:
            return
        try:
            self.seen = result
        finally:
            self.done = True

    def changed(self, module: nn.Module, args: Any, result: Any) -> Any:
        return result if args else None


def test_which_hooks_may_return_a_value() -> None:
    assert not may_return(Observer())
    assert may_return(Observer().changed)
    assert not may_return(lambda *_: None)
    assert may_return(lambda *args: args[0] if args else None)
    assert may_return(lambda *args: None if args else 1)
    assert may_return(max)

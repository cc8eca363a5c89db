"""Evidence is used again only as long as nothing has changed that it depends on."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import frostlab as fl
from frostlab.roles import read
from frostlab.surgery.split import SplitProjection
from zoo import build

WIDTH = 16


REVERSED = False


class Sizes:
    """A class that is used as settings."""

    reversed = False


def is_reversed() -> bool:
    return REVERSED


def mixed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value)


def mixed_otherwise(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(key, query, value)


class Settings:
    """A plain object that a module keeps."""

    def __init__(self) -> None:
        self.sides = {"query": "first", "key": ["second"]}


class Attention(nn.Module):
    """An attention whose order of weights is a setting; the order can be kept in many places."""

    swap = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.order, self.heads, self.mixed = ("first", "second"), 2, mixed
        self.settings = Settings()
        self.register_buffer("turn", torch.tensor(0))

    def sides(self, x: Tensor) -> list[Tensor]:
        names = [self.settings.sides["query"], self.settings.sides["key"][0]]
        names = [names[self.order.index(name)] for name in ("first", "second")]
        names = names[::-1] if self.swap or self.turn or is_reversed() or Sizes.reversed else names
        return [getattr(self, name)(x) for name in (*names, "third")]

    def forward(self, x: Tensor) -> Tensor:
        sides = [t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.sides(x)]
        return self.out(self.mixed(*sides).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(to_dict=lambda: {"width": WIDTH})
        self.words, self.attention = nn.Embedding(50, WIDTH), Attention()

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.words(ids)
        return x + self.attention(x)


def by_tuple(attention: Any) -> None:
    attention.order = ("second", "first")


def by_function(attention: Any) -> None:
    attention.mixed = mixed_otherwise


def by_lambda(attention: Any) -> None:
    before = attention.mixed
    attention.mixed = lambda query, key, value: before(key, query, value)


def by_object(attention: Any) -> None:
    attention.settings.sides = {"query": "second", "key": ["first"]}


def by_inner_list(attention: Any) -> None:
    attention.settings.sides["query"] = "second"
    attention.settings.sides["key"][0] = "first"


def by_buffer(attention: Any) -> None:
    attention.turn.fill_(1)


def by_method(attention: Any) -> None:
    attention.sides = lambda x: [attention.second(x), attention.first(x), attention.third(x)]


def by_hook(attention: Any) -> None:
    first, second = attention.first, attention.second
    first.register_forward_hook(lambda m, x, y: F.linear(x[0], second.weight, second.bias))
    second.register_forward_hook(lambda m, x, y: F.linear(x[0], first.weight, first.bias))


CHANGES = (
    by_tuple, by_function, by_lambda, by_object, by_inner_list, by_buffer, by_method, by_hook,
)  # fmt: skip


def roles(model: nn.Module) -> tuple[str, str]:
    found = {part.name: part.role for part in fl.anatomy(model).parts}
    return found["attention.first.weight"], found["attention.second.weight"]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("of_the_same", [True, False], ids=["same", "other"])
def test_a_changed_setting_is_seen(change: Callable[[Any], None], of_the_same: bool) -> None:
    model = Model()
    assert roles(model) == ("query", "key")
    model = model if of_the_same else Model()
    change(model.attention)
    assert roles(model) == ("key", "query")


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setitem(globals(), "REVERSED", True),
        lambda patch: patch.setitem(globals(), "is_reversed", lambda: True),
        lambda patch: patch.setattr(Sizes, "reversed", True),
    ],
    ids=["flag", "function", "class"],
)
def test_a_changed_global_of_the_users_code_is_seen(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, where a cell with a helper or a flag is run again."""
    model = Model()
    assert roles(model) == ("query", "key")
    change(monkeypatch)
    assert roles(model) == ("key", "query")


def test_a_changed_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    assert roles(model) == ("query", "key")
    monkeypatch.setattr(Attention, "swap", True)
    assert roles(model) == ("key", "query")
    before = Attention.sides

    def sides(self: Attention, x: Tensor) -> list[Tensor]:
        query, key, value = before(self, x)
        return [key, query, value]

    monkeypatch.setattr(Attention, "sides", sides)
    assert roles(model) == ("query", "key")
    assert roles(Model()) == ("query", "key")


def test_another_number_of_heads_is_seen() -> None:
    model = Model()
    for heads in (2, 4):
        model.attention.heads = heads
        (part,) = fl.anatomy(model).select("query.weight")
        assert part.heads == fl.Heads(heads, heads, WIDTH // heads)


def test_settings_of_torchs_own_modules_are_seen() -> None:
    model: Any = nn.Sequential(nn.Embedding(50, WIDTH), nn.Linear(WIDTH, WIDTH), Attending())
    for heads in (2, 4):
        model[2].whole.num_heads = heads
        model[2].whole.head_dim = WIDTH // heads
        parts = fl.anatomy(model).select("query.weight")
        assert [part.heads for part in parts] == [fl.Heads(heads, heads, WIDTH // heads)]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.whole(x, x, x)[0]
        return y


@pytest.mark.parametrize("of_the_same", [True, False], ids=["same", "other"])
def test_a_query_that_becomes_the_key_too_is_refused(of_the_same: bool) -> None:
    model = Model()
    fl.anatomy(model)
    model = model if of_the_same else Model()
    model.attention.second.weight = model.attention.first.weight
    with pytest.raises(fl.UnknownArchitecture, match="is query and key at once"):
        fl.freeze(model, "query")
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_query_of_a_table_that_is_also_the_key_is_refused() -> None:
    model, _ = build("bert")
    attention = model.get_submodule("encoder.layer.1.attention.self")
    attention.key.weight = attention.query.weight
    with pytest.raises(fl.UnknownArchitecture, match=r"query.weight and .*at once"):
        fl.anatomy(model)


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the models that have been read by a probe."""
    names: list[str] = []
    find = read.find_roles

    def counted(model: nn.Module, *arguments: Any) -> Any:
        names.append(type(model).__name__)
        return find(model, *arguments)

    monkeypatch.setattr(read, "find_roles", counted)
    monkeypatch.setattr(read, "_FOUND_BY_CONFIG", {})
    return names


def test_a_pass_that_changes_nothing_is_not_repeated(probes: list[str]) -> None:
    model = Model().train()
    fl.anatomy(model)
    model(torch.arange(12).view(2, 6)).sum().backward()
    model.eval().double()
    fl.anatomy(model)
    fl.anatomy(Model())
    fl.anatomy(copy.deepcopy(model))
    assert probes == ["Model"]


class Odd:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("nobody looks inside")


def test_what_fails_when_it_is_looked_at_is_no_obstacle(probes: list[str]) -> None:
    model: Any = Model()
    model.odd = Odd()
    for _ in range(2):
        assert roles(model) == ("query", "key")
    assert probes == ["Model"]


class Counts(Model):
    """Its class counts passes."""

    passes = 0

    def forward(self, ids: Tensor) -> Tensor:
        Counts.passes += 1
        return super().forward(ids)


def test_a_class_that_counts_passes_is_read_once(probes: list[str]) -> None:
    model = Counts()
    for _ in range(3):
        fl.anatomy(model)
    assert probes == ["Counts"]


class Projection(nn.Linear):
    """A projection that a split replaces."""


class Fused(Model):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Module()  # type: ignore[assignment]
        self.whole, self.out = Projection(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.words(ids)
        sides = self.whole(x).unflatten(-1, (3, 2, -1)).transpose(1, 3).unbind(2)
        return x + self.out(mixed(*sides).transpose(1, 2).flatten(2))


def test_nothing_is_read_after_a_split(probes: list[str]) -> None:
    model = Fused()
    frozen = fl.freeze(model, "query")
    assert isinstance(model.whole, SplitProjection)
    assert {part.role for part in frozen.parts if part.state == "frozen"} == {"query"}
    fl.freeze(model, "key", "query")
    fl.thaw(model)
    assert isinstance(model.whole, Projection)
    assert fl.anatomy(model).count("trainable") == sum(p.numel() for p in model.parameters())
    assert probes == ["Fused"]

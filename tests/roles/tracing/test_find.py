"""Roles found by evidence, against tables, against labels, and where the evidence does not do."""

import copy
import itertools
import warnings
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import frostlab as fl
from cases import slow_unless
from frostlab.roles import read
from labelled import LABELLED, OUTSIDE, disagreements, expected
from zoo import ALL, EVERY, LAYOUTS, build

QUICK = {
    "unused-query", "swapped-names", "before-query", "before-all", "tied-query-key",
    "two-attentions", "experts-only", "attention-and-experts", "value-key-query", "strided-heads",
    "two-halves", "scaled-queries", "bare-value", "constant-query", "einsum", "module-per-head",
    "fused-chunk", "fused-view-split", "raw-parameters", "axis-of-heads", "olmo2", "persimmon",
    "codegen", "deepseek_v3", "qwen3_next", "swin", "levit", "mbart", "siglip", "mamba",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of models
@pytest.mark.parametrize("name", slow_unless(QUICK, [n for n in LABELLED if n not in OUTSIDE]))
def test_what_is_found_is_what_the_forward_pass_says(name: str) -> None:
    case = LABELLED[name]
    model = case.build()
    try:
        anatomy = guessed_or_given(model, case.inputs())
    except fl.UnknownArchitecture:
        assert case.refused or case.may_refuse
        return
    assert not case.refused
    assert not disagreements(expected(case, model), anatomy.parts, model)
    assert anatomy.evidence.method == "probe"
    assert anatomy.evidence.passes > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", slow_unless(LAYOUTS, EVERY))
def test_tables_and_probes_agree(name: str) -> None:
    model, inputs = build(name)
    table = {part.key: part for part in fl.anatomy(model).parts}
    anatomy = fl.anatomy(model, inputs)  # a batch asks for a probe
    found = {part.key: part for part in anatomy.parts}
    for key in table.keys() | found.keys():
        said, seen = table.get(key), found.get(key)
        if (said or seen).name in anatomy.evidence.unreached:  # type: ignore[union-attr]
            continue
        assert said is not None, f"the probe alone has {key}"
        assert seen is not None, f"the table alone has {key}"
        if said.role == "head" and seen.role == "norm":
            continue  # a norm inside a head
        for field in ("role", "kind", "stack", "layers", "layout", "axis", "matmul", "heads"):
            assert getattr(said, field) == getattr(seen, field), (key, field)
        assert said.place.cross == seen.place.cross, key
        assert _ranges(said) == _ranges(seen), key


def guessed_or_given(model: nn.Module, inputs: Any) -> fl.Anatomy:
    """Nystromformer runs only with texts of one length, which nobody guesses."""
    try:
        return fl.anatomy(model)
    except fl.UnknownArchitecture:
        return fl.anatomy(model, inputs)


def _ranges(part: Any) -> Any:
    return None if part.rows is None else part.rows.ranges()


def test_all_46_configurations_are_compared() -> None:
    assert len(ALL) == 46


@pytest.fixture(autouse=True)
def no_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the batches of other tests."""
    monkeypatch.setattr(read, "_BATCHES", {})


class Attends(nn.Module):
    """An attention that its users can spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.out = nn.Linear(16, 16)

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (2, 8)).transpose(1, 2) for p in self.projections())
        scores = q @ k.transpose(-1, -2)
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def projections(self) -> tuple[nn.Module, ...]:
        return self.query, self.key, self.value

    def forward(self, ids: Tensor) -> Tensor:
        return self.mix(self.embed(ids))


def roles(model: nn.Module, batch: Any = None) -> dict[str, str]:
    return {part.key: part.role for part in fl.anatomy(model, batch).parts}


def test_an_attention_without_layers() -> None:
    found = roles(Attends())
    assert found["query.weight"] == "query"
    assert found["out.bias"] == "output"
    assert found["embed.weight"] == "embedding"


class Skips(Attends):
    def forward(self, ids: Tensor, attend: bool = False) -> Tensor:
        return self.mix(self.embed(ids)) if attend else self.embed(ids)


class Memory:
    """A counter that copies of a model share."""

    def __init__(self) -> None:
        self.times = itertools.count()

    def __deepcopy__(self, memo: Any) -> "Memory":
        return self


class Turns(Attends):
    """Every second time it uses its weights in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()

    def projections(self) -> tuple[nn.Module, ...]:
        return (self.query, self.key, self.value)[:: 1 if next(self.memory.times) % 2 == 0 else -1]


class Wants(Attends):
    def forward(self, graph: Any, ids: Tensor) -> Tensor:  # type: ignore[override]
        return self.mix(self.embed(ids[graph["order"]]))


class Warns(Wants):
    def forward(self, graph: Any, ids: Tensor) -> Tensor:  # type: ignore[override]
        warnings.warn("a guess is odd", stacklevel=1)
        return super().forward(graph, ids)


class Fails(Attends):
    def forward(self, ids: Tensor) -> Tensor:
        raise RuntimeError("no such weather")


class FailsLate(Attends):
    """It takes vectors, which its argument's name does not tell, and fails after its attention."""

    def forward(self, stream: Tensor) -> Tensor:
        return self.mix(stream).topk(17).values


class Bytes(Attends):
    def __init__(self, dtype: torch.dtype = torch.int8) -> None:
        super().__init__()
        whole = torch.zeros(16, 16).to(dtype)
        self.key.weight = nn.Parameter(whole, requires_grad=False)


class EightBits(Bytes):
    def __init__(self) -> None:
        super().__init__(torch.float8_e4m3fn)


BAD: dict[str, tuple[type[nn.Module], str]] = {
    "no attention": (lambda: nn.Sequential(nn.Linear(4, 4)), "product with a third)"),  # type: ignore[dict-item]
    "never called": (
        Skips,
        "did not use `query.weight`, `query.bias`, `key.weight`, …: if an attention has these",
    ),
    "another way": (Turns, "rows of"),
    "inputs nobody can guess": (Wants, "cannot guess `graph` of Wants.forward (IndexError"),
    "what to do about it": (
        Wants,
        "; read the model on a small batch first, fl.anatomy(model, {'graph': tensor})",
    ),
    "a forward that fails": (
        Fails,
        "Fails: its forward pass fails on guessed inputs (RuntimeError: no such weather); if it ",
    ),
    "a forward that fails late": (
        FailsLate,
        "its forward pass fails on guessed inputs (RuntimeError: selected index k out of range)",
    ),
    "quantised": (Bytes, "key.weight is quantised (int8)"),
    "floats of eight bits": (EightBits, "key.weight is quantised (float8_e4m3fn)"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_models_end_in_one_clear_line(case: str) -> None:
    make, message = BAD[case]
    with pytest.raises(fl.UnknownArchitecture) as error:
        fl.anatomy(make())
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_guesses_that_fail_do_not_warn() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises(fl.UnknownArchitecture):
            fl.anatomy(Warns())
    assert seen == []


def test_a_model_in_training_mode_is_read_in_eval_mode() -> None:
    class Exchanges(Attends):
        def projections(self) -> tuple[nn.Module, ...]:
            pair = (self.key, self.query) if self.training else (self.query, self.key)
            return *pair, self.value

    model = Exchanges().train()
    assert roles(model)["query.weight"] == "query"
    assert model.training


def test_a_batch_takes_another_way_than_a_guess() -> None:
    batch = {"ids": torch.randint(3, 50, (2, 6)), "attend": True}
    assert roles(Skips(), batch)["query.weight"] == "query"
    order = torch.tensor([1, 0])
    assert roles(Wants(), ({"order": order}, batch["ids"]))["key.weight"] == "key"


def test_a_batch_that_does_not_fit_is_named() -> None:
    with pytest.raises(fl.BadInput, match=r"Attends does not run with this batch \(TypeError"):
        fl.anatomy(Attends(), {"words": torch.zeros(2, 3)})


@pytest.mark.parametrize("batch", [[], {}])
def test_a_batch_without_arguments_is_called_empty(batch: Any) -> None:
    said = r"Attends does not run with an empty batch \(TypeError: .*'ids'"
    with pytest.raises(fl.BadInput, match=said):
        fl.anatomy(Attends(), batch)


@pytest.mark.parametrize("shape", [(0, 6), (2, 0)])
def test_a_batch_without_values_is_called_empty(shape: tuple[int, int]) -> None:
    ids = torch.zeros(shape, dtype=torch.long)
    for batch in (ids, (ids,), {"ids": ids}):
        with pytest.raises(fl.BadInput, match=f"the batch is empty: .* of shape \\({shape[0]}, "):
            fl.anatomy(Attends(), batch)


class Tied(Attends):
    def projections(self) -> tuple[nn.Module, ...]:
        return self.query, self.key, self.key


def test_no_table_is_suggested_where_none_could_help() -> None:
    with pytest.raises(fl.UnknownArchitecture) as error:
        fl.anatomy(Tied())
    assert str(error.value) == (
        "Tied: key.weight is key and value at once (16 rows, such as row 0), so neither can be "
        "frozen alone"
    )


def test_copies_are_read_on_the_batch_of_the_first_model(tmp_path: Path) -> None:
    model = Wants()
    batch = ({"order": torch.tensor([1, 0])}, torch.randint(3, 50, (2, 6)))
    with pytest.raises(fl.UnknownArchitecture, match="read the model on a small batch first"):
        fl.freeze(model, "query", "key")
    read_on_batch = fl.anatomy(model, batch)
    frozen = fl.freeze(model, "query", "key")
    double = copy.deepcopy(model)
    fl.audit(double).verify(model)
    assert fl.anatomy(double) == frozen
    assert fl.thaw(double) == read_on_batch
    fl.save_trainable(model, tmp_path / "delta")
    fresh = Wants()
    fresh.load_state_dict(model.state_dict())
    fl.load_trainable(fresh, tmp_path / "delta")
    assert fl.anatomy(model).count("frozen") == frozen.count("frozen")

    class Other(Wants):
        pass

    with pytest.raises(fl.UnknownArchitecture, match="cannot guess `graph`"):
        fl.anatomy(Other())


def test_a_batch_that_another_model_cannot_take_is_not_insisted_on() -> None:
    class Longer(Attends):
        longest = 3

        def __init__(self) -> None:
            super().__init__()
            self.longest = Longer.longest

        def forward(self, ids: Tensor) -> Tensor:
            if ids.shape[1] > self.longest:
                raise ValueError("too long")
            return super().forward(ids)

    Longer.longest = 64
    fl.anatomy(Longer(), torch.randint(3, 50, (2, 32)))
    Longer.longest = 16
    assert roles(Longer())["query.weight"] == "query"


def test_only_a_few_batches_are_kept() -> None:
    models = [type(f"Kind{n}", (Wants,), {})() for n in range(read._KEPT_BATCHES + 1)]
    batch = ({"order": torch.tensor([1, 0])}, torch.randint(3, 50, (2, 6)))
    for model in models:
        fl.anatomy(model, batch)
    assert len(read._BATCHES) == read._KEPT_BATCHES
    fl.anatomy(type(models[-1])())
    with pytest.raises(fl.UnknownArchitecture, match="cannot guess `graph`"):
        fl.anatomy(type(models[0])())
    assert fl.anatomy(models[0]).evidence.method == "probe", "its own evidence stays"


def test_wrapped_models_are_read() -> None:
    assert roles(nn.DataParallel(Attends()))["query.weight"] == "query"
    assert roles(torch.compile(Attends()))["query.weight"] == "query"  # type: ignore[arg-type]


def test_the_evidence_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    probes: list[str] = []
    find = read.find_roles

    def counted(model: nn.Module, *arguments: Any) -> Any:
        probes.append(type(model).__name__)
        return find(model, *arguments)

    monkeypatch.setattr(read, "find_roles", counted)
    monkeypatch.setattr(read, "_FOUND_BY_CONFIG", {})
    model = Attends()
    fl.anatomy(model)
    fl.freeze(model, "query", "key")
    fl.anatomy(model)
    assert probes == ["Attends"]
    fl.anatomy(Attends())  # another model of this class may have other heads
    granites = [LABELLED["granite"].build() for _ in range(2)]
    for granite in granites:
        fl.anatomy(granite)
    assert probes == ["Attends", "Attends", "GraniteModel"], "one class and config, one probe"


def _attends_with_config(*order: str, flag: bool = False) -> nn.Module:
    """Return a model of a new class that always has the same name, and a config."""

    class Configured(Attends):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(to_dict=lambda: {"width": 16})
            self.flag = flag

        def projections(self) -> tuple[nn.Module, ...]:
            modules = tuple(getattr(self, name) for name in order)
            return modules[::-1] if self.flag else modules

    return Configured()


def test_a_class_that_is_defined_again_is_read_again() -> None:
    first = _attends_with_config("query", "key", "value")
    again = _attends_with_config("value", "key", "query")
    assert repr(type(first)) == repr(type(again))
    assert roles(first)["query.weight"] == "query"
    assert roles(again)["query.weight"] == "value"


def test_a_flag_of_a_model_that_its_config_lacks_is_seen() -> None:
    model = _attends_with_config("query", "key", "value")
    flagged = type(model)()
    flagged.flag = True  # type: ignore[assignment]
    assert roles(model)["query.weight"] == "query"
    assert roles(flagged)["query.weight"] == "value"


def test_a_changed_forward_pass_is_read_again() -> None:
    model = nn.Sequential(Attends())
    assert roles(model)["0.query.weight"] == "query"

    class Turned(Attends):
        def projections(self) -> tuple[nn.Module, ...]:
            return self.value, self.key, self.query

    model[0] = Turned()
    assert roles(model)["0.query.weight"] == "value"
    model[0].forward = MethodType(lambda self, ids: Attends.mix(self, self.embed(ids)), model[0])
    model[0].projections = MethodType(Attends.projections, model[0])  # type: ignore[method-assign]
    assert roles(model)["0.query.weight"] == "query"


def test_heads_of_another_number_are_not_those_that_were_kept() -> None:
    class Heads(Attends):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.count = count

        def mix(self, x: Tensor) -> Tensor:
            size = (self.count, 16 // self.count)
            q, k, v = (p(x).unflatten(-1, size).transpose(1, 2) for p in self.projections())
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
            return x + self.out(mixed.transpose(1, 2).flatten(2))

    for count in (2, 4):
        (part,) = fl.anatomy(Heads(count)).select("query.weight")
        assert part.heads == fl.Heads(count, count, 16 // count)

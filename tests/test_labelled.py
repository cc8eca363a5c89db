"""The truth that a reader is judged by is whole, and right by symmetries; no reader is used here.

A symmetry is a change of several weights that the outputs of a model do not show, such as twice the
queries and half the keys. It holds of the right rows alone, and needs nothing but the outputs.
Models of timm and torchvision are among them where these are installed.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from cases import slow_unless
from frostlab.roles import ROLES
from frostlab.roles.description import known_types
from frostlab.roles.parts import Heads, Part, Place, Rows
from labelled import (
    DECOYS,
    LABELLED,
    NEW_ROLES,
    TYPES,
    VISION,
    WRITTEN,
    Label,
    disagreements,
    expected,
    matches,
)
from labelled.truth import INPUTS_OF_ATTENTION, Labelled, Whole, made, merged, shares
from zoo import loss_of, outputs, text

Model = tuple[Labelled, nn.Module, list[Label]]
INSTALLED = all(find_spec(name) for name in ("timm", "torchvision"))
# types whose modules had other names before the version in which they were read
_RENAMED = {"dinov2"} if Version(transformers.__version__) < Version("5.22") else set()
TRUTHS = {name: case for name, case in LABELLED.items() if name not in _RENAMED}
TRUTHS |= VISION if INSTALLED else {}
NAMES = list(TRUTHS)
READ = [name for name in NAMES if not TRUTHS[name].refused]


@pytest.fixture(scope="module")
def load() -> Callable[[str], Model]:
    @cache
    def build(name: str) -> Model:
        case = TRUTHS[name]
        model = case.build()
        keep_only_scales(case, model)
        return case, model, expected(case, model)

    return build


def keep_only_scales(case: Labelled, model: nn.Module) -> None:
    """Let a batch norm divide all by one number and do nothing else: factors then go through."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    if not norms:
        return
    for norm in norms:
        norm.reset_parameters()
        norm.momentum = 1.0
    model.train()
    model(**case.inputs())
    model.eval()
    for norm in norms:
        norm.running_mean.zero_()
        norm.running_var.fill_(norm.running_var.mean())


def rows_of(label: Label, parameter: Tensor) -> list[int]:
    whole = ((0, parameter.shape[label.axis] if parameter.ndim else 1),)
    return [row for a, b in label.rows or whole for row in range(a, b)]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_built_and_runs(load: Callable[[str], Model], name: str) -> None:
    case, model, _ = load(name)
    torch.manual_seed(1)
    loss = loss_of(model, case.inputs())
    assert loss.isfinite()


@pytest.mark.parametrize("name", READ)
def test_every_row_has_one_role(load: Callable[[str], Model], name: str) -> None:
    _, model, labels = load(name)
    parameters = dict(model.named_parameters())
    labelled: dict[str, list[int]] = defaultdict(list)
    for label in labels:
        labelled[label.name] += rows_of(label, parameters[label.name])
    assert list(labelled) == list(parameters)
    for path, rows in labelled.items():
        (axis,) = {label.axis for label in labels if label.name == path}
        size = parameters[path].shape[axis] if parameters[path].ndim else 1
        assert sorted(rows) == list(range(size)), path


@pytest.mark.parametrize("name", READ)
def test_heads_divide_the_rows_of_their_role(load: Callable[[str], Model], name: str) -> None:
    _, model, labels = load(name)
    for label in labels:
        if not label.heads:
            assert (label.by_head, label.heads, label.size) == ((), None, None)
            continue
        assert label.role in INPUTS_OF_ATTENTION
        assert len(label.by_head) == label.heads
        assert {len(rows) for rows in label.by_head} == {label.size}
        every = [row for rows in label.by_head for row in rows]
        assert sorted(every) == rows_of(label, model.get_parameter(label.name))


@pytest.mark.parametrize("name", READ)
def test_roles_are_words_that_exist(load: Callable[[str], Model], name: str) -> None:
    for label in load(name)[2]:
        assert {label.role, *label.also} <= {*ROLES, *NEW_ROLES}, label.name
        assert label.role not in label.also
        assert label.kind in ("weight", "bias")


@pytest.mark.parametrize("name", READ)
def test_no_path_of_a_table_is_left_over(load: Callable[[str], Model], name: str) -> None:
    case, model, _ = load(name)
    used = Counter(path for n, _ in model.named_parameters() for path in matches(case, n))
    assert set(used) == set(case.table)


@pytest.mark.parametrize("name", READ)
def test_every_attention_has_its_three_inputs(load: Callable[[str], Model], name: str) -> None:
    """By stack, layer and crossing; a weight is enough, and models that lack one say so."""
    case, _, labels = load(name)
    found: dict[tuple[object, ...], set[str]] = defaultdict(set)
    for label in labels:
        if label.role in INPUTS_OF_ATTENTION and label.kind == "weight":
            found[label.stack, label.layers, label.cross].add(label.role)
    assert found
    if "there is no" not in case.may_refuse:
        assert all(roles == set(INPUTS_OF_ATTENTION) for roles in found.values())


# Relative changes of the outputs: more than rounding, and rounding.
SEEN, UNSEEN = 3e-5, 1e-5
# A norm between projection and attention undoes any factor, of all heads together in olmo2.
NORMED = {"olmo2", "persimmon", "stablelm", "cohere", "gemma3_text", "qwen3_moe", "qwen3_next"}
NORMED |= {"swinv2_tiny_window8_256", "swin_v2_t"} & set(NAMES)  # their scores are cosines
# Channels attend to channels in some layers, and their scores are cosines; not so in the others.
CHANNELS = {"xcit_nano_12_p16_224"}
# Keys are turned by their place, so that a shift of all keys is no longer the same for all.
TURNED = {"roformer", "starcoder2", "glm", "persimmon"} | CHANNELS
# The same of queries and keys: their rows go in pairs, whose places in the head count.
ROTARY = {"roformer", "codegen", "gpt_neox_japanese", "deepseek_v3", "eva02_tiny_patch14_224"}
# There is an activation function between the values and the output projection.
CURVED = {"levit"}


# One type for each way in which weights lie; the others are tried in the slow tests.
TYPICAL = {"camembert", "squeezebert", "codegen", "openai-gpt", "prophetnet", "swin", "deepseek_v3"}


def by_symmetry(without: Iterable[str] = ()) -> list[Any]:
    """Return the models that a symmetry is tried on."""
    return slow_unless({*DECOYS, *WRITTEN, *TYPICAL}, [n for n in READ if n not in without])


class Change:
    """What a model returns, before and after a change of some rows."""

    def __init__(self, case: Labelled, model: nn.Module) -> None:
        torch.manual_seed(1)
        self.model, self.inputs = model, case.inputs()
        self.before = self.outputs()

    @torch.no_grad()
    def outputs(self) -> list[Tensor]:
        return outputs(self.model, self.inputs)

    def by(self, *changes: tuple[list[Label], float], shift: bool = False) -> float:
        """Return what factors of some rows change, or amounts that are added to them."""

        def change() -> None:
            for labels, amount in changes:
                for label in labels:
                    parameter, rows = self.lying(label), rows_of(label, self.parameter(label))
                    parameter[rows] = (
                        parameter[rows] + amount if shift else parameter[rows] * amount
                    )

        return self.of(change)

    def swapping(self, labels: list[Label], one: tuple[int, int], two: tuple[int, int]) -> float:
        """Return what it changes to swap two rows, each the row of a head."""

        def change() -> None:
            for label in labels:
                rows = [label.by_head[head][row] for head, row in (one, two)]
                self.lying(label)[rows] = self.lying(label)[rows[::-1]].clone()

        return self.of(change)

    def parameter(self, label: Label) -> Tensor:
        return self.model.get_parameter(label.name)

    def lying(self, label: Label) -> Tensor:
        """Return a label's parameter with its rows first."""
        return self.parameter(label).movedim(label.axis, 0)

    @torch.no_grad()
    def of(self, change: Callable[[], None]) -> float:
        """Return the largest change, relative to the largest output, and undo what made it."""
        saved = {name: p.clone() for name, p in self.model.named_parameters()}
        change()
        after = self.outputs()
        for name, parameter in self.model.named_parameters():
            parameter.copy_(saved[name])
        pairs = zip(self.before, after, strict=True)
        return max(((b - a).abs().max() / b.abs().max()).item() for b, a in pairs)


def attentions(labels: list[Label]) -> list[dict[str, list[Label]]]:
    """Return the weights and biases of each attention that heads have rows of, by role."""
    found: dict[tuple[object, ...], dict[str, list[Label]]] = {}
    for label in labels:
        place = found.setdefault((label.stack, label.layers, label.cross), defaultdict(list))
        if label.heads or (label.role == "output" and label.kind == "weight"):
            place[label.role].append(label)
    return [place for place in found.values() if place["query"]]


@pytest.mark.parametrize("name", by_symmetry(NORMED | CHANNELS))
def test_a_factor_of_queries_is_undone_by_one_of_keys(
    load: Callable[[str], Model], name: str
) -> None:
    """The scores are products of both, whatever else a model does with them."""
    case, model, labels = load(name)
    change = Change(case, model)
    for attention in attentions(labels):
        query, key = attention["query"], attention["key"]
        assert change.by((query, 2.0), (key, 0.5)) < UNSEEN
        assert change.by((query, 2.0)) > SEEN
        assert change.by((key, 2.0)) > SEEN


def of_heads(labels: list[Label], heads: range) -> list[Label]:
    """Return labels of these heads' rows alone."""
    rows = [sorted(row for head in heads for row in label.by_head[head]) for label in labels]
    return [replace(a, rows=merged(b)) for a, b in zip(labels, rows, strict=True)]


@pytest.mark.parametrize("name", by_symmetry(NORMED | CHANNELS))
def test_the_same_holds_of_each_head(load: Callable[[str], Model], name: str) -> None:
    """And of all queries that share a head of keys: row by row, they go together."""
    case, model, labels = load(name)
    change = Change(case, model)
    for attention in attentions(labels):
        counts = [{a.heads or 0 for a in attention[role]} for role in ("query", "key")]
        if any(len(count) > 1 for count in counts):
            continue  # two attentions, or a part of the keys that all heads share
        (count,), (kv,) = counts
        group = count // kv
        for head in range(kv):
            near = range(head * group, (head + 1) * group)
            sharing = range(head, count, kv) if case.strided_groups else near
            query = of_heads(attention["query"], sharing)
            key = of_heads(attention["key"], range(head, head + 1))
            assert change.by((query, 2.0), (key, 0.5)) < UNSEEN
            if kv > 1:
                next_one = (head + 1) % kv
                other = of_heads(attention["key"], range(next_one, next_one + 1))
                assert change.by((query, 2.0), (other, 0.5)) > SEEN


@pytest.mark.parametrize("name", by_symmetry(NORMED | ROTARY | CHANNELS))
def test_rows_of_a_head_can_be_swapped(load: Callable[[str], Model], name: str) -> None:
    """In queries and keys at once, and within a head alone: its scores are sums over its rows."""
    case, model, labels = load(name)
    change = Change(case, model)
    for attention in attentions(labels):
        both = [*attention["query"], *attention["key"]]
        (heads, *others), (size, *sizes) = {a.heads for a in both}, {a.size for a in both}
        if others or sizes or not heads or not size or size < 2:
            continue  # heads are shared, of two attentions, or single indices
        for head in range(heads):
            assert change.swapping(both, (head, 0), (head, size - 1)) < UNSEEN
            if heads > 1:
                assert change.swapping(both, (head, 0), ((head + 1) % heads, 0)) > SEEN


@pytest.mark.parametrize("name", sorted(NORMED))
def test_a_factor_before_a_norm_changes_nothing(load: Callable[[str], Model], name: str) -> None:
    case, model, labels = load(name)
    change = Change(case, model)
    for attention in attentions(labels):
        assert change.by((attention["query"], 2.0)) < 1e-2
        assert change.by((attention["key"], 2.0)) < 1e-2
        assert change.by((attention["query"], -1.0)) > 1e-2


@pytest.mark.parametrize("name", by_symmetry(CURVED))
def test_a_factor_of_values_is_undone_by_one_of_the_output(
    load: Callable[[str], Model], name: str
) -> None:
    case, model, labels = load(name)
    change = Change(case, model)
    for attention in attentions(labels):
        value, output = attention["value"], attention["output"]
        if value:
            assert change.by((value, 2.0), (output, 0.5)) < UNSEEN
            assert change.by((value, -1.0)) > SEEN


@pytest.mark.parametrize("name", by_symmetry(TURNED))
def test_only_keys_can_be_shifted(load: Callable[[str], Model], name: str) -> None:
    """A softmax does not see what is added to all scores of a query: keys are not queries."""
    case, model, labels = load(name)
    change = Change(case, model)
    for attention in attentions(labels):
        key = [label for label in attention["key"] if label.kind == "bias"]
        query = [label for label in attention["query"] if label.kind == "bias"]
        assert change.by((key, 0.5), shift=True) < 1e-4
        assert not query or change.by((query, 0.5), shift=True) > SEEN


@pytest.mark.parametrize("name", by_symmetry())
def test_a_factor_of_up_is_undone_by_one_of_down(load: Callable[[str], Model], name: str) -> None:
    """Where there is a gate: the activation function is on that, not on what it multiplies."""
    case, model, labels = load(name)
    change = Change(case, model)
    places: dict[tuple[object, ...], dict[str, list[Label]]] = {}
    for label in labels:
        place = places.setdefault((label.stack, label.layers), defaultdict(list))
        if label.role != "down" or label.kind == "weight":
            place[label.role].append(label)
    for place in places.values():
        if place["gate"] and place["up"]:
            assert change.by((place["up"], 2.0), (place["down"], 0.5)) < UNSEEN
            assert change.by((place["gate"], 2.0), (place["down"], 0.5)) > SEEN


def test_no_table_names_these_types() -> None:
    assert not set(NAMES) & set(known_types())


def test_there_are_enough_of_each() -> None:
    assert len(DECOYS) >= 10
    assert len(WRITTEN) >= 4
    assert len(TYPES) >= 30


def as_parts(labels: list[Label], model: nn.Module) -> list[Part]:
    """Return what a reader that is right would say; heads only where their rows lie together."""
    parts = []
    for label in labels:
        shape = model.get_parameter(label.name).shape
        size = shape[label.axis] if shape else 1
        heads = None
        if label.heads and label.size and all(b - a == 1 for r in label.by_head
                                              for a, b in pairwise(r)):  # fmt: skip
            heads = Heads(label.heads, label.heads, label.size)
        rows = None if label.rows is None else Rows(size, 1, label.rows)
        place = Place(label.role, label.stack, label.layers, label.cross)
        kind: Any = label.kind
        parts.append(Part(label.name, place, kind, (), "trainable", rows, label.axis, heads))
    return parts


@pytest.mark.parametrize("name", READ)
def test_the_truth_is_judged_right(load: Callable[[str], Model], name: str) -> None:
    _, model, labels = load(name)
    assert disagreements(labels, as_parts(labels, model), model) == []


def test_what_is_wrong_is_named(load: Callable[[str], Model]) -> None:
    _, model, labels = load("fused-chunk")
    parts = as_parts(labels, model)
    at = next(i for i, part in enumerate(parts) if part.name == "layers.0.qkv.weight")
    query, key = parts[at : at + 2]

    def judged(*instead: Part) -> list[str]:
        wrong = [*parts[:at], *instead, *parts[at + 2 :]]
        return [line.partition(":")[0] for line in disagreements(labels, wrong, model)]

    assert judged(query, key) == []
    assert judged(query) == ["missing"]
    assert judged(replace(query, rows=key.rows), replace(key, rows=query.rows)) == ["role"] * 2
    assert judged(replace(query, heads=Heads(2, 2, 16)), key) == ["heads"]
    elsewhere = Place("query", "encoder", (1,), True)
    assert judged(replace(query, place=elsewhere), key) == ["cross", "stack", "layers"]
    _, model, labels = load("strided-heads")
    parts = [replace(part, heads=Heads(4, 4, 8)) if part.role == "query" else part
             for part in as_parts(labels, model)]  # fmt: skip
    lines = disagreements(labels, parts, model)
    assert len(lines) == 4  # weights and biases of two layers
    assert all(line.startswith("heads: blocks.") for line in lines)


class Little(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)


def little(entry: object) -> list[Label]:
    case = Labelled(made(Little), text, {"qkv": entry}, heads=(2, 2))  # type: ignore[dict-item]
    return expected(case)


def test_rows_that_follow_one_another() -> None:
    query, _, value = little(shares(("query", 4), ("key", 4), ("value", 4)))[:3]
    assert (query.rows, query.by_head) == (((0, 4),), ((0, 1), (2, 3)))
    assert (value.rows, value.heads, value.size) == (((8, 12),), 2, 2)


def test_rows_that_lie_by_head() -> None:
    weight = little(shares(("query", 2), ("key", 2), ("value", 2), repeats=2))[0]
    assert (weight.rows, weight.by_head) == (((0, 2), (6, 8)), ((0, 1), (6, 7)))


def test_heads_that_lie_in_strides() -> None:
    weight = little(Whole("query", strided=True))[0]
    assert weight.rows is None
    assert weight.by_head == ((0, 2, 4, 6, 8, 10), (1, 3, 5, 7, 9, 11))


def test_a_truth_that_leaves_rows_out_is_an_error() -> None:
    with pytest.raises(LookupError, match="has 12 rows, not 8"):
        little(shares(("query", 4), ("key", 4)))
    with pytest.raises(LookupError, match="cannot be divided among 5 heads"):
        little(Whole("query", heads=5))
    case = Labelled(made(Little), text, {"other": "query"})
    with pytest.raises(LookupError, match=r"qkv\.weight is named by no path"):
        expected(case)

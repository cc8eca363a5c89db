"""Whether an anatomy is true, by what must not change in a model's outputs.

These checks know nothing of the reader's graph: they change weights in the rows that the anatomy
names, and compare the outputs. All of them are exact (factors are powers of two, or signs).

- scores: a factor of the queries is undone by one of the keys, and either alone is seen. A norm
  between projection and scores undoes factors but not signs; terms for positions may have to be
  changed with the queries or with the keys.
- heads: the same of one key head and the queries that share it; another head's keys do not undo it.
- tokens: noise in the query of one token changes that token's sum of values and no other; noise in
  its key changes others. This tells queries from keys.
- values: a factor of the values is undone by one of the output projection.
- outputs: without output projections, other queries, keys and values change nothing.
- feed-forward: without `down`, another `up` or `gate` changes nothing; with it, it does.
- gates: a factor of `up` is undone by one of `down`; that of `gate` is not, behind its activation
  function.
- order: queries, keys and values run before the output projection, and `up` and `gate` before
  `down`.
- layers: parameters of the same name and shape have the same roles in all layers of a stack.
"""

import copy
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from frostlab.roles.parts import Part
from frostlab.roles.snapshot import Anatomy
from frostlab.roles.tracing.passes.facts import Call

SAME, SEEN = 1e-6, 1e-5  # changes relative to the largest output
MOST_POSITIONS = 5  # kinds of terms for positions that are tried with queries and with keys
Place = tuple[str, tuple[int, ...], bool]
Group = dict[str, list[Part]]
Changes = Sequence[tuple[Sequence[Part], float]]


@dataclass
class Outcome:
    """What the checks say: which passed, which failed at what, and which could not be made."""

    passed: dict[str, int]
    failed: list[str]
    without: list[str]


class Probe:
    """A model in double precision whose weights are changed and put back."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        self.model, self.call = copy.deepcopy(model).eval(), call
        self.remembers = False
        single = [p.detach().clone() for p in self.model.parameters()]
        try:
            self.model.double()
            self.call = _in_double(call)
            self.before = self.outputs()
            if not all(bool(torch.isfinite(value).all()) for value in self.before):
                raise ArithmeticError
        except Exception:  # a model that computes in single precision whatever its weights are
            self.model.float()
            for parameter, values in zip(self.model.parameters(), single, strict=True):
                parameter.data = values
            self.call = call
            self.before = self.outputs()
        if self.difference(self.outputs()) > 0:  # it remembers something, such as its last inputs
            self.remembers = True
            self.before = self.outputs()

    @torch.no_grad()
    def outputs(self) -> list[Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = copy.deepcopy(self.model) if self.remembers else self.model
            made = model(*_copied(self.call.args), **_copied(self.call.kwargs))
        return [t.detach().clone() for t in _tensors(made) if t.is_floating_point()]

    def difference(self, after: Sequence[Tensor]) -> float:
        """Return the largest change relative to the largest entry; infinite if a shape changed."""
        largest = 0.0
        for a, b in zip(self.before, after, strict=True):
            if a.shape != b.shape:
                return float("inf")
            kept = torch.isfinite(a)
            if kept.any():
                gap = (a[kept] - b[kept]).abs().max() / a[kept].abs().max().clamp_min(1e-30)
                largest = max(largest, float(gap.nan_to_num(float("inf"))))
        return largest

    def lying(self, part: Part) -> Tensor:
        """Return a part's parameter with its rows first."""
        return self.model.get_parameter(part.name).data.movedim(part.axis, 0)

    @contextmanager
    def changed(self, parts: Iterable[Part]) -> Iterator[None]:
        """Put the weights of these parts back afterwards."""
        names = {part.name for part in parts}
        saved = {name: self.model.get_parameter(name).detach().clone() for name in names}
        try:
            yield
        finally:
            for name, values in saved.items():
                self.model.get_parameter(name).data.copy_(values)

    def scaled(self, *changes: tuple[Sequence[Part], float]) -> float:
        """Return what factors of parts change."""
        with self.changed(part for parts, _ in changes for part in parts):
            for parts, factor in changes:
                for part in parts:
                    self.lying(part)[rows_of(part, self)] *= factor
            return self.difference(self.outputs())

    def scaled_rows(self, changes: Sequence[tuple[Part, list[int], float]]) -> float:
        with self.changed(part for part, _, _ in changes):
            for part, rows, factor in changes:
                self.lying(part)[rows] *= factor
            return self.difference(self.outputs())

    def renewed(self, parts: Sequence[Part], without: Sequence[Part] = ()) -> float:
        """Return what other values of parts change where the weights of others are zero."""
        generator = torch.Generator().manual_seed(1)
        with self.changed([*parts, *without]):
            for part in without:
                self.lying(part)[rows_of(part, self)] = 0
            before = self.outputs()
            for part in parts:
                rows = rows_of(part, self)
                values = self.lying(part)
                noise = torch.randn(values[rows].shape, generator=generator).to(values)
                values[rows] += 0.3 * noise
            after = self.outputs()
        saved, self.before = self.before, before
        try:
            return self.difference(after)
        finally:
            self.before = saved


def rows_of(part: Part, probe: Probe) -> list[int]:
    """Return the rows of a part along its axis."""
    if part.rows is None:
        lying = probe.lying(part)
        return list(range(len(lying))) if lying.ndim else []
    return [row for start, stop in part.rows.ranges() for row in range(start, stop)]


def check(model: nn.Module, anatomy: Anatomy, call: Call, skipped: Collection[str] = ()) -> Outcome:
    """Hold an anatomy to everything that must not change, but for what a type rules out."""
    probe = Probe(model, call)
    if not probe.before or probe.difference(probe.outputs()) > 0:
        return Outcome({}, [], ["the same outputs twice"])
    unreached = set(anatomy.evidence.unreached)
    parts = [p for p in anatomy.parts if p.name not in unreached and p.shape]
    outcome = Outcome({}, [], [])
    groups = _attentions(parts)
    position = [p for p in parts if p.role == "position"]
    shifts = [p for p in parts if p.role == "norm" and p.name.endswith("bias")]
    for name, test in (
        ("scores", lambda: _scores(probe, groups, position, shifts)),
        ("heads", lambda: _heads(probe, groups)),
        ("tokens", lambda: _tokens(probe, groups)),
        ("values", lambda: _values(probe, groups, shifts)),
        ("outputs", lambda: _outputs(probe, parts)),
        ("feed-forward", lambda: _feed_forward(probe, parts)),
        ("gates", lambda: _gates(probe, parts)),
        ("order", lambda: _order(probe, parts)),
        ("layers", lambda: _layers(parts)),
    ):  # fmt: skip
        if name in skipped:
            outcome.without.append(name)
            continue
        passed, failed = test()
        if passed:
            outcome.passed[name] = passed
        outcome.failed += [f"{name}: {line}" for line in failed]
        if not passed and not failed:
            outcome.without.append(name)
    return outcome


def _attentions(parts: Sequence[Part]) -> dict[Place, Group]:
    """Return the queries, keys, values and outputs of each attention by stack and layers."""
    found: dict[Place, Group] = {}
    for part in parts:
        if part.role in ("query", "key", "value", "output"):
            if part.role == "output" and part.kind != "weight":
                continue
            group = found.setdefault((part.stack, part.layers, part.place.cross), defaultdict(list))
            group[part.role].append(part)
    return {place: group for place, group in found.items() if group["query"] or group["key"]}


def _all(groups: Mapping[Place, Group], role: str) -> list[Part]:
    return [part for group in groups.values() for part in group[role]]


def _said(place: Place) -> str:
    stack, layers, cross = place
    words = [stack, "layer " + "+".join(map(str, layers)) if layers else "", "cross" * cross]
    return " ".join(word for word in words if word) or "the attention"


def _variants(query: list[Part], key: list[Part], position: list[Part]) -> Iterator[Changes]:
    """Yield the changes that scores must not see, one for each way in which they are computed."""
    headed = [[p for p in parts if p.heads] for parts in (query, key)]
    early = [p for p in key if not p.heads]  # of keys that go through two projections
    sides = [(query, key)]
    for some in ((headed[0], key), (headed[0], headed[1]), (query, early)):
        if all(some) and some not in sides:
            sides.append(some)
    for (one, two), (q, k) in itertools.product(sides, ((2.0, 0.5), (-1.0, -1.0))):
        for factors in _assignments(position, q, k):
            yield [(one, q), (two, k), *factors]


def _assignments(position: list[Part], q: float, k: float) -> Iterator[Changes]:
    """Yield the ways in which terms for positions belong to queries, to keys, or to neither."""
    kinds: dict[str, list[Part]] = {}
    for part in position:
        kinds.setdefault(".".join(_template(part.name).split(".")[-2:]), []).append(part)
    if len(kinds) > MOST_POSITIONS:
        yield []
        return
    choices = list(itertools.product((None, k, q), repeat=len(kinds)))
    for chosen in sorted(choices, key=lambda c: sum(factor is not None for factor in c)):
        pairs = zip(kinds.values(), chosen, strict=True)
        yield [(parts, factor) for parts, factor in pairs if factor is not None]


def _inside(part: Part, group: Group) -> bool:
    """Return whether a part is in the module that holds the queries and keys."""
    modules = [p.name.split(".")[:-1] for p in (*group["query"], *group["key"])]
    shared = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*modules, strict=False))
    holder = [names[0] for names in shared]
    if holder in modules:  # a fused projection: what holds it
        holder = holder[:-1]
    return part.name.startswith(".".join([*holder, ""]))


def _undone(
    probe: Probe,
    query: list[Part],
    key: list[Part],
    position: list[Part],
    shifts: Sequence[Part] = (),
) -> bool:
    """Return whether what is done to queries is undone by what is done to keys, and is seen."""
    variants = list(_variants(query, key, position))
    if shifts:  # a norm's shift has the sign of what it is added to
        variants += [[(query, -1.0), (key, -1.0), (shifts, -1.0)]]
    for changes in variants:
        if probe.scaled(*changes) > SAME:
            continue
        one, two = changes[0], changes[1]
        if probe.scaled(one) > SEEN and probe.scaled(two) > SEEN:
            return True
    return False


def _scores(
    probe: Probe,
    groups: Mapping[Place, Group],
    position: list[Part],
    shifts_of_norms: Sequence[Part],
) -> tuple[int, list[str]]:
    whole = {place: g for place, g in groups.items() if g["query"] and g["key"]}
    whole = {
        place: g
        for place, g in whole.items()
        if min(probe.renewed(g["query"]), probe.renewed(g["key"])) > SEEN
    }  # not those of a single token, whose scores do not matter
    if not whole:
        return 0, []
    if _undone(probe, _all(groups, "query"), _all(groups, "key"), position):
        return len(whole), []
    passed, failed = 0, []
    for place, group in whole.items():
        near = [p for p in position if p.stack == place[0] and set(p.layers) & set(place[1])]
        shifts = [p for p in shifts_of_norms if _inside(p, group)]
        if any(
            _undone(probe, group["query"], group["key"], terms, shifts)
            for terms in ((near, position) if near else (position,))
        ):
            passed += 1
        else:
            failed.append(f"{_said(place)}: a factor of queries is not undone by one of keys")
    return passed, failed


def _head_rows(part: Part, head: int, probe: Probe) -> list[int]:
    assert part.heads is not None
    size = part.heads.size
    return rows_of(part, probe)[head * size : (head + 1) * size]


def _heads(probe: Probe, groups: Mapping[Place, Group]) -> tuple[int, list[str]]:
    """Check the second head of keys with the queries that share it."""
    passed, failed = 0, []
    for place, group in groups.items():
        query, key = ([p for p in group[role] if p.heads] for role in ("query", "key"))
        counts = {p.heads.of("query") for p in query if p.heads}
        kvs = {p.heads.of("key") for p in key if p.heads}
        if len(counts) != 1 or len(kvs) != 1 or len(query) < len(group["query"]):
            continue
        if len(key) < len(group["key"]):
            continue
        (count,), (kv,) = counts, kvs
        if kv < 2 or count % kv:
            continue
        near = range(count // kv, 2 * count // kv)
        far = range(1, count, kv)
        found = False
        for heads, factors in itertools.product((near, far), ((2.0, 0.5), (-1.0, -1.0))):
            asked = [(p, _head_rows(p, h, probe), factors[0]) for p in query for h in heads]
            for answer, same in ((1, True), (0, False)):
                told = [(p, _head_rows(p, answer, probe), factors[1]) for p in key]
                change = probe.scaled_rows([*asked, *told])
                if (change <= SAME) != same:
                    break
            else:
                found = True
                break
        factor = probe.scaled((group["query"], 2.0), (group["key"], 0.5))
        if found:
            passed += 1
        elif factor <= SAME < SEEN < probe.scaled((group["query"], 2.0)):  # no norm of all heads
            failed.append(f"{_said(place)}: the factor of one head is not undone by its keys")
    return passed, failed


def _owner(probe: Probe, part: Part) -> nn.Module:
    return probe.model.get_submodule(part.name.rpartition(".")[0])


def _tokens(probe: Probe, groups: Mapping[Place, Group]) -> tuple[int, list[str]]:
    """Check what noise in one token's query or key changes before the output projection."""
    passed, failed = 0, []
    for place, group in groups.items():
        sides = [[p for p in group[r] if p.kind == "weight"] for r in ("query", "key", "output")]
        if any(len(parts) != 1 for parts in sides):
            continue
        owners = [_owner(probe, parts[0]) for parts in sides]
        if not all(type(owner).__name__ in ("Linear", "Conv1D") for owner in owners):
            continue
        try:
            spread = [
                _spread(probe, owners[i], rows_of(sides[i][0], probe), owners[2]) for i in (0, 1)
            ]
        except _CannotTell:
            continue
        if spread[1] == 0 or spread == [1, 1] or spread == [0, 1]:
            continue  # tokens on another axis, or a window of one token
        if spread[0] == 1 < spread[1]:
            passed += 1
        else:
            failed.append(
                f"{_said(place)}: noise in one token's query reaches {spread[0]} tokens, in its "
                f"key {spread[1]}"
            )
    return passed, failed


class _CannotTell(Exception):
    """The projections do not see tokens on the axis before the last."""


@torch.no_grad()
def _spread(probe: Probe, source: nn.Module, rows: list[int], target: nn.Module) -> int:
    """Return how many tokens change at the target's input, at most, for noise in one token."""
    most = 0
    base = _inputs_of(probe, source, target, lambda y: y)
    sizes = {y.shape[-2] for y in base[1]}
    if len(sizes) != 1 or len(base[0]) != len(base[1]):
        raise _CannotTell
    (length,) = sizes
    batch = next(len(t) for t in _tensors((probe.call.args, probe.call.kwargs)) if t.ndim)
    if any(y.shape[-2] == batch != len(y) for y in (*base[0], *base[1])):
        raise _CannotTell  # tokens come before the examples of a batch
    if length < 2 or len(base[0]) != 1:
        raise _CannotTell  # called several times: which call belongs to which?
    for token in {0, length // 2, length - 1}:

        def noise(y: Tensor, token: int = token) -> Tensor:
            y = y.clone()
            y[..., token, rows] += torch.linspace(-1, 1, len(rows)).to(y) * y.abs().max()
            return y

        after = _inputs_of(probe, source, target, noise)
        for a, b in zip(base[0], after[0], strict=True):
            if a.shape != b.shape or a.ndim < 2:
                raise _CannotTell
            moved = (a - b).abs().amax(-1) > SEEN * a.abs().max()
            most = max(most, int(moved.sum(-1).max()))
    return most


def _inputs_of(
    probe: Probe, source: nn.Module, target: nn.Module, change: Callable[[Tensor], Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the inputs of a module, and the results of another one that is changed."""
    inputs: list[Tensor] = []
    results: list[Tensor] = []

    def after(_: nn.Module, args: Any, result: Tensor) -> Tensor:
        if result.ndim < 3:
            raise _CannotTell
        results.append(result)
        return change(result)

    handles = [
        source.register_forward_hook(after),
        target.register_forward_pre_hook(lambda _, args: inputs.append(args[0].clone())),
    ]
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            probe.model(*_copied(probe.call.args), **_copied(probe.call.kwargs))
    except _CannotTell:
        raise
    except Exception:
        raise _CannotTell from None
    finally:
        for handle in handles:
            handle.remove()
    return inputs, results


def _values(
    probe: Probe, groups: Mapping[Place, Group], shifts_of_norms: Sequence[Part]
) -> tuple[int, list[str]]:
    whole = {place: g for place, g in groups.items() if g["value"] and g["output"]}
    whole = {place: g for place, g in whole.items() if probe.renewed(g["value"]) > SEEN}
    value, output = _all(groups, "value"), _all(groups, "output")
    if not whole:
        return 0, []
    if _kept(probe, value, output):
        return len(whole), []
    passed, failed = 0, []
    for place, group in whole.items():
        shifts = [p for p in shifts_of_norms if _inside(p, group)]
        if _kept(probe, group["value"], group["output"], shifts):
            passed += 1
        else:
            failed.append(f"{_said(place)}: a factor of values is not undone by one of outputs")
    return passed, failed


def _kept(probe: Probe, value: list[Part], output: list[Part], shifts: Sequence[Part] = ()) -> bool:
    headed = [p for p in value if p.heads]
    early = [p for p in value if not p.heads]
    for values, (v, o) in itertools.product((value, headed, early), ((2.0, 0.5), (-1.0, -1.0))):
        if not values or probe.scaled((values, v), (output, o)) > SAME:
            continue
        if probe.scaled((values, v)) > SEEN:
            return True
    if shifts and probe.scaled((value, -1.0), (output, -1.0), (shifts, -1.0)) <= SAME:
        return probe.scaled((value, -1.0)) > SEEN
    return False


def _outputs(probe: Probe, parts: Sequence[Part]) -> tuple[int, list[str]]:
    inputs = [p for p in parts if p.role in ("query", "key", "value") and not p.ties]
    outputs = [p for p in parts if p.role == "output" and p.kind == "weight"]
    if not inputs or not outputs or probe.renewed(inputs) <= SEEN:
        return 0, []
    change = probe.renewed(inputs, without=outputs)
    if change <= 1e-12:
        return 1, []
    seen = [p.key for p in inputs if probe.renewed([p], without=outputs) > 1e-12]
    return 0, [f"{len(seen)} parts reach the outputs past them, such as {seen[:1]}"]


def _feed_forward(probe: Probe, parts: Sequence[Part]) -> tuple[int, list[str]]:
    first = [p for p in parts if p.role in ("up", "gate") and p.layers]
    last = [p for p in parts if p.role == "down" and p.kind == "weight"]
    if not first or not last or probe.renewed(first) <= SEEN:
        return 0, []
    if probe.renewed(first, without=last) <= 1e-12:
        return 1, []
    seen = [p.key for p in first if probe.renewed([p], without=last) > 1e-12]
    return 0, [f"{len(seen)} parts reach the outputs past `down`, such as {seen[:1]}"]


def _by_layer(parts: Sequence[Part], roles: Sequence[str]) -> Iterator[Group]:
    """Yield the parts of some roles in each layer, where there are some of each role."""
    found: dict[tuple[object, ...], Group] = {}
    for part in parts:
        if part.role in roles and part.layers:
            place = (part.stack, part.layers, part.place.cross)
            found.setdefault(place, defaultdict(list))[part.role].append(part)
    yield from (group for group in found.values() if all(group[role] for role in roles))


def _gates(probe: Probe, parts: Sequence[Part]) -> tuple[int, list[str]]:
    passed, failed = 0, []
    for group in _by_layer(parts, ("gate", "down")):
        places = {(p.stack, p.layers) for p in group["gate"]}
        if not any(p.role == "up" and (p.stack, p.layers) in places for p in parts):
            failed.append(f"{group['gate'][0].key} is a gate, but there is no `up` beside it")
    for group in _by_layer(parts, ("up", "gate", "down")):
        down = [p for p in group["down"] if p.kind == "weight"]
        if min(probe.renewed(group[role]) for role in ("up", "gate")) <= SEEN:
            continue
        up, gate = (probe.scaled((group[r], 2.0), (down, 0.5)) for r in ("up", "gate"))
        if up <= SAME and gate > SEEN:
            passed += 1
        elif gate <= SAME and up > SEEN:
            failed.append(f"a factor of {group['gate'][0].key} is undone, of `up` it is not")
    return passed, failed


def _order(probe: Probe, parts: Sequence[Part]) -> tuple[int, list[str]]:
    """Check which modules run first; those that hold several roles say nothing."""
    calls: dict[str, int] = {}
    handles = []
    for name in {part.name.rpartition(".")[0] for part in parts}:
        module = probe.model.get_submodule(name)

        def hook(*_: Any, name: str = name) -> None:
            calls.setdefault(name, len(calls))

        handles.append(module.register_forward_pre_hook(hook))
    try:
        probe.outputs()
    finally:
        for handle in handles:
            handle.remove()
    passed, failed = 0, []
    for first, last in (("query", "output"), ("key", "output"), ("value", "output"),
                        ("up", "down"), ("gate", "down")):  # fmt: skip
        for group in _by_layer(parts, (first, last)):
            names = [{p.name.rpartition(".")[0] for p in group[r] if p.kind == "weight"}
                     for r in (first, last)]  # fmt: skip
            if any(len(some) != 1 or not some <= calls.keys() for some in names):
                continue  # several, such as experts, or such as are not called themselves
            (one,), (two,) = names
            if calls[one] < calls[two]:
                passed += 1
            elif one != two and not two.startswith(f"{one}."):
                failed.append(f"{two}, which is {last}, runs before {one}, which is {first}")
    return passed, failed


def _layers(parts: Sequence[Part]) -> tuple[int, list[str]]:
    """Check that parameters of the same name and shape have the same roles in all layers."""
    found: dict[tuple[str, str, tuple[int, ...]], dict[str, set[str]]] = {}
    for part in parts:
        if part.layers and part.role != "recurrent":
            name = _template(part.name)
            whole = part.shape if part.rows is None else ()
            same = found.setdefault((part.stack, name, whole), {})
            same.setdefault(part.name, set()).add(f"{part.role}{' across' * part.place.cross}")
    failed = []
    for (_, name, _), roles in found.items():
        kinds = {" and ".join(sorted(r)) for r in roles.values()}
        if len(kinds) > 1:
            failed.append(f"{name} is {' or '.join(sorted(kinds))}")
    return len(found), failed


def _template(name: str) -> str:
    """Return a name with `*` for each number."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _in_double(call: Call) -> Call:
    def change(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.double()
        if isinstance(value, tuple | list):
            return type(value)(map(change, value))
        if isinstance(value, dict):
            return {key: change(item) for key, item in value.items()}
        return value

    return Call(change(tuple(call.args)), change(dict(call.kwargs)))


def _copied(value: Any) -> Any:
    return copy.deepcopy(value)


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping) and depth < 6:
        for item in value.values():
            yield from _tensors(item, depth + 1)
    elif isinstance(value, tuple | list) and depth < 6:
        for item in value:
            yield from _tensors(item, depth + 1)

"""The layers and stacks of a model whose attentions are known.

A layer is a module in a list of modules of which some have an attention. What stands before the
first attention or after the last is a layer only if it resembles one that is: in
`nn.Sequential(embedding, block, block, head)`, only the blocks are layers. A stack is such a list,
or several lists if their layers are grouped, such as `layers.0.blocks` and `layers.1.blocks` in
Swin.

In a list, the number of a layer is a segment of its own in paths: `layers.0`. If a model names its
layers `layer_0`, `layer_1` and so on, `layer_` is a stem, and `layer_0` is spelled `layer_.0` here.
The template of a path has `*` for each number.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_ALIKE = 0.8  # smallest fraction of parameter names that two repeated modules have in common


class Layers:
    """Which layer and stack each parameter belongs to."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        attentions: Iterable[tuple[Sequence[str], Sequence[str]]],
        runs: Mapping[str, Sequence[int]],
    ) -> None:
        """Find the layers from the names of each attention's projections and output.

        Args:
            shapes: name of a parameter → its shape, for all parameters.
            attentions: the names of query, key and value of each attention, and of its output.
            runs: path of a module → the calls at which it began to run, by their numbers in
                `trace.Trace.records`.
        """
        pairs = [(list(inputs), list(outputs)) for inputs, outputs in attentions]
        self._stems = _stems(list(shapes), [inputs for inputs, _ in pairs])
        self._shapes = {self._spelled(name): tuple(shape) for name, shape in shapes.items()}
        names = list(self._shapes)
        spelled = [[[self._spelled(name) for name in side] for side in pair] for pair in pairs]
        pairs = [(inputs, outputs) for inputs, outputs in spelled]
        runs = {self._spelled(path): calls for path, calls in runs.items()}
        self._local = _local_names(names)
        # beginnings of the names of attentions' parameters
        attending = tuple(f"{path}." for pair in pairs for path in _attention_modules(*pair))
        rest = [n for n, s in self._shapes.items() if len(s) > 1 and not n.startswith(attending)]
        self._other_matrices = _local_names(rest)  # matrices outside attentions
        inner = {path for inputs, _ in pairs if (path := self._numbered(inputs))}
        paths = [self._layer_of(inputs, outputs, inner) for inputs, outputs in pairs]
        layer_paths = dict.fromkeys(path for path in paths if path)
        layer_paths = dict.fromkeys(_innermost(path, layer_paths, pairs) for path in layer_paths)
        templates = {_template(_parent(path)) for path in layer_paths}
        self._paths: dict[str, None] = {}
        for name in names:
            segments = name.split(".")
            for i, segment in enumerate(segments):
                prefix = ".".join(segments[:i])
                path = ".".join(segments[: i + 1])
                if segment.isdecimal() and _template(prefix) in templates:
                    held = any(_parent(other) == prefix for other in layer_paths)
                    if held or any(self._are_alike(path, other) for other in layer_paths):
                        self._paths[path] = None
        for template in templates:
            for path in self._around_layers(template, layer_paths, pairs):
                del self._paths[path]
        self._stack_names = _stack_names(sorted(templates))
        self._containers = {template: _container(template, templates) for template in templates}
        self._indices = self._number(runs)
        self._add_side_lists(names, runs)

    def _add_side_lists(self, names: Sequence[str], runs: Mapping[str, Sequence[int]]) -> None:
        """Add the modules of other lists, such as norms, to layers that they alternate with."""
        lists: dict[str, set[int]] = {}
        for name in names:
            segments = name.split(".")
            first = next((i for i, segment in enumerate(segments) if segment.isdecimal()), None)
            if first is not None:
                lists.setdefault(".".join(segments[:first]), set()).add(int(segments[first]))
        stacks = {_parent(path) for path in self._paths}
        for stack in stacks & lists.keys():
            lists[stack] = {int(path.rpartition(".")[2]) for path in self._in_list(stack)}
        for path in lists.keys() - stacks:
            for stack in stacks & lists.keys():
                alike = _parent(path) == _parent(stack) and lists[path] == lists[stack]
                if alike and _in_turn(path, stack, sorted(lists[path]), runs):
                    self._stack_names[_template(path)] = self._stack_names[_template(stack)]
                    for number in lists[path]:
                        self._paths[f"{path}.{number}"] = None
                        self._indices[f"{path}.{number}"] = self._indices[f"{stack}.{number}"]

    def _in_list(self, prefix: str) -> list[str]:
        """Return the layers of a list, in their order."""
        return sorted((path for path in self._paths if _parent(path) == prefix), key=_natural)

    def _around_layers(
        self, template: str, layer_paths: Iterable[str], pairs: Sequence[Any]
    ) -> list[str]:
        """Return the modules of a stack that stand around its layers, such as a head at its end.

        Such a module stands before the first attention of its list or after the last one, resembles
        no module between them, and shares no part with a module that has an attention.
        """
        marks = []  # names of an attention's projections in its layer
        for path in layer_paths:
            if _template(_parent(path)) == template:
                own = [[n for n in inputs if n.startswith(f"{path}.")] for inputs, _ in pairs]
                marks += [{_template(n[len(path) + 1 :]) for n in names} for names in own if names]
        attending: list[str] = []
        inside: list[str] = []
        around: list[str] = []
        for prefix in {_parent(path): None for path in layer_paths}:
            modules = self._in_list(prefix)
            mixing = [path for path in modules if any(mark <= self._local[path] for mark in marks)]
            if _template(prefix) == template and mixing:
                first, last = modules.index(mixing[0]), modules.index(mixing[-1])
                attending += mixing
                inside += modules[first : last + 1]
                around += modules[:first] + modules[last + 1 :]
        parts = {part for path in attending for part in self._ends(path)}
        return [
            path
            for path in around
            if not self._ends(path) & parts
            and not any(self._resembles(path, other) for other in inside)
        ]

    def _resembles(self, path: str, other: str) -> bool:
        """Return whether two modules have parameters of mostly the same names.

        Modules without inner ones, such as two linear layers, must also have the same shapes.
        """
        if any("." in name for name in self._local[path]):
            return self._are_alike(path, other)
        return self._forms(path) == self._forms(other)

    def _forms(self, path: str) -> set[tuple[str, tuple[int, ...]]]:
        """Return the names and shapes of the parameters of a module."""
        below = {n[len(path) + 1 :]: s for n, s in self._shapes.items() if n.startswith(f"{path}.")}
        return {(_template(name), shape) for name, shape in below.items()}

    def _ends(self, path: str) -> set[tuple[str, tuple[int, ...]]]:
        """Return shapes and the last two segments of names, for parameters of inner modules."""
        return {
            (".".join(name.split(".")[-2:]), shape)
            for name, shape in self._forms(path)
            if "." in name
        }

    def _layer_of(self, inputs: Sequence[str], outputs: Sequence[str], inner: set[str]) -> str:
        """Return the path of the layer of one attention; empty if it is in no layer.

        The layer holds the attention's projections and its output. `inner` has, for each attention
        of the model, the path of the smallest repeated module around its projections.
        """
        path = self._numbered([*inputs, *outputs])
        if not path:  # keys and values that several layers share are outside them
            path = self._numbered([*inputs[:1], *outputs])
        below = {other for other in inner if other.startswith(f"{path}.")}
        if not path or not below:
            return path
        # If each head is a module, a layer holds one list of heads; their shared output shows it.
        heads = bool(outputs) and len({_parent(other) for other in below}) == 1 and _alike(below)
        return path if heads else self._numbered(inputs)

    def _numbered(self, names: Sequence[str]) -> str:
        """Return the longest path to a repeated module that all names begin with.

        If no module is repeated, any numbered module counts; empty without numbered modules.

        A module of a list is repeated if another module of the list has parameters of mostly the
        same names, or the same matrices outside the attention, or if it is alone in the list.
        In T5, each layer holds a list of different modules, which are not repeated; the layers are.
        """
        if not names:
            return ""
        common = _common(names)
        paths = [".".join(common[: i + 1]) for i, s in enumerate(common) if s.isdecimal()]
        for path in reversed(paths):
            if self._is_repeated(path):
                return path
        return paths[-1] if paths else ""

    def _is_repeated(self, path: str) -> bool:
        prefix = _parent(path)
        others = [p for p in self._local if p != path and _parent(p) == prefix]
        own = self._other_matrices.get(path)
        return not others or any(
            self._are_alike(path, other) or (own and own == self._other_matrices.get(other))
            for other in others
        )

    def _are_alike(self, path: str, other: str) -> bool:
        own, others = self._local[path], self._local[other]
        return len(own & others) >= _ALIKE * len(own | others)

    def _spelled(self, path: str) -> str:
        """Return a path with the number of a layer as a segment: `layer_0` as `layer_.0`."""
        for stem in self._stems:
            if path.startswith(stem) and path[len(stem) :].split(".")[0].isdecimal():
                return f"{stem}.{path[len(stem) :]}"
        return path

    def path(self, name: str) -> str:
        """Return the path of the layer that holds a parameter; empty if none does."""
        path = self._spelled_path(name)
        for stem in self._stems:
            if path.startswith(f"{stem}."):
                return stem + path[len(stem) + 1 :]
        return path

    def _spelled_path(self, name: str) -> str:
        segments = self._spelled(name).split(".")
        for i in range(len(segments), 0, -1):
            path = ".".join(segments[:i])
            if path in self._paths:
                return path
        return ""

    def place(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return the stack of a parameter and its layers, which are several if they share it."""
        path = self._spelled_path(name)
        if path:
            return self._stack_names[_template(_parent(path))], self._indices[path]
        for template, container in self._containers.items():
            if container and _template(self._spelled(name)).startswith(f"{container}."):
                return self._stack_names[template], ()
        return "", ()

    def in_any_layer(self, name: str) -> str:
        """Return a parameter's name with `*` for the number of its layer."""
        path = self.path(name)
        return f"{path.rstrip('0123456789')}*{name[len(path) :]}" if path else name

    def expert(self, name: str) -> int | None:
        """Return the number in a parameter's path below its layer, such as that of an expert."""
        path = self.path(name)
        rest = name[len(path) + 1 :].split(".") if path else []
        return next((int(segment) for segment in rest if segment.isdecimal()), None)

    def _number(self, runs: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        """Return path of a layer → its index in the stack; several if the layer runs repeatedly."""
        stacks: dict[str, list[str]] = {}
        for path in self._paths:
            stacks.setdefault(_template(_parent(path)), []).append(path)
        numbers: dict[str, tuple[int, ...]] = {}
        for template, paths in stacks.items():
            started = {path: list(runs.get(path, ())) for path in paths}
            once = all(len(calls) <= 1 for calls in started.values())
            nested = "*" in template
            if not nested and (once or len(paths) > 1):
                counts = {path: int(path.rpartition(".")[2]) for path in paths}
                named = any(path.startswith(f"{stem}.") for path in paths for stem in self._stems)
                first = min(counts.values())
                if not named:  # a list is counted from 0, without the modules before its layers
                    others = [p for p in self._local.keys() - counts if _parent(p) == template]
                    first = sum(int(path.rpartition(".")[2]) < first for path in others)
                numbers |= {path: (count - first,) for path, count in counts.items()}
                continue
            if not all(started.values()):  # some never ran, so number them by name
                numbers |= {path: (i,) for i, path in enumerate(sorted(paths, key=_natural))}
                continue
            order = sorted((call, path) for path in paths for call in started[path])
            for number, (_, path) in enumerate(order):
                numbers[path] = (*numbers.get(path, ()), number)
        return numbers


def _stems(names: Sequence[str], attentions: Iterable[Sequence[str]]) -> list[str]:
    """Return the beginnings of names such as `encoder_layer_0`, in which a number names a layer.

    Modules of a list, whose names are only numbers, are left out.
    """
    stems: dict[str, None] = {}
    for inputs in attentions:
        segments = inputs[0].split(".")[:-1] if inputs else []
        if any(segment.isdecimal() for segment in segments):
            continue
        for i, segment in enumerate(segments):
            stem = ".".join([*segments[:i], segment.rstrip("0123456789")])
            if stem == ".".join(segments[: i + 1]):
                continue
            numbered = [name[len(stem) :].partition(".") for name in names if name.startswith(stem)]
            below: dict[str, set[str]] = {}
            for number, _, rest in numbered:
                if number.isdecimal():
                    below.setdefault(number, set()).add(rest)
            if len(below) > 1 and len({frozenset(rest) for rest in below.values()}) == 1:
                stems[stem] = None
                break
    return list(stems)


def _local_names(names: Sequence[str]) -> dict[str, set[str]]:
    """Return path that ends in a number → names of the parameters below it."""
    local: dict[str, set[str]] = {}
    for name in names:
        segments = name.split(".")
        for i, segment in enumerate(segments):
            if segment.isdecimal():
                path = ".".join(segments[: i + 1])
                local.setdefault(path, set()).add(_template(".".join(segments[i + 1 :])))
    return local


def _innermost(path: str, paths: Iterable[str], pairs: Sequence[Any]) -> str:
    """Return the path of a layer inside this module; this path if there is none.

    Such a layer holds an attention and stands in a list like those of other layers, for example
    `layers.*.blocks`.
    """
    forms = {_template(_parent(p)) for p in paths}
    for inputs, _ in pairs:
        if inputs and all(name.startswith(f"{path}.") for name in inputs):
            segments = inputs[0].split(".")
            for i in range(len(segments) - 1, len(path.split(".")), -1):
                prefix = ".".join(segments[:i])
                if segments[i].isdecimal() and _template(prefix) in forms:
                    return ".".join(segments[: i + 1])
    return path


def _in_turn(
    path: str, stack: str, numbers: Sequence[int], runs: Mapping[str, Sequence[int]]
) -> bool:
    """Return whether module i of one list runs between modules i − 1 and i + 1 of another."""
    starts = [[runs.get(f"{parent}.{n}", ()) for n in numbers] for parent in (path, stack)]
    if len(numbers) < 2 or not all(begun for parent in starts for begun in parent):
        return False
    own, other = ([begun[0] for begun in parent] for parent in starts)
    return all(own[i] < other[i + 1] and other[i] < own[i + 1] for i in range(len(numbers) - 1))


def _common(names: Iterable[str]) -> list[str]:
    """Return the segments of the path of the module that holds all these parameters."""
    common: list[str] = []
    for segments in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(segments)) > 1:
            break
        common.append(segments[0])
    return common


def _attention_modules(inputs: Sequence[str], outputs: Sequence[str]) -> list[str]:
    """Return the path of an attention's module, or of each projection if it has none."""
    common = _common([*inputs, *outputs])
    if common and not common[-1].isdecimal():
        return [".".join(common)]
    return [_parent(name) for name in (*inputs, *outputs)]


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _alike(paths: Iterable[str]) -> bool:
    return len({_template(path) for path in paths}) == 1


def _template(path: str) -> str:
    """Return a path with `*` for each number."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def _natural(path: str) -> list[tuple[int, str]]:
    return [(int(s), "") if s.isdecimal() else (-1, s) for s in path.split(".")]


def _stack_names(templates: Sequence[str]) -> dict[str, str]:
    """Return a short name for each stack: empty if it is alone, else what differs in the paths."""
    if len(templates) < 2:
        return dict.fromkeys(templates, "")
    split = {template: template.split(".") for template in templates}
    shortest = min(len(segments) for segments in split.values())
    for i in range(shortest):
        names = {t: s[i] for t, s in split.items()}
        if len(set(names.values())) == len(templates) and "*" not in names.values():
            return {t: name.removesuffix("_model") for t, name in names.items()}
    start = 0
    while len({tuple(s[: start + 1]) for s in split.values()}) == 1:
        start += 1
    return {t: "_".join(s for s in segments[start:] if s != "*") for t, segments in split.items()}


def _container(template: str, templates: set[str]) -> str:
    """Return the path that holds one stack and no other; empty if there is none."""
    if len(templates) < 2:
        return ""
    segments = template.split(".")
    for i in range(1, len(segments) + 1):
        path = ".".join(segments[:i])
        if not any(f"{o}.".startswith(f"{path}.") for o in templates if o != template):
            return path
    return ""

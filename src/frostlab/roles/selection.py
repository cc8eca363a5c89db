"""The selection language: `query`, `layers[0:3]`, `encoder.layers[-1].cross.key.bias`, `!head`.

A selection is a path of filters in this order; at least one filter is required:

    [!] [stack .] [layers[…] .] [cross | self .] [role | all] [. weight | bias]

A selection selects parts: parameters, or the rows of a parameter that have one role. A stack is a
sequence of layers; stacks have names if a model has several, such as `encoder` and `decoder`.
Several selections form a union. A selection with `!` is negative: it removes its parts from the
union, or from all parts if every selection is negative.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from frostlab.errors import BadInput, nearest
from frostlab.roles import ROLES
from frostlab.roles.parts import Kind, Part, Place

_LAYERS = re.compile(r"layers\[([^\[\]]*)\]")
_SYNONYMS = {  # name that users may write → selection that the error message suggests
    "q": "query",
    "k": "key",
    "v": "value",
    "o": "output",
    "out": "output",
    "attention": "query",
    "attn": "query",
    "mlp": "up",
    "ffn": "up",
    "layernorm": "norm",
    "ln": "norm",
    "layer": "layers[0]",
    "layers": "layers[0]",
    "classifier": "head",
    "lm_head": "head",
    "everything": "all",
    "qk": "query,key",
    "qkv": "query,key,value",
}


_MOST_CHARACTERS = 200  # largest length of one selection


@dataclass(frozen=True)
class Term:
    """A parsed selection; a filter that is not given is None."""

    text: str
    negative: bool = False
    stack: str | None = None
    layers: str | None = None  # the text between the brackets of `layers[…]`
    cross: bool | None = None  # True: only cross-attention; False: only self-attention
    role: str | None = None
    kind: Kind | None = None

    def fits(self, place: Place, kind: Kind) -> bool:
        """Return whether all filters except `layers` match this place and kind."""
        return (
            (self.stack is None or place.stack == self.stack)
            and (self.cross is None or (place.cross == self.cross and _is_attention(place)))
            and (self.role is None or place.role == self.role)
            and (self.kind is None or kind == self.kind)
        )


def _is_attention(place: Place) -> bool:
    return place.role in ("query", "key", "value", "output")


def select(parts: Sequence[Part], texts: Iterable[str], model: str) -> tuple[Part, ...]:
    """Return the parts in the union of the selections, in model order.

    A tied tensor is one part with one role: a head that is tied to the embedding is an `embedding`.
    In a model with such a head, `head` alone, `!head` alone and `all, !head` are errors, because
    they do not say what happens to the embedding. Instead:

        head, embedding          selects the tensor
        query, head, !embedding  leaves it out
        all, !head, !embedding   leaves it out
        all, !head, embedding    selects it
    """
    stacks = sorted({p.stack for p in parts if p.stack})
    terms = [parse(text, stacks) for text in texts]
    if not terms:
        raise BadInput("no selection given; try `query`, `layers[0]` or `all`")
    counts: dict[str, int] = {}  # stack → number of layers
    for part in parts:
        if part.layers:
            counts[part.stack] = max(counts.get(part.stack, 0), 1 + max(part.layers))
    chosen: set[str] = set()
    if all(term.negative for term in terms):
        chosen = {part.key for part in parts}
    # Parts that a selection takes or removes by a tied name only: key → (selection, part, name).
    taken_by_tie: dict[str, tuple[Term, Part, str]] = {}
    removed_by_tie: dict[str, tuple[Term, Part, str]] = {}
    chosen_by_role: set[str] = set()  # keys of parts that a selection takes by their own role
    for term in sorted(terms, key=lambda t: t.negative):  # negative selections last
        hits = _matching_keys(parts, term, counts, model)
        ties = {
            part.key: (term, part, tie.name)
            for part in parts
            for tie in part.ties
            if part.key not in hits and term.layers is None and term.fits(tie.place, part.kind)
        }
        if not hits and not ties:
            raise BadInput(_no_match(parts, term, model))
        if term.negative:
            chosen -= hits
            for key in hits:
                taken_by_tie.pop(key, None)
            removed_by_tie |= ties
        else:
            chosen |= hits
            taken_by_tie |= ties
            chosen_by_role |= hits if term.role else set()
    for key, (term, part, name) in taken_by_tie.items():
        if key not in chosen:
            leave_out = f", or `!{part.role}` to leave both out" if chosen else ""
            raise BadInput(
                f"`{term.text}`: {name} is tied to {part.name}, which is `{part.role}`; "
                f"add `{part.role}` to take both{leave_out}"
            )
    for key, (term, part, name) in removed_by_tie.items():
        if key in chosen and key not in chosen_by_role:
            raise BadInput(
                f"`{term.text}`: {name} is tied to {part.name}, which is `{part.role}`; "
                f"add `!{part.role}` to remove both, or `{part.role}` to keep both"
            )
    selected = tuple(part for part in parts if part.key in chosen)
    if not selected:
        raise BadInput(f"the selections {', '.join(f'`{t.text}`' for t in terms)} select nothing")
    return selected


def names_everything(texts: Iterable[str]) -> bool:
    """Return whether selections start from all parts: one of them is `all`, or all are negative."""
    terms = [text.strip() for text in texts]
    return "all" in terms or all(term.startswith("!") for term in terms)


def parse(text: str, stacks: Sequence[str]) -> Term:
    """Parse one selection for a model with these stacks."""
    if not isinstance(text, str):
        raise BadInput(f'selections are strings, such as "query", "key"; {text!r} is not')
    body = text.strip()
    if not body.isprintable() or len(body) > _MOST_CHARACTERS:
        raise BadInput(
            f"selection {text!r:.60} has unprintable characters, or more than {_MOST_CHARACTERS} "
            "characters; try `query`"
        )
    negative = body.startswith("!")
    body = body.removeprefix("!").strip()
    if not body:
        raise BadInput(f"selection `{text}` is empty; try `query` or `layers[0]`")
    filters: dict[str, object] = {}
    order = ("stack", "layers", "cross", "role", "kind")
    for token in re.split(r"\.(?![^\[]*\])", body):  # split at dots outside brackets
        name, value = _parse_token(token.strip(), text, stacks)
        if any(later in filters for later in order[order.index(name) :]):
            raise BadInput(
                f"selection `{text}`: `{token}` is out of place; the order is "
                "stack.layers[i].cross.role.bias"
            )
        filters[name] = value
    if filters.get("role") == "all":
        filters["role"] = None
    return Term(text=text.strip(), negative=negative, **filters)  # type: ignore[arg-type]


def _parse_token(token: str, text: str, stacks: Sequence[str]) -> tuple[str, object]:
    """Return the filter that a token sets, and its value."""
    if token in stacks:
        return "stack", token
    if match := _LAYERS.fullmatch(token):
        return "layers", match[1].strip()
    if token in ("cross", "self"):
        return "cross", token == "cross"
    if token in ROLES or token == "all":
        return "role", token
    if token in ("weight", "bias"):
        return "kind", token
    choices = [*ROLES, "all", "cross", "self", "bias", "weight", "layers[0]", *stacks]
    role = _SYNONYMS.get(token.lower())
    hint = f"; did you mean `{role}`?" if role else nearest(token, choices)
    where = "" if token == text.strip() else f" in selection `{text}`"
    hint = hint or f"; roles are {', '.join(ROLES)}"
    raise BadInput(f"`{token}`{where} is not a role or a stack{hint}")


def _matching_keys(
    parts: Sequence[Part], term: Term, counts: dict[str, int], model: str
) -> set[str]:
    """Return the keys of the parts that match; `counts` has the number of layers per stack."""
    wanted: dict[str, set[int]] = {}
    if term.layers is not None:
        stacks = [s for s in counts if term.stack in (None, s)]
        wanted = {s: _layer_indices(term.layers, counts[s], term, s) for s in stacks}
    hits = set()
    for part in parts:
        if not term.fits(part.place, part.kind):
            continue
        if term.layers is None:
            hits.add(part.key)
            continue
        common = wanted.get(part.stack, set()) & set(part.layers)
        if common and common != set(part.layers):
            first, last = part.layers[0], part.layers[-1]
            raise BadInput(
                f"`{term.text}`: {len(part.layers)} layers of {model} ({first} to {last}) share "
                f"{part.name}; select `layers[{first}:{last + 1}]`, or leave `layers` out"
            )
        if common:
            hits.add(part.key)
    return hits


def _layer_indices(spec: str, count: int, term: Term, stack: str) -> set[int]:
    """Return the indices that `layers[spec]` selects; a slice must not exceed the stack."""
    where = f"`{term.text}`: {f'the {stack}' if stack else 'the model'} has layers 0 to {count - 1}"
    try:
        numbers = [None if not s.strip() else int(s) for s in spec.split(":")]
        if not spec or len(numbers) > 3 or (len(numbers) == 1 and numbers[0] is None):
            raise ValueError
        if len(numbers) == 3 and numbers[2] == 0:
            raise ValueError
    except ValueError:
        raise BadInput(f"`{term.text}`: write layers[2], layers[-1] or layers[0:3]") from None
    if len(numbers) == 1:
        (index,) = numbers
        assert index is not None
        if not -count <= index < count:
            raise BadInput(f"{where}; did you mean `layers[{count - 1 if index > 0 else 0}]`?")
        return {index % count}
    if any(n is not None and not -count <= n <= count for n in numbers[:2]):
        raise BadInput(f"{where}; did you mean `layers[:]`?")
    indices = set(range(count)[slice(*numbers)])
    if not indices:
        raise BadInput(f"{where}, so `layers[{spec}]` is empty")
    return indices


def _no_match(parts: Sequence[Part], term: Term, model: str) -> str:
    """Return the error message for a selection that matches no part."""
    if term.kind == "bias" and not any(part.kind == "bias" for part in parts):
        return f"`{term.text}` matches nothing in {model}: it has no biases"
    roles = [role for role in ROLES if any(p.role == role for p in parts)]
    hint = nearest(term.role, roles) if term.role and term.role not in roles else ""
    hint = hint or f"; it has {', '.join(roles)}"
    return f"`{term.text}` matches nothing in {model}{hint}"

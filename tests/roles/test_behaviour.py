"""Ground truth by behaviour: what a role does when its rows change, not what it is called.

Every attention's scores are caught before the softmax, under whatever name the model computes
them. With all output projections at zero no attention can reach another, so changing one
head's query rows must change that head's scores in that attention and nothing else at all.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import frostlab as fl
from frostlab.roles.parts import Part, Slot
from frostlab.roles.read import survey
from zoo import EVERY, Inputs, build, outputs

Attention = tuple[str, tuple[int, ...], bool]  # stack, layers, cross


class Scores(TorchDispatchMode):
    """Records the input of every softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.current: Any = None
        self.caught: list[tuple[Any, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default):
            self.caught.append((self.current, args[0].detach().clone()))
        return func(*args, **(kwargs or {}))


@contextmanager
def labelled(slots: dict[str, Slot], parts: tuple[Part, ...]) -> Iterator[Scores]:
    """Label each softmax with the attention whose query projection ran last before it."""
    scores, handles = Scores(), []

    def label(place: Attention) -> Any:
        def hook(*_: Any) -> None:
            scores.current = place

        return hook

    for part in parts:
        if part.role == "query" and part.kind == "weight":
            owner = slots[part.name].owner
            place = (part.stack, part.layers, part.place.cross)
            handles.append(owner.register_forward_pre_hook(label(place)))
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.no_grad(), scores:
            yield scores
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
        for handle in handles:
            handle.remove()


def caught_scores(
    model: nn.Module, inputs: Inputs, slots: dict[str, Slot], parts: tuple[Part, ...]
) -> list[tuple[Any, Tensor]]:
    with labelled(slots, parts) as scores:
        torch.default_generator.manual_seed(0)
        outputs(model, inputs)
    return scores.caught


def per_head(scores: Tensor, heads: int, batch: int = 2) -> Tensor:
    """(B, heads, T, S), from that or from torch's (B · heads, T, S)."""
    return scores.unflatten(0, (batch, heads)) if scores.dim() == 3 else scores


def changed_heads(before: list[Any], after: list[Any], heads: int) -> dict[Attention, set[int]]:
    """Which heads of which attention have other scores now."""
    changed: dict[Attention, set[int]] = {}
    for (place, old), (_, new) in zip(before, after, strict=True):
        differs = (per_head(old, heads) != per_head(new, heads)).any(-1).any(-1).any(0)
        found = set(differs.nonzero().flatten().tolist())
        if found:
            changed[place] = changed.get(place, set()) | found
    return changed


@contextmanager
def nudged(slot: Slot, part: Part, head: int) -> Iterator[None]:
    """One head's rows of a part, moved for a while."""
    assert part.heads is not None
    before = slot.read(part.rows).clone()
    moved = before.clone()
    rows = moved.movedim(part.axis, 0).unflatten(0, (-1, part.heads.size))
    rows[head] += 0.5 + torch.rand_like(rows[head])
    slot.write(moved, part.rows)
    yield
    slot.write(before, part.rows)


def cut_attention_off(slots: dict[str, Slot], parts: tuple[Part, ...]) -> None:
    for part in parts:
        if part.role == "output":
            slots[part.name].write(torch.zeros(part.shape), part.rows)


def small_positions(slots: dict[str, Slot], parts: tuple[Part, ...]) -> None:
    """Keep scores moderate, so that no mask value swallows a change."""
    for part in parts:
        if part.role in ("query", "key") and part.kind == "weight":
            slot = slots[part.name]
            slot.write(slot.read(part.rows) * 0.5, part.rows)


@pytest.mark.parametrize("name", EVERY)
def test_rows_behave_as_their_role(name: str) -> None:
    model, inputs = build(name)
    anatomy, slots = survey(model)
    parts = anatomy.parts
    cut_attention_off(slots, parts)
    small_positions(slots, parts)
    before = caught_scores(model, inputs, slots, parts)
    assert before
    assert all(place is not None for place, _ in before)
    for role in ("query", "key", "value"):
        named = [part for part in parts if part.role == role]
        assert len(named) >= 2
        for chosen, head in together(named):
            expected: dict[Attention, set[int]] = {}
            with ExitStack() as stack:
                for part in chosen:
                    stack.enter_context(nudged(slots[part.name], part, head))
                    here = (part.stack, part.layers, part.place.cross)
                    expected[here] = reached(part, head)
                after = caught_scores(model, inputs, slots, parts)
            assert part.heads is not None
            changed = changed_heads(before, after, part.heads.count)
            wanted = {} if role == "value" else expected
            assert changed == wanted, f"{role} head {head} of {[p.key for p in chosen]}"


def together(parts: list[Part]) -> Iterator[tuple[list[Part], int]]:
    """The first head of every part alone, then each other head of all parts at once.

    Attentions cannot reach each other, so what changes in each is still told apart.
    """
    for part in parts:
        yield [part], 0
    kinds: dict[Any, list[Part]] = {}
    for part in parts:
        kinds.setdefault(part.heads, []).append(part)
    for heads, alike in kinds.items():
        for head in range(1, heads.of(alike[0].role)):
            yield alike, head


def reached(part: Part, head: int) -> set[int]:
    """The query heads whose scores one head of a query or key takes part in."""
    assert part.heads is not None
    group = 1 if part.role == "query" else part.heads.count // part.heads.kv
    return set(range(head * group, (head + 1) * group))


@pytest.mark.parametrize("name", EVERY)
def test_value_output_and_feed_forward_reach_the_result(name: str) -> None:
    """A role that changes nothing would be a name without a part."""
    model, inputs = build(name)
    anatomy, slots = survey(model)
    with torch.no_grad():
        before = outputs(model, inputs)
        for role in ("value", "output", "up", "down", "norm"):
            part = next(p for p in anatomy.select(f"{role}.weight") if 0 in p.layers)
            slot = slots[part.name]
            old = slot.read(part.rows).clone()
            slot.write(old + 0.5 * torch.randn_like(old), part.rows)
            after = outputs(model, inputs)
            slot.write(old, part.rows)
            assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)), role


def test_every_promised_architecture_is_registered_and_tested() -> None:
    from frostlab.roles.description import known_types
    from zoo import CASES

    promised = [
        "bert",
        "roberta",
        "distilbert",
        "albert",
        "electra",
        "deberta-v2",
        "mpnet",
        "xlm-roberta",
        "modernbert",
        "gpt2",
        "gpt_neo",
        "gpt_neox",
        "gptj",
        "opt",
        "bloom",
        "falcon",
        "mpt",
        "gpt_bigcode",
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma2",
        "phi",
        "phi3",
        "t5",
        "bart",
        "vit",
        "clip",
        "whisper",
        "wav2vec2",
        "wav2vec2-conformer",
    ]
    assert set(promised) <= set(known_types())
    assert set(known_types()) == set(CASES), "an architecture is registered and not tested"


def test_anatomy_is_the_function() -> None:
    import frostlab.roles.parts  # noqa: F401

    assert callable(fl.anatomy)

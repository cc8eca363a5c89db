"""A small stand-in for a Hugging Face model: fewer layers, words and experts, the same attention.

The copy is built from a copy of the config, never from the weights, so it exists for a model on
the `meta` device too. Hidden size, heads and ranks stay, so that every attention weight has the
shape it has in the original, and `Small.names` says which parameter of the copy stands for which
of the original.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from frostlab.roles.tracing.passes.deciding import Deciding

LARGEST = 600_000_000  # most parameters of a copy: 2.4 GB in float32
MOST_LAYERS = 16
WORDS, FEED_FORWARD, EXPERTS = 128, 72, 4  # largest sizes in a copy
# names of attributes of configs
LAYERS = re.compile(
    r"((\w+_)?(num|n)_)?(\w+_)?(layers?|depth)|num_blocks|num_(en|de)coder_blocks|(\w+_)?n_layers?"
)
NOT_LAYERS = re.compile(
    r"num_feat_extract_layers|\w*(conv|mlp|fpn|residual|postnet|lstm|kv_shared|hidden_layers_to|proj"
    r"|feature|dense|rope|sparse|shared|only|pred|nextn|window|adapter)\w*_layers?|iou_head_depth"
    r"|\w*feature_layer|layer"
)
VOCABULARY = re.compile(r"(\w+_)?vocab_size(_\w+)?|n_vocab")
FEED_FORWARDS = re.compile(r"(\w+_)?(intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size)")
EXPERT_COUNTS = re.compile(r"(moe_)?(num|n)_(routed_|local_)?experts")
CHOSEN_EXPERTS = re.compile(r"num_experts_per_tok(en)?|moe_(topk|k)|num_selected_experts")
GROUPS = re.compile(r"n_group|topk_group|num_expert_group")
FIRST_DENSE = re.compile(r"first_k_dense_replace|num_dense_layers|moe_layer_start_index")
OFFSETS = re.compile(r"(attn|expert)_layer_offset")
TOKEN = re.compile(r"(\w+_)?token_(id|index|ids)")
INDICES = re.compile(r"\w*(indexes|indices|layer_ids?|attn_idx|layer_index)|vision_feature_layers?")


@dataclass(frozen=True)
class Small:
    """A small copy of a model."""

    model: nn.Module
    names: dict[str, str]  # original parameter → the one that stands for it in the copy


def small_copy(model: nn.Module) -> Small | None:
    """Return a smaller float32 copy on the CPU, or None if none can be built."""
    config = getattr(model, "config", None)
    if not hasattr(config, "model_type") or not hasattr(type(model), "_from_config"):
        return None
    seen = set()
    for changes in (
        {"words", "feed", "experts"},
        {"words", "experts"},
        {"feed", "experts"},
        {"experts"},
        set(),
    ):
        for layers in _layer_counts(config):
            shrunk = _shrunk(config, frozenset(changes), layers)
            if shrunk is None or repr(shrunk.to_dict()) in seen:
                continue
            seen.add(repr(shrunk.to_dict()))
            planned = _built(type(model), shrunk, "meta")
            if planned is None and layers < 6:
                continue  # perhaps too few layers
            if planned is None:
                break
            names = _stand_ins(model, planned)
            if sum(item.numel() for item in planned.parameters()) > LARGEST:
                if layers == 2:
                    continue  # one layer may still do
                break
            if names is not None:
                real = _built(type(model), shrunk, "cpu")
                return None if real is None else Small(real.eval(), names)
    return None


def _layer_counts(config: Any) -> Iterator[int]:
    """Yield the numbers of layers to try: 2, 1, 3, 4, … and at last the model's own number.

    Two layers may be too large, and a kind of layer may be missing in the first few.
    """
    longest = max(
        (value for part in _configs(config) for _, value in _layer_fields(part)), default=1
    )
    yield from (2, 1, *range(3, min(longest, MOST_LAYERS) + 1)) if longest > 1 else ()
    if longest <= 1 or longest > MOST_LAYERS:
        yield longest


def _built(kind: Any, config: Any, device: str) -> nn.Module | None:
    """Return a model of this class with random weights; the caller's random state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            with torch.device(device):
                built = kind._from_config(copy.deepcopy(config), dtype=torch.float32)
        except Exception:  # these sizes do not fit together: others are tried
            return None
    assert isinstance(built, nn.Module)
    return built


def _configs(config: Any) -> Iterator[Any]:
    """Yield the config and its sub-configs."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "model_type"):
            yield from _configs(value)


def _layer_fields(config: Any) -> Iterator[tuple[str, int]]:
    """Yield the attributes that count layers."""
    for name, value in vars(config).items():
        counts = LAYERS.fullmatch(name) and not NOT_LAYERS.fullmatch(name)
        if counts and type(value) is int and value > 0:
            yield name, value


def _shrunk(config: Any, changes: frozenset[str], layers: int) -> Any:
    """Return a copy of the config with fewer layers, in which the sizes in `changes` are small."""
    small = copy.deepcopy(config)
    tokens: dict[int, int] = {}
    for part in _configs(small):
        for name, before in list(_layer_fields(part)):
            after = min(before, layers)
            if after < before:
                _cut_lists(part, before, after)
            _put(part, name, after)
        for name, value in list(vars(part).items()):
            if "words" in changes:
                if _is_count(name, value, VOCABULARY):
                    _put(part, name, min(value, WORDS))
                elif TOKEN.fullmatch(name):
                    _put(part, name, _small_tokens(value, tokens))
            if _is_count(name, value, FIRST_DENSE):
                _put(part, name, 1)
            if name == "num_kv_shared_layers" and value:
                _put(part, name, min(value, layers // 2))
            if _is_count(name, value, OFFSETS):
                _put(part, name, 2 - value % 2)
            if "feed" in changes and _is_count(name, value, FEED_FORWARDS):
                _put(part, name, min(value, FEED_FORWARD))
            if "experts" in changes:
                if _is_count(name, value, EXPERT_COUNTS):
                    _put(part, name, min(value, EXPERTS))
                elif _is_count(name, value, CHOSEN_EXPERTS):
                    _put(part, name, min(value, 2))
                elif _is_count(name, value, GROUPS):
                    _put(part, name, 1)
    return small


def _is_count(name: str, value: Any, pattern: re.Pattern[str]) -> bool:
    return bool(pattern.fullmatch(name)) and type(value) is int and value > 0


def _put(config: Any, name: str, value: Any) -> None:
    """Set an attribute directly, without the `__setattr__` of transformers."""
    vars(config)[name] = value


def _small_tokens(value: Any, tokens: dict[int, int]) -> Any:
    """Return token ids that fit the small vocabulary; `tokens` has old id → new id."""
    if isinstance(value, (list, tuple)):
        return type(value)(_small_tokens(item, tokens) for item in value)
    if type(value) is not int or value < WORDS // 2:
        return value
    return tokens.setdefault(value, WORDS - 1 - len(tokens) % (WORDS // 2))


def _cut_lists(config: Any, before: int, after: int) -> None:
    """Cut lists with one entry per layer, so that every kind of layer stays if possible.

    Attributes that hold indices of layers are limited to the index of the last layer that is left.
    """
    lists = {
        name: list(value)
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple))
        and len(value) == before
        and not INDICES.fullmatch(name)
        and not any(isinstance(item, (list, tuple, dict)) for item in value)
    }
    kinds = [repr(kind) for kind in zip(*lists.values(), strict=True)] or [""] * before
    first = {kind: number for number, kind in reversed(list(enumerate(kinds)))}
    kept_layers = sorted(first.values())[:after]
    rest = [number for number in range(before) if number not in kept_layers]
    kept_layers = sorted(kept_layers + rest[: after - len(kept_layers)])
    for name, value in list(vars(config).items()):
        if name in lists:
            _put(config, name, type(value)([lists[name][number] for number in kept_layers]))
        elif INDICES.fullmatch(name) and not name.startswith("_"):
            if isinstance(value, (list, tuple)) and all(type(item) is int for item in value):
                # none is dropped: the width of a later layer may depend on how many there are
                _put(config, name, type(value)([min(item, after - 1) for item in value]))
            elif type(value) is int and value >= 0:
                _put(config, name, min(value, after - 1))
    stages = vars(config).get("stage_names")
    if isinstance(stages, list) and len(stages) == before + 1:  # a backbone: one stage per layer
        indices = vars(config).get("_out_indices") or []
        kept = list(dict.fromkeys(min(item, after) for item in indices))
        _put(config, "stage_names", stages[: after + 1])
        _put(config, "_out_indices", kept)
        _put(config, "_out_features", [stages[item] for item in kept])


# ---- which parameter stands for which ----


def _stand_ins(model: nn.Module, small: nn.Module) -> dict[str, str] | None:
    """Return original parameter → its stand-in, or None if a parameter or module has none."""
    scales = _scales(model.config, small.config)
    deciding = Deciding(model)
    big_index, small_index = _Index(model, deciding), _Index(small, deciding)
    chosen: dict[str, str] = {"": ""}
    for name in big_index.order:
        if not name:
            continue
        parent, _, last = name.rpartition(".")
        if parent not in chosen:
            return None
        stand = f"{chosen[parent]}.{last}" if chosen[parent] else last
        if last.isdigit():
            siblings = small_index.numbered[chosen[parent]]
            wanted = big_index.kind(name)
            alike = [other for other in siblings if small_index.kind(other) == wanted]
            if not alike:
                return None
            stand = stand if stand in alike else alike[0]
        if (
            stand not in small_index.classes
            or small_index.classes[stand] != big_index.classes[name]
        ):
            return None
        chosen[name] = stand
    names: dict[str, str] = {}
    shapes = dict(small.named_parameters(remove_duplicate=False))
    for name, item in model.named_parameters(remove_duplicate=False):
        parent, _, last = name.rpartition(".")
        if parent not in chosen:
            return None
        stand = f"{chosen[parent]}.{last}" if chosen[parent] else last
        if stand not in shapes and last.isdigit():
            stand = f"{chosen[parent]}.0"
        if stand not in shapes or not _fits(item.shape, shapes[stand].shape, scales):
            return None
        names[name] = stand
    return names


class _Index:
    """The modules of a model by name, and what each one holds, whatever its sizes are."""

    def __init__(self, model: nn.Module, deciding: Deciding) -> None:
        self.order: list[str] = []
        self.deciding = deciding
        self.classes: dict[str, str] = {}
        self.numbered: dict[str, list[str]] = defaultdict(list)
        self.modules = dict(model.named_modules(remove_duplicate=False))
        for name, part in self.modules.items():
            self.order.append(name)
            self.classes[name] = type(part).__qualname__  # torch remakes parametrized classes
            parent, _, last = name.rpartition(".")
            if last.isdigit():
                self.numbered[parent].append(name)
        self.kinds: dict[str, str] = {}

    def kind(self, name: str) -> str:
        """Return what a layer is made of: classes, parameter names and settings."""
        if name not in self.kinds:
            part = self.modules[name]
            pieces = []
            for inner, module in part.named_modules(remove_duplicate=False):
                if re.search(r"(^|\.)\d*[1-9]\d*(\.|$)", inner):
                    continue  # numbered parts after the first: experts, stacked blocks
                held = sorted(key for key, item in module._parameters.items() if item is not None)
                chosen = self.deciding.of(module, name.rpartition(".")[2])
                pieces.append(f"{inner}:{type(module).__qualname__}:{held}:{chosen}")
            self.kinds[name] = "\n".join(pieces)
        return self.kinds[name]


def _scales(config: Any, small: Any) -> set[tuple[int, int]]:
    """Return the sizes that were shrunk, each with the size it became."""
    changed: set[tuple[int, int]] = set()
    for own, other in zip(_configs(config), _configs(small), strict=True):
        for name, value in vars(own).items():
            after = vars(other).get(name)
            if type(value) is int and type(after) is int and after != value:
                changed.add((value, after))  # `_fits` also allows fused and padded tables
            if isinstance(value, (list, tuple)) and isinstance(after, (list, tuple)):
                changed.add((len(value), len(after)))
    return changed


def _fits(big: torch.Size, small: torch.Size, scales: set[tuple[int, int]]) -> bool:
    """Say whether two shapes differ only in sizes that were shrunk on purpose."""
    return len(big) == len(small) and all(
        size == other
        or any(
            (size % before == 0 and size // before * after == other)
            or (before > 8 and abs(size - before) <= 64 and size - before == other - after)
            for before, after in scales
            if before > 0
        )
        for size, other in zip(big, small, strict=True)
    )

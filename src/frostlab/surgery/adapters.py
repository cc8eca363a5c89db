"""PEFT's adapters on selected weights, also on the rows of some roles of a fused projection.

An adapter wraps a module. LoRA adds the product of two small matrices, B·A, to the module's weight.
In a fused projection, whose rows belong to several roles, each selected role has a pair B, A of its
own, as if the roles were separate projections. The rows of the other roles have no parameters, and
their update is exactly zero:

                        B            A
    query rows      [ Bq  0  ]    [ Aq ]
    key rows        [ 0   0  ]  · [ Av ]
    value rows      [ 0   Bv ]

PEFT sees a plain LoRA, here of twice the rank, whose B is the whole matrix. So PEFT's merging works
unchanged. State dicts hold the whole B, so that PEFT can load them without frostlab.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostlab.errors import BadInput, FrostlabError, require
from frostlab.recipe.treatment import LowRank, Scales
from frostlab.roles.parts import Multiplies, Part, Rows, Slot, Split, gathered
from frostlab.roles.read import survey
from frostlab.roles.snapshot import Anatomy
from frostlab.storage import derive_seed
from frostlab.surgery.freeze import avoid_fast_path, freeze, refuse_untouchable, refuse_wrapped
from frostlab.surgery.split import sharded_like
from frostlab.surgery.stale import record_change, retire

_ADAPTER = "default"  # PEFT's name of the adapter
_PROJECTED = ("query", "key", "value", "output", "up", "gate", "down")  # projections of a layer


def add_lora(
    model: nn.Module,
    *selections: str,
    r: int = 8,
    alpha: float = 16.0,
    dropout: float = 0.0,
    seed: int = 0,
) -> Anatomy:
    """Add LoRA adapters to the selected projections, in place; only the adapters learn.

    The model's outputs do not change. If some roles of a fused projection are selected, such as
    query and value of GPT-2's c_attn, each has an adapter for its own rows; if all are selected,
    one adapter covers the projection, as in PEFT. To train the head as well, call
    `freeze(model, "all", "!adapter", "!head")` afterwards. Build the optimizer at the end.

    Args:
        r: the rank of each adapter.
        alpha: the product B·A is multiplied by alpha / r.
        dropout: the probability of zeroing an input of the adapters in training.
        seed: the seed of the adapters' initial weights.
    """
    if not selections or not all(isinstance(text, str) for text in selections):
        raise BadInput('add_lora: selections are strings; try add_lora(model, "query", "value")')
    if not isinstance(r, int) or isinstance(r, bool) or r < 1:
        raise BadInput(f"add_lora: r={r!r} should be a whole number of at least 1")
    if not alpha > 0 or not 0 <= dropout < 1:
        raise BadInput(f"add_lora: {alpha=} should be above 0 and {dropout=} from 0 to below 1")
    refuse_wrapped(model, "add_lora")
    _, slots = survey(model)
    refuse_untouchable(model, slots.values(), "add_lora")
    wanted = LowRank(method="lora", select=selections, r=r, alpha=float(alpha), dropout=dropout)
    adapt(model, wanted, seed, "add_lora")
    return freeze(model, "all", "!adapter")


def merge_adapters(model: nn.Module) -> None:
    """Merge adapters into the weights that they adapt, and remove them, in place.

    The merged weights stay frozen. A model without adapters is left as it is.
    """
    if hasattr(model, "merge_and_unload"):
        raise BadInput(
            "merge_adapters: this is PEFT's own wrapper around the model; "
            "model = model.merge_and_unload() merges its adapters"
        )
    if not hasattr(model, "peft_config"):
        return
    require("peft", "peft", "merge_adapters")
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = [
        (name, module) for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer)
    ]  # fmt: skip
    for name, module in adapted:
        module.merge()
        base = module.get_base_layer()
        kept = {id(parameter) for parameter in base.parameters()}
        for local, parameter in module.named_parameters():
            if id(parameter) not in kept:
                retire(parameter, f"{name}.{local}")
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, base)
    del model.peft_config
    avoid_fast_path(model)
    record_change(model)


def adapt(
    model: nn.Module, wanted: LowRank | Scales, seed: int, where: str = "treatment.peft.select"
) -> set[str]:
    """Add adapters to a model, in place; return their parts' keys. Outputs do not change.

    PEFT draws from torch's global generator. The generator's state is restored afterwards, so that
    all other random values stay the same.

    Args:
        where: the beginning of error messages.
    """
    peft = require("peft", "peft", where.removesuffix(".select"))
    structure, slots = survey(model)
    if structure.has_adapters:
        raise BadInput(
            f"{where}: the model already has adapters; select all weights to adapt in one call"
        )
    targets = _targets(model, structure, slots, wanted, where)
    with torch.random.fork_rng([]):
        torch.manual_seed(derive_seed("adapters", seed))
        peft.inject_adapter_in_model(_config(peft, wanted, targets), model)
    for path, target in targets.items():
        if target.is_partial:
            layer: Any = model.get_submodule(path)
            layer.lora_B[_ADAPTER] = RoleRows(target.rows, layer.lora_B[_ADAPTER].weight)
    avoid_fast_path(model)
    structure, slots = survey(model)
    if {s.adapts for s in slots.values() if s.adapts is not None} != targets.keys():
        raise FrostlabError(f"{where}: PEFT adapted other modules than the selected ones")
    return {part.key for part in structure.select("adapter")}


@dataclass(frozen=True)
class _Target:
    """The selected roles of a projection."""

    parts: tuple[Part, ...]
    is_partial: bool  # whether the projection holds other roles, too

    @property
    def rows(self) -> dict[str, Rows]:
        return {part.role: part.rows for part in self.parts if part.rows is not None}

    @property
    def pairs(self) -> int:
        """The number of pairs A, B: one per selected role if other roles are left out, else one."""
        return len(self.parts) if self.is_partial else 1


def _targets(
    model: nn.Module,
    structure: Anatomy,
    slots: dict[str, Slot],
    wanted: LowRank | Scales,
    where: str,
) -> dict[str, _Target]:
    """Return the projections to adapt by path; refuse weights that cannot have adapters."""
    try:
        chosen = [part for part in structure.select(*wanted.select) if part.kind == "weight"]
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None
    if not chosen:
        raise BadInput(f"{where}: only biases are selected; adapters need weights")
    by_name: dict[str, list[Part]] = {}
    for part in chosen:
        _check_adaptable(model, part, slots[part.name], where)
        by_name.setdefault(part.name, []).append(part)
    targets: dict[str, _Target] = {}
    for name, parts in by_name.items():
        together = [part for part in structure.parts if part.name == name]
        partial = len(parts) < len(together)
        if partial and wanted.method != "lora":
            raise BadInput(
                f"{where}: {name} holds {', '.join(p.role for p in together)} together; select all "
                f"of them or none ({wanted.method} cannot adapt some of its rows, lora can)"
            )
        targets[name.rpartition(".")[0]] = _Target(tuple(parts), partial)
    return targets


def _check_adaptable(model: nn.Module, part: Part, slot: Slot, where: str) -> None:
    """Refuse the head, split projections, and weights that are not a projection."""
    if part.role == "head":
        raise BadInput(f"{where}: {part.name} belongs to the head, which learns without adapters")
    if isinstance(slot.owner, Split):
        raise BadInput(
            f"{where}: {part.name} is split, because some of its rows are frozen; "
            "call fl.thaw first, and freeze after the adapters are added"
        )
    parent = model.get_submodule(".".join(part.name.split(".")[:-2]))
    # nn.MultiheadAttention reads the weight of its out_proj, but never calls it.
    owner = parent if isinstance(parent, nn.MultiheadAttention) else slot.owner
    kind = type(owner)
    projection = kind.__name__ == "Conv1D" if part.axis else isinstance(owner, nn.Linear)
    if part.role in _PROJECTED and not (projection and slot.local == "weight"):
        raise BadInput(
            f"{where}: {part.name} ({part.role}) is a parameter of a {kind.__name__}, not the "
            "weight of a linear module that the model calls, so PEFT cannot adapt it"
        )
    if not part.matmul or not projection or part.ties:
        raise BadInput(
            f"{where}: {part.name} ({part.role}) is not the weight of a linear module, or is tied "
            f"to another weight; select from {', '.join(_PROJECTED)}"
        )


def _config(peft: Any, wanted: LowRank | Scales, targets: Mapping[str, _Target]) -> Any:
    """Return PEFT's config for these modules.

    The modules are given as a regular expression, which PEFT matches against whole paths; names in
    a list would also match the ends of other paths. For a projection with several pairs A, B, both
    r and alpha are multiplied by the number of pairs, so alpha / r is the same everywhere.
    """
    transposed = any(part.axis for target in targets.values() for part in target.parts)
    if isinstance(wanted, LowRank):
        several = {f"^{re.escape(p)}": t.pairs for p, t in targets.items() if t.pairs > 1}
        return peft.LoraConfig(
            r=wanted.r,
            lora_alpha=wanted.alpha,
            lora_dropout=wanted.dropout,
            target_modules=_pattern(targets),
            use_dora=wanted.method == "dora",
            fan_in_fan_out=transposed,
            rank_pattern={path: pairs * wanted.r for path, pairs in several.items()},
            alpha_pattern={path: pairs * wanted.alpha for path, pairs in several.items()},
        )
    down = [path for path, target in targets.items() if target.parts[0].role == "down"]
    return peft.IA3Config(
        target_modules=_pattern(targets),
        feedforward_modules=_pattern(down) if down else [],
        fan_in_fan_out=transposed,
    )


def _pattern(paths: Iterable[str]) -> str:
    return "|".join(map(re.escape, paths))


class RoleRows(nn.Module, Multiplies):
    """LoRA's B for the rows of some roles of a fused projection, with one parameter for each role.

    It takes the place of the nn.Linear that PEFT calls lora_B. The state dict holds the whole B of
    the diagram above, with its zeros, under the name `weight`.
    """

    def __init__(self, rows: Mapping[str, Rows], like: Tensor) -> None:
        super().__init__()
        self.rows = dict(rows)  # role → its rows of the projection's output
        self.rank = like.shape[1] // len(self.rows)  # of each role
        for role, own in self.rows.items():
            self.register_parameter(role, nn.Parameter(like.new_zeros(len(own), self.rank)))

    @property
    def weight(self) -> Tensor:
        """The whole B (out, roles · rank)."""
        return self._whole(list(self.parameters()))

    def _whole(self, blocks: Sequence[Tensor]) -> Tensor:
        width = len(blocks) * self.rank
        padded = [
            F.pad(block, (i * self.rank, width - (i + 1) * self.rank))
            for i, block in enumerate(blocks)
        ]  # each (rows of a role, roles · rank)
        return _spread(padded, list(self.rows.values()), 0)

    def forward(self, low: Tensor) -> Tensor:
        inputs = low.split(self.rank, -1)  # each (…, rank)
        updates = [F.linear(x, b) for x, b in zip(inputs, self.parameters(), strict=True)]
        return _spread(updates, list(self.rows.values()), low.dim() - 1)  # (…, out)

    def extra_repr(self) -> str:
        roles = ", ".join(f"{role}: {len(rows)} rows" for role, rows in self.rows.items())
        return f"{roles}, rank={self.rank}"

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        blocks = [gathered(parameter.detach()) for parameter in self.parameters()]
        like = next(self.parameters())
        destination[f"{prefix}weight"] = sharded_like(self._whole(blocks), like)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = f"{prefix}weight"
        if strict:
            unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k != key]
        if key not in state_dict:
            missing_keys.append(key)
            return
        value = gathered(state_dict[key])
        shape = (next(iter(self.rows.values())).size, len(self.rows) * self.rank)
        if tuple(value.shape) != shape:
            error_msgs.append(
                f"size mismatch for {key}: copying a param with shape {tuple(value.shape)} "
                f"from checkpoint, the shape in current model is {shape}."
            )
            return
        blocks = [
            rows.take(value).narrow(1, i * self.rank, self.rank).contiguous()
            for i, rows in enumerate(self.rows.values())
        ]
        if not torch.equal(self._whole(blocks), value):
            error_msgs.append(
                f"{key} has values outside the rows of {', '.join(self.rows)}, "
                "the roles that this adapter is for."
            )
            return
        assign = local_metadata.get("assign_to_params_buffers", False)
        with torch.no_grad():
            for role, block in zip(self.rows, blocks, strict=True):
                parameter = self.get_parameter(role)
                if assign:
                    fresh = sharded_like(block.clone(), parameter)
                    setattr(self, role, nn.Parameter(fresh, parameter.requires_grad))
                else:
                    parameter.copy_(sharded_like(block, parameter))


def _spread(values: Sequence[Tensor], rows: Sequence[Rows], axis: int) -> Tensor:
    """Put each value at its rows along an axis, with zeros at all other rows, in one copy."""
    taken = rows[0]
    for more in rows[1:]:
        taken = taken | more
    pieces: list[tuple[tuple[int, int], Tensor]] = []
    for own, value in zip(rows, values, strict=True):
        folded = value.unflatten(axis, (own.repeats, len(own) // own.repeats))
        sizes = [stop - start for start, stop in own.spans]
        pieces += zip(own.spans, folded.split(sizes, axis + 1), strict=True)
    for start, stop in taken.rest().spans:
        shape = list(values[0].shape)
        shape[axis : axis + 1] = [taken.repeats, stop - start]
        pieces.append(((start, stop), values[0].new_zeros(()).expand(shape)))
    ordered = [tensor for _, tensor in sorted(pieces, key=lambda item: item[0])]
    return torch.cat(ordered, axis + 1).flatten(axis, axis + 1)

"""The treatment of a model before training: changed weights, adapters and frozen parts.

Digests of the weights show later which parts a treatment left unchanged. A part is a parameter, or
the rows of a parameter that have one role, such as query (see `frostlab.roles.parts`).
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from frostlab.errors import (
    BadInput,
    FrostlabError,
    UnknownArchitecture,
    check_registration,
    nearest,
    require,
    same_function,
)
from frostlab.recipe.recipe import Recipe
from frostlab.recipe.treatment import (
    TREATMENTS,
    Identity,
    LowRank,
    Orthogonalize,
    Randomize,
    RegisteredChange,
    Scales,
    Treatment,
)
from frostlab.roles.parts import Part, Slot
from frostlab.roles.read import anatomy, survey
from frostlab.roles.snapshot import Anatomy
from frostlab.storage import derive_seed
from frostlab.surgery.audit import Audit, frozen_audit
from frostlab.surgery.freeze import freeze
from frostlab.surgery.origin import digest
from frostlab.surgery.orthogonal import orthogonalize, randomize
from frostlab.training.distributed import full_tensor


def _orthogonalize(model: nn.Module, change: Orthogonalize, seed: int) -> set[str]:
    orthogonalize(model, *change.select, scope=change.scope, source=change.source, seed=seed)
    return _weights_of(model, change.select)


def _set_identity(model: nn.Module, change: Identity, seed: int) -> set[str]:
    orthogonalize(model, *change.select, scope=change.scope, source="identity")
    return _weights_of(model, change.select)


def _randomize(model: nn.Module, change: Randomize, seed: int) -> set[str]:
    randomize(model, *change.select, std=change.std, seed=seed)
    return _weights_of(model, change.select)


def _weights_of(model: nn.Module, selections: Sequence[str]) -> set[str]:
    """Return the keys of the selected parts that are weights, not biases."""
    return {part.key for part in anatomy(model).select(*selections) if part.kind == "weight"}


def _call_registered(model: nn.Module, change: RegisteredChange, seed: int) -> set[str]:
    """Call a registered function; return the keys of the parts that it changed."""
    if change.name not in CHANGES:
        hint = nearest(change.name, CHANGES)
        raise BadInput(f"treatment.init: no function is registered as {change.name}{hint}")
    before = weight_digests(model)
    CHANGES[change.name](model, seed)
    after = weight_digests(model)
    return {key for key, value in after.items() if before.get(key) != value}


# For each class of change, a function that applies it and returns the keys of the changed parts.
_APPLY: dict[type, Callable[[nn.Module, Any, int], set[str]]] = {
    Orthogonalize: _orthogonalize,
    Randomize: _randomize,
    Identity: _set_identity,
    RegisteredChange: _call_registered,
}
CHANGES: dict[str, Callable[[nn.Module, int], object]] = {}  # registered functions by name


def register_treatment(
    name: str,
    change: Callable[[nn.Module, int], object],
    *,
    freeze: Sequence[str] = (),
) -> None:
    """Register a treatment for recipes, and arms of comparisons, that set `treatment: NAME`.

    Args:
        name: a name that no other treatment has.
        change: a function that takes the model on the CPU and the run's seed, and changes weights
            in place. It must draw from its own random generator, and leave torch's generator as
            it was, so that nothing drawn later depends on the treatment.
        freeze: selections to freeze afterwards.

    A name can be registered again only with a function of the same module and name, as when a
    notebook cell runs again.
    """
    check_registration("register_treatment", name, change)
    if name in TREATMENTS and not same_function(CHANGES.get(name), change):
        raise BadInput(f"register_treatment: the name {name} is taken; choose another")
    init = (RegisteredChange(method="registered", name=name),)
    TREATMENTS[name] = Treatment(init=init, freeze=tuple(freeze))
    CHANGES[name] = change


def treat(model: nn.Module, recipe: Recipe, *, init: bool = True) -> set[str]:
    """Apply the recipe's treatment; return the keys of the parts that it changed or added.

    Treatments draw from their own random generators, as registered ones should, so all other random
    values stay the same. Without `init`, weights keep their values, for a checkpoint to replace.
    """
    surgery, touched = recipe.surgery, set[str]()
    for change in surgery.init if init else ():
        touched |= _APPLY[type(change)](model, change, recipe.seed)
    if surgery.peft is not None:
        touched |= adapt(model, surgery.peft, recipe.seed)
    if surgery.frozen:
        _freeze(model, recipe)
    if not any(p.requires_grad for p in model.parameters()):
        raise BadInput("treatment.freeze leaves nothing that learns")
    return touched


def _freeze(model: nn.Module, recipe: Recipe) -> None:
    """Freeze the treatment's selections; an error about a selection names the treatment.

    A recipe may contain only the name of the treatment, not the selection that failed.
    """
    try:
        freeze(model, *recipe.surgery.frozen)
    except UnknownArchitecture:
        raise
    except BadInput as error:
        raise BadInput(f"treatment {recipe.treatment_name}: {error}") from None


def weight_digests(model: nn.Module) -> dict[str, str]:
    """Return the digest of every part by its key, so that runs can be compared part by part.

    For an unknown architecture, return the digest of every tensor by its name.
    """
    try:
        structure, slots = survey(model)
    except UnknownArchitecture:
        return {name: digest(tensor)[:16] for name, tensor in model.state_dict().items()}
    return {part.key: digest(slots[part.name].read(part.rows))[:16] for part in structure.parts}


def state_digest(model: nn.Module) -> str:
    """Return one digest of all weights and buffers of a model."""
    hasher = hashlib.sha256()
    for name, value in model.state_dict().items():
        hasher.update(f"{name} {digest(full_tensor(value))}".encode())
    return hasher.hexdigest()[:16]


def audit_frozen(model: nn.Module, recipe: Recipe) -> Audit | None:
    """Return an audit of the weights that the treatment or a stage froze; None if neither did."""
    by_stage = recipe.stages and not all(p.requires_grad for p in model.parameters())
    return frozen_audit(model) if recipe.surgery.frozen or by_stage else None


def count_parameters(model: nn.Module) -> dict[str, int]:
    """Count all, trainable and frozen parameters; a tied parameter counts once."""
    total = sum(p.numel() for p in model.parameters())
    learn = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {"total": total, "trainable": learn, "frozen": total - learn}


def wants_types(model: Any) -> bool:
    """Return whether a model embeds token types, which mark the second text of a pair."""
    config = getattr(model, "config", None)
    return getattr(config, "type_vocab_size", 0) > 1


_SELECT_KEY = "treatment.peft.select"


def adapt(model: nn.Module, wanted: LowRank | Scales, seed: int) -> set[str]:
    """Add adapters to a model in place and return the keys of their parts; outputs do not change.

    PEFT draws from torch's global generator. The generator's state is restored afterwards, so that
    all other random values stay the same.
    """
    peft = require("peft", "peft", "treatment.peft")
    structure, slots = survey(model)
    chosen = _weights_to_adapt(structure, slots, wanted.select)
    targets = {part.name.rpartition(".")[0]: part for part in chosen}
    config = _config(peft, wanted, targets, transposed=any(part.axis for part in chosen))
    with torch.random.fork_rng([]):
        torch.manual_seed(derive_seed("adapters", seed))
        peft.inject_adapter_in_model(config, model)
    structure, slots = survey(model)
    if {s.adapts for s in slots.values() if s.adapts is not None} != targets.keys():
        raise FrostlabError(f"{_SELECT_KEY}: PEFT adapted other modules than the selected ones")
    return {part.key for part in structure.select("adapter")}


def _weights_to_adapt(
    structure: Anatomy, slots: dict[str, Slot], selections: tuple[str, ...]
) -> list[Part]:
    """Return the selected weights; refuse the head and weights that are not a whole projection.

    An adapter always wraps a whole projection.
    """
    try:
        chosen = [part for part in structure.select(*selections) if part.kind == "weight"]
    except BadInput as error:
        raise BadInput(f"{_SELECT_KEY}: {error}") from None
    if not chosen:
        raise BadInput(f"{_SELECT_KEY}: only biases are selected; adapters need weights")
    keys = {part.key for part in chosen}
    for part in chosen:
        if part.role == "head":
            raise BadInput(
                f"{_SELECT_KEY}: {part.name} belongs to the head, which learns without adapters"
            )
        projection = isinstance(slots[part.name].owner, nn.Linear) or part.axis == 1
        if not part.matmul or not projection or part.ties:
            raise BadInput(
                f"{_SELECT_KEY}: {part.name} ({part.role}) is not a projection of its own; "
                "select from query, key, value, output, up, gate, down"
            )
        sharing = [other for other in structure.parts if other.name == part.name]
        if not {other.key for other in sharing} <= keys:
            roles = ", ".join(other.role for other in sharing)
            raise BadInput(
                f"{_SELECT_KEY}: {part.name} holds {roles} together; select all of them or none"
            )
    return chosen


def _config(peft: Any, wanted: LowRank | Scales, targets: dict[str, Part], transposed: bool) -> Any:
    """Return PEFT's config for these modules.

    PEFT matches a regular expression against whole paths, but a list of names also against the ends
    of paths.
    """
    all_targets = _pattern(targets)
    if isinstance(wanted, LowRank):
        return peft.LoraConfig(
            r=wanted.r,
            lora_alpha=wanted.alpha,
            lora_dropout=wanted.dropout,
            target_modules=all_targets,
            use_dora=wanted.method == "dora",
            fan_in_fan_out=transposed,
        )
    down = [path for path, part in targets.items() if part.role == "down"]
    return peft.IA3Config(
        target_modules=all_targets,
        feedforward_modules=_pattern(down) if down else [],
        fan_in_fan_out=transposed,
    )


def _pattern(paths: Iterable[str]) -> str:
    return "|".join(map(re.escape, paths))

"""The treatment of a model before training: changed weights, adapters and frozen parts.

Digests of the weights show later which parts a treatment left unchanged. A part is a parameter, or
the rows of a parameter that have one role, such as query (see `frostlab.roles.parts`).
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from frostlab.errors import (
    BadInput,
    UnknownArchitecture,
    check_registration,
    nearest,
    same_function,
)
from frostlab.recipe.recipe import Recipe
from frostlab.recipe.treatment import (
    TREATMENTS,
    Identity,
    Orthogonalize,
    Randomize,
    RegisteredChange,
    Treatment,
)
from frostlab.roles.read import anatomy, survey
from frostlab.roles.snapshot import Anatomy
from frostlab.surgery.adapters import adapt
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
    """Register a treatment; recipes can then set `treatment: NAME`, and comparisons can train it.

    Args:
        name: a name that no other treatment has.
        change: a function that takes the model on the CPU and the run's seed, and changes weights
            in place. It must draw from its own random generator, and leave torch's generator as
            it was, so that nothing drawn later depends on the treatment.
        freeze: selections to freeze afterwards, such as `query` or `layers[0]`.

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


def treated_parts(model: nn.Module, recipe: Recipe) -> Anatomy:
    """Add the recipe's adapters to a model; return its parts, marked as the treatment freezes them.

    No weight gets a new value, so the model may be on the meta device.
    """
    if recipe.surgery.peft is not None:
        adapt(model, recipe.surgery.peft, recipe.seed)
    parts = anatomy(model)
    return parts.with_frozen(*recipe.surgery.frozen) if recipe.surgery.frozen else parts


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
    """Return one digest of all weights and persistent buffers of a model."""
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

"""A treatment applied to a model, and digests that prove what it left alone."""

import hashlib
from typing import Any

from torch import nn

from frostlab.anatomy import anatomy, survey
from frostlab.errors import BadInput, UnknownArchitecture
from frostlab.recipe import Recipe
from frostlab.recipe.treatment import Orthogonalize
from frostlab.surgery import Audit, audit, freeze, orthogonalize, randomize
from frostlab.surgery.origin import digest
from frostlab.training.adapting import adapt
from frostlab.training.distributed import whole


def treat(model: nn.Module, recipe: Recipe) -> set[str]:
    """Do what the recipe's treatment says; return the keys of what got new values or is new.

    Surgery draws from generators of its own, so everything else is as without it.
    """
    surgery, touched = recipe.surgery, set[str]()
    for change in surgery.init:
        touched |= {p.key for p in anatomy(model).select(*change.select) if p.kind == "weight"}
        if isinstance(change, Orthogonalize):
            orthogonalize(
                model, *change.select, scope=change.scope, source=change.source, seed=recipe.seed
            )
        else:
            randomize(model, *change.select, std=change.std, seed=recipe.seed)
    if surgery.peft is not None:
        touched |= adapt(model, surgery.peft, recipe.seed)
    if surgery.frozen:
        _freeze(model, recipe)
    if not any(p.requires_grad for p in model.parameters()):
        raise BadInput("treatment.freeze leaves nothing that learns")
    return touched


def _freeze(model: nn.Module, recipe: Recipe) -> None:
    """Freeze what the treatment says; a named one did not write the selection it is told of."""
    try:
        freeze(model, *recipe.surgery.frozen)
    except UnknownArchitecture:
        raise
    except BadInput as error:
        raise BadInput(f"treatment {recipe.treatment_name}: {error}") from None


def weight_digests(model: nn.Module) -> dict[str, str]:
    """A digest of every part, so that two runs can be compared weight by weight."""
    try:
        found, slots = survey(model)
    except UnknownArchitecture:
        return {name: digest(tensor)[:16] for name, tensor in model.state_dict().items()}
    return {part.key: digest(slots[part.name].read(part.rows))[:16] for part in found.parts}


def state_digest(model: nn.Module) -> str:
    """One digest of all of a model's weights and buffers."""
    made = hashlib.sha256()
    for name, value in model.state_dict().items():
        made.update(f"{name} {digest(whole(value))}".encode())
    return made.hexdigest()[:16]


def audit_frozen(model: nn.Module, recipe: Recipe) -> Audit | None:
    """Digests of what the treatment or a stage froze, or nothing if nothing is."""
    by_stage = recipe.stages and not all(p.requires_grad for p in model.parameters())
    return audit(model) if recipe.surgery.frozen or by_stage else None


def count_parameters(model: nn.Module) -> dict[str, int]:
    """How many parameters there are, learn, and are frozen; a tied one counts once."""
    total = sum(p.numel() for p in model.parameters())
    learn = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {"total": total, "trainable": learn, "frozen": total - learn}


def wants_types(model: Any) -> bool:
    """Whether a model can tell the second text of a pair from the first."""
    config = getattr(model, "config", None)
    return getattr(config, "type_vocab_size", 0) > 1

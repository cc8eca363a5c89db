"""What differs between two arms beside the treatment, by name and with both values."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from frostlab.errors import BadInput, nearest
from frostlab.recipe import Recipe
from frostlab.records.places import differences

_OWN = ("about", "treatment", "seed")  # what arms and their runs may differ in
NEVER = ("data", "tokenizer")  # arms that saw other data are not comparable at all


@dataclass(frozen=True)
class Confound:
    """A setting that differs between an arm and the baseline."""

    key: str  # such as optim.lr
    baseline: Any
    arm: Any

    def within(self, keys: Iterable[str]) -> bool:
        """Whether it is one of these settings, or below one."""
        return any(self.key == key or self.key.startswith(f"{key}.") for key in keys)

    def __str__(self) -> str:
        return f"{self.key} {_shown(self.baseline)} → {_shown(self.arm)}"


def confounds(baseline: Recipe, arm: Recipe) -> tuple[Confound, ...]:
    """Every setting in which an arm differs from the baseline."""
    one, other = baseline.to_dict(), arm.to_dict()
    keys = [key for key in differences(one, other) if key.partition(".")[0] not in _OWN]
    return tuple(Confound(key, _at(one, key), _at(other, key)) for key in sorted(keys))


def check_confounds(
    baseline: str, arm: str, found: Iterable[Confound], allowed: Iterable[str]
) -> None:
    """Refuse what differs and was not declared; other data can not be declared."""
    permitted = set(allowed)
    for confound in found:
        where = f"{arm} differs from {baseline} in {confound}"
        if confound.key.partition(".")[0] in NEVER:
            raise BadInput(f"{where}: arms must see the same data")
        section, _, short = confound.key.partition(".")
        if not permitted & {confound.key, section, short, short.rpartition(".")[2]}:
            raise BadInput(
                f"{where}: a confound; give both the same, tune it for both (--tune), "
                f"or declare it (--allow-confound {short})"
            )


def check_known(said: str, keys: Iterable[str], recipe: Recipe) -> None:
    """Refuse to name a setting that there is not."""
    paths = _paths(recipe.to_dict())
    known = {*recipe.to_dict(), *paths, *(path.rpartition(".")[2] for path in paths)}
    for name in keys:
        if name not in known:
            raise BadInput(f"{said} {name}: no setting is called that{nearest(name, known)}")


def _paths(values: Any, path: str = "") -> list[str]:
    if not isinstance(values, dict) or not values:
        return [path]
    return [found for key in values for found in _paths(values[key], f"{path}.{key}".strip("."))]


def _at(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

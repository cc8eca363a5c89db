"""What lies on top of what in a recipe.

A section that names another kind (`model.kind`, `tokenizer.kind`, `data.name`) starts anew:
nothing of the parent's section is kept. Settings hold in whatever order they are given.
"""

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from frostlab.recipe.conformer import PRESETS

_KIND = {"model": "kind", "tokenizer": "kind", "data": "name"}
_BY_PATH = {"eeg-simulated": "eeg-challenge"}  # what a path means beside data that are made
_KEY = re.compile(r"\b[a-z]+\.[a-z_]+\b|\btokenizer\b")


@dataclass
class Layers:
    """A recipe's keys so far, and where each came from."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[tuple[str, ...], str] = field(default_factory=dict)

    def add(self, values: dict[str, Any], source: str) -> None:
        values = self._found_by_path(values)
        for section, kind in _KIND.items():
            given, known = values.get(section), self.values.get(section)
            if isinstance(given, dict) and isinstance(known, dict) and kind in given:
                anew = {key: known[key] for key in known if self._was_set(section, key)}
                self.values[section] = known if given[kind] == known.get(kind) else anew
        self._forget_duration(values.get("train"))
        self._forget_switches(values.get("model"))
        self._merge(self.values, values, source, ())

    def _found_by_path(self, values: dict[str, Any]) -> dict[str, Any]:
        """A path given to data that are made names the kind of data that lie at paths."""
        given, known = values.get("data"), self.values.get("data")
        if isinstance(given, dict) and "path" in given and "name" not in given:
            made = known.get("name") if isinstance(known, dict) else None
            if made in _BY_PATH:
                return values | {"data": {"name": _BY_PATH[made]} | given}
        return values

    def _forget_duration(self, given: Any) -> None:
        """Epochs replace a parent's steps, and steps its epochs."""
        known = self.values.get("train")
        if isinstance(given, dict) and isinstance(known, dict):
            for new, old in (("steps", "epochs"), ("epochs", "steps")):
                if given.get(new) is not None and given.get(old) is None:
                    known.pop(old, None)

    def _forget_switches(self, given: Any) -> None:
        """A preset replaces what a parent spelled out; a setting beside it stays."""
        known = self.values.get("model")
        if isinstance(given, dict) and isinstance(known, dict):
            for key in PRESETS.get(str(given.get("preset")), {}):
                if not self._was_set("model", key):
                    known.pop(key, None)

    def _was_set(self, section: str, key: str) -> bool:
        return self.sources.get((section, str(key)), "").startswith("--set ")

    def _merge(
        self, into: dict[str, Any], values: dict[str, Any], source: str, path: tuple[str, ...]
    ) -> None:
        for key, value in values.items():
            here = (*path, str(key))
            self.sources.pop(here, None)
            self.sources[here] = source  # last given, last listed
            if isinstance(value, dict) and isinstance(into.get(key), dict):
                self._merge(into[key], value, source, here)
            else:
                into[key] = copy.deepcopy(value)

    def source_of(self, path: Sequence[Any]) -> str:
        for end in range(len(path), 0, -1):
            found = self.sources.get(tuple(map(str, path[:end])))
            if found is not None:
                return found
        return next(reversed(self.sources.values()), "recipe")

    def source_of_any(self, text: str) -> str:
        """Where the last given of the keys that a text names came from."""
        named = {tuple(key.split(".")) for key in _KEY.findall(text)}
        found = [source for path, source in self.sources.items() if path in named]
        return found[-1] if found else self.source_of(())

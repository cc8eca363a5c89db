"""A finished or unfinished run, read from its folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frostlab.errors import BadInput
from frostlab.records.folder import effective, read_events


@dataclass(frozen=True)
class RunRecord:
    """What a run left behind; everything is read from `folder`."""

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))  # a str will do

    @property
    def result(self) -> dict[str, Any]:
        """The result, once there is one."""
        return self._json("result.json")

    @property
    def status(self) -> str:
        """finished, stopped, failed or diverged."""
        return str(self.result["status"])

    @property
    def metrics(self) -> dict[str, float]:
        """The reported metrics, of the last layer."""
        return {n: v for n, v in (self.result["report"] or {}).items() if n != "layers"}

    @property
    def layers(self) -> dict[int, dict[str, float]]:
        """The reported metrics of every supervised layer; none where only the last one is."""
        found = (self.result["report"] or {}).get("layers", {})
        return {int(number): dict(metrics) for number, metrics in found.items()}

    @property
    def environment(self) -> dict[str, Any]:
        """Where it ran."""
        return self._json("environment.json")

    @property
    def digests(self) -> dict[str, Any]:
        """What it started from: weights, data, order, frozen tensors."""
        return self._json("digests.json")

    def events(self) -> list[dict[str, Any]]:
        """The events that count, in order."""
        return effective(read_events(self.folder / "events.jsonl"))

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise BadInput(f"{path} does not exist (yet)") from None
        except ValueError as error:
            raise BadInput(f"{path} is damaged ({error})") from None

"""A comparison's folder: its plan is written first, and nothing finished is done again."""

import fcntl
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from frostlab.compare.plan import SCHEMA, Plan
from frostlab.errors import BadInput
from frostlab.records.folder import finite, write_whole
from frostlab.records.places import differences

_PLAN, _LOCK = "plan.json", "compare.lock"


class ComparisonFolder:
    """Where a comparison's plan, runs and answers lie."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def open(self, plan: Plan) -> Iterator[Plan]:
        """Take the folder and write the plan, or find the one it was begun with.

        The plan that comes back has every seed that was ever asked for.
        """
        if self.path.exists() and not self.path.is_dir():
            raise BadInput(f"{self.path} is a file, not a folder")
        known = {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()
        begun = {name for name in known if name == _LOCK or name.startswith(f".{_PLAN}")}
        if known - begun and _PLAN not in known:
            raise BadInput(f"{self.path} is not empty and holds no comparison; choose another")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / _LOCK).open("a")
        except OSError as error:
            raise BadInput(f"{self.path} cannot be written ({error.strerror})") from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise BadInput(f"{self.path}: another process is comparing in it") from None
            yield self._agree(plan)

    def _agree(self, plan: Plan) -> Plan:
        stored = self.read(_PLAN)
        looks: list[dict[str, Any]] = []
        if stored is not None or (self.path / _PLAN).exists():
            known = self._known(stored)
            if known.digest != plan.digest:
                changed = differences(known.model_dump(mode="json"), plan.model_dump(mode="json"))
                named = ", ".join(key for key in changed if key != "seeds")
                raise BadInput(f"{self.path} was made by another plan ({named} differ)")
            seeds = (*known.seeds, *(seed for seed in plan.seeds if seed not in known.seeds))
            looks = stored["looks"]
            plan = plan.model_copy(update={"seeds": seeds})
        self._write_plan(plan, looks)
        return plan

    def _known(self, stored: Any) -> Plan:
        try:
            if stored["schema"] == SCHEMA and isinstance(stored["looks"], list):
                tune = stored["plan"]["tune"] or []  # a list since several can be tuned
                tune = [tune] if isinstance(tune, dict) else tune
                return Plan.model_validate_json(json.dumps(stored["plan"] | {"tune": tune}))
        except (KeyError, TypeError, ValueError):
            pass
        raise BadInput(f"{self.path / _PLAN} is damaged, or of another version")

    def _write_plan(self, plan: Plan, looks: list[dict[str, Any]]) -> None:
        self.write(
            _PLAN,
            {"schema": SCHEMA, "plan": plan.model_dump(mode="json"), "looks": looks},
        )

    def look(self, plan: Plan) -> int:
        """Which look at the results this is: each number of seeds that was judged is one."""
        stored = self.read(_PLAN)
        assert stored is not None, "the plan is written first"
        looks = stored["looks"]
        known = [look["seeds"] for look in looks]
        if len(plan.seeds) not in known:
            looks.append({"seeds": len(plan.seeds), "at": round(time.time(), 3)})
            self._write_plan(plan, looks)
            known.append(len(plan.seeds))
        return known.index(len(plan.seeds)) + 1

    def read(self, name: str) -> Any:
        """A JSON file of the folder, or None."""
        path = self.path / name
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise BadInput(f"{path} is damaged ({error})") from None

    def write(self, name: str, value: Any) -> None:
        """Write a JSON file, whole or not at all."""
        write_whole(self.path / name, json.dumps(finite(value), indent=1) + "\n")

"""What callbacks that watch have in common, whoever calls them."""

from pathlib import Path
from typing import Any

from frostlab.flow import Watch, watch
from frostlab.flow.flow import can_save
from frostlab.flow.watching import Tell


class Watching:
    """Begins and ends a flow; `.flow` is what was seen, also written to `path` at the end."""

    flow: Watch

    def __init__(
        self,
        every: int = 10,
        path: str | Path | None = None,
        *,
        change: bool = False,
        agreement: bool = False,
        units: bool = False,
        entropy: bool = False,
        verify: bool = True,
        tell: Tell | None = None,
    ) -> None:
        self.every, self.path = every, path
        self.options: dict[str, Any] = {
            "change": change, "agreement": agreement, "units": units, "entropy": entropy,
            "verify": verify, "tell": tell,
        }  # fmt: skip

    def begin(self, model: Any, optimizer: Any, step: int) -> None:
        """Begin to watch, so many steps after the first."""
        if self.path is not None:
            can_save(self.path)  # training that ends in an error would be lost
        self.flow = watch(model, optimizer, self.every, **self.options)
        self.flow.step = step
        self.flow.start()

    def end(self, writes: bool) -> None:
        """End watching; one process writes."""
        self.flow.stop()
        if self.path is not None and writes:
            self.flow.save(self.path)

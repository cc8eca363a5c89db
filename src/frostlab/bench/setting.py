"""Where and how a benchmark runs."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from frostlab.bench.catalogue import Benchmark
from frostlab.bench.ceilings import Ceilings
from frostlab.bench.rounds import Driver, Step, Times, interleave
from frostlab.training.batching import Batch

Feed = Callable[[int], Batch]  # the batch of a step, made when it is asked for


@dataclass(frozen=True)
class Setting:
    """What every benchmark is given."""

    benchmark: Benchmark
    device: torch.device
    small: bool
    rounds: int | None  # None: as many as the benchmark thinks right
    seconds: float | None  # of timed rounds at most, but never fewer than three rounds
    data_dir: Path | None
    ceilings: Ceilings

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def precision(self) -> torch.dtype:
        return torch.bfloat16 if self.cuda else torch.float32

    @property
    def every(self) -> int:
        """Steps of one side before it is the other's turn."""
        return 10 if self.cuda else 2

    def interleave(
        self,
        ours: Callable[[], Step],
        theirs: Callable[[], Driver],
        rounds: int,
        warm: int = 3,
    ) -> Times:
        """Time both sides in turn: as many rounds as asked for, else as usual, few if small."""
        count = self.rounds or (min(rounds, 3) if self.small else rounds)
        return interleave(
            ours, theirs, self.device,
            rounds=count, every=self.every, warm=warm, seconds=self.seconds,
        )  # fmt: skip

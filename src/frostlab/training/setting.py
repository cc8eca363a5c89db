"""All that the loop works with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from frostlab.data import Material
from frostlab.recipe import Recipe
from frostlab.records.folder import RunFolder
from frostlab.surgery import Audit
from frostlab.training.distributed import World
from frostlab.training.objective import Objective
from frostlab.training.progress import Display
from frostlab.training.stages import Stage
from frostlab.training.staging import Entered


@dataclass
class Setting:
    """All that the loop works with; a boundary between stages changes the model."""

    recipe: Recipe
    prepared: Material
    model: nn.Module  # on its device, treated, not wrapped
    objective: Objective  # the model with its loss
    stages: tuple[Stage, ...]
    device: torch.device
    precision: torch.dtype
    world: World
    folder: RunFolder | None  # None in processes that do not write
    frozen: Audit | None
    display: Display
    asked_to_stop: Callable[[], bool]
    path: Path  # the run's folder, for all processes to read
    entered: Entered = field(default_factory=Entered)  # the stage that the model is in

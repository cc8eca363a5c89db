"""The kernels of AdamW on the CPU: stand-ins in torch, or the kernels in Triton's interpreter."""

import ctypes
import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from frostlab.training.step import optimizer

KERNELS = "frostlab.training.step.adamw_kernels"


def at_address(address: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return the memory at an address as a tensor, as a kernel sees it."""
    width = torch.empty((), dtype=dtype).element_size()
    memory = (ctypes.c_char * (size * width)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


def gradient_of(row: list[int]) -> Tensor:
    """Return the gradient of a row of the kernels' table."""
    return at_address(row[3], row[6], torch.bfloat16 if row[7] else torch.float32).float()


def measure_gradients(
    table: Tensor, owners: Tensor, starts: Tensor, clip: float, *, block: int
) -> Tensor:
    """Do what the kernels do, row by row of their table."""
    norms = torch.stack(
        [gradient_of(row).norm() for row in table[: int(owners.max()) + 1].tolist()]
    )
    norm, stops = norms.norm(), ~norms.isfinite()
    factor = (clip / (norm + 1e-6)).clamp(max=1.0)
    broken = float(stops.int().argmax()) if stops.any() else -1.0
    return torch.stack(
        [norm, factor, torch.tensor(broken), 1 / factor, torch.tensor(float(stops.any()))]
    )


def adamw_blocks(
    table: Tensor, owners: Tensor, starts: Tensor, *given: Any, **options: Any
) -> None:
    """Do what the kernels do, row by row of their table."""
    decays, rates, rate_indices, scale, stopped, sums = given
    assert sums is None
    (beta1, beta2), eps = options["betas"], options["eps"]
    table = table[: len(decays)]  # a recorded table may be longer
    counts = {row[5]: at_address(row[5], 1, torch.float32) for row in table.tolist()}
    for count in counts.values():
        count += 1.0 if stopped is None else 1.0 - stopped
    for i, row in enumerate(table.tolist()):
        addresses, copy, size = row[:3], row[4], row[6]
        p, m, v = (at_address(address, size, torch.float32) for address in addresses)
        assert starts[owners == i].tolist() == list(range(0, size, options["block"]))
        assert row[8] == all(number % 16 == 0 for number in (*row[:5], size))
        if stopped is not None and stopped > 0:
            continue
        g, taken = gradient_of(row) / (1.0 if scale is None else scale), float(counts[row[5]])
        lr = rates.reshape(-1)[rate_indices[i]]
        p -= lr * decays[i] * p
        m += (1 - beta1) * (g - m)
        v.mul_(beta2).add_((1 - beta2) * g * g)
        root = v.sqrt() / (1 - beta2**taken) ** 0.5 + eps
        p -= lr / (1 - beta1**taken) * m / root
        if copy:
            at_address(copy, size, torch.bfloat16).copy_(p)


def use(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Put the stand-ins in the place of the kernels."""
    kernels: Any = ModuleType(KERNELS)
    kernels.measure_gradients, kernels.adamw_blocks = measure_gradients, adamw_blocks
    return _put(kernels, monkeypatch)


def interpret(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Let Triton's interpreter run the kernels, with several blocks in a small tensor."""
    triton: Any = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name in ("sum", "min", "zeros"):  # functions that Triton itself compiles
        function = triton.jit(getattr(triton.language, name).fn)
        monkeypatch.setattr(triton.language, name, function)
    found: Any = importlib.util.find_spec(KERNELS)
    kernels: Any = importlib.util.module_from_spec(found)
    found.loader.exec_module(kernels)
    kernels._PART, kernels._CHUNK = 32, 8
    monkeypatch.setattr(optimizer, "_BLOCK", 256)
    return _put(kernels, monkeypatch)


def _put(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setitem(sys.modules, KERNELS, kernels)
    monkeypatch.setattr(optimizer, "updates_conditionally", lambda device: True)
    return kernels

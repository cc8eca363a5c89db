"""Where a run computes, with how many threads, and how precisely."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from frostlab.errors import BadInput
from frostlab.recipe.settings import Train


def choose_device(wanted: str) -> torch.device:
    """`auto` is CUDA, then MPS, then the CPU; with several processes each takes its own GPU."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if wanted in ("auto", "cuda"):
        if torch.cuda.is_available():
            device = torch.device("cuda", local % torch.cuda.device_count())
            torch.cuda.set_device(device)
            return device
        if wanted == "cuda":
            raise BadInput("train.device cuda: no CUDA device is available; `cpu` is")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise BadInput(f"train.device {wanted} is no device; auto, cpu, cuda, cuda:0 …") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise BadInput(f"train.device {wanted}: no CUDA device is available; `cpu` is")
        if (device.index or 0) >= torch.cuda.device_count():
            last = torch.cuda.device_count() - 1
            raise BadInput(f"train.device {wanted} does not exist; the last one is cuda:{last}")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise BadInput("train.device mps is not available; `cpu` is")
    elif device.type not in ("cpu", "mps"):
        raise BadInput(f"train.device {wanted} is not supported; auto, cpu, cuda, mps are")
    return device


@contextmanager
def with_threads(count: int | None) -> Iterator[None]:
    """Within this, compute with as many threads; None: with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def choose_precision(train: Train, device: torch.device) -> torch.dtype:
    """bf16 on CUDA unless told otherwise, float32 elsewhere."""
    if train.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if train.precision == "bf16" else torch.float32

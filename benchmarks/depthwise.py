"""Time the depthwise convolution alone, and the Conformer's step with it; CUDA only.

The convolution is timed in CUDA graphs of 20 calls, as captured steps run it: our kernels against
torch's convolution, which reads (B, T, C) as a channels-last image or as a transposed (B, C, T).
`gb_per_s` counts one read of the input and one write of the result (forward), and in addition
two reads of the gradient, one more of the input and one write (with backward).

The arms of the step are: eager; compiled and captured as before (torch's convolution, only the
layers compiled); with the kernels; with the kernels, and with front and head compiled (as `auto`
does now); and the last with the front's convolutions channels-last, too, which is only tried here.

    python benchmarks/depthwise.py [--only kernel] [--only "conformer published"] [--rounds 8]
    python benchmarks/depthwise.py --tune      # sizes of blocks; compiles for about a minute
"""

import argparse
import functools
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from common import device_name, report, timed
from frostlab.models.conformer import Conformer, ConvolutionBlock
from frostlab.models.fused import depthwise, depthwise_kernels
from frostlab.models.fused.depthwise import Depthwise
from frostlab.recipe.settings import Optim, StepKind, Train
from frostlab.training.distributed import Compute
from frostlab.training.step import build_step
from frostlab.training.step.eager import EagerStep
from kinds import CASES, CUDA, MANY_STEPS, take

HALF = torch.bfloat16
SHAPES = [(64, 640, 256), (64, 640, 512)]  # windows, samples and channels: frostlab's, the authors'
KERNEL, CALLS = 31, 20
Arm = tuple[StepKind, bool, bool, bool]  # kind; kernels, compiled parts, channels-last front
ARMS: dict[str, Arm] = {
    "eager": ("eager", False, False, False),
    "eager with kernels": ("eager", True, False, False),
    "compiled as before": ("captured", False, False, False),
    "with kernels": ("captured", True, False, False),
    "with kernels, front and head": ("captured", True, True, False),
    "and a channels-last front": ("captured", True, True, True),
}
FEWER = ["eager", "compiled as before", "with kernels, front and head"]  # for the second case


def transposed(layer: Depthwise, x: Tensor) -> Tensor:
    mixed = F.conv1d(x.mT, layer.weight, layer.bias, padding=KERNEL // 2, groups=x.shape[-1])
    return mixed.mT.contiguous()


WAYS: dict[str, Callable[[Depthwise, Tensor], Tensor]] = {
    "kernels": lambda layer, x: layer(x),
    "torch, channels-last": lambda layer, x: without_kernels(layer, x),
    "torch, (B, C, T)": transposed,
}


def never(x: Tensor, weight: Tensor) -> bool:
    """Stand in for `has_kernel`; the compiler can read a function, but not a mock."""
    return False


def without_kernels(layer: Depthwise, x: Tensor) -> Tensor:
    with mock.patch.object(depthwise, "has_kernel", never):
        return layer(x)


def graph_of(work: Callable[[], Any]) -> Callable[[], None]:
    """Capture `CALLS` calls; the first call outside compiles and chooses algorithms."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(CALLS):
            work()
    return graph.replay


def call(way: str, layer: Depthwise, x: Tensor, pull: Tensor, backward: bool) -> Any:
    with torch.autocast("cuda", HALF), torch.set_grad_enabled(backward):
        made = WAYS[way](layer, x)
    if backward:
        return torch.autograd.grad(made, [x, layer.weight, layer.bias], pull)
    return made


def spread(times: list[float], digits: int = 2) -> list[float]:
    return [round(f(times), digits) for f in (statistics.median, min, max)]


def error(found: Tensor, exact: Tensor) -> float:
    return float(f"{float((found.double() - exact).norm() / exact.norm()):.2g}")


def time_kernel(shape: tuple[int, int, int], rounds: int) -> None:
    torch.manual_seed(0)
    layer = Depthwise(shape[-1], KERNEL).to(CUDA)
    x = torch.randn(shape, device=CUDA, dtype=HALF, requires_grad=True)
    pull = torch.randn(shape, device=CUDA, dtype=HALF)
    double = Depthwise(shape[-1], KERNEL).to(CUDA).double()
    double.load_state_dict(layer.state_dict())
    # float64 on a part of the windows: all would take seconds
    exact = without_kernels(double, x[:4].detach().double()).detach()
    errors = {way: error(call(way, layer, x, pull, False)[:4], exact) for way in WAYS}
    for backward in (False, True):
        began = time.perf_counter()
        sides = {
            way: graph_of(functools.partial(call, way, layer, x, pull, backward)) for way in WAYS
        }
        prepared = time.perf_counter() - began
        times = {way: list[float]() for way in WAYS}
        for _ in range(rounds):
            for way, replay in sides.items():
                times[way].append(1e6 * timed(replay, CUDA) / CALLS)
        ours = times["kernels"]
        for way, taken in times.items():
            moved = x.nbytes * (6 if backward else 2)
            facts = {
                "shape": shape,
                "taps": KERNEL,
                "way": way,
                "passes": "forward and backward" if backward else "forward",
                "us": spread(taken),
                "gb_per_s": round(moved / statistics.median(taken) / 1e3),
                "kernels_faster": spread([b / a for a, b in zip(ours, taken, strict=True)], 3),
                "relative_error": errors[way],
                "prepare_all_s": round(prepared, 1),
            }
            say("depthwise", facts)


def say(name: str, facts: dict[str, Any]) -> None:
    report(name, facts | {"device": device_name(CUDA), "torch": torch.__version__})


def channels_last(self: ConvolutionBlock, x: Tensor) -> Tensor:
    """The forward pass of a `ConvolutionBlock` over a channels-last image of one row."""
    image, weight = x.transpose(1, 2)[:, :, None], self.conv.weight[:, :, None]
    mixed = F.conv2d(image, weight, self.conv.bias, padding=(0, weight.shape[-1] // 2))
    x = mixed[:, :, 0].transpose(1, 2)
    return F.dropout(F.leaky_relu(self.norm(x)), self.dropout, self.training)


@contextmanager
def variant(kernels: bool, parts: bool, last: bool) -> Iterator[None]:
    with ExitStack() as stack:
        if not kernels:
            stack.enter_context(mock.patch.object(depthwise, "has_kernel", never))
        if not parts:
            stack.enter_context(mock.patch.object(Conformer, "compiled_parts", ()))
        if last:
            stack.enter_context(mock.patch.object(ConvolutionBlock, "forward", channels_last))
        yield


def prepare(case: str, arm: Arm, batch: Any) -> EagerStep:
    kind, *changes = arm
    torch.manual_seed(0)
    torch.compiler.reset()
    with variant(*changes):
        objective = CASES[case][0]().to(CUDA).train()
        compute = Compute(CUDA, HALF)
        step = build_step(objective, Optim(), Train(step=kind), compute, steps=MANY_STEPS)
        take(step, batch, 6)
    return step


def run(step: EagerStep, arm: Arm, batch: Any, times: int) -> None:
    """Take steps; eager ones need the arm's patches at every call."""
    with variant(*arm[1:]):
        take(step, batch, times)


def time_steps(case: str, names: list[str], rounds: int, until: float) -> None:
    _, draw, shape = CASES[case]
    batch = draw(*shape)
    sides, prepared = dict[str, EagerStep](), dict[str, float]()
    for name in names:
        began = time.perf_counter()
        if began > until:
            say("conformer step", {"case": case, "way": name, "skipped": "no time left"})
            continue
        sides[name] = prepare(case, ARMS[name], batch)
        prepared[name] = time.perf_counter() - began
    times = {name: list[float]() for name in sides}
    for _ in range(rounds):
        for name, step in sides.items():
            work = functools.partial(run, step, ARMS[name], batch, 5)
            times[name].append(1e3 * timed(work, CUDA) / 5)
    for name, step in sides.items():
        faster = [a / b for a, b in zip(times.get("eager", []), times[name], strict=False)]
        facts = {
            "case": case,
            "shape": shape,
            "way": name,
            "became": step.kind,
            "reason": step.reason,
            "ms": spread(times[name], 3),
            "faster_than_eager": spread(faster, 3) if faster else None,
            "prepare_s": round(prepared[name], 1),
            "memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
        }
        say("conformer step", facts)


def tune() -> None:
    """Time the kernels with other sizes of blocks; ROWS, CHANNELS and STEPS are the constants."""
    shape = SHAPES[0]
    x, pull = (torch.randn(shape, device=CUDA, dtype=HALF) for _ in range(2))
    taps, bias = torch.randn(KERNEL, shape[-1], device=CUDA), torch.zeros(shape[-1], device=CUDA)
    works = {
        "forward": lambda: depthwise_kernels.convolve(x, taps, bias, False),
        "weight gradient": lambda: depthwise_kernels.correlate(pull, x, KERNEL),
    }
    for rows, channels, steps in itertools.product((16, 32), (32, 64), (4, 8)):
        sizes = {"ROWS": rows, "CHANNELS": channels, "STEPS": steps}
        with mock.patch.multiple(depthwise_kernels, **sizes):
            taken = {}
            for name, work in works.items():
                replay = graph_of(work)
                taken[name] = spread([1e6 * timed(replay, CUDA) / CALLS for _ in range(8)])
        say("depthwise blocks", {"shape": shape, **sizes, "us": taken})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = ["kernel", "conformer", "conformer published"]
    parser.add_argument("--only", choices=parts, action="append")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=70, help="prepare no step after these")
    parser.add_argument("--tune", action="store_true")
    options = parser.parse_args()
    until = time.perf_counter() + options.seconds
    if options.tune:
        tune()
        return
    chosen = options.only or parts
    with tempfile.TemporaryDirectory() as cache:  # shared by the arms, whose layers are often equal
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        if "kernel" in chosen:
            for shape in SHAPES:
                time_kernel(shape, options.rounds)
        if "conformer" in chosen:
            time_steps("conformer", list(ARMS), options.rounds, until)
        if "conformer published" in chosen:
            time_steps("conformer published", FEWER, options.rounds, until)


if __name__ == "__main__":
    main()

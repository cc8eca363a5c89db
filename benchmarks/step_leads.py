"""Time the compiled and captured step under other settings of torch's compiler.

For each case a process builds the step as it is, and then one setting after another. A setting's
step is timed in turn with the step as it is, and its first losses are compared with that step's.
The first setting is the step as it is again: its ratio shows the noise. Every result is a line of
JSON, also appended to --out at once. A setting that crashes the process or takes too long is
skipped, and the others follow. On a CPU, --small runs a tiny model, and its times mean nothing.

    python benchmarks/step_leads.py [--case bert] [--first 6] [--minutes 8] [--out FILE]
"""

import argparse
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._inductor.config
from torch import nn

from common import device, device_name, timed
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.recipe.settings import Optim, Train
from frostlab.training.batches.batch import Batch
from frostlab.training.distributed import Compute
from frostlab.training.step import build_step
from frostlab.training.step.eager import EagerStep, seed_step
from frostlab.training.step.objective import Objective
from kinds import CASES, texts

WHERE = torch.device("cuda", 0) if device().type == "cuda" else torch.device("cpu")
DEFAULT_CASES = ("bert", "gpt language 8", "gpt language 64")
SMALL_NORMS = {"triton.mix_order_reduction_non_strict_mode": True}
PDL = {"triton.enable_pdl": True}
# By expected gain. Fusing the two sums of a norm's backward pass is refused for small tensors,
# unless the mode is not strict. Programmatic dependent launch overlaps the ends of kernels.
LEADS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "norms of small tensors fused": SMALL_NORMS,
    "dependent launch": PDL,
    "small norms fused, dependent launch": SMALL_NORMS | PDL,
    "pointwise kernels tuned": {"max_autotune_pointwise": True},
    "small norms fused, dependent launch, pointwise kernels tuned": SMALL_NORMS
    | PDL
    | {"max_autotune_pointwise": True},
    "norms not fused": {"triton.mix_order_reduction": False},
    "small norms fused, their splits tuned": SMALL_NORMS
    | {"triton.mix_order_reduction_autotune_split_size": True},
    "coordinate descent": {"coordinate_descent_tuning": True},
    "cooperative reductions": {"triton.cooperative_reductions": True},
    "matmuls tuned, without their epilogues": {"max_autotune_gemm": True, "epilogue_fusion": False},
    "matmuls tuned, with their epilogues": {"max_autotune_gemm": True, "epilogue_fusion": True},
}
CHECKED_STEPS = 4
TOLERANCE = (0.015, 0.05)  # of the first loss, and of later ones, as in `frostlab bench`


def small_gpt() -> Objective:
    return Objective(GPT(GPTConfig(400, width=32, layers=2, heads=2, hidden=64, dropout=0.0,
                                   classes=2, causal=False)))  # fmt: skip


def small_texts(rows: int, length: int) -> Batch:
    batch = texts(rows, length)
    batch.inputs["input_ids"] %= 400
    return batch


def case_of(name: str) -> tuple[Callable[[], Objective], Batch]:
    build, draw, shape = CASES[name] if name != "small" else (small_gpt, small_texts, (4, 16))
    torch.manual_seed(1)
    return build, draw(*shape)


class Side:
    """A step that was built under some settings, its first losses and the seconds that it took."""

    def __init__(self, build: Callable[[], nn.Module], batch: Batch, settings: dict[str, Any]):
        began = time.perf_counter()
        torch.manual_seed(0)
        torch.compiler.reset()
        objective = build().to(WHERE).train()
        assert isinstance(objective, Objective)
        precision = torch.bfloat16 if WHERE.type == "cuda" else torch.float32
        kind = "captured" if WHERE.type == "cuda" else "compiled"
        self.batch = batch
        with torch._inductor.config.patch(settings), tempfile.TemporaryDirectory() as empty_cache:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = empty_cache
            self.step: EagerStep = build_step(
                objective, Optim(), Train(step=kind), Compute(WHERE, precision), steps=10**6
            )
            self.losses = [self.one(number) for number in range(CHECKED_STEPS)]
            self.take(4)
        self.prepare_s = time.perf_counter() - began

    def one(self, number: int) -> float:
        seed_step(0, number, 0, WHERE)
        return float(self.step([self.batch], self.batch.scored, 1e-5).loss)

    def take(self, steps: int) -> None:
        for _ in range(steps):
            self.step([self.batch], self.batch.scored, 1e-5)
        if WHERE.type == "cuda":
            torch.cuda.synchronize()


def compare(base: Side, other: Side, rounds: int, steps: int) -> dict[str, Any]:
    times: dict[Side, list[float]] = {base: [], other: []}
    for number in range(rounds + 1):
        for side in (base, other) if number % 2 else (other, base):
            times[side].append(1e3 * timed(functools.partial(side.take, steps), WHERE) / steps)
    ours, theirs = (np.array(times[side][1:]) for side in (other, base))
    ratios = ours / theirs
    off = np.abs(np.subtract(other.losses, base.losses)) / np.abs(base.losses)
    return {
        "became": other.step.kind,
        "reason": other.step.reason,
        "ms": round(float(np.median(ours)), 4),
        "ms_p10_p90": [round(float(np.quantile(ours, q)), 4) for q in (0.1, 0.9)],
        "base_ms": round(float(np.median(theirs)), 4),
        "ratio": round(float(np.median(ratios)), 4),
        "ratio_p10_p90": [round(float(np.quantile(ratios, q)), 4) for q in (0.1, 0.9)],
        "prepare_s": round(other.prepare_s, 1),
        "base_prepare_s": round(base.prepare_s, 1),
        "losses_differ_by": float(f"{off.max():.2g}"),
        "losses_equal": bool(off[0] <= TOLERANCE[0] and off.max() <= TOLERANCE[1]),
        "rounds": rounds,
        "steps_per_round": steps,
    }


def missing(settings: dict[str, Any]) -> list[str]:
    """Return the settings that this version of torch does not have."""
    known = torch._inductor.config.get_config_copy()
    return [name for name in settings if name not in known]


def measure(name: str, leads: list[str], options: argparse.Namespace) -> None:
    """Measure the named settings in this process."""
    build, batch = case_of(name)
    base = Side(build, batch, {})
    steps = 10 if batch.tokens <= 16384 else 4
    for lead in leads:
        facts: dict[str, Any] = {"case": name, "lead": lead, "settings": LEADS[lead]}
        (options.state / "current").write_text(lead)
        signal.signal(signal.SIGALRM, too_long)
        signal.alarm(options.seconds)
        try:
            absent = missing(LEADS[lead])
            if absent:
                facts["problem"] = f"torch {torch.__version__} has no {', '.join(absent)}"
            else:
                facts |= compare(base, Side(build, batch, LEADS[lead]), options.rounds, steps)
        except Exception as error:  # compilers raise errors of many types
            facts["problem"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        finally:
            signal.alarm(0)
        write(facts, options)


def too_long(*_: object) -> None:
    raise TimeoutError("the time limit of a setting is over")


def write(facts: dict[str, Any], options: argparse.Namespace) -> None:
    line = json.dumps({"benchmark": "step leads", **facts, "device": device_name(WHERE),
                       "torch": torch.__version__})  # fmt: skip
    print(line, flush=True)
    with options.out.open("a") as file:
        file.write(line + "\n")


def in_processes(cases: list[str], options: argparse.Namespace) -> None:
    """Measure each case in a process of its own; after a crash, continue with the next setting."""
    deadline = time.monotonic() + 60 * options.minutes
    for name in cases:
        left = [lead for lead in LEADS if not options.only or lead in options.only]
        left = left[: options.first]
        while left and time.monotonic() < deadline:
            command = [sys.executable, __file__, "--inside", name, "--state", str(options.state)]
            command += ["--rounds", str(options.rounds), "--seconds", str(options.seconds)]
            command += ["--out", str(options.out), *(f"--only={lead}" for lead in left)]
            (options.state / "current").unlink(missing_ok=True)
            try:
                code = subprocess.run(command, timeout=deadline - time.monotonic()).returncode
            except subprocess.TimeoutExpired:
                write({"case": name, "problem": "the total time limit is over"}, options)
                return
            if code == 0:
                break
            current = options.state / "current"
            if not current.exists():
                write({"case": name, "problem": f"the step as it is failed, exit {code}"}, options)
                break
            lead = current.read_text()
            write({"case": name, "lead": lead, "problem": f"crashed, exit {code}"}, options)
            left = left[left.index(lead) + 1 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--only", choices=LEADS, action="append")
    parser.add_argument("--first", type=int, help="only the first N settings")
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit of everything")
    parser.add_argument("--seconds", type=int, default=60, help="time limit of one setting")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("step-leads.jsonl"))
    parser.add_argument("--small", action="store_true", help="a tiny model, for any device")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--state", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        measure(options.inside, options.only or list(LEADS), options)
        return
    if WHERE.type != "cuda" and not options.small:
        raise SystemExit("this benchmark needs a GPU; --small shows that it works")
    with tempfile.TemporaryDirectory() as state:
        options.state = Path(state)
        in_processes(["small"] if options.small else options.case or list(DEFAULT_CASES), options)


if __name__ == "__main__":
    main()

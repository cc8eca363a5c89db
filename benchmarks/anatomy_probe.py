"""Time the reading of models by evidence, count what it says on the labelled truth, and freeze.

    python benchmarks/anatomy_probe.py time     # 12 layers with values, and large models on meta
    python benchmarks/anatomy_probe.py truth    # every labelled case of tests/labelled
    PYTHONPATH=.outside python benchmarks/anatomy_probe.py truth   # and those of `make outside`
    python benchmarks/anatomy_probe.py freeze   # query and key of 50 types, 20 steps

A line of JSON per measurement. Times are of the processor, with one thread, and of the clock.
"""

import resource
import sys
import time
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common import report
from frostlab.errors import first_line

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

LARGE: dict[str, dict[str, Any]] = {  # shapes of published models that no table describes
    "granite": {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
                "intermediate_size": 11008, "num_hidden_layers": 32, "vocab_size": 32000},
    "glm": {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 2,
            "intermediate_size": 13696, "num_hidden_layers": 40},
}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:] == ["time"]:
        times()
    elif sys.argv[1:] == ["truth"]:
        truth()
    elif sys.argv[1:] == ["freeze"]:
        freeze()
    else:
        raise SystemExit(__doc__)


def times() -> None:
    """Read a model of 12 layers and 110 million parameters, then large ones without values."""
    from transformers import AutoConfig, AutoModel

    import frostlab as fl
    from frostlab.roles import read

    config = AutoConfig.for_model("camembert")
    model = AutoModel.from_config(config).eval()
    for _ in range(5):
        read._FOUND.clear()
        read._FOUND_BY_CONFIG.clear()
        _timed("camembert, 12 × 768, with values", model, fl.anatomy)
    for kind, sizes in LARGE.items():
        with torch.device("meta"):
            model = AutoModel.from_config(AutoConfig.for_model(kind, **sizes))
        _timed(f"{kind} on meta", model, fl.anatomy)


def _timed(name: str, model: nn.Module, anatomy: Any) -> None:
    clock, processor = time.perf_counter(), time.process_time()
    found = anatomy(model)
    report(
        "anatomy by probe",
        {
            "model": name, "parameters": found.count(), "layers": len(found.layers),
            "seconds": round(time.perf_counter() - clock, 2),
            "processor_seconds": round(time.process_time() - processor, 2),
            "evidence": str(found.evidence),
            "process_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000,
        },
    )  # fmt: skip


def truth() -> None:
    """Compare what is found with every label."""
    from outside import declare_operators

    declare_operators()  # before transformers imports torchvision, if it is there

    import frostlab as fl
    from labelled import LABELLED, VISION, disagreements, expected

    cases = LABELLED | (VISION if find_spec("timm") and find_spec("torchvision") else {})
    counts = dict.fromkeys(("read", "refused as they should be", "refused but labelled"), 0)
    labels = wrong = 0
    for name, case in cases.items():
        model = case.build()
        try:
            try:
                found = fl.anatomy(model)
            except fl.UnknownArchitecture:
                found = fl.anatomy(model, case.inputs())
        except fl.UnknownArchitecture:
            honest = bool(case.refused or case.may_refuse)
            counts["refused as they should be" if honest else "refused but labelled"] += 1
            continue
        counts["read"] += 1
        said = expected(case, model)
        labels += len(said)
        differing = disagreements(said, found.parts, model)
        wrong += len(differing) + bool(case.refused)
        if differing or case.refused:
            report("anatomy truth", {"case": name, "wrong": differing[:3] or ["was not refused"]})
    report("anatomy truth", {"cases": len(cases), **counts, "labels": labels, "wrong": wrong})


def freeze() -> None:
    """Freeze query and key of the drawn types and train 20 steps of AdamW with weight decay.

    A type whose counts are not exact, whose frozen bits moved or whose other parameters with a
    gradient did not move has a line that says so. Parameters without a gradient are listed.
    """
    from freezing import DRAWN, STEPS, check_training, working_call
    from small_types import small_model

    for kind in DRAWN:
        model = small_model(kind)
        line: dict[str, Any] = {"type": kind, "steps": STEPS}
        try:
            outcome = check_training(model, working_call(model), "query", "key")
            report("anatomy freezing", {**line, "right": True, **asdict(outcome)})
        except AssertionError as error:
            report("anatomy freezing", {**line, "right": False, "why": first_line(error)})


if __name__ == "__main__":
    main()

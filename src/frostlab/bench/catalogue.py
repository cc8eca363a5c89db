"""The list of benchmarks, with their work, competitors and targets.

This module does not import torch, so that the command line can list benchmarks quickly.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from frostlab.errors import BadInput, FrostlabError, nearest

Scale = Literal["full", "small"]
Result = dict[str, Any]  # one line of the results file


class NotAvailable(FrostlabError):
    """Raised when a benchmark cannot run on this machine."""


@dataclass(frozen=True)
class Target:
    """The figures that a result must reach; a figure that is None is not required."""

    faster: float | None = None  # least ratio of their time to ours
    ours_ms: float | None = None  # longest time of our step; in `whole-run`, of our whole run
    memory: float | None = None  # largest ratio of our peak memory to theirs
    gain_share: float | None = None  # least share of the gain in speed that the saved FLOPs allow
    # like `faster`, against a loop that is compiled with mode reduce-overhead
    faster_than_loop: float | None = None

    def __str__(self) -> str:
        texts = (
            (self.faster, "≥ {:g}×"),
            (self.ours_ms, "≤ {:g} ms"),
            (self.memory, "≤ {:.0%} of the memory"),
            (self.gain_share, "≥ {:.0%} of the gain that the FLOPs allow"),
            (self.faster_than_loop, "≥ {:g}× the reduce-overhead loop"),
        )
        return ", ".join(text.format(value) for value, text in texts if value is not None)

    def reached(self, result: Result) -> bool | None:
        """Return whether a result reaches every target; None if a figure was not measured."""
        targets = (  # 1: at least, -1: at most
            (self.faster, "faster", 1),
            (self.ours_ms, "ours_ms", -1),
            (self.memory, "memory_ratio", -1),
            (self.gain_share, "gain_share", 1),
            (self.faster_than_loop, "faster_than_loop", 1),
        )
        pairs = [
            (target, result.get(key), sign) for target, key, sign in targets if target is not None
        ]
        if any(value is None for _, value, _ in pairs):
            return None
        return all(sign * value >= sign * target for target, value, sign in pairs)  # type: ignore[operator]


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: its work, its competitor, its target and the function that measures it."""

    name: str
    work: str
    against: str
    unit: Literal["examples", "tokens"]
    target: Target
    function: str  # module of frostlab.bench and name, such as cases.frozen_qk
    needs: tuple[str, ...] = ()  # libraries, and datasets as data:NAME
    small_needs: tuple[str, ...] | None = None  # what small scale needs; None: the same
    case_targets: tuple[tuple[str, Target], ...] = ()  # cases with another target than `target`

    def target_of(self, case: str) -> Target:
        """Return the target of a case, such as `256 × 128`."""
        return dict(self.case_targets).get(case, self.target)

    @property
    def targets(self) -> str:
        """The targets of the benchmark, and of cases that have their own, as text."""
        return "; ".join(
            [str(self.target), *(f"{target} at {case}" for case, target in self.case_targets)]
        )

    def missing(self, scale: Scale, data_dir: Path | None, cuda: bool) -> str | None:
        """Return the reason why the benchmark cannot run on this machine, or None."""
        if scale == "full" and not cuda:
            return "needs a CUDA device; --scale small runs a small variant here"
        small = scale == "small" and self.small_needs is not None
        for need in (self.small_needs or ()) if small else self.needs:
            kind, _, name = need.rpartition(":")
            if kind == "data":
                if data_dir is None:
                    return f"needs {name}/SPLIT.jsonl in the folder given with --data-dir"
                if not (data_dir / name).is_dir():
                    return f"needs {name}, and {data_dir} has no such folder"
            elif importlib.util.find_spec(need) is None:
                return f"needs {need}: pip install {need}"
        return None


_TRAINER = "Hugging Face Trainer"
_PLAIN_LOOP = "a plain torch.compile loop, fused AdamW, SDPA"
# Sizes are examples per step × tokens per example; V is the size of the vocabulary, d the width.
# GPT Medium-512 has 6 layers, width 512 and 8 heads (docs/from-the-sources.md); it is not GPT-2
# Medium.
BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            "bert-finetune",
            "BERT-base fine-tuning, 32 × 128",
            f"{_TRAINER}, same model and batches",
            "examples",
            Target(faster=5, ours_ms=7, faster_than_loop=1.25),
            "cases.bert_finetune",
            ("accelerate",),
        ),
        Benchmark(
            "sst2-epoch",
            "BERT-base, an epoch of SST-2 at its real lengths, 32 a step",
            f"{_TRAINER}, dynamic padding, group_by_length, fused AdamW, torch_compile",
            "examples",
            Target(faster=4),
            "cases.sst2_epoch",
            ("accelerate", "data:sst2"),
        ),
        Benchmark(
            "gpt-language-8",
            "GPT Medium-512 language modelling, V 50,304, 8 × 512",
            _PLAIN_LOOP,
            "tokens",
            Target(faster=2.6, ours_ms=3.7),
            "cases.gpt_language_8",
        ),
        Benchmark(
            "gpt-language-64",
            "GPT Medium-512 language modelling, V 50,304, 64 × 512",
            _PLAIN_LOOP,
            "tokens",
            Target(faster=1.15),
            "cases.gpt_language_64",
        ),
        Benchmark(
            "gpt-imdb",
            "GPT Medium-512 as a classifier, 16 texts of up to 512 tokens, of IMDB if it is there",
            "frostlab's eager step, padded",
            "examples",
            Target(faster=4),
            "cases.gpt_imdb",
        ),
        Benchmark(
            "frozen-qk",
            "BERT-base with query and key frozen, 32 × 128 and 256 × 128",
            "everything trained, same captured step",
            "examples",
            Target(gain_share=0.7),
            "cases.frozen_qk",
            case_targets=(("256 × 128", Target(gain_share=0.85)),),
        ),
        Benchmark(
            "deep-supervision",
            "three decoders with a loss at every layer: of 4 layers, of 3, and of 4 with the "
            "first 3 frozen; V 69,830, d 64",
            "the same with all logits in memory",
            "tokens",
            Target(faster=2, memory=0.25),
            "supervision.deep_supervision",
        ),
        Benchmark(
            "frozen-prefix",
            "12 layers, 11 frozen, their outputs cached",
            "the same uncached",
            "examples",
            Target(faster=3),
            "cases.frozen_prefix",
        ),
        Benchmark(
            "whole-run",
            "`frostlab run imdb-gpt`, from the start of the process to its end",
            f"{_TRAINER}, same model, data, epochs, evaluations and best checkpoint, compiled or "
            "not, whichever is faster",
            "examples",
            Target(ours_ms=25_000),
            "whole_run.whole_run",
            ("accelerate", "data:imdb"),
            small_needs=("accelerate",),
        ),
    )
}


def chosen(names: Sequence[str]) -> list[Benchmark]:
    """Return each named benchmark once, or all benchmarks if no name is given."""
    for name in names:
        if name not in BENCHMARKS:
            hint = nearest(name, BENCHMARKS) or f"; choose from: {', '.join(BENCHMARKS)}"
            raise BadInput(f"unknown benchmark {name}{hint}")
    return [BENCHMARKS[name] for name in dict.fromkeys(names or BENCHMARKS)]

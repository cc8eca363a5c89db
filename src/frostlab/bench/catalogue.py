"""What can be measured, against what, and what is to be reached. Nothing here needs torch."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from frostlab.errors import BadInput, FrostlabError, nearest

Scale = Literal["full", "small"]


class NotAvailable(FrostlabError):
    """A benchmark that cannot run here; the message says why."""


@dataclass(frozen=True)
class Target:
    """What a result must reach; what is None does not count."""

    faster: float | None = None  # their time over ours, at least
    ours_ms: float | None = None  # at most
    memory: float | None = None  # our peak over theirs, at most
    gain_share: float | None = None  # of the gain that the FLOPs allow, at least

    def __str__(self) -> str:
        words = (
            (self.faster, "≥ {:g}×"),
            (self.ours_ms, "≤ {:g} ms"),
            (self.memory, "≤ {:.0%} of the memory"),
            (self.gain_share, "≥ {:.0%} of the FLOP bound"),
        )
        return ", ".join(text.format(value) for value, text in words if value is not None)

    def reached(self, result: dict[str, Any]) -> bool | None:
        """Whether a result does it all; None where something was not measured."""
        wanted = (
            (self.faster, "faster", 1),
            (self.ours_ms, "ours_ms", -1),
            (self.memory, "memory_ratio", -1),
            (self.gain_share, "gain_share", 1),
        )
        asked = [(value, result.get(key), sign) for value, key, sign in wanted if value is not None]
        if any(found is None for _, found, _ in asked):
            return None
        return all(sign * found >= sign * value for value, found, sign in asked)  # type: ignore[operator]


@dataclass(frozen=True)
class Benchmark:
    """One entry: its work, whom it is measured against, and the function that does it."""

    name: str
    work: str
    against: str
    unit: Literal["examples", "tokens"]
    target: Target
    function: str  # its name in frostlab.bench.cases
    needs: tuple[str, ...] = ()  # libraries, and data sets as data:NAME

    def missing(self, scale: Scale, data_dir: Path | None, cuda: bool) -> str | None:
        """Say why it cannot run here, or None."""
        if scale == "full" and not cuda:
            return "needs a CUDA device; --scale small runs a tiny one here"
        for need in self.needs:
            kind, _, name = need.rpartition(":")
            if kind == "data":
                if data_dir is None:
                    return f"needs {name}/SPLIT.jsonl in a folder named with --data-dir"
                if not (data_dir / name).is_dir():
                    return f"needs {name}, and {data_dir} has no such folder"
            elif importlib.util.find_spec(need) is None:
                return f"needs {need}: pip install {need}"
        return None


_TRAINER = "Hugging Face Trainer"
_NANO = "a plain torch.compile loop, fused AdamW, SDPA"
BENCHMARKS = {
    found.name: found
    for found in (
        Benchmark(
            "bert-finetune",
            "BERT-base fine-tuning, 32 × 128",
            f"{_TRAINER}, same model and batches",
            "examples",
            Target(faster=5, ours_ms=7),
            "bert_finetune",
            ("accelerate",),
        ),
        Benchmark(
            "sst2-epoch",
            "BERT-base, an epoch of SST-2 at its real lengths, 32 a step",
            f"{_TRAINER}, dynamic padding, group_by_length, fused AdamW, torch_compile",
            "examples",
            Target(faster=4),
            "sst2_epoch",
            ("accelerate", "data:sst2"),
        ),
        Benchmark(
            "gpt-language-8",
            "GPT Medium-512 language modelling, V 50,304, 8 × 512",
            _NANO,
            "tokens",
            Target(faster=2.5),
            "gpt_language_8",
        ),
        Benchmark(
            "gpt-language-64",
            "GPT Medium-512 language modelling, V 50,304, 64 × 512",
            _NANO,
            "tokens",
            Target(faster=1.15),
            "gpt_language_64",
        ),
        Benchmark(
            "gpt-imdb",
            "GPT Medium-512 classification, 16 × 512",
            "frostlab's eager step",
            "examples",
            Target(faster=4),
            "gpt_imdb",
        ),
        Benchmark(
            "frozen-qk",
            "BERT-base with query and key frozen, 32 × 128 and 256 × 128",
            "everything trained, same captured step",
            "examples",
            Target(gain_share=0.8),
            "frozen_qk",
        ),
        Benchmark(
            "deep-supervision",
            "4 supervised layers, V 69,830, d 64, 64 × 32 tokens, fused loss",
            "the same with plain logits",
            "tokens",
            Target(faster=2, memory=0.25),
            "deep_supervision",
        ),
        Benchmark(
            "frozen-prefix",
            "12 layers, 11 frozen, the prefix cached",
            "the same uncached",
            "examples",
            Target(faster=3),
            "frozen_prefix",
        ),
    )
}


def chosen(names: Sequence[str]) -> list[Benchmark]:
    """The benchmarks of these names, once each; all of them for no name."""
    for name in names:
        if name not in BENCHMARKS:
            hint = nearest(name, BENCHMARKS) or f"; there are {', '.join(BENCHMARKS)}"
            raise BadInput(f"{name} is no benchmark{hint}")
    return [BENCHMARKS[name] for name in dict.fromkeys(names or BENCHMARKS)]

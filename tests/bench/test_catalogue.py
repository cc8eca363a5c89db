"""Targets of the benchmarks, and the reasons why one cannot run."""

from pathlib import Path
from typing import Any

from frostlab.bench.catalogue import BENCHMARKS, Benchmark, Target


def test_a_target_is_reached_missed_or_not_measured() -> None:
    target = Target(faster=2, memory=0.25)
    assert str(target) == "≥ 2×, ≤ 25% of the memory"
    assert target.reached({"faster": 2.0, "memory_ratio": 0.2}) is True
    assert target.reached({"faster": 1.9, "memory_ratio": 0.2}) is False
    assert target.reached({"faster": 3.0, "memory_ratio": 0.3}) is False
    assert target.reached({"faster": 3.0, "memory_ratio": None}) is None
    loop = Target(ours_ms=7, faster_than_loop=1.25)
    assert str(loop) == "≤ 7 ms, ≥ 1.25× the reduce-overhead loop"
    assert loop.reached({"ours_ms": 6.9, "faster_than_loop": 1.3}) is True
    assert loop.reached({"ours_ms": 6.9, "faster_than_loop": 1.2}) is False
    assert loop.reached({"ours_ms": 6.9}) is None
    assert Target(gain_share=0.8).reached({"gain_share": 0.79}) is False


def test_a_case_may_have_a_target_of_its_own() -> None:
    frozen = BENCHMARKS["frozen-qk"]
    assert frozen.target_of("32 × 128").gain_share == 0.7
    assert frozen.target_of("256 × 128").gain_share == 0.85
    gain = "of the gain that the FLOPs allow"
    assert frozen.targets == f"≥ 70% {gain}; ≥ 85% {gain} at 256 × 128"
    assert BENCHMARKS["gpt-language-64"].targets == "≥ 1.15×"


def test_a_missing_device_dataset_or_library_is_named(tmp_path: Path) -> None:
    def reason(name: str, **changes: Any) -> str | None:
        arguments: dict[str, Any] = {"scale": "full", "data_dir": None, "cuda": True} | changes
        return BENCHMARKS[name].missing(**arguments)

    assert "CUDA" in (reason("gpt-imdb", cuda=False) or "")
    assert reason("gpt-imdb") is None
    assert "--data-dir" in (reason("sst2-epoch") or "")
    assert "no such folder" in (reason("sst2-epoch", data_dir=tmp_path) or "")
    needy = Benchmark("x", "", "", "tokens", Target(), "x:y", ("no_such_library",))
    assert (
        needy.missing("small", None, False) == "needs no_such_library: pip install no_such_library"
    )

"""The benchmarks on CUDA, small: both sides agree in bf16, and memory is measured."""

import pytest
import torch

from frostlab.bench.catalogue import chosen
from frostlab.bench.runner import run_benchmarks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.filterwarnings("ignore"),  # theirs
]


@pytest.mark.parametrize(
    "name",
    ["bert-finetune", "gpt-language-8", "gpt-imdb", "frozen-qk", "deep-supervision"],
)
def test_small_ones_are_measured(name: str) -> None:
    for result in run_benchmarks(chosen([name]), scale="small", rounds=2):
        assert result["status"] == "measured", result["reason"]
        assert result["precision"] == "bfloat16"
        assert result["ours_peak_bytes"] > 0 < result["theirs_peak_bytes"]
        assert result["ceilings"]["matmul_flops"] > 0

"""`frostlab bench`: who goes when, what is refused, and what a result says."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import frostlab as fl
from forked import frostlab_command
from frostlab.bench import runner as running
from frostlab.bench.catalogue import BENCHMARKS, Benchmark, Target, chosen
from frostlab.bench.peers import Ours, SidesDiffer, agree, sharpened, step_losses
from frostlab.bench.workloads import Setting, bert, drawn, only_first, padding_collator
from frostlab.cli.main import app
from frostlab.data.tokens import Tokens
from frostlab.models.gpt import GPT, GPTConfig
from frostlab.recipe.settings import Optim
from frostlab.timing.flops import Ceilings, Work, measure_ceilings, step_work
from frostlab.timing.interleave import interleave, looped, schedule
from frostlab.training.batches.batch import Batch, collate

CPU = torch.device("cpu")
MEASURED = ("bert-finetune", "sst2-epoch", "gpt-language-8", "gpt-language-64", "gpt-imdb",
            "frozen-qk", "deep-supervision")  # fmt: skip


@pytest.fixture
def setting() -> Setting:
    ceilings = Ceilings(1e12, 1e11, "assumed", None)
    return Setting(BENCHMARKS["bert-finetune"], CPU, True, 1, None, None, ceilings)


def uneven() -> Tokens:
    """Eight examples of different lengths."""
    lengths = np.array([3, 9, 5, 12, 4, 7, 12, 6])
    stops = np.cumsum(lengths)
    ids = np.random.default_rng(0).integers(5, 400, int(stops[-1])).astype(np.int32)
    return Tokens(ids, stops - lengths, stops, np.arange(8) % 2, None, None, "made")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every benchmark that can run here, small, through the command."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "sst2").mkdir()
    rows = [{"sentence": f"a {'very ' * (i % 7)}good film {i}", "label": i % 2} for i in range(60)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for split in ("train", "validation"):
        (folder / "sst2" / f"{split}.jsonl").write_text(text)
    record = folder / "record.jsonl"
    done = CliRunner().invoke(
        app, ["bench", "--scale", "small", "--rounds", "2", "--data-dir", str(folder),
              "--out", str(record)], catch_exceptions=False,
    )  # fmt: skip
    assert done.exit_code == 0
    assert "theirs ms" in done.stdout
    for name in BENCHMARKS:
        assert name in done.stdout
    return [json.loads(line) for line in record.read_text().splitlines()]


def test_every_benchmark_has_a_result_or_a_reason(results: list[dict[str, Any]]) -> None:
    assert tuple(dict.fromkeys(r["benchmark"] for r in results)) == tuple(BENCHMARKS)
    measured = {r["benchmark"] for r in results if r["status"] == "measured"}
    assert measured >= set(MEASURED), [r.get("reason") for r in results]
    assert all(r["reason"] for r in results if r["status"] != "measured")
    assert sum(r["benchmark"] == "frozen-qk" for r in results) == 2


def test_results_agree_with_themselves(results: list[dict[str, Any]]) -> None:
    for r in results:
        assert r["torch"] == torch.__version__
        assert {"device", "transformers", "commit", "time"} <= set(r)
        if r["status"] != "measured":
            continue
        assert r["ratio"] == pytest.approx(r["ours_ms"] / r["theirs_ms"])
        assert r["faster"] == pytest.approx(1 / r["ratio"])
        assert r["ratio_p10"] <= r["ratio_paired_median"] <= r["ratio_p90"]
        assert r["ours_per_s"] / r["theirs_per_s"] == pytest.approx(r["faster"])
        assert r["ceiling_ms"] == max(r["compute_ms"], r["traffic_ms"]) > 0
        assert r["of_ceiling"] == pytest.approx(r["ceiling_ms"] / r["ours_ms"])
        rate = r["ceilings"]["matmul_flops"]
        assert r["mfu"] == pytest.approx(r["compute_ms"] / r["ours_ms"])
        assert r["compute_ms"] == pytest.approx(1e3 * r["flops"] / rate)
        assert r["traffic_ms"] * r["ceilings"]["copy_bytes"] == pytest.approx(28e3 * r["trainable"])
        assert (r["rounds"], r["reached"], r["scale"]) == (2, None, "small")
        assert r["ours_prepare_s"] > 0 < r["theirs_prepare_s"]
        assert r["ours_losses"] == pytest.approx(r["theirs_losses"], rel=0.01)
    frozen = next(r for r in results if r["benchmark"] == "frozen-qk")
    gained = (frozen["faster"] - 1) / (frozen["flop_bound"] - 1)
    assert frozen["gain_share"] == pytest.approx(gained)


def test_turns_alternate_and_are_equal() -> None:
    log: list[str] = []

    def side(name: str) -> Any:
        return lambda: log.append(name)

    times = interleave(
        lambda: side("o"), lambda: looped(side("t")), CPU, rounds=4, every=3, warm=2
    )  # fmt: skip
    assert "".join(log) == "oo" + "tt" + "tttooo" + "ooottt" + "tttooo" + "ooottt"
    assert len(times.ours) == len(times.theirs) == 4
    assert list(schedule(2)) == ["theirs", "ours", "ours", "theirs"]


def test_seconds_end_the_rounds_but_not_before_three() -> None:
    times = interleave(
        lambda: lambda: None, lambda: looped(lambda: None), CPU, rounds=500, every=1, seconds=0.0
    )
    assert len(times.ours) == len(times.theirs) == 3


def test_ceilings_and_the_longer_part_decides() -> None:
    found = measure_ceilings(CPU, small=True)
    assert found.matmul_flops > 1e8
    assert found.copy_bytes > 1e7
    ceilings = Ceilings(1e12, 1e11, "assumed", None)
    assert Work(1e12, 1000).least(ceilings)["ceiling_ms"] == 1e3
    assert Work(1.0, 10**9).least(ceilings)["ceiling_ms"] == pytest.approx(280)


@pytest.mark.parametrize("classes", [0, 3])
def test_the_work_of_a_step_is_what_the_flop_counter_sees(classes: int) -> None:
    config = GPTConfig(400, 16, 32, 2, 2, 64, 0.0, causal=False, classes=classes)
    model, ids = GPT(config), torch.randint(0, 400, (2, 16))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids).sum().backward()
    assert step_work(model, 16, 32).flops == pytest.approx(counter.get_total_flops())
    assert step_work(model, 16, 32).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("freeze", [(), ("all", "!head")])
def test_the_work_of_attention_that_looks_back_is_half(freeze: tuple[str, ...]) -> None:
    """Forward and backward where something learns, forward alone where nothing does."""
    sizes, ids = (400, 16, 32, 2, 2, 64, 0.0), torch.randint(0, 400, (2, 16))
    models = [GPT(GPTConfig(*sizes, causal=causal, classes=3)) for causal in (True, False)]
    for model in models:
        if freeze:
            fl.freeze(model, *freeze)
    back, both = (step_work(model, 16, 32).flops for model in models)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        models[1](ids).sum().backward()
    assert both == pytest.approx(counter.get_total_flops())
    products = 2 * 2 * 16 * 32 * 2 * (1 if freeze else 3)  # a token
    assert both - back == pytest.approx(products / 2 * 32)


def test_sides_that_differ_are_refused(setting: Setting) -> None:
    tokens = uneven()
    whole = collate(tokens, np.arange(8), 0)
    blind = Batch({"input_ids": whole.inputs["input_ids"]}, whole.targets, 8, whole.tokens, 8)

    def losses(batch: Batch) -> list[float]:
        model = sharpened(bert(setting, 0.0), "classifier")
        return step_losses(Ours(model, only_first(lambda _: batch), Optim(), setting).step)

    found = agree(losses(whole), losses(whole), torch.float32)
    assert found["ours_losses"] == found["theirs_losses"]
    with pytest.raises(SidesDiffer, match="nothing was timed"):
        agree(losses(blind), losses(whole), torch.float32)
    with pytest.raises(SidesDiffer, match="at step 2"):
        agree([1.0, 0.5], [1.0, 0.9], torch.bfloat16)
    with pytest.raises(SidesDiffer):
        agree([float("nan")], [1.0], torch.bfloat16)


def test_the_trainers_batches_are_padded_as_ours() -> None:
    tokens = uneven()
    rows = [
        {"input_ids": tokens.ids[a:b].tolist(), "label": int(c)}
        for a, b, c in zip(tokens.starts, tokens.stops, tokens.labels, strict=True)  # type: ignore[arg-type]
    ]
    made, plain = padding_collator(0)(rows), collate(tokens, np.arange(8), 0)
    width = plain.inputs["input_ids"].shape[1]
    assert made["input_ids"].shape[1] % 8 == 0
    for name in ("input_ids", "attention_mask"):
        assert torch.equal(made[name][:, :width], plain.inputs[name])
        assert not made[name][:, width:].any()
    assert torch.equal(made["labels"], plain.targets)


def test_drawn_examples_are_of_one_length() -> None:
    tokens = drawn(6, 9, 50, 0)
    assert tokens.labels is None
    assert set(tokens.lengths) == {9}
    assert collate(tokens, np.arange(6), 0).inputs["input_ids"].shape == (6, 8)


def test_targets() -> None:
    target = Target(faster=2, memory=0.25)
    assert str(target) == "≥ 2×, ≤ 25% of the memory"
    assert target.reached({"faster": 2.0, "memory_ratio": 0.2}) is True
    assert target.reached({"faster": 1.9, "memory_ratio": 0.2}) is False
    assert target.reached({"faster": 3.0, "memory_ratio": 0.3}) is False
    assert target.reached({"faster": 3.0, "memory_ratio": None}) is None
    assert Target(gain_share=0.8).reached({"gain_share": 0.79}) is False


def test_what_goes_wrong_in_one_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(setting: Setting) -> Iterator[dict[str, Any]]:
        raise RuntimeError("first line\nsecond")

    monkeypatch.setattr(running, "work_of", lambda benchmark: broken)
    found = list(running.run_benchmarks(chosen(["frozen-qk", "gpt-imdb"]), scale="small"))
    assert [r["status"] for r in found] == ["failed", "failed"]
    assert found[0]["reason"] == "RuntimeError: first line"


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    def reason(name: str, **changes: Any) -> str | None:
        given: dict[str, Any] = {"scale": "full", "data_dir": None, "cuda": True} | changes
        return BENCHMARKS[name].missing(**given)

    assert "CUDA" in (reason("gpt-imdb", cuda=False) or "")
    assert reason("gpt-imdb") is None
    assert "--data-dir" in (reason("sst2-epoch") or "")
    assert "no such folder" in (reason("sst2-epoch", data_dir=tmp_path) or "")
    wants = Benchmark("x", "", "", "tokens", Target(), "x:y", ("no_such_library",))
    assert (
        wants.missing("small", None, False) == "needs no_such_library: pip install no_such_library"
    )


def test_listing_needs_no_torch() -> None:
    program = (
        "import sys\nsys.argv = ['frostlab', 'bench', *{!r}]\n"
        "from frostlab.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as e: assert e.code == {}, e.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    for arguments, code in ((["--list"], 0), (["--help"], 0), (["gpt-imbd"], 2)):
        done = subprocess.run(
            [sys.executable, "-c", program.format(arguments, code)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        if arguments == ["--list"]:
            assert [line.split()[0] for line in done.stdout.splitlines()] == list(BENCHMARKS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt-imbd",), "gpt-imbd is no benchmark; did you mean `gpt-imdb`?"),
        (("qqqq",), "there are bert-finetune, sst2-epoch"),
        (("gpt-imdb", "--data-dir", "nowhere"), "--data-dir nowhere is not a folder"),
        (("gpt-imdb", "--out", "nowhere/x.jsonl"), "nowhere/x.jsonl cannot be written: No such"),
        (("gpt-imdb", "--out", "/"), "--out / cannot be written: Is a directory"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = frostlab_command("bench", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_a_name_that_cannot_run_here_is_said_and_is_no_success() -> None:
    done = frostlab_command("bench", "gpt-imdb")
    assert done.returncode == 1
    assert "needs a CUDA device; --scale small" in done.stdout
    assert "frostlab: not measured: gpt-imdb" in done.stderr

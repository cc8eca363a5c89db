"""`frostlab bench`: every benchmark small, what a result contains, failures and refusals."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import frostlab as fl
from forked import frostlab_command
from frostlab.bench import runner
from frostlab.bench.catalogue import BENCHMARKS, chosen
from frostlab.bench.supervision import (
    PlainLogits,
    decoder_config,
    deep_work,
    partly_frozen,
    supervised,
)
from frostlab.bench.whole_run import Side, _check_outcomes
from frostlab.bench.workloads import BenchSettings, random_feed
from frostlab.cli.main import app
from frostlab.recipe.settings import Supervise
from frostlab.timing.flops import step_work

MEASURED = ("bert-finetune", "sst2-epoch", "gpt-language-8", "gpt-language-64", "gpt-imdb",
            "frozen-qk", "deep-supervision", "whole-run")  # fmt: skip
ALL = pytest.param((), marks=pytest.mark.slow, id="all")
WITH_LOOP = MEASURED[:-2]  # a third side: torch.compile with reduce-overhead


@pytest.fixture(
    scope="module",
    params=[pytest.param(("frozen-qk", "deep-supervision", "sst2-epoch"), id="three"), ALL],
)
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Run some benchmarks, or every one that can run here, at small scale, through the command."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "sst2").mkdir()
    rows = [{"sentence": f"a {'very ' * (i % 7)}good film {i}", "label": i % 2} for i in range(60)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for split in ("train", "validation"):
        (folder / "sst2" / f"{split}.jsonl").write_text(text)
    record = folder / "record.jsonl"
    done = CliRunner().invoke(
        app, ["bench", *request.param, "--scale", "small", "--rounds", "2",
              "--data-dir", str(folder), "--out", str(record)], catch_exceptions=False,
    )  # fmt: skip
    assert done.exit_code == 0
    assert "theirs ms" in done.stdout
    assert "loop ms" in done.stdout
    for name in request.param or BENCHMARKS:
        assert name in done.stdout
    return [json.loads(line) for line in record.read_text().splitlines()]


def test_every_benchmark_has_a_result_or_a_reason(
    results: list[dict[str, Any]], request: pytest.FixtureRequest
) -> None:
    asked = request.node.callspec.params["results"] or BENCHMARKS
    found = tuple(dict.fromkeys(r["benchmark"] for r in results))
    assert found == tuple(asked)
    measured = {r["benchmark"] for r in results if r["status"] == "measured"}
    assert measured >= set(MEASURED) & set(asked), [r.get("reason") for r in results]
    assert all(r["reason"] for r in results if r["status"] != "measured")
    assert sum(r["benchmark"] == "frozen-qk" for r in results) == 2


def test_the_figures_of_a_result_are_consistent(results: list[dict[str, Any]]) -> None:
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
        traffic = 28e3 * r["trainable"] * r.get("steps", 1)
        assert r["traffic_ms"] * r["ceilings"]["copy_bytes"] == pytest.approx(traffic)
        assert (r["rounds"], r["reached"], r["scale"]) == (2, None, "small")
        assert r["ours_prepare_s"] > 0 < r["theirs_prepare_s"]
        assert r["ours_losses"] == pytest.approx(r["theirs_losses"], rel=0.01)
        assert ("loop_ms" in r) == (r["benchmark"] in WITH_LOOP)
        if "loop_ms" in r:
            assert r["faster_than_loop"] == pytest.approx(r["loop_ms"] / r["ours_ms"])
            assert r["faster_than_loop_p10"] <= r["faster_than_loop_p90"]
            assert len(r["loop_losses"]) == 4
            assert r["loop_losses"][0] == pytest.approx(r["ours_losses"][0], rel=0.01)
    frozen = next(r for r in results if r["benchmark"] == "frozen-qk")
    gained = (frozen["faster"] - 1) / (frozen["flop_bound"] - 1)
    assert frozen["gain_share"] == pytest.approx(gained)


@pytest.mark.parametrize("results", [ALL], indirect=True)
def test_whole_runs_do_the_same_job(results: list[dict[str, Any]]) -> None:
    (result,) = (r for r in results if r["benchmark"] == "whole-run")
    assert result["steps"] == 16
    assert result["theirs_is"] == "Trainer", "nothing is compiled on the CPU"
    assert len(result["ours_accuracy"]) == len(result["theirs_accuracy"]) == 2
    assert result["ours_accuracy"][0] == result["ours_accuracy"][1]
    wall, seconds = result["ours_wall"], result["seconds"]
    assert result["ours_ms"] == pytest.approx(1e3 * sum(seconds["ours"]) / 2, abs=0.1)
    assert result["theirs_ms"] == pytest.approx(1e3 * sum(seconds["Trainer"]) / 2, abs=0.1)
    assert 0 < wall["starting"] < wall["total"] < seconds["ours"][-1]
    assert result["ours_prepare_s"] < min(seconds["ours"])
    assert result["theirs_prepare_s"] < min(seconds["Trainer"])


def test_sides_that_do_another_job_are_refused() -> None:
    def side(**changes: int) -> Side:
        outcome = {"steps": 16, "evaluations": 2, "examples": 9} | changes
        return Side(lambda folder: [], lambda *given: {}, [1.0], [outcome])

    _check_outcomes(side(), side(), 16)
    for key in ("steps", "evaluations", "examples"):
        with pytest.raises(fl.FrostlabError, match=f"the same job: {key}"):
            _check_outcomes(side(), side(**{key: 3}), 16)
    with pytest.raises(fl.FrostlabError, match="the same job: steps"):
        _check_outcomes(side(), side(), 17)


def test_a_side_that_fails_says_why() -> None:
    program = "import sys; print('first'); sys.exit('the last line')"
    side = Side(lambda folder: [sys.executable, "-c", program], lambda *given: {})
    with pytest.raises(fl.FrostlabError, match="failed: the last line"):
        side.run()


def test_deep_supervision_is_measured_in_both_phases(results: list[dict[str, Any]]) -> None:
    whole, first, second = (r for r in results if r["benchmark"] == "deep-supervision")
    assert [r["case"].partition(", ")[0] for r in (whole, first, second)] == [
        "4 layers", "phase 1", "phase 2",
    ]  # fmt: skip
    assert second["case"] == "phase 2, 3 of 4 layers frozen, 4 × 8"
    config = decoder_config(small=True)
    width, head = config.width, config.vocabulary * config.width
    layer = 4 * width**2 + 3 * width * config.hidden + 2 * width
    assert second["trainable"] == layer + head
    assert whole["trainable"] == 4 * layer + 2 * head
    assert first["trainable"] == 3 * layer + 2 * head
    for result in (whole, first, second):
        ratio = result["deep_ms"] / result["standard_ms"]
        assert result["over_standard"] == pytest.approx(ratio)
        assert result["over_standard_p10"] <= result["over_standard_p90"]
        assert 1 < result["flops_over_standard"] < 4
    deep, standard = (first[key] + second[key] for key in ("deep_ms", "standard_ms"))
    assert second["phases_over_standard"] == pytest.approx(deep / standard)


@pytest.mark.parametrize(("layers", "frozen"), [(4, 0), (3, 0), (4, 3), (4, 1)])
def test_the_work_of_every_layers_head_equals_torchs_count(layers: int, frozen: int) -> None:
    """As the difference to a step with a loss at the last layer, whose head counts already."""
    config = replace(decoder_config(small=True), layers=layers)
    batch = random_feed(4, 9, config.vocabulary, 0)(0)
    counts = []
    for supervise in (Supervise(layers="all", frozen=bool(frozen)), Supervise(layers=(layers,))):
        objective = supervised(PlainLogits, config, supervise, frozen)
        with FlopCounterMode(display=False) as counter:
            objective(batch).backward()
        counts.append(counter.get_total_flops())
    standard = step_work(partly_frozen(config, frozen), 8, 32)
    deep = deep_work(config, 8, 32, frozen)
    assert deep.parameters == standard.parameters
    assert deep.flops - standard.flops == counts[0] - counts[1]


def test_a_failing_benchmark_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(settings: BenchSettings) -> Iterator[dict[str, Any]]:
        raise RuntimeError("first line\nsecond")

    monkeypatch.setattr(runner, "case_function", lambda benchmark: broken)
    results = list(runner.run_benchmarks(chosen(["frozen-qk", "gpt-imdb"]), scale="small"))
    assert [r["status"] for r in results] == ["failed", "failed"]
    assert results[0]["reason"] == "RuntimeError: first line"


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
        (("gpt-imbd",), "unknown benchmark gpt-imbd; did you mean `gpt-imdb`?"),
        (("qqqq",), "unknown benchmark qqqq; choose from: bert-finetune, sst2-epoch"),
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
def test_a_named_benchmark_that_cannot_run_here_is_reported_and_fails() -> None:
    done = frostlab_command("bench", "gpt-imdb")
    assert done.returncode == 1
    assert "needs a CUDA device; --scale small" in done.stdout
    assert "frostlab: not measured: gpt-imdb" in done.stderr

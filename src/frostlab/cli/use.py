"""Use of a trained run: `frostlab evaluate`, `predict`, `generate` and `export`."""

import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from frostlab.cli.options import (
    AsJson,
    DataDir,
    Device,
    RunName,
    RunsFolder,
    check_data_dir,
    echo,
    settings_from,
)
from frostlab.errors import BadInput
from frostlab.storage import finite
from frostlab.text import counted, plain

if TYPE_CHECKING:
    from frostlab.use.run import Run


def evaluate(
    run: RunName,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="File or folder with other data to evaluate; for EEG, a folder of recordings "
            "(default: the run's own data).",
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            metavar="SPLIT",
            help="Split to evaluate: report (the run's result comes from it), tune (it selected "
            "the weights), train or, for EEG, unseen: subjects that were not trained on (default: "
            "report).",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a setting of the data, e.g. data.language=zh; can be repeated.",
        ),
    ] = None,
    languages: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="For xnli: all, or languages such as en,zh."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the result to this new .json file, too."),
    ] = None,
    data_dir: DataDir = None,
    device: Device = None,
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Evaluate the best weights of a run, on its own data or on other data.

    The best weights are those of the run's best evaluation. Only the run's folder and
    the data to evaluate are needed. Without --out, nothing is written.

    By default, the split that the run's result comes from is evaluated again. The metrics are
    exactly the recorded ones if the run used one process, and if the hardware, the libraries and
    the number of threads are the same as for the run.
    """
    check_data_dir(data_dir)
    changes = settings_from(settings)
    if languages is not None and (data is not None or changes):
        raise BadInput("--languages evaluates xnli's own splits; leave out --data and --set")
    loaded = _load(runs, run)
    from frostlab.use.evaluation import evaluate_languages, evaluate_run
    from frostlab.use.predict import check_new, new_file
    from frostlab.use.scoring import evaluation_lines, languages_lines

    if out is not None:
        check_new(out, [".json"])
    values: Any
    if languages is not None:
        by_language = evaluate_languages(
            loaded, languages, split=split, data_dir=data_dir, device=device
        )
        values = {name: asdict(evaluation) for name, evaluation in by_language.items()}
        lines = languages_lines(by_language)
    else:
        evaluation = evaluate_run(
            loaded, data, split=split, settings=changes, data_dir=data_dir, device=device
        )
        values, lines = asdict(evaluation), evaluation_lines(evaluation)
    text = json.dumps(finite(values), indent=1)
    if out is not None:
        with new_file(out, [".json"]) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")
    echo(text if as_json else "\n".join(lines))


def predict(
    run: RunName,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="For texts: a .txt file or - (standard input) with one text per line, or a csv, "
            "tsv, jsonl or parquet file with the recipe's columns. For EEG: a recording, or a "
            "folder of recordings.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the predictions to this new file: .csv, .tsv or .jsonl; for EEG, .npz or "
            ".csv (default: print them).",
        ),
    ] = None,
    device: Device = None,
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Predict with the best weights of a run; only the run's folder is needed.

    A classifier predicts the class of each text, with the probability of every class. A
    language model gives the loss and the perplexity of each text. An EEG model decodes,
    from each recording, the envelope (the loudness over time) of the speech that was
    heard.
    """
    loaded = _load(runs, run)
    if loaded.recipe.data.task == "envelope":
        _predict_envelopes(loaded, file, out, device, as_json)
        return
    from frostlab.use.predict import check_new, new_file, predict_file, write_rows

    endings = [".csv", ".tsv", ".jsonl"]
    if out is not None:
        check_new(out, endings)
    _show_caution(loaded)
    rows = predict_file(loaded, file, device)
    if out is None:
        if as_json:
            echo(json.dumps(finite(list(rows)), indent=1))
        else:
            _print_rows(rows)
        return
    counts: Counter[str] = Counter()
    with new_file(out, endings) as temporary, temporary.open("w", encoding="utf-8") as target:
        count = write_rows(_counted(rows, counts), target, out.suffix)
    if as_json:
        echo(json.dumps({"out": str(out), "rows": count, "labels": counts}, indent=1))
        return
    listed = ", ".join(f"{label} {number:,}" for label, number in counts.most_common(8))
    classes = f"; predicted classes: {listed}" if listed else ""
    echo(plain(f"{out}: {counted(count, 'texts')}{classes}"))


def _show_caution(run: "Run") -> None:
    """Warn, on stderr, if the run was made smaller by its `scale`, or used stand-ins."""
    if run.recipe.caution is not None:
        echo(plain(f"caution: {run.folder.name}: {run.recipe.caution}"), err=True)


def _print_rows(rows: Iterable[dict[str, Any]]) -> None:
    from frostlab.use.predict import write_rows

    table = io.StringIO()
    write_rows(rows, table, ".csv")
    echo(table.getvalue().rstrip("\n"))


def _counted(rows: Iterable[dict[str, Any]], counts: Counter[str]) -> Iterator[dict[str, Any]]:
    """Yield rows, and count their labels."""
    for row in rows:
        if "label" in row:
            counts[str(row["label"])] += 1
        yield row


def _predict_envelopes(
    run: "Run", path: str, out: Path | None, device: str | None, as_json: bool
) -> None:
    """Decode recordings, and print or write their envelopes."""
    import numpy as np

    from frostlab.recipe.data import EEGData
    from frostlab.use.predict import Predictor, check_new, envelope_rows, new_file, write_rows

    endings = [".npz", ".csv"]
    if out is not None:
        check_new(out, endings)
    data = run.recipe.data
    assert isinstance(data, EEGData)
    _show_caution(run)
    envelopes = Predictor(run, device).envelopes(Path(path))
    if out is None:
        if as_json:
            echo(json.dumps({name: values.tolist() for name, values in envelopes.items()}))
        else:
            _print_rows(envelope_rows(envelopes, data.rate))
        return
    with new_file(out, endings) as temporary:
        if out.suffix == ".npz":
            with temporary.open("wb") as arrays:
                np.savez(arrays, **envelopes)  # type: ignore[arg-type]
        else:
            with temporary.open("w", encoding="utf-8") as table:
                write_rows(envelope_rows(envelopes, data.rate), table, ".csv")
    samples = {name: len(values) for name, values in envelopes.items()}
    if as_json:
        echo(json.dumps({"out": str(out), "rate": data.rate, "samples": samples}, indent=1))
    else:
        echo(plain(f"{out}: {counted(len(samples), 'recordings')} at {data.rate:g} Hz"))


def generate(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...", help="Names of runs, beginnings of their names, or their folders."
        ),
    ],
    prompts: Annotated[
        list[str],
        typer.Option(
            "--prompt",
            metavar="TEXT",
            help='Text to continue; "" begins a new text; can be repeated.',
        ),
    ],
    samples: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of samples for each run and prompt (default: 5, or 1 at temperature 0).",
        ),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(metavar="T", help="Temperature; 0 always takes the most probable token."),
    ] = 0.8,
    top_p: Annotated[
        float,
        typer.Option(
            metavar="P",
            help="Draw from the most probable tokens, whose probabilities sum to P; 1: draw from "
            "all tokens.",
        ),
    ] = 0.95,
    tokens: Annotated[
        int, typer.Option(metavar="N", help="Maximum number of tokens in a sample.")
    ] = 100,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the samples.")] = 0,
    device: Device = None,
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Continue prompts with the language models of one or several runs.

    Sample number k is drawn with the same random numbers for every run and prompt, so that samples
    with the same number can be compared. Each sample is printed with the reason why it ended: the
    model wrote its end token (end), the sample has --tokens tokens (length), or the model has no
    more positions (positions).
    """
    count = samples if samples is not None else 5 if temperature else 1
    loaded = list(dict.fromkeys(_load(runs, name) for name in names))
    from frostlab.models.sampling import Sampling
    from frostlab.use.generate import check_generates, generate, samples_text
    from frostlab.use.scoring import Evaluator

    sampling = Sampling(tokens, temperature, top_p, seed, count)
    for run in loaded:
        check_generates(run)
        _show_caution(run)
    distinct = len({run.folder.name for run in loaded}) == len(loaded)
    shown = [
        (run.folder.name if distinct else str(run.folder), sample)
        for run in loaded
        for sample in generate(Evaluator(run, device), list(dict.fromkeys(prompts)), sampling)
    ]
    if as_json:
        listed = [{"run": name, **asdict(sample)} for name, sample in shown]
        echo(json.dumps(listed, indent=1))
    else:
        echo(samples_text(shown))


def export(
    run: RunName,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new or empty folder.")],
    runs: RunsFolder = Path("runs"),
) -> None:
    """Write the model of a run as a Hugging Face folder; transformers loads it without frostlab.

    The folder holds the config, the best weights, the tokenizer, the names of the
    classes, and a model card with the run's data, training and results. If the model is
    a classifier of frostlab's own, its head is a separate file, and the model card has
    the code that adds it. A run that decodes EEG cannot be exported.
    """
    echo(plain(str(_load(runs, run).export(folder))))


def _load(runs: Path, name: str) -> "Run":
    """Load the run that a command names."""
    from frostlab.records.finding.index import find_run

    folder = find_run(runs, name)
    from frostlab.use.run import load_run

    return load_run(folder)

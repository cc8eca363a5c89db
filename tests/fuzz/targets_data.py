"""Targets: data files, arrays, .mat files, tokenizers, and the cache of data."""

import gzip
import io
import json
import tempfile
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoTokenizer

from frostlab.data import registered
from frostlab.data.arrays import read_npy, read_npz
from frostlab.data.eeg.matlab import MatFiles
from frostlab.data.eeg.readers import from_mne, read_raw
from frostlab.data.eeg.recordings import Recording, Store, load_store
from frostlab.data.prepare import _TextFacts
from frostlab.data.sources import Columns, Split, _splits
from frostlab.data.split_record import LengthRecord, SplitRecord
from frostlab.data.splits import class_numbers, classes_of, survey
from frostlab.data.tokenizers import load_pretrained, load_trained, train_tokenizer
from frostlab.data.tokens import load_facts, save_facts
from frostlab.envelopes.scores import EnvelopeScores, StoredScores, score_recordings
from frostlab.errors import FrostlabError
from frostlab.recipe.data import BPE, LOADERS, Loader, Words
from frostlab.storage import SEAL, build_once, damaged_file, parse_json, seal
from frostlab.typed import read
from fuzz.mutate import Target

ROWS = [{"text": "plain words", "label": 0}, {"text": "naïve 東京", "label": 1}]
LABELLED = Columns(("text",), "label")


def _saved(write: Callable[[Any], object]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


# Files of text


def _jsonl() -> list[bytes]:
    named = [{"text": row["text"], "label": f"class {row['label']}"} for row in ROWS]
    return ["".join(json.dumps(row) + "\n" for row in rows).encode() for rows in (ROWS, named)]


def _csv() -> list[bytes]:
    return [
        b'text,label\n"quoted, ""text""",1\nplain,0\n',
        b'a,text,label\r\n1,"x\ny",b\r\n2,z,a\r\n',
    ]


def _tsv() -> list[bytes]:
    return [b'text\tlabel\nplain\t0\nit\'s "so"\t1\n']


def _txt() -> list[bytes]:
    return ["a document\n<|endoftext|>\nanother, naïve\n".encode(), b"words " * 50]


def _gzip() -> list[bytes]:
    return [gzip.compress(_jsonl()[0], mtime=0), gzip.compress(_jsonl()[0] * 40, mtime=0)]


def _parquet() -> list[bytes]:
    table = pa.Table.from_pylist(ROWS * 5)
    ways: list[dict[str, Any]] = [
        {"compression": "none"},
        {"compression": "snappy", "use_dictionary": False},
        {"compression": "zstd", "data_page_version": "2.0"},
    ]
    return [_saved(lambda file, way=way: pq.write_table(table, file, **way)) for way in ways]


def _rows(name: str, columns: Columns = LABELLED) -> Callable[[bytes, Path], None]:
    def check(data: bytes, folder: Path) -> None:
        (folder / name).write_bytes(data)
        deque(Split("train", name, (folder / name,)).rows(columns), maxlen=0)

    return check


def _check_survey(data: bytes, folder: Path) -> None:
    (folder / "train.jsonl").write_bytes(data)
    split = Split("train", "train.jsonl", (folder / "train.jsonl",))
    rows = survey(split, LABELLED, folder / "cache")
    class_numbers(split, rows, classes_of(split, rows, None))


def _check_registered(data: bytes, folder: Path) -> None:
    """Give a loader's rows any value that JSON can write."""
    rows = parse_json(data, "rows")
    LOADERS["fuzzed"] = Loader(lambda _: rows, "classification")
    try:
        files = registered.registered_files("fuzzed", None, folder)
    finally:
        del LOADERS["fuzzed"]
    for split in _splits(files, "fuzzed").values():
        deque(split.rows(LABELLED), maxlen=0)


# Arrays


def _npy() -> list[bytes]:
    arrays = [np.arange(12.0).reshape(3, 4), np.arange(6, dtype=np.int16), np.ones((2, 2), "f4")]
    return [_saved(lambda file, array=array: np.save(file, array)) for array in arrays]


def _npz() -> list[bytes]:
    arrays = {"a": np.arange(3.0), "b": np.ones((2, 2))}
    return [
        _saved(lambda file, save=save: save(file, **arrays))
        for save in (np.savez, np.savez_compressed)
    ]


def _file(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Path], None]:
    def check(data: bytes, folder: Path) -> None:
        (folder / name).write_bytes(data)
        read(folder / name)

    return check


def _mat_file(variables: dict[str, Any], packed: bool) -> bytes:
    """Return a .mat file without the time at which it was written."""
    from scipy import io as matlab

    content = _saved(lambda file: matlab.savemat(file, variables, do_compression=packed))
    return b"MATLAB 5.0 MAT-file".ljust(116) + content[116:]


def _mat() -> list[bytes]:
    cells = np.empty((1, 2), dtype=object)
    cells[0, 0], cells[0, 1] = np.ones((3, 1)), np.zeros((2, 1))
    values = {"eeg": np.arange(6.0).reshape(2, 3), "stim": cells}
    return [_mat_file(values, packed) for packed in (False, True)]


@cache
def _mat_files() -> MatFiles:
    return MatFiles()


def _set() -> list[bytes]:
    places = np.zeros(2, dtype=[(field, "O") for field in ("labels", "type", "X", "Y", "Z")])
    places[0], places[1] = ("Fz", "EEG", 0.05, 0.02, 0.03), ("E1", "EOG", 0.06, 0.02, 0.03)
    empty = {name: [] for name in ("event", "icawinv", "icasphere", "icaweights", "icaact")}
    sizes = {"nbchan": 2.0, "trials": 1.0, "pnts": 40.0, "srate": 64.0, "xmin": 0.0, "xmax": 1.0}
    values = {**sizes, **empty, "chanlocs": places, "data": _waves().T}
    files: list[dict[str, Any]] = [values, {"EEG": values}, {"EEG": values | {"data": "a.fdt"}}]
    return [_mat_file(variables, False) for variables in files]


def _check_set(data: bytes, folder: Path) -> None:
    (folder / "a.set").write_bytes(data)
    _waves().tofile(folder / "a.fdt")
    raw = read_raw(folder / "a.set", _set_files())
    from_mne(raw, np.arange(raw.n_times) % 7, subject="s", name="n")


def _waves() -> Any:
    return np.sin(np.arange(80, dtype=np.float32).reshape(40, 2))  # (samples, channels)


@cache
def _set_files() -> MatFiles:
    return MatFiles(mne=True)


# Tokenizers


@cache
def _tokenizers() -> list[bytes]:
    texts = ["some words and some other words", "naïve words"] * 3
    trained = []
    for settings in (Words(kind="words"), BPE(kind="bpe", size=300)):
        with tempfile.TemporaryDirectory() as folder:
            train_tokenizer(settings, texts, Path(folder))
            trained.append((Path(folder) / "tokenizer.json").read_bytes())
    return trained


def _check_tokenizer(data: bytes, folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(data)
    encoder = load_trained(folder / "tokenizer.json")
    encoder.examples([("some words",)], 4)
    encoder.running(["some other words"])


def _tokenizer_configs() -> list[bytes]:
    assert AutoTokenizer  # imported before the first input, whose time is measured
    fast = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|pad|>"}
    named = {"pad_token": "<|pad|>", "eos_token": "<|end|>", "model_max_length": 99}
    return [json.dumps(fast).encode(), json.dumps(named).encode()]


def _check_tokenizer_folder(data: bytes, folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(_tokenizers()[0])
    (folder / "tokenizer_config.json").write_bytes(data)
    load_pretrained(str(folder))


# The cache


def _facts() -> list[bytes]:
    split = SplitRecord("", 2, "0a", rows=3, dropped={"a": 1}, lengths=LengthRecord(1, 1.5, 1.5, 2))
    facts = _TextFacts(300, 0, {"train": split, "report": SplitRecord("", 1, "0b", note="5 %")})
    with tempfile.TemporaryDirectory() as folder:
        save_facts(Path(folder), facts)
        return [(Path(folder) / "prepared.json").read_bytes()]


def _check_facts(data: bytes, folder: Path) -> None:
    (folder / "prepared.json").write_bytes(data)
    load_facts(_TextFacts, folder)


@cache
def _recording() -> Recording:
    random = np.random.default_rng(0)
    eeg = random.standard_normal((900, 2)).astype(np.float32)
    return Recording("r", "s", eeg, eeg[:, 0] + random.standard_normal(900).astype(np.float32))


def _store(folder: Path) -> None:
    store = Store(folder)
    store.add("train", _recording())
    store.finish(32.0, ("1", "2"), {"train": "made"}, {"best_r": 0.5})


def _store_facts() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        _store(Path(folder))
        return [(Path(folder) / "prepared.json").read_bytes()]


def _check_store(data: bytes, folder: Path) -> None:
    _store(folder)
    (folder / "prepared.json").write_bytes(data)
    load_store(folder)


def _seals() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        _build(Path(folder))
        seal(Path(folder))
        return [(Path(folder) / SEAL).read_bytes()]


def _build(folder: Path) -> None:
    (folder / "a.json").write_text("{}")
    (folder / "b").write_bytes(b"x" * 1000)


def _check_seal(data: bytes, folder: Path) -> None:
    import warnings

    made = build_once(folder / "made", _build)
    (made / SEAL).write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = build_once(folder / "made", _build)
    assert damaged_file(made) is None
    assert set(json.loads((made / SEAL).read_text())) >= {"a.json", "b"}
    assert (made / "a.json").read_text() == "{}"


def _scores() -> list[bytes]:
    recording = _recording()
    scores = score_recordings({"r": recording.eeg[:, 0]}, [recording], 32.0, null_shifts=19)
    return [json.dumps(scores.to_dict()).encode()]


def _check_scores(data: bytes, folder: Path) -> None:
    """Read scores with the digest in the file, and with one that fits the rest of it."""
    values = parse_json(data, "scores.json")
    try:
        EnvelopeScores.from_dict(values)
    except FrostlabError as error:
        if "\n" in str(error):
            raise
        stored = read(StoredScores, values, "scores.json")
        scores = EnvelopeScores(stored.settings, stored.recordings, stored.subjects, stored.null)
        EnvelopeScores.from_dict(values | {"digest": scores.digest})


TARGETS = {
    "data-jsonl": Target(_jsonl, _rows("train.jsonl"), "jsonl"),
    "data-survey": Target(_jsonl, _check_survey, "jsonl"),
    "data-csv": Target(_csv, _rows("train.csv")),
    "data-tsv": Target(_tsv, _rows("train.tsv")),
    "data-txt": Target(_txt, _rows("train.txt", Columns(("text",), None))),
    "data-gzip": Target(_gzip, _rows("train.jsonl.gz")),
    "data-parquet": Target(_parquet, _rows("train.parquet")),
    "data-registered": Target(
        lambda: [b'{"train": [["text", 1], ["words", 0]], "tune": [["x", "a"]]}'],
        _check_registered,
        "json",
    ),
    "eeg-npy": Target(_npy, _file("a.npy", read_npy)),
    "eeg-npz": Target(_npz, _file("a.npz", read_npz)),
    "eeg-mat": Target(_mat, _file("a.mat", lambda path: _mat_files().read(path, "eeg", "stim"))),
    "eeg-set": Target(_set, _check_set),
    "tokenizer": Target(_tokenizers, _check_tokenizer, "json"),
    "tokenizer-folder": Target(_tokenizer_configs, _check_tokenizer_folder, "json"),
    "cache-facts": Target(_facts, _check_facts, "json"),
    "cache-recordings": Target(_store_facts, _check_store, "json"),
    "cache-seal": Target(_seals, _check_seal, "json"),
    "stored-scores": Target(_scores, _check_scores, "json"),
}

"""Built-in data, without downloads: docstrings of installed packages, and synthetic tasks.

The class of a docstring is its package. Docstrings can also be cut into pairs of a summary and a
body; the class of a pair says whether both are from one docstring and, with three classes, whether
they are from one package. Docstrings are read from source files, without importing the packages.
Synthetic tasks have a known answer and are drawn from fixed seeds.
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from frostlab.data.files import split_files
from frostlab.data.tokens import TokenWriter
from frostlab.errors import BadInput
from frostlab.recipe.data import Synthetic
from frostlab.storage import FORMAT, build_once, digest_of

# Docstrings

PACKAGES = ("numpy", "scipy", "torch", "transformers")
SPLIT_SHARES = {"train": 0.8, "validation": 0.1, "test": 0.1}
PAIRING = 2  # version of the rule that pairs summaries and bodies; raise it when the rule changes
FEWEST_WORDS = 12  # minimum number of words in a text, or in the body of a pair
MASK = "package"  # replaces the packages' names, which would give the label away
_PACKAGE_NAMES = re.compile(
    r"(?<![a-z])(?:num[-_ ]?py\w*|np|sci[-_ ]?py\w*|(?:py|lib)?torch\w*|aten|c10d?"
    r"|hugging[-_ ]?face\w*|hf|transformers?)(?![a-z])",
    re.IGNORECASE,
)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_ROLE = re.compile(r":[a-zA-Z:]+:(?=`)")  # a Sphinx role, such as :class: before a backtick
_RULE = re.compile(r"^\W*([-=~^*#])\1{2,}\W*$")  # a line that underlines a heading
_DIRECTIVE = re.compile(r"^\.\. ")  # a Sphinx directive
_MARKUP = str.maketrans("", "", "`*~")
_PLACEHOLDER = re.compile(r"%\(\w+\)s")  # replaced by text when the package is imported
_PLAIN_WORD = re.compile(r"(?<![\w.])[a-z]+(?![\w(])")  # lower case, and no attribute or call

# Synthetic tasks

Ids = npt.NDArray[np.int64]
# Split → seed; drawn in this order. `report` gives the reported result, `tune` selects checkpoints.
SYNTHETIC_SEEDS = {"report": 101, "tune": 202, "train": 303}
TRIES = 50  # draws in a row without a new example before an error is raised
DRAWN_AT_ONCE = 8192  # maximum number of examples per draw


@dataclass(frozen=True)
class Docstring:
    """First paragraph and rest of a docstring, without markup and with package names masked."""

    summary: str
    body: str

    @property
    def text(self) -> str:
        """Summary and body."""
        return f"{self.summary} {self.body}".strip()


def docstring_files(
    per_package: int, *, pairs: bool, cache: Path, classes: int | None = None
) -> dict[str, Path]:
    """Return the file of each split; extract the docstrings if they are not in the cache.

    Args:
        per_package: the most docstrings of a package, over all splits; each split has at least two,
            or three for three classes of pairs.
        pairs: write pairs of a summary and a body instead of whole docstrings.
        cache: the cache folder.
        classes: for whole docstrings, the number of packages (None: all that are installed); for
            pairs, 2 or 3 classes (None: 2).
    """
    versions = {
        name: importlib.metadata.version(name)
        for name in PACKAGES
        if importlib.util.find_spec(name) is not None
    }
    needed = 2 if pairs or classes is None else classes
    if len(versions) < needed:
        installed = ", ".join(versions) or "none"
        raise BadInput(
            f"data.name docstrings{'-pairs' * pairs} needs {needed} of {', '.join(PACKAGES)}; "
            f"installed: {installed}"
        )
    if classes is not None and not pairs:
        versions = dict(list(versions.items())[:classes])
    kinds = (classes or 2) if pairs else 0
    name = digest_of([versions, per_package, [PAIRING, kinds] if pairs else False, FORMAT])[:32]
    return split_files(
        build_once(
            cache / "docstrings" / name,
            lambda folder: _write_docstrings(tuple(versions), per_package, kinds, folder),
        )
    )


def _write_docstrings(
    packages: tuple[str, ...], per_package: int, kinds: int, folder: Path
) -> None:
    """Write a file for each split, with the same number of docstrings from every package.

    `kinds` is the number of classes of pairs; 0 for whole docstrings.
    """
    least = max(2, kinds)
    shares = SPLIT_SHARES.items()
    counts = {split: max(least, round(share * per_package)) for split, share in shares}
    collected: list[dict[str, list[Docstring]]] = []
    for name in packages:  # in the end, the counts fit the smallest package
        collected.append(collect_docstrings(name, counts, pairs=kinds > 0))
        counts = {split: len(docs) for split, docs in collected[-1].items()}
        for split, count in counts.items():
            if count < least:
                raise BadInput(
                    f"data.name docstrings{'-pairs' * bool(kinds)}: the installed {name} has "
                    f"{count} usable docstrings for the split {split}, but {least} are needed"
                )
    for split, count in counts.items():
        rows: list[dict[str, str | int]] = []
        docs_of = [package[split][:count] for package in collected]
        for label, docs in enumerate(docs_of):
            other = docs_of[(label + 1) % len(docs_of)]
            rows += (
                _pairs(docs, other, kinds)
                if kinds
                else [{"text": doc.text, "label": label} for doc in docs]
            )
        rows.sort(key=lambda row: _hash(json.dumps(row)))
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text)


def _pairs(
    docs: list[Docstring], elsewhere: list[Docstring], kinds: int
) -> list[dict[str, str | int]]:
    """Pair summaries with bodies, in equal numbers for each of two or three classes.

    The body belongs to the summary (label 1), to another docstring of the package (0) or, with
    three classes, to a docstring of another package, from `elsewhere` (2). Docstrings that are left
    over are not used. If label 0 has only one summary, this summary gets the body of the first
    docstring.
    """
    share = len(docs) // kinds
    rows = [(doc.summary, doc.body, 1) for doc in docs[:share]]
    mismatched = docs[share : 2 * share]
    others = mismatched[1:] + mismatched[:1] if share > 1 else docs[:share]
    rows += [(doc.summary, other.body, 0) for doc, other in zip(mismatched, others, strict=True)]
    if kinds == 3:
        parts = (source[2 * share : 3 * share] for source in (docs, elsewhere))
        rows += [(doc.summary, other.body, 2) for doc, other in zip(*parts, strict=True)]
    return [{"summary": a, "body": b, "label": label} for a, b, label in rows]


def collect_docstrings(
    package: str, wanted: dict[str, int], *, pairs: bool
) -> dict[str, list[Docstring]]:
    """Collect docstrings of a package, up to the wanted number for each split.

    Files are read in the order of a hash of their names.
    """
    spec = importlib.util.find_spec(package)
    root = Path(next(iter((spec and spec.submodule_search_locations) or ())))
    collected: dict[str, list[Docstring]] = {split: [] for split in wanted}
    seen: set[str] = set()
    names = [path.relative_to(root).as_posix() for path in root.rglob("*.py")]
    for name in sorted(names, key=lambda name: _hash(f"{package}/{name}")):
        docs = collected[split := split_of_module(package, name)]
        if len(docs) == wanted[split] or "tests" in name.split("/"):
            continue
        for text in _docstrings_of(root / name):
            doc = Docstring(*clean_docstring(text))
            content = doc.body if pairs else doc.text
            key = near_duplicate_key(content)
            if len(content.split()) < FEWEST_WORDS or len(doc.summary.split()) < 3 or key in seen:
                continue
            seen.add(key)
            docs.append(doc)
            if len(docs) == wanted[split]:
                break
        if all(len(collected[split]) == wanted[split] for split in wanted):
            break
    return collected


def split_of_module(package: str, name: str) -> str:
    """Return a module's split, chosen by a hash of the first three parts of the dotted name.

    Related modules, which share these parts, are in the same split.
    """
    group = ".".join((package, *name.removesuffix(".py").split("/"))[:3])
    digit = int(_hash(f"module {group}")[:8], 16) % 10
    return "train" if digit < 8 else "validation" if digit == 8 else "test"


def near_duplicate_key(text: str) -> str:
    """Return a key that near duplicates share: a text's first word and its lower-case words.

    After the first word, the key omits attributes, calls, and words with capitals, digits or
    underscores.
    """
    first, _, rest = text.partition(" ")
    return " ".join((first.lower(), *_PLAIN_WORD.findall(rest)))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def _docstrings_of(path: Path) -> Iterator[str]:
    """Yield the docstrings of a source file; yield nothing if the file cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in strings
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError):
        return
    yield from _docstrings_in(tree)


def _docstrings_in(node: ast.AST) -> Iterator[str]:
    """Yield the docstrings in a node; only statements are searched, as expressions have none."""
    if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node, clean=False)):
        yield text
    for name in ("body", "orelse", "finalbody", "handlers"):
        children = getattr(node, name, None)
        for child in children if isinstance(children, list) else ():
            yield from _docstrings_in(child)


def clean_docstring(text: str) -> tuple[str, str]:
    """Return the first paragraph and the rest, without code and markup; mask package names."""
    paragraphs: list[list[str]] = [[]]
    code_indent: int | None = None  # lines with more indentation are code
    fenced = prompt = False
    for line in inspect.cleandoc(text).splitlines():
        bare = line.strip()
        indent = len(line) - len(line.lstrip())
        if bare.startswith("```"):
            fenced = not fenced
        elif fenced:
            continue
        elif not bare:
            prompt = False
            paragraphs.append([])
        elif bare.startswith(">>>"):
            prompt = True
        elif prompt or (code_indent is not None and indent > code_indent):
            continue
        else:
            directive = bool(_DIRECTIVE.match(bare))
            code_indent = indent if directive or bare.endswith("::") else None
            if not directive and not _RULE.match(bare):
                paragraphs[-1].append(bare)
    joined = [_without_markup(" ".join(lines)) for lines in paragraphs if lines]
    return (joined[0], " ".join(joined[1:])) if joined else ("", "")


def _without_markup(text: str) -> str:
    text = _PLACEHOLDER.sub("", _ROLE.sub("", text)).translate(_MARKUP)
    return " ".join(_PACKAGE_NAMES.sub(MASK, text).split())


def reference_scores(data: Synthetic) -> dict[str, float]:
    """Return the accuracies of guessing and of a perfect model."""
    best = "best_token_accuracy" if data.name == "induction" else "best_accuracy"
    return {"chance": 1 / data.symbols, best: 1.0}


def majority(data: Synthetic, count: int, random: np.random.Generator) -> tuple[Ids, Ids]:
    """Draw sequences with one most frequent symbol; this symbol is the class."""
    ids = random.integers(data.symbols, size=(count, data.length))
    rows = np.arange(count)
    # (count, symbols): how often each symbol occurs in each sequence
    counts = np.zeros((count, data.symbols), dtype=np.int64)
    np.add.at(counts, (rows[:, None], ids), 1)
    # Break ties at random: the winner replaces another symbol at one position.
    priorities = random.random(counts.shape)
    winners = np.where(counts == counts.max(1, keepdims=True), priorities, -1).argmax(1)
    tied = (counts == counts.max(1, keepdims=True)).sum(1) > 1
    positions = np.where(ids == winners[:, None], -1, random.random(ids.shape)).argmax(1)
    ids[rows[tied], positions[tied]] = winners[tied]
    return ids, winners


def recall(data: Synthetic, count: int, random: np.random.Generator) -> tuple[Ids, Ids]:
    """Draw keys that are each followed by a value; at the end, one key recurs.

    The class is the value that followed this key.
    """
    pairs = min(data.symbols, (data.length - 1) // 2)
    keys = random.permuted(np.tile(np.arange(data.symbols), (count, 1)), axis=1)[:, :pairs]
    values = random.integers(data.symbols, size=(count, pairs))
    asked = random.integers(pairs, size=count)
    rows = np.arange(count)
    ids = np.empty((count, 2 * pairs + 1), dtype=np.int64)
    ids[:, 0:-1:2] = keys
    ids[:, 1::2] = values + data.symbols  # token ids of values follow the token ids of keys
    ids[:, -1] = keys[rows, asked]
    return ids, values[rows, asked]


def induction(data: Synthetic, count: int, random: np.random.Generator) -> tuple[Ids, Ids]:
    """Draw distinct symbols and repeat them, so that each symbol always has the same successor.

    Return the sequences, and for each the first position with a symbol that can be predicted.
    """
    period = min(data.symbols, (data.length + 1) // 2)
    first = random.permuted(np.tile(np.arange(data.symbols), (count, 1)), axis=1)[:, :period]
    repeats = -(-(data.length + 1) // period)
    return np.tile(first, (1, repeats))[:, : data.length + 1], np.full(count, period + 1)


# Each function returns token ids (count, width), where the width depends on the task, and classes
# or (induction) positions (count,).
TASKS: dict[str, Callable[[Synthetic, int, np.random.Generator], tuple[Ids, Ids]]] = {
    "majority": majority,
    "recall": recall,
    "induction": induction,
}


def write_synthetic(data: Synthetic, folder: Path) -> dict[str, str]:
    """Draw splits that share no example, write them, and return their digests."""
    held_out_count = max(256, data.examples // 8)
    seen: set[bytes] = set()
    digests: dict[str, str] = {}
    for role, seed in SYNTHETIC_SEEDS.items():
        count = data.examples if role == "train" else held_out_count
        ids, answers = _draw(data, count, np.random.Generator(np.random.PCG64(seed)), seen)
        seen |= {row.tobytes() for row in ids} if role != "train" else set()
        with TokenWriter(folder, role, data.vocabulary) as writer:
            writer.append(ids.ravel())
        width = ids.shape[1]
        starts = np.arange(count, dtype=np.int64) * width
        digests[role] = writer.finish(
            {
                "starts": starts,
                "stops": starts + width,
                "labels": None if data.name == "induction" else answers,
                "scored_from": answers if data.name == "induction" else None,
            }
        )
    return digests


def _draw(
    data: Synthetic, count: int, random: np.random.Generator, seen: set[bytes]
) -> tuple[Ids, Ids]:
    """Draw `count` examples that are not in `seen`, and their answers."""
    batches: list[tuple[Ids, Ids]] = []
    missing, tries = count, 0
    while missing:
        ids, answers = TASKS[data.name](data, min(missing, DRAWN_AT_ONCE), random)
        new = np.array([row.tobytes() not in seen for row in ids])
        tries = 0 if new.any() else tries + 1
        if tries == TRIES:
            raise BadInput(
                f"data.symbols {data.symbols} and data.length {data.length} make too few different "
                f"examples of {data.name} for separate splits; raise one of them"
            )
        batches.append((ids[new], answers[new]))
        missing -= int(new.sum())
    return np.concatenate([ids for ids, _ in batches]), np.concatenate([a for _, a in batches])

"""The report of a comparison: what was found, how far to trust it, and every number behind it.

evidence.json, in the comparison's folder, has all results. comparison.json and timing.json have
means over seeds, in the layout of the files of the OELM study, the published study from which the
treatment `oelm` comes. A run is paired with the baseline's run of the same seed, unless their data,
order of examples, initial weights or software differ in a way that the plan does not allow; such
runs are listed in `Evidence.refused_pairs`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from frostlab.comparison.evidence import ArmVerdict, Evidence, RunSummary, read_evidence
from frostlab.comparison.judging.verdict import DOUBTFUL, MEANINGS, SHOWING_COST
from frostlab.comparison.measures.arms import paired_runs
from frostlab.comparison.oelm_json import QUESTIONS, arm_key
from frostlab.errors import BadInput
from frostlab.pages import record
from frostlab.pages.content import (
    Block,
    Cell,
    Document,
    Figure,
    Paragraph,
    Records,
    Section,
    item,
    words,
)
from frostlab.pages.curves import Curve
from frostlab.pages.generated import generated_texts
from frostlab.pages.languages.phrases import translated
from frostlab.pages.languages.sentences import time_pieces, verdict_pieces
from frostlab.pages.languages.words import TRANSLATIONS, translated_word
from frostlab.pages.one_comparison import compared_curves as drawn_curves
from frostlab.pages.one_comparison import compared_facts as facts
from frostlab.pages.one_comparison import compared_figures as drawn
from frostlab.pages.one_comparison import compared_tables as tables
from frostlab.pages.one_comparison.compared_tables import COMPARISON
from frostlab.pages.one_run import eeg_run
from frostlab.text import plain

EVIDENCE = "evidence.json"
GAIN = (
    "(Compares how much the best value changed from the first stage to the last, on the split "
    "that also selects the checkpoint.) "
)
_SHOWN_DOUBTS = 12  # most doubts that the first screen lists


@dataclass(frozen=True)
class Compared:
    """A comparison's folder with its evidence, from which every section is made."""

    folder: Path
    evidence: Evidence
    records: Records
    language: str

    @cached_property
    def arms(self) -> tuple[str, ...]:
        """Names of all arms in the plan's order."""
        return tuple(self.evidence.arms)

    @cached_property
    def others(self) -> tuple[str, ...]:
        """Names of all arms but the baseline."""
        return tuple(name for name in self.arms if name != self.evidence.baseline)

    @cached_property
    def baseline(self) -> str:
        """Name of the baseline without control characters, to show it."""
        return plain(self.evidence.baseline)

    def runs(self, arm: str) -> list[RunSummary]:
        """Return an arm's runs that finished and can be paired."""
        return paired_runs(self.evidence, arm)

    def of_arm(self, arm: str, *keys: str | int, format: str = "number") -> Cell:
        """Return the cell of a value of an arm in comparison.json."""
        return self.records.cell(COMPARISON, self.key(arm), *keys, format=format)

    def key(self, arm: str) -> str:
        """Return the key of an arm in comparison.json and timing.json."""
        return arm_key(arm, self.evidence.baseline, self.evidence.oelm)

    def sentence(self, verdict: ArmVerdict, *keys: str | int) -> list[str | Cell]:
        """Return the sentence of a verdict; `keys` lead to the verdict in evidence.json."""
        if self.language in TRANSLATIONS:
            return verdict_pieces(verdict, self.evidence.rules, self.language, self.cell, *keys)
        return [self.cell(*keys, "sentence", format="text")]

    def remark(self, *keys: str | int) -> Cell:
        """Return the cell of a remark of evidence.json, in the report's language if possible."""
        return self.cell(*keys, format=f"remark in {self.language}")

    def looks(self) -> Cell:
        """Return the cell about the looks (analyses of the results), taken and planned."""
        return self.cell(format=f"looks in {self.language}")

    def time_of(self, name: str) -> Paragraph:
        """Return the verdict on an arm's step time, in red if it is doubtful.

        It is doubtful if the timing is unproven (cannot be trusted), if the arm is confounded
        (differs from the baseline in more than what is compared), or if the arm is faster than the
        saved FLOPs explain (`TimedArm.flag`).
        """
        timing, confounded = self.evidence.timing, bool(self.evidence.confounds.get(name))
        assert timing is not None
        arm, foreign = timing.arms[name], self.language in TRANSLATIONS
        pieces: list[str | Cell] = (
            time_pieces(name, arm, self.evidence.baseline, self.language, self.cell)
            if foreign
            else [self.cell("timing", "arms", name, "sentence", format="text")]
        )
        if confounded:
            pieces += [" Confounded by ", self.cell("confounds", name, format="list"), "."]
        alarm = confounded or not timing.proven or arm.flag is not None
        lead = "" if foreign else f"Time of a step, {plain(name)}:"
        return item(*pieces, alarm=alarm, lead=lead)

    @cached_property
    def curves(self) -> dict[str, list[Curve]]:
        """Curves of the finished runs that can be paired, by arm, read once from their events."""
        return drawn_curves.read_curves(self)

    def cell(self, *keys: str | int, format: str = "number", alarm: bool = False) -> Cell:
        """Return the cell of a value of evidence.json."""
        return self.records.cell(EVIDENCE, *keys, format=format, alarm=alarm)


def document(folder: Path, language: str) -> Document:
    """Return the report of a comparison."""
    evidence = read_evidence(folder / EVIDENCE)
    if evidence is None:
        raise BadInput(f"{folder} has no {EVIDENCE}: the comparison is not finished")
    compared = Compared(folder, evidence, Records(folder), language)
    sections = []
    for name, title, makers in SECTIONS:
        if blocks := [block for make in makers for block in make(compared)]:
            sections.append(Section(name, title, tuple(blocks)))
    plan = compared.evidence.plan
    return Document(
        title=f"{plain(plan.name)}: {plain(', '.join(compared.arms))}",
        about=plain(plan.about or _question(compared)),
        first=tuple(_first_screen(compared)),
        sections=tuple(sections),
        arms=compared.arms,
        language=language,
        caution=compared.evidence.caution,
        record=record.of_comparison(compared),
    )


def _question(compared: Compared) -> str:
    evidence = compared.evidence
    question = "What does {arms} change, compared with {baseline}, on {metric}?"
    return translated(question, compared.language).format(
        arms=translated(" or ", compared.language).join(compared.others),
        baseline=evidence.baseline,
        metric=evidence.rules.metric,
    )


# The first screen


def _first_screen(compared: Compared) -> list[Block]:
    blocks: list[Block] = [*_cautions(compared), *_findings(compared), *_doubts(compared)]
    if (figure := drawn.paired_differences(compared)) is not None:
        blocks.append(figure)
    return blocks


def _cautions(compared: Compared) -> list[Paragraph]:
    evidence = compared.evidence
    blocks = []
    if evidence.caution:
        blocks.append(words("Caution: ", compared.cell("caution", format="text"), ".", alarm=True))
    texts = []
    if evidence.plan.quick:
        texts.append("A quick comparison with short runs: it shows no more than whether a full "
                     "one is worthwhile.")  # fmt: skip
    if evidence.plan.runs:
        texts.append("The runs were chosen after they had ended, so the statements hold only if "
                     "the choice did not depend on their results.")  # fmt: skip
    return blocks + [words(text, alarm=True) for text in texts]


def _findings(compared: Compared) -> list[Paragraph]:
    """Return the verdicts on every arm but the baseline; a doubtful one is red and says why."""
    evidence, metric = compared.evidence, plain(compared.evidence.rules.metric)
    blocks = []
    for name in compared.others:
        verdict = evidence.verdicts[name]
        if compared.language in TRANSLATIONS:
            blocks.append(_foreign(compared, name))
            continue
        if verdict.word in DOUBTFUL:
            blocks.append(item(*compared.sentence(verdict, "verdicts", name), alarm=True))
            continue
        pieces: list[str | Cell] = [compared.cell("verdicts", name, "word", format="text")]
        size = "percent of a ratio" if evidence.rules.log else "short number"
        if verdict.paired is not None:
            pieces += [f" on {metric}, ",
                       compared.cell("verdicts", name, "paired", format="effect"), " over ",
                       compared.cell("verdicts", name, "paired", "n", format="count"),
                       " paired seeds"]  # fmt: skip
        is_between = verdict.word in SHOWING_COST and verdict.word not in ("better", "worse")
        if is_between and verdict.margin is not None:
            pieces += ["; ", *_cost(compared, name)]
        if is_between and verdict.could_have_seen is not None:
            pieces += ["; a true difference of ",
                       compared.cell("verdicts", name, "could_have_seen", format=size),
                       " would be found in 8 of 10 such comparisons"]  # fmt: skip
        blocks.append(item(*pieces, ".", lead=f"{plain(name)}:"))
    return blocks + [compared.time_of(name) for name in compared.others if evidence.timing]


def _foreign(compared: Compared, name: str) -> Paragraph:
    """Return the verdict on an arm in the language of the report, if that is not English."""
    verdict = compared.evidence.verdicts[name]
    pieces = compared.sentence(verdict, "verdicts", name)
    lead = f"{plain(name)}：{translated_word(verdict.word, compared.language)}。"
    return item(*pieces, alarm=verdict.word in DOUBTFUL, lead=lead)


def _doubts(compared: Compared) -> list[Paragraph]:
    """Return, in red, everything that is confounded, missing or unproven."""
    evidence, blocks = compared.evidence, []
    for number, arm in enumerate(compared.arms):
        if len(evidence.arms[arm].finished) < len(evidence.arms[arm].runs):
            status = compared.records.cell(COMPARISON, "overview", number, "status", format="text")
            blocks.append(item(f"{plain(arm)}: ", status, ".", alarm=True))
    blocks += facts.confounds(compared)
    blocks += [
        item(compared.cell("verdicts", name, "together", format="list"),
             " differ together, so none of them alone is shown to be the cause.", alarm=True,
             lead=f"{plain(name)}:")
        for name, verdict in evidence.verdicts.items()
        if verdict.together
    ]  # fmt: skip
    if evidence.timing is not None and not evidence.timing.proven:
        blocks.append(item("The times of steps are unproven: ",
                           compared.cell("timing", "reasons",
                                         format=f"remarks in {compared.language}"), ".",
                           alarm=True))  # fmt: skip
    if evidence.assay is not None and not evidence.assay.found:
        blocks.append(_assay(compared))
    if evidence.rules.risk > evidence.rules.alpha + 1e-12:
        blocks.append(item("Too many looks at the results: ", compared.looks(), ".", alarm=True))
    blocks += facts.refused_pairs(compared)
    blocks += _notes(compared, only_doubts=True)
    if len(blocks) > _SHOWN_DOUBTS:
        more = item("Further doubts are listed under “Verdicts” and “What differs between the "
                    "arms”.", alarm=True)  # fmt: skip
        blocks = [*blocks[:_SHOWN_DOUBTS], more]
    return blocks


def _notes(compared: Compared, only_doubts: bool) -> list[Paragraph]:
    """Return the notes of verdicts, doubts in red; a note about a single run comes only once."""
    blocks, seen = [], set()
    for name, verdict in compared.evidence.verdicts.items():
        for number, note in enumerate(verdict.notes):
            doubt = _is_doubt(note)
            if note in seen or (only_doubts and not doubt):
                continue
            about_run = note.startswith(tuple(f"{arm}, seed " for arm in compared.arms))
            if about_run:  # the note names its own arm, and may belong to several verdicts
                seen.add(note)
            blocks.append(item(
                compared.remark("verdicts", name, "notes", number), ".", alarm=doubt,
                lead="" if about_run else f"{plain(name)}:",
            ))  # fmt: skip
    return blocks


def _is_doubt(note: str) -> bool:
    if note.startswith("for other test examples"):
        return "is not shown" in note
    return not note.startswith("look ")


# Sections


def _arms(compared: Compared) -> list[Block]:
    """Describe each arm, and show all of them in the overview table."""
    blocks: list[Block] = []
    for number, arm in enumerate(compared.evidence.plan.arms):
        pieces: list[str | Cell] = [compared.cell("arms", arm.name, "does", format="text")]
        for key in arm.set:
            value = compared.cell("plan", "arms", number, "set", key, format="json")
            pieces += [f"; {plain(key)} ", value]
        mark = " (the baseline)" if arm.name == compared.evidence.baseline else ""
        blocks.append(item(*pieces, ".", lead=f"{plain(arm.name)}{mark}:"))
    return [*blocks, *tables.overview(compared)]


def _verdicts(compared: Compared) -> list[Block]:
    """Return every verdict in a full sentence, and the tests of the comparison itself."""
    evidence = compared.evidence
    blocks: list[Block] = [
        item(*compared.sentence(verdict, "verdicts", name), alarm=verdict.word in DOUBTFUL)
        for name, verdict in evidence.verdicts.items()
    ]
    blocks += _notes(compared, only_doubts=False)
    if evidence.timing is not None:
        blocks += [compared.time_of(name) for name in compared.others]
    if evidence.repeat is not None:
        blocks.append(_repeat(compared))
    if evidence.assay is not None:
        blocks.append(_assay(compared))
    blocks.append(_false_alarms(compared))
    if evidence.rules.history() is not None:
        blocks.append(item("This is ", compared.looks(), ".",
                           alarm=evidence.rules.risk > evidence.rules.alpha + 1e-12))  # fmt: skip
    blocks += [_earlier_look(compared, number) for number, _ in enumerate(evidence.earlier_looks)]
    used = {verdict.word for verdict in evidence.verdicts.values()}
    blocks += [words(f"“{translated_word(word, compared.language)}” means: {text}.")
               for word, text in MEANINGS.items() if word in used]  # fmt: skip
    return [*blocks, *tables.further_numbers(compared)]


def _repeat(compared: Compared) -> Paragraph:
    """Describe the run that was trained twice, which shows the noise of the device."""
    repeat, metric = compared.evidence.repeat, compared.evidence.rules.metric
    assert repeat is not None
    seed = compared.cell("repeat", "seed", format="count")
    values = repeat.metrics.get(metric, (None, None))
    if None in values:
        return item(f"The run of {compared.baseline} with seed ", seed, ", trained a second time: ",
                    compared.cell("repeat", "status", format="text"), ".", alarm=True)  # fmt: skip
    first, second = (compared.cell("repeat", "metrics", metric, number, format="exact")
                     for number in (0, 1))  # fmt: skip
    weights = "the same weights" if repeat.same_weights else "different weights"
    return item(f"The same run twice ({compared.baseline}, seed ", seed, f"): {plain(metric)} ",
                first, " and ", second, f", {weights}. Any difference is the noise of the device "
                "and the evaluation.")  # fmt: skip


def _assay(compared: Compared) -> Paragraph:
    """Describe the test of the comparison itself: it must find a harm that was planted."""
    assay = compared.evidence.assay
    assert assay is not None
    missed = "was not found, so this comparison cannot see a harm of that size"
    known = {"worse": "was found", "better": "is no harm here, so it tests nothing"}
    outcome = known.get(assay.verdict.word, missed)
    return item("The planted harm, a baseline that trained for ",
                compared.cell("assay", "steps", format="count"), " steps instead of ",
                compared.cell("assay", "of", format="count"), f", {outcome}: ",
                *compared.sentence(assay.verdict, "assay", "verdict"),
                alarm=not assay.found)  # fmt: skip


def _false_alarms(compared: Compared) -> Paragraph:
    """Say how often such a comparison finds a difference where none exists."""
    rules, first = compared.evidence.rules, compared.others[0]
    pieces: list[str | Cell] = [
        f"Statements about {plain(rules.metric)}: ",
        compared.cell("verdicts", first, "family", format="count"),
        ". If no arm differed, at most ", compared.cell(format="level"),
    ]  # fmt: skip
    if rules.timed:
        pieces += [" of such comparisons would call any arm better or worse, and at most ",
                   compared.cell(format="time level"), " any arm faster or slower"]  # fmt: skip
    else:
        pieces += [" of such comparisons would call any arm better or worse"]
    return item(*pieces, ".")


def _earlier_look(compared: Compared, number: int) -> Paragraph:
    return item("An earlier look: ", compared.cell("earlier_looks", number, "at", format="day"),
                ", ", compared.cell("earlier_looks", number, "metric", format="text"), ", ",
                compared.cell("earlier_looks", number, "seeds", format="count"), " seeds, in ",
                compared.cell("earlier_looks", number, "folder", format="text"), ".")  # fmt: skip


def _questions(compared: Compared) -> list[Block]:
    """Answer the plan's questions or, if it has none, the OELM study's five about the OELM arm."""
    evidence = compared.evidence
    blocks: list[Block] = []
    for number, answer in enumerate(evidence.contrasts):
        pieces: list[str | Cell] = [
            GAIN if answer.of == "gain" else "",
            *compared.sentence(answer.verdict, "contrasts", number, "verdict"),
            *_note_pieces(compared, answer.verdict, "contrasts", number, "verdict"),
        ]
        question = compared.cell("contrasts", number, "question", format="text")
        alarm = answer.verdict.word in DOUBTFUL
        blocks.append(item(*pieces, alarm=alarm, lead=question))
    if blocks or evidence.oelm is None:
        return blocks
    texts: tuple[list[str | Cell], ...] = (
        compared.sentence(evidence.verdicts[evidence.oelm], "verdicts", evidence.oelm),
        _saving(compared, evidence.oelm),
        _speed(compared, evidence.oelm),
        _orthogonality(compared),
        ["One comparison cannot answer this: its recipe has the model ",
         compared.records.cell(COMPARISON, "model", format="text"),
         "; make the same comparison with the other model, too."],
    )  # fmt: skip
    about = words(f"The questions are about {plain(evidence.oelm)}: ",
                  compared.cell("arms", evidence.oelm, "does", format="text"), ".")  # fmt: skip
    return [about, *(item(*pieces, lead=question)
                     for question, pieces in zip(QUESTIONS, texts, strict=True))]  # fmt: skip


def _note_pieces(compared: Compared, verdict: ArmVerdict, *keys: str | int) -> list[str | Cell]:
    pieces: list[str | Cell] = []
    for number, _ in enumerate(verdict.notes):
        pieces += [" Note: ", compared.remark(*keys, "notes", number), "."]
    return pieces


def _saving(compared: Compared, arm: str) -> list[str | Cell]:
    """Say how many parameters an arm saves, and what that costs."""
    evidence = compared.evidence
    counts = evidence.arms[arm].parameters
    base_counts = evidence.arms[evidence.baseline].parameters
    if counts is None or base_counts is None:
        return ["Not known: an arm has no finished run that can be paired."]
    if counts.trainable >= base_counts.trainable:
        return [f"{plain(arm)} trains as many parameters as the baseline, or more: there is no "
                "saving."]  # fmt: skip
    return [
        f"{plain(arm)} trains ",
        compared.of_arm(arm, "vs_baseline", "params_saved", format="text"), " fewer parameters (",
        compared.cell("arms", arm, "parameters", "trainable", format="count"), " of ",
        compared.cell("arms", evidence.baseline, "parameters", "trainable", format="count"),
        "), and needs that much less memory for gradients and the optimizer's moments; ",
        *_cost(compared, arm), ".",
    ]  # fmt: skip


def _cost(compared: Compared, arm: str) -> list[str | Cell]:
    """Say what an arm costs in performance, as far as the interval shows it."""
    verdict = compared.evidence.verdicts[arm]
    margin, limit = verdict.margin, compared.cell(format="margin")
    if verdict.word == "better":
        return ["it is also better, so no cost was found"]
    if verdict.word == "worse":
        small = margin is not None and margin.answer == "yes"
        within: list[str | Cell] = [", but at most ", limit] if small else []
        return ["the saving costs performance", *within, ": see the gap"]
    if verdict.word not in SHOWING_COST or margin is None:
        return [f"the cost is not known ({verdict.word})"]
    if margin.answer == "yes":
        return ["a cost above ", limit, " is excluded"]
    if margin.largest is None:
        return ["no cost is excluded"]
    ratio = compared.evidence.rules.log
    largest = compared.cell("verdicts", arm, "margin", "largest",
                            format="factor" if ratio else "short number")  # fmt: skip
    return ["a cost of up to ", largest, " is not excluded (margin: ", limit, ")"]


def _speed(compared: Compared, arm: str) -> list[str | Cell]:
    if compared.evidence.timing is None:
        return ["Not known: steps were not timed."]
    return list(compared.time_of(arm).pieces)


def _orthogonality(compared: Compared) -> list[str | Cell]:
    verdict = compared.evidence.orthogonality
    if verdict is None:
        return ["Not asked: it needs two arms that freeze query and key, one with orthogonal "
                "weights (treatment oelm) and one with random weights (oelm-random-matched or "
                "oelm-random)."]  # fmt: skip
    scale = (
        " This isolates orthogonality, at an equal norm of every head."
        if compared.evidence.equal_norms
        else " This compares orthogonality and scale together: the heads of "
        f"{plain(verdict.baseline)} may also have other norms. With the treatments oelm and "
        "oelm-random-matched, every head has the same norm in both arms."
    )
    return [*compared.sentence(verdict, "orthogonality"),
            *_note_pieces(compared, verdict, "orthogonality"), scale]  # fmt: skip


def _decoders(compared: Compared) -> list[Figure]:
    """Draw the results of each arm's first run, if the arms are EEG decoders."""
    if not compared.evidence.subjects:
        return []
    runs = {arm: run.folder for arm in compared.arms for run in compared.runs(arm)[:1]}
    return eeg_run.of_arms(compared.folder, runs)


def _samples(compared: Compared) -> list[Block]:
    """Return texts that the first run of each arm generated, if the arms are language models."""
    runs = [(arm, run.folder) for arm in compared.arms for run in compared.runs(arm)[:1]]
    return generated_texts(compared.records, runs)


Make = Callable[[Compared], Sequence[Block]]  # makes the blocks of a section, possibly none
SECTIONS: tuple[tuple[str, str, tuple[Make, ...]], ...] = (
    ("verdicts", "Verdicts", (_verdicts,)),
    ("questions", "The questions", (_questions,)),
    ("arms", "The arms", (_arms,)),
    ("performance", "Performance", (*drawn.PERFORMANCE, tables.performance)),
    ("curves", "Training curves", (drawn_curves.training_curves,)),
    ("time", "Time", (*drawn.TIME_RATIOS, tables.times, *drawn.TIMES, drawn_curves.step_times)),
    ("convergence", "Convergence", (drawn_curves.cost_curves, tables.convergence)),
    ("tuning", "Tuning", (*drawn.TUNING, tables.tuning)),
    ("stages", "Stages", (tables.stages,)),
    ("subjects", "Subjects", (tables.subjects, _decoders)),
    ("gradients", "Gradient flow", (*drawn.GRADIENTS, tables.gradients)),
    ("share", "Parameters and memory", drawn.SHARE),
    ("samples", "Generated texts", (_samples,)),
    ("differences", "What differs between the arms", (facts.differences,)),
    ("data", "Data", (facts.data,)),
    ("environment", "Environment", (facts.environment,)),
    ("rules", "The rules", (facts.rules,)),
    ("runs", "Every run", (facts.runs,)),
    ("notes", "Notes and tags", (facts.notes,)),
    ("methods", "Methods", (facts.methods,)),
)

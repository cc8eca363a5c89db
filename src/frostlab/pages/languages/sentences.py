"""The sentences of verdicts in Chinese and Japanese, and the translation of a report's texts.

A verdict's sentence is made from the verdict's word and numbers, not translated from the English
sentence. Every number in it is a `Cell`, which knows its place in evidence.json. There, the reason
for the verdict “unproven” is English text. It is translated if `phrases` knows it; otherwise the
sentence refers to the record.
"""

import re
from collections.abc import Callable
from dataclasses import replace

from frostlab.comparison.evidence import ArmVerdict, TimedArm
from frostlab.comparison.plan import AFTER_THE_FACT, Rules
from frostlab.pages.content import Block, Cell, Document, Figure, Paragraph, Section
from frostlab.pages.languages.phrases import translated
from frostlab.pages.languages.words import TRANSLATIONS
from frostlab.text import plain

_SMALL = "smaller than the smallest effect of interest"  # the English sentence has these words
Pieces = list[str | Cell]
Source = Callable[..., Cell]  # makes the cell of a value of evidence.json from its keys

# Parts of the sentences, by name; those in the middle of a sentence begin with its punctuation.
_PARTS: dict[str, dict[str, str]] = {
    "zh": {
        "none": "没有成对的数值",
        "effect": "效应为 {effect}，基于 {n} 对种子",
        "interval": "效应为 {effect}（方括号内为 {confidence} 置信区间），基于 {n} 对种子",
        "intervals": "效应为 {effect}（方括号内为 {family} 个结论的 {confidence} 联合置信区间），"
        "基于 {n} 对种子",
        "missing": "；{name} 有 {count} 次运行没有有效数值，均按全部运行中的最差值计",
        "unfinished": "；{name} 有 {count} 次运行没有有效数值",
        "together": "；{factors} 同时不同，不能断定其中任何一个单独是原因",
        "skewed": "；差值的分布向零的另一侧拖有长尾（偏度 {skewness}），少见的一次运行就可能推翻"
        "这一结论",
        "small": "；小于所关注的最小效应（{size}）",
        "chosen": "；这些运行是事后选定的",
        "untuned": "；未曾为各组调参",
        "confounds": "（两者在 {factors} 上也不同）",
        "excluded": "；可以排除超过容许界限（{limit}）的损失",
        "not excluded": "；不能排除高达 {largest} 的损失（容许界限：{limit}）",
        "nothing excluded": "；任何大小的损失都不能排除",
        "power": "；检验功效为 80 % 时可检出的真实差异为 {size}",
        "factor": "{value} 倍",
        "factor of errors": "错误率的 {value} 倍",
        "faster": "{arm} 的单步耗时短于 {baseline}：",
        "slower": "{arm} 的单步耗时长于 {baseline}：",
        "same": "未发现 {arm} 与 {baseline} 的单步耗时有差异：",
        "unproven": "{arm} 与 {baseline} 的单步耗时之差未经证实：",
        "time": "耗时之比为 {ratio}（方括号内为置信区间）{ceiling}。",
        "ceiling": "，按节省的浮点运算量最多可降至 {ceiling}",
    },
    "ja": {
        "none": "対になる値がない",
        "effect": "効果は {effect}、対応のあるシードは {n} 組",
        "interval": "効果は {effect}（角括弧内は {confidence} 信頼区間）、"
        "対応のあるシードは {n} 組",
        "intervals": "効果は {effect}（角括弧内は {family} 個の判定に対する {confidence} 同時信頼"
        "区間）、対応のあるシードは {n} 組",
        "missing": "。{name} では {count} 回の実行で有効な値が得られず、全実行中の最悪値とみなした",
        "unfinished": "。{name} では {count} 回の実行で有効な値が得られなかった",
        "together": "。{factors} が同時に異なるため、そのいずれか一つが原因であるとは言えない",
        "skewed": "。差の分布はゼロの反対側に長い裾をもち（歪度 {skewness}）、まれな一回の実行で"
        "結論が覆ることもありうる",
        "small": "。関心のある最小の効果（{size}）より小さい",
        "chosen": "。実行は事後に選ばれた",
        "untuned": "。群ごとの調整は行われていない",
        "confounds": "（{factors} も異なる）",
        "excluded": "。許容限界（{limit}）を超える損失は排除できる",
        "not excluded": "。最大 {largest} の損失は排除できない（許容限界：{limit}）",
        "nothing excluded": "。どの大きさの損失も排除できない",
        "power": "。検出力 80 % で検出できる真の差は {size}",
        "factor": "{value} 倍",
        "factor of errors": "誤り率の {value} 倍",
        "faster": "{arm} のステップ時間は {baseline} より短い：",
        "slower": "{arm} のステップ時間は {baseline} より長い：",
        "same": "{arm} と {baseline} のステップ時間に差は認められない：",
        "unproven": "{arm} と {baseline} のステップ時間の差は実証されていない：",
        "time": "時間の比は {ratio}（角括弧内は信頼区間）{ceiling}。",
        "ceiling": "、演算量の削減から見込める下限は {ceiling}",
    },
}


def verdict_pieces(
    verdict: ArmVerdict,
    rules: Rules,
    language: str,
    cell: Source,
    *keys: str | int,
) -> Pieces:
    """Return a verdict's sentence in a language; `keys` lead to the verdict in evidence.json."""
    parts = _PARTS[language]
    metric, seen, skewness = plain(verdict.metric), verdict.could_have_seen, verdict.skewed
    is_listed = keys == ("verdicts", verdict.arm)  # other pairs of arms have no list of confounds
    values: dict[str, Pieces] = {
        "metric": [metric],
        "arm": [plain(verdict.arm)],
        "baseline": [plain(verdict.baseline)],
        "numbers": _numbers(verdict, parts, cell, *keys),
        "missing": [
            piece
            for name in verdict.missing
            for piece in _filled(
                parts["unfinished" if verdict.word == "did not finish" else "missing"],
                name=[plain(name)],
                count=[cell(*keys, "missing", name, format="count")],
            )
        ],
        "together": _filled(parts["together"], factors=[cell(*keys, "together", format="list")])
        if verdict.together
        else [],
        "skewed": _filled(parts["skewed"], skewness=[cell(*keys, "skewed", format="short number")])
        if skewness is not None
        else [],
        "confounds": _filled(
            parts["confounds"], factors=[cell("confounds", verdict.arm, format="list")]
        )
        if is_listed
        else [],
        "costs": _costs(verdict, rules, parts, cell, *keys),
        "power": _filled(
            parts["power"],
            size=[cell(*keys, "could_have_seen",
                       format="percent of a ratio" if rules.log else "short number")],
        )
        if seen is not None
        else [],
        "small": _filled(
            parts["small"],
            size=[cell("plan", "rules", "minimum_effect",
                       format="percent of a ratio" if rules.log else "short number")],
        )
        if _SMALL in verdict.sentence
        else [],
        "chosen": [
            parts[part]
            for part, mark in (("chosen", AFTER_THE_FACT), ("untuned", "untuned"))
            if any(note.startswith(f"{mark}: ") for note in verdict.notes)
        ],
        "reason": [cell(*keys, "sentence", format=f"reason in {language}")],
    }  # fmt: skip
    return _filled(TRANSLATIONS[language][verdict.word].sentence, **values)


def time_pieces(name: str, arm: TimedArm, baseline: str, language: str, cell: Source) -> Pieces:
    """Return the verdict on the time of an arm's step in a language."""
    parts = _PARTS[language]
    outcomes = {"better": "faster", "worse": "slower", "no difference found": "same"}
    outcome = parts[outcomes.get(arm.word or "", "unproven")]
    keys = ("timing", "arms", name)
    ceiling: Pieces = []
    if arm.ceiling is not None:
        ceiling = _filled(parts["ceiling"], ceiling=[cell(*keys, "ceiling", format="number")])
    return [
        *_filled(outcome, arm=[plain(name)], baseline=[plain(baseline)]),
        *_filled(parts["time"], ratio=[cell(*keys, format="step ratio")], ceiling=ceiling),
    ]


def _numbers(verdict: ArmVerdict, parts: dict[str, str], cell: Source, *keys: str | int) -> Pieces:
    """Return the effect, its interval and the number of pairs."""
    if verdict.paired is None:
        return [parts["none"]]
    kind = "effect" if verdict.paired.n < 2 else "intervals" if verdict.family > 1 else "interval"
    return _filled(
        parts[kind],
        effect=[cell(*keys, "paired", format="effect")],
        n=[cell(*keys, "paired", "n", format="count")],
        family=[cell(*keys, "family", format="count")],
        confidence=[cell(format="confidence")],
    )


def _costs(
    verdict: ArmVerdict, rules: Rules, parts: dict[str, str], cell: Source, *keys: str | int
) -> Pieces:
    """Return which costs the interval excludes; nothing if the comparison has no margin."""
    if verdict.margin is None:
        return []
    if verdict.margin.answer != "yes" and verdict.margin.largest is None:
        return [parts["nothing excluded"]]
    limit: Pieces = [cell(*keys, "margin", "limit", format="number")]
    largest: Pieces = [cell(*keys, "margin", "largest", format="short number")]
    if rules.log or rules.of_errors:
        limit = _filled(parts["factor of errors" if rules.of_errors else "factor"], value=limit)
    if rules.log:
        largest = _filled(
            parts["factor"], value=[cell(*keys, "margin", "largest", format="number")]
        )
    if verdict.margin.answer == "yes":
        return _filled(parts["excluded"], limit=limit)
    return _filled(parts["not excluded"], largest=largest, limit=limit)


def _filled(template: str, **values: Pieces) -> Pieces:
    """Return the pieces of a template, with the pieces of each value in place of its `{name}`."""
    pieces: Pieces = []
    for number, text in enumerate(re.split(r"\{(\w+)\}", template)):
        pieces += values[text] if number % 2 else [text] if text else []
    return pieces


def in_its_language(document: Document) -> Document:
    """Return a report with its fixed texts in its language, as far as they have a translation.

    The texts of tables, the title, and texts in charts stay as they are.
    """
    language = document.language
    if language == "en":
        return document
    return replace(
        document,
        first=tuple(_block(block, language) for block in document.first),
        sections=tuple(_section(section, language) for section in document.sections),
        record=tuple(_section(section, language) for section in document.record),
    )


def _section(section: Section, language: str) -> Section:
    blocks = tuple(_block(block, language) for block in section.blocks)
    return replace(section, title=translated(section.title, language), blocks=blocks)


def _block(block: Block, language: str) -> Block:
    if isinstance(block, Paragraph):
        pieces = tuple(_piece(piece, language) for piece in block.pieces)
        return replace(block, pieces=pieces, lead=_piece(block.lead, language))
    if isinstance(block, Figure):
        title, caption = (translated(text, language) for text in (block.title, block.caption))
        return replace(block, title=title, caption=caption)
    return block


def _piece(piece: str | Cell, language: str) -> str | Cell:
    return translated(piece, language) if isinstance(piece, str) else piece

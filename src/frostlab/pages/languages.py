"""Verdicts and the words of the first screen in Chinese and Japanese.

A verdict's sentence is made from the verdict's word and numbers, not translated from the English
sentence. Every number in it is a cell of its record. Reasons that a record holds as English text
are shown as they are.
"""

import re
from collections.abc import Callable

from frostlab.comparison.evidence import ArmVerdict, TimedArm
from frostlab.comparison.plan import Rules
from frostlab.comparison.verdict import Word
from frostlab.pages.content import Cell
from frostlab.text import plain

Pieces = list[str | Cell]
Source = Callable[..., Cell]  # makes the cell of a value of evidence.json from its keys

WORDS: dict[str, dict[Word, str]] = {
    "zh": {
        "better": "更好",
        "worse": "更差",
        "no difference found": "未发现差异",
        "identical": "完全相同",
        "at chance": "处于随机水平",
        "did not finish": "未完成",
        "too few seeds": "种子太少",
        "confounded": "存在混杂",
        "unproven": "未经证实",
    },
    "ja": {
        "better": "優れている",
        "worse": "劣っている",
        "no difference found": "差は認められない",
        "identical": "完全に同一",
        "at chance": "偶然の水準",
        "did not finish": "未完了",
        "too few seeds": "シード不足",
        "confounded": "交絡あり",
        "unproven": "未実証",
    },
}
LANGUAGES = ("en", *WORDS)
_SENTENCES: dict[str, dict[Word, str]] = {
    "zh": {
        "better": "{metric}：{arm} 优于 {baseline}。{numbers}{missing}{together}{skewed}。",
        "worse": "{metric}：{arm} 劣于 {baseline}。{numbers}{missing}{together}{skewed}。",
        "no difference found": "{metric}：未发现 {arm} 与 {baseline} 有差异。{numbers}{missing}"
        "{costs}{power}{together}。",
        "identical": "{arm} 与 {baseline} 完全相同：每个种子训练结束时权重都一致，"
        "可见两者的差别没有产生任何作用。{numbers}。",
        "at chance": "{metric}：{arm} 与 {baseline} 均处于随机水平，没有证据表明其中任何一个"
        "学到了东西。{numbers}{missing}。",
        "did not finish": "{metric}：完成的配对太少，无法判断 {arm} 与 {baseline} 孰优孰劣"
        "{missing}。",
        "too few seeds": "{metric}：种子太少，无法判断 {arm} 与 {baseline} 孰优孰劣。"
        "{numbers}{missing}。",
        "confounded": "{metric}：{arm} 与 {baseline} 的比较存在混杂{confounds}，差异不能归因于所"
        "比较的因素。{numbers}{missing}。",
        "unproven": "{metric}：{arm} 与 {baseline} 之间的差异未经证实。{numbers}{missing}。"
        "原因见英文原句：{sentence}",
    },
    "ja": {
        "better": "{metric}：{arm} は {baseline} より優れている。{numbers}{missing}{together}"
        "{skewed}。",
        "worse": "{metric}：{arm} は {baseline} より劣っている。{numbers}{missing}{together}"
        "{skewed}。",
        "no difference found": "{metric}：{arm} と {baseline} の間に差は認められない。{numbers}"
        "{missing}{costs}{power}{together}。",
        "identical": "{arm} と {baseline} は完全に同一である。どのシードでも学習後の重みが"
        "一致しており、両者の違いは何の効果も及ぼさなかった。{numbers}。",
        "at chance": "{metric}：{arm} も {baseline} も偶然の水準にあり、いずれも何かを学習したとは"
        "言えない。{numbers}{missing}。",
        "did not finish": "{metric}：完了したペアが少なすぎるため、{arm} と {baseline} の優劣は"
        "判定できない{missing}。",
        "too few seeds": "{metric}：シードが少なすぎるため、{arm} と {baseline} の優劣は"
        "判定できない。{numbers}{missing}。",
        "confounded": "{metric}：{arm} と {baseline} の比較には交絡があり{confounds}、差を比較対象"
        "の要因に帰すことはできない。{numbers}{missing}。",
        "unproven": "{metric}：{arm} と {baseline} の差は実証されていない。{numbers}{missing}。"
        "理由は英語の原文を参照：{sentence}",
    },
}
# Parts of the sentences, by name; a part begins with the punctuation that separates it.
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
# Fixed texts of a comparison's page, by their English form.
PHRASES: dict[str, dict[str, str]] = {
    "Caution: ": {"zh": "注意：", "ja": "注意："},
    "A quick comparison with short runs: it shows no more than whether a full one is worthwhile.": {
        "zh": "这是用短时运行做的快速比较，只能说明是否值得做完整的比较。",
        "ja": "短い実行による簡易比較であり、本格的な比較を行う価値があるかどうかしか示さない。",
    },
    "The runs were chosen after they had ended, so the statements hold only if nobody knew their "
    "results.": {
        "zh": "这些运行是在结束之后才选入比较的，因此只有在选择者不知道结果时，结论才成立。",
        "ja": "実行は終了後に選ばれたため、選んだ人が結果を知らなかった場合に限り結論は成り立つ。",
    },
    "The times of steps are unproven: ": {
        "zh": "单步耗时未经证实：",
        "ja": "ステップ時間は実証されていない：",
    },
    "Difference from the baseline, seed by seed": {
        "zh": "各种子与基线之差",
        "ja": "シードごとのベースラインとの差",
    },
    "What does {arms} change, compared with {baseline}, on {metric}?": {
        "zh": "与 {baseline} 相比，{arms} 会使 {metric} 发生什么变化？",
        "ja": "{baseline} と比べて、{arms} は {metric} をどう変えるか。",
    },
    " or ": {"zh": " 或 ", "ja": " または "},
    "light or dark": {"zh": "浅色／深色", "ja": "ライト／ダーク"},
    "Verdicts": {"zh": "结论", "ja": "判定"},
    "The questions": {"zh": "研究问题", "ja": "研究の問い"},
    "The arms": {"zh": "各组", "ja": "各群"},
    "Performance": {"zh": "性能", "ja": "性能"},
    "Training curves": {"zh": "训练曲线", "ja": "学習曲線"},
    "Time": {"zh": "时间", "ja": "時間"},
    "Convergence": {"zh": "收敛", "ja": "収束"},
    "Tuning": {"zh": "调参", "ja": "チューニング"},
    "Stages": {"zh": "训练阶段", "ja": "学習の段階"},
    "Subjects": {"zh": "受试者", "ja": "被験者"},
    "Gradient flow": {"zh": "梯度流", "ja": "勾配の流れ"},
    "Parameters and memory": {"zh": "参数与内存", "ja": "パラメータとメモリ"},
    "What differs between the arms": {"zh": "各组之间的差别", "ja": "群間の違い"},
    "Data": {"zh": "数据", "ja": "データ"},
    "Environment": {"zh": "运行环境", "ja": "実行環境"},
    "The rules fixed beforehand": {"zh": "事先确定的规则", "ja": "事前に定めた規則"},
    "Every run": {"zh": "全部运行", "ja": "すべての実行"},
    "Notes and tags": {"zh": "备注与标签", "ja": "メモとタグ"},
    "Methods": {"zh": "方法", "ja": "方法"},
}


def translated(text: str, language: str) -> str:
    """Return a fixed text in a language; the English text if it has no translation."""
    return PHRASES.get(text, {}).get(language, text)


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
        "sentence": [cell(*keys, "sentence", format="text")],
    }  # fmt: skip
    return _filled(_SENTENCES[language][verdict.word], **values)


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
    """Return which costs the interval excludes; nothing without a margin."""
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
    """Return the pieces of a template, in which `{name}` stands for values."""
    pieces: Pieces = []
    for number, text in enumerate(re.split(r"\{(\w+)\}", template)):
        pieces += values[text] if number % 2 else [text] if text else []
    return pieces

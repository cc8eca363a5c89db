"""The words of verdicts in Chinese and Japanese, with their meanings and sentences.

The module `sentences` replaces a name in braces, such as `{numbers}`, by a part of the sentence.
"""

from dataclasses import dataclass

from frostlab.comparison.judging.verdict import Word


@dataclass(frozen=True)
class Translation:
    """A word of verdicts in another language."""

    word: str
    meaning: str  # the translated entry of `comparison.judging.verdict.MEANINGS`
    sentence: str  # template of the sentence of a verdict with this word


TRANSLATIONS: dict[str, dict[Word, Translation]] = {  # by language
    "zh": {
        "better": Translation(
            "更好",
            "效应的整个区间都对该组有利",
            "{metric}：{arm} 优于 {baseline}。{numbers}{missing}{small}{together}{skewed}"
            "{chosen}。",
        ),
        "worse": Translation(
            "更差",
            "效应的整个区间都对该组不利",
            "{metric}：{arm} 劣于 {baseline}。{numbers}{missing}{small}{together}{skewed}"
            "{chosen}。",
        ),
        "no difference found": Translation(
            "未发现差异",
            "区间包含零（或比值 1）；在已知范围内，句中说明它排除了多大的损失，以及怎样的真实差异"
            "在 10 次此类比较中会有 8 次被发现",
            "{metric}：未发现 {arm} 与 {baseline} 有差异。{numbers}{missing}{costs}{power}"
            "{together}{chosen}。",
        ),
        "identical": Translation(
            "完全相同",
            "对每个种子，两组报告的权重都相同",
            "{arm} 与 {baseline} 完全相同：对每个种子，两者报告的权重都一致，可见两者的差别没有产"
            "生任何作用。{numbers}。",
        ),
        "at chance": Translation(
            "处于随机水平",
            "未发现差异，也不能证明任何一组优于随机水平",
            "{metric}：{arm} 与 {baseline} 均处于随机水平，没有证据表明其中任何一个学到了东西。"
            "{numbers}{missing}。",
        ),
        "did not finish": Translation(
            "未完成",
            "计划的配对数足够，但完成的少于 5 对",
            "{metric}：完成的配对太少，无法判断 {arm} 与 {baseline} 孰优孰劣{missing}。",
        ),
        "too few seeds": Translation(
            "种子太少",
            "少于 5 对；两组都未完成的种子不算一对",
            "{metric}：种子太少，无法判断 {arm} 与 {baseline} 孰优孰劣。{numbers}{missing}。",
        ),
        "confounded": Translation(
            "存在混杂",
            "有一项不属于比较内容的设置不同",
            "{metric}：{arm} 与 {baseline} 的比较存在混杂{confounds}，差异不能归因于所比较的因"
            "素。{numbers}{missing}。",
        ),
        "unproven": Translation(
            "未经证实",
            "句中说明这些数值为何不能证明什么",
            "{metric}：{arm} 与 {baseline} 之间的差异未经证实（{reason}）。{numbers}{missing}。",
        ),
    },
    "ja": {
        "better": Translation(
            "優れている",
            "効果の区間全体がその群に有利である",
            "{metric}：{arm} は {baseline} より優れている。{numbers}{missing}{small}{together}"
            "{skewed}{chosen}。",
        ),
        "worse": Translation(
            "劣っている",
            "効果の区間全体がその群に不利である",
            "{metric}：{arm} は {baseline} より劣っている。{numbers}{missing}{small}{together}"
            "{skewed}{chosen}。",
        ),
        "no difference found": Translation(
            "差は認められない",
            "区間がゼロ（または比 1）を含む。わかる範囲で、どの損失が排除されるか、またどの大きさ"
            "の真の差がこの種の比較 10 回のうち 8 回で見つかるかを文が述べる",
            "{metric}：{arm} と {baseline} の間に差は認められない。{numbers}{missing}{costs}"
            "{power}{together}{chosen}。",
        ),
        "identical": Translation(
            "完全に同一",
            "どのシードでも両群の報告された重みが同じである",
            "{arm} と {baseline} は完全に同一である。どのシードでも報告された重みが一致しており、"
            "両者の違いは何の効果も及ぼさなかった。{numbers}。",
        ),
        "at chance": Translation(
            "偶然の水準",
            "差は認められず、どちらの群も偶然を上回るとは言えない",
            "{metric}：{arm} も {baseline} も偶然の水準にあり、いずれも何かを学習したとは言えな"
            "い。{numbers}{missing}。",
        ),
        "did not finish": Translation(
            "未完了",
            "計画した組は足りていたが、完了したのは 5 組に満たない",
            "{metric}：完了したペアが少なすぎるため、{arm} と {baseline} の優劣は判定できない"
            "{missing}。",
        ),
        "too few seeds": Translation(
            "シード不足",
            "5 組に満たない。両群とも完了しなかったシードは組に数えない",
            "{metric}：シードが少なすぎるため、{arm} と {baseline} の優劣は判定できない。"
            "{numbers}{missing}。",
        ),
        "confounded": Translation(
            "交絡あり",
            "比較の対象でない設定が異なっている",
            "{metric}：{arm} と {baseline} の比較には交絡があり{confounds}、差を比較対象の要因に"
            "帰すことはできない。{numbers}{missing}。",
        ),
        "unproven": Translation(
            "未実証",
            "値が何も証明しない理由を文が述べる",
            "{metric}：{arm} と {baseline} の差は実証されていない（{reason}）。{numbers}"
            "{missing}。",
        ),
    },
}


def translated_word(word: str, language: str) -> str:
    """Return a verdict's word in a language; a word without a translation stays English."""
    known = TRANSLATIONS.get(language, {}).get(word)  # type: ignore[call-overload]
    return word if known is None else known.word

"""The five questions of the experiments, each answered in one sentence with its numbers."""

from typing import Any

from frostlab.compare.plan import key_of

QUESTIONS = (
    "How large is the gap?",
    "Is the parameter saving worth it?",
    "Is it faster?",
    "Is orthogonality needed?",
    "Does it carry from BERT to GPT?",
)


def answers(evidence: dict[str, Any]) -> list[tuple[str, str]]:
    """Question and answer, for the arm that the comparison is about."""
    arm = main_arm(evidence)
    said = (
        _gap(evidence, arm),
        _saving(evidence, arm),
        _speed(evidence, arm),
        _orthogonality(evidence),
        _carries(evidence),
    )
    return list(zip(QUESTIONS, said, strict=True))


def main_arm(evidence: dict[str, Any]) -> str:
    """OELM if it is there, else the first that is not the baseline."""
    others = [name for name in evidence["arms"] if name != evidence["baseline"]]
    named = [name for name in others if key_of(name, evidence["baseline"]) == "oelm_freeze"]
    return (named or others)[0]


def _verdict(evidence: dict[str, Any], arm: str) -> dict[str, Any]:
    found: dict[str, Any] = evidence["verdicts"][evidence["plan"]["rules"]["metric"]][arm]
    return found


def _gap(evidence: dict[str, Any], arm: str) -> str:
    return str(_verdict(evidence, arm)["sentence"])


def _saving(evidence: dict[str, Any], arm: str) -> str:
    one, whole = (evidence["arms"][name]["parameters"] for name in (arm, evidence["baseline"]))
    if one is None or whole is None:
        return "Not known: an arm has no finished run."
    saved = 1 - one["trainable"] / whole["trainable"]
    if saved <= 0:
        return f"{arm} trains as many parameters as the baseline, or more: there is no saving."
    said = (
        f"{arm} trains {saved:.1%} fewer parameters ({one['trainable']:,} of "
        f"{whole['trainable']:,}), and so much less memory for gradients and Adam's moments"
    )
    cost = {
        "better": "it is also better, so there is nothing to weigh",
        "worse": "it pays for them: see the gap",
        "no difference found": "no cost was found, as far as these seeds could have seen one",
    }
    word = _verdict(evidence, arm)["word"]
    return f"{said}; {cost.get(word, f'what it costs is not known ({word})')}."


def _speed(evidence: dict[str, Any], arm: str) -> str:
    timing = evidence["timing"]
    if timing is None:
        return "Steps were not timed against each other."
    return str(timing["arms"][arm]["sentence"])


def _orthogonality(evidence: dict[str, Any]) -> str:
    found = evidence["orthogonality"]
    if found is None:
        return "Not asked: it needs the arms oelm and oelm-random-matched (or oelm-random)."
    scale = "" if found["baseline"] == "oelm-random-matched" else (
        " oelm-random also has another scale; oelm-random-matched would tell the two apart."
    )  # fmt: skip
    return f"{found['sentence']}{scale}"


def _carries(evidence: dict[str, Any]) -> str:
    model = evidence["plan"]["recipe"]["model"]
    name = model.get("name") or model["kind"]
    return f"Not answered by one model: this comparison has {name} alone; make the other one, too."

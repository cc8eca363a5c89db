"""A small evidence.json with every section, made without training."""

import json
from dataclasses import asdict
from functools import cache

from frostlab.comparison.evidence import (
    CONVERGED,
    QUANTITIES,
    SCHEMA,
    SEGMENTS,
    Answer,
    ArmConvergence,
    ArmEvidence,
    ArmVerdict,
    Assay,
    ComparedOrder,
    Convergence,
    EarlierLook,
    Effect,
    Evidence,
    Limit,
    MachineLoad,
    Made,
    Parameters,
    PredictionTest,
    Quantity,
    RefusedPair,
    Repeat,
    RoundTimes,
    RunSummary,
    SplitTests,
    StageSummary,
    StepTiming,
    SubjectTest,
    Summary,
    TimedArm,
    TunedSetting,
    TuningPoint,
    VariedFact,
)  # fmt: skip
from frostlab.comparison.load import make_plan
from frostlab.comparison.plan import Plan
from frostlab.data.split_record import SplitRecord
from frostlab.records.schema import DataRecord, TelemetrySummary
from frostlab.typed import read
from run_made import TELEMETRY

_EFFECT = Effect(2, False, 0.05, 0.1, -0.1, 0.3, 0.2, 0.1)
_MADE = Made("p", "d", None, "r", "2024-01-01", "2024-01-02", "a machine", {"torch": "2.13"},
             None, "c", "frostlab compare x")  # fmt: skip
_SUMMARY = Summary(2, 0.5, 0.1, 0.2, 0.4, 0.6)
_TUNED = TunedSetting(
    "optim.decay", (0.01, 0.1), False, {"baseline": 0.01, "oelm": 0.1},
    {"baseline": True, "oelm": True},
    {name: (TuningPoint(0.01, 0.5, 0.4, 0.6, (0.5,), (0.5,), 1),
            TuningPoint(0.1, None, None, None, (None,), (None,), 0))
     for name in ("baseline", "oelm")},
)  # fmt: skip


@cache
def _data() -> DataRecord:
    split = SplitRecord(source="reviews.csv", examples=8, digest="0" * 32, classes=[5, 3], empty=1)
    return DataRecord("classification", "0" * 32, ["bad", 1], {"train": split}, ["1 empty text"])


def plan() -> Plan:
    """Return a plan of two arms with a tuned setting and a question."""
    return make_plan(
        {
            "recipe": {"data": {"name": "majority", "examples": 64, "length": 8}},
            "arms": "baseline,oelm",
            "seeds": 2,
            "tune": {"key": "optim.decay", "values": [0.01, 0.1]},
            "contrasts": [{"question": "Is it?", "arm": "oelm", "against": "baseline"}],
        }
    )


def tuning() -> bytes:
    """Return a valid tuning.json for the plan."""
    return json.dumps([asdict(_TUNED)]).encode()


def _verdict() -> ArmVerdict:
    return ArmVerdict(
        arm="oelm", baseline="baseline", metric="accuracy", word="no difference found",
        sentence="No difference was found.", family=2, paired=_EFFECT, could_have_seen=0.4,
        margin=Limit("not shown", 1.1, 0.05, 0.1, 0.2), anytime=(None, 0.5), improvement=0.4,
        population=_EFFECT, skewed=None, missing={"oelm": 1}, together=("the treatment", "stages"),
        notes=("a note",),
    )  # fmt: skip


def _run(name: str, seed: int) -> RunSummary:
    stage = StageSummary("train", "accuracy", 0.5, 1.0, 2.0, 10, 20)
    return RunSummary(
        seed, f"runs/{name}-s{seed}", "finished", None, 1,
        {"accuracy": 0.5, "macro_f1": 0.4, "loss": 1.0}, 0.5, 1.0, 3, 1.5, (stage,),
        Parameters(20, 10), 3.0, 2.0, 1.0, (0.5, 0.5), (1.0, 1.0), 5.0, 90.0, 2, "abc", "def", None,
    )  # fmt: skip


def _timed(baseline: bool) -> TimedArm:
    ratio = None if baseline else 0.9
    return TimedArm(1.0, 1.1, ratio, ratio, ratio, ratio, None, None, None if baseline else
                    "better", None if baseline else "It is faster.", "eager", None, 100, 100, 10,
                    (0.1, 0.2))  # fmt: skip


def steps() -> bytes:
    """Return a valid steps.json for the plan."""
    return json.dumps(asdict(_timing())).encode()


def _timing() -> StepTiming:
    return StepTiming(
        "baseline", {name: _timed(name == "baseline") for name in ("baseline", "oelm")},
        _timed(False), True, (), ("busy",), 4, 2, 1, 2, 3.0, "time", 0.01, "cpu", {"halves": 1.0},
        MachineLoad(2, 0.5, None, read(TelemetrySummary, TELEMETRY, "telemetry")),
    )  # fmt: skip


def evidence() -> bytes:
    """Return a valid evidence.json."""
    names, metrics = ("baseline", "oelm"), ("accuracy", "macro_f1", "loss")
    subjects = SubjectTest(2, 2, 1, 0.1, _EFFECT, 0.5, None, 0.5)
    whole = Evidence(
        schema=SCHEMA, plan=plan(), made=_MADE, baseline="baseline", look=2,
        earlier_looks=(EarlierLook(1.5e9, "comparisons/it", "accuracy", 6, 0.05),), jobs=1,
        caution=None, pairs=2, data=_data(),
        confounds={"oelm": ()}, tuning=(_TUNED,),
        arms={name: ArmEvidence("everything trains", (_run(name, 0), _run(name, 1)),
                                dict.fromkeys(metrics, _SUMMARY), Parameters(20, 10), _SUMMARY)
              for name in names},
        refused_pairs=(RefusedPair("oelm", 1, "the data differ"),),
        partly_compared=(ComparedOrder("oelm", "baseline", 0, 3, 2),),
        varied_facts=(VariedFact("torch", {"2.12": (0,), "2.13": (1,)}),),
        verdicts={"oelm": _verdict()}, secondary={"loss": {"oelm": _EFFECT}},
        contrasts=(Answer("Is it?", "value", _verdict()),),
        oelm="oelm", equal_norms=True, orthogonality=_verdict(),
        assay=Assay(3, 6, _verdict()),
        repeat=Repeat(0, "repeat/baseline-s0", "finished", {"accuracy": (0.5, None)}, False),
        mcnemar={"oelm": (PredictionTest(0, 1, 2, 3, 4, 0.5),)},
        subjects={"report": SplitTests({"oelm": subjects}, dict.fromkeys(names, _EFFECT))},
        segments={name: dict.fromkeys(SEGMENTS, Quantity(_SUMMARY, against))
                  for name, against in (("baseline", None), ("oelm", _EFFECT))},
        flow={name: dict.fromkeys(QUANTITIES, Quantity(_SUMMARY, against))
              for name, against in (("baseline", None), ("oelm", _EFFECT))},
        convergence=Convergence("accuracy", 0.5, "evaluate.target of the recipe", 2, {
            name: ArmConvergence(2, 1, dict.fromkeys(CONVERGED, _SUMMARY),
                                 dict.fromkeys(CONVERGED, _EFFECT))
            for name in names
        }),
        timing=_timing(),
        rounds={name: RoundTimes((1.0, 2.0), 0.5, _EFFECT if name == "oelm" else None, True)
                for name in names},
    )  # fmt: skip
    return json.dumps(whole.to_dict()).encode()

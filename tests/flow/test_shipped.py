"""Every shipped recipe, made small, is called healthy at every moment of its run."""

from pathlib import Path

import pytest

import frostlab as fl
from frostlab.flow.judge import FROZEN, LEARNING
from frostlab.flow.measurements import flows_of
from frostlab.recipe.load import parse_settings, shipped_experiments, shipped_recipes
from shrunken import shrunken, write_data

STEPS = 80
QUICK = ("majority-gpt",)
RECIPES = [  # experiments are these with another treatment or rate; all are trained elsewhere
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in shipped_recipes()
    if name not in shipped_experiments()
]
GROWN = "stages=[{}, {add: {layers: 1, init: identity}, steps: 30}]"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def check(name: str, settings: tuple[str, ...], folder: Path, data: Path) -> None:
    record = fl.run(shrunken(name, STEPS, parse_settings(settings)), out=folder, data_dir=data)
    flows = flows_of(record.folder)
    assert sum(len(flow.reports) for flow in flows.values()) >= 20
    for stage, flow in flows.items():
        reports = list(flow.reports)
        for count in range(1, len(reports) + 1):
            flow._reports = reports[:count]
            words = {n: v for n, v in flow.verdicts().items() if v.word not in (LEARNING, FROZEN)}
            assert words == {}, (stage, count)


@pytest.mark.parametrize("name", RECIPES)
def test_a_shipped_recipe_raises_no_alarm(name: str, tmp_path: Path, data: Path) -> None:
    check(name, (), tmp_path / "run", data)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sst2-bert", "recall-gpt", "wikitext2-decoder"])
@pytest.mark.parametrize(
    "setting",
    [
        "treatment=oelm", "treatment=oelm-random", "treatment=head", "treatment=norms",
        "treatment=bitfit", "treatment=frozen-embedding", "treatment={peft: {method: lora, r: 4}}",
        "treatment={peft: {method: ia3}}", GROWN, "optim.decay=0.3", "optim.lr=1e-5",
    ],
)  # fmt: skip
def test_its_treatments_raise_no_alarm(setting: str, name: str, tmp_path: Path, data: Path) -> None:
    if ("bitfit" in setting and "decoder" in name) or ("ia3" in setting and "gpt" in name):
        pytest.skip("it has no biases, or one projection that cannot be divided")
    check(name, (setting,), tmp_path / "run", data)

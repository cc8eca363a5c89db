"""The page and the notebook on a user's own data do what they show."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import frostlab as fl

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "own-data.md").read_text()


def blocks(kind: str) -> list[str]:
    """The code blocks of one language on the page."""
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.slow
def test_every_recipe_of_the_page_trains_and_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_data, use = blocks("python")
    subprocess.run([sys.executable, "-c", make_data], check=True)
    recipes = {re.match(r"# (\S+)\n", text)[1]: text for text in blocks("yaml")}  # type: ignore[index]
    assert list(recipes) == ["reviews.yaml", "pairs.yaml", "stories.yaml", "listening.yaml"]
    runs = {}
    for name, text in recipes.items():
        Path(name).write_text(text)
        runs[name] = fl.run(name)
    assert runs["reviews.yaml"].metrics["accuracy"] > 0.9  # type: ignore[operator]
    assert runs["pairs.yaml"].metrics["accuracy"] > 0.7  # type: ignore[operator]
    assert runs["stories.yaml"].metrics["perplexity"] < 10  # type: ignore[operator]
    assert runs["listening.yaml"].metrics["pearson"] > 0.3  # type: ignore[operator]
    ran = subprocess.run([sys.executable, "-c", use], check=True, capture_output=True, text=True)
    assert "label='good'" in ran.stdout
    samples = runs["stories.yaml"].generate("a lovely", samples=2, max_tokens=20)
    assert len(samples) == 2
    assert (runs["stories.yaml"].export("my-model") / "README.md").is_file()
    command = [sys.executable, "-m", "frostlab", "predict", "listening", "eeg", "--out", "e.npz"]
    subprocess.run(command, check=True)
    assert len(np.load("e.npz").files) == 8


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(DOCS / "own-data.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()
    shown = [
        output.get("data", {}).get("text/plain") or output.get("text", "")
        for cell in notebook.cells
        for output in cell.get("outputs", [])
    ]
    assert any(re.search(r"epoch 3  60/60  loss 0\.\d+", text) for text in shown)  # the bar
    assert any(text.startswith("too few seeds to judge oelm") for text in shown)
    assert any("head.safetensors" in text for text in shown)

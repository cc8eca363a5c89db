"""The bar on a terminal, and the lines elsewhere."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import frostlab as fl
from stages import progressive


def test_the_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """rich draws epoch, loss, speed and remaining time."""
    import io

    from rich.console import Console

    from frostlab.cli import progress

    bar, screen = progress.Bar(), io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    bar._progress.live.console = console
    bar.begin(0, 20, 10, None, 0)
    bar.advance(5, 1.25)
    bar.evaluated(10, {"accuracy": 0.5}, best=True)
    bar.close()
    for text in ("epoch", "10/20", "loss", "1.2500", "steps/s", "left", "accuracy 0.5000  (best)"):
        assert text in screen.getvalue()


def test_the_epoch_of_a_stage_is_counted_after_resuming_in_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Stages of two and of one epoch of 4 steps; stopped at step 10, the second of the second."""
    from frostlab.cli import progress
    from frostlab.training import run as running

    monkeypatch.setattr(progress, "_EVERY", 0.0)
    asked = iter([False] * 9 + [True] * 100)

    @contextmanager
    def interrupted() -> Iterator[Callable[[], bool]]:
        yield lambda: next(asked)

    recipe = progressive(stages=[{}, {"add": {}, "epochs": 2}])
    with monkeypatch.context() as patch:
        patch.setattr(running, "interruptions", interrupted)
        with pytest.raises(fl.RunFailed):
            fl.run(recipe, out=tmp_path / "run", display=progress.Lines())
    capsys.readouterr()
    fl.run(recipe, out=tmp_path / "run", resume=True, display=progress.Lines())
    shown = re.findall(r"step (\d+)  epoch (\d+)", capsys.readouterr().err)
    assert [int(epoch) for _, epoch in shown] == [1 + (int(s) - 9) // 4 for s, _ in shown]
    assert shown
    bar = progress.Bar()
    bar.begin(10, 16, 4, None, 8)
    assert bar._progress.tasks[0].fields["epoch"] == "1"
    bar.close()

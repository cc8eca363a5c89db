"""The bar on a terminal and in a notebook, and the lines elsewhere."""

import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import frostlab as fl
from comparing import compare
from frostlab import devices
from frostlab.records.schema import StepEvent
from frostlab.training import progress
from frostlab.training import run as running
from frostlab.training.distributed import Compute, World
from frostlab.training.loop import StopRequest
from frostlab.training.progress import Display, Lines, Notebook, Nowhere, Terminal, choose_screen
from stages import progressive
from tiny import tiny


def on_terminal(width: int = 120) -> tuple[Terminal, io.StringIO]:
    from rich.console import Console

    screen, text = Terminal(), io.StringIO()
    screen._progress.live.console = Console(file=text, force_terminal=True, width=width)
    return screen, text


def plain_text(text: io.StringIO) -> str:
    """What a terminal shows, without its control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.getvalue())


def test_the_bar_on_a_terminal() -> None:
    """rich draws epoch, loss, speed and remaining time."""
    screen, text = on_terminal()
    display = Display(screen)
    display.begin(0, 20, 10, "a caution", 0)
    display._next_reading = display._last_drawn = 0.0
    display.advance(5, lambda: 1.25)
    display.evaluated(10, {"accuracy": 0.5, "layers": {}}, best=True)
    display.advance(10, lambda: 1.0)
    display.close()
    shown = plain_text(text)
    for part in ("caution: a caution", "epoch 1", "10/20", "loss 1.2500", "steps/s", "left",
                 "step 10  accuracy 0.5000  (best)"):  # fmt: skip
        assert part in shown


def test_the_last_bar_has_the_loss_of_the_last_step() -> None:
    """The last steps of a run are often too close together for a reading between them."""
    screen, text = on_terminal()
    display = Display(screen)
    display.begin(0, 20, 10, None, 0)
    display.advance(20, lambda: 0.75)
    display.evaluated(20, {"accuracy": 0.5}, best=True)
    display.close()
    assert re.search(r"20/20 loss 0\.7500 .* 0:00:00 left", plain_text(text))


def test_one_of_several_runs_has_only_a_bar_with_its_name() -> None:
    screen, text = on_terminal()
    for label in ("first [red]", "second"):
        display = Display(screen, label)
        display.begin(0, 20, 10, None, 0)
        display.say("not shown")
        display.close()
    assert "first [red] ━" in plain_text(text)
    assert "second ━" in plain_text(text)
    assert "not shown" not in plain_text(text)
    assert not [task for task in screen._progress.tasks if task.visible]


def test_the_bar_of_a_long_run_with_a_long_name_fits_80_columns() -> None:
    screen, text = on_terminal(80)
    display = Display(screen, "an arm with a very long name seed 12")
    display.begin(0, 123_456, 10, None, 0)
    display._loss, display._step = 12.3456, 123_455
    screen.draw(display._bar())
    screen._progress.refresh()
    display.close()
    assert "an arm with a very long… ━" in plain_text(text)
    assert re.search(
        r"123455/123456 loss 12\.3456 \d:\d\d:\d\d \S:\S\S:\S\S left", plain_text(text)
    )


def test_the_epoch_of_a_stage_is_counted_after_resuming_in_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Stages of two and of one epoch of 4 steps; stopped at step 10, the second of the second."""
    monkeypatch.setattr(Lines, "every", 0.0)
    asked = iter([False] * 9 + [True] * 100)

    @contextmanager
    def interrupted() -> Iterator[Callable[[], bool]]:
        yield lambda: next(asked)

    recipe = progressive(stages=[{}, {"add": {}, "epochs": 2}])
    with monkeypatch.context() as patch:
        patch.setattr(running, "interruptions", interrupted)
        with pytest.raises(fl.RunFailed):
            fl.run(recipe, out=tmp_path / "run", progress=True)
    capsys.readouterr()
    fl.run(recipe, out=tmp_path / "run", resume=True, progress=True)
    shown = re.findall(r"step (\d+)  epoch (\d+)", capsys.readouterr().err)
    assert [int(epoch) for _, epoch in shown] == [1 + (int(s) - 9) // 4 for s, _ in shown]
    assert shown


def test_the_loss_is_that_of_the_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(Lines, "every", 0.0)
    record = fl.run(tiny(), runs=tmp_path, progress=True)
    shown = re.findall(r"step (\d+)  epoch \d+  loss (\S+)", capsys.readouterr().err)
    losses = [loss for event in record.events(StepEvent) for loss in event.loss]
    assert shown == [(str(step), f"{loss:.4f}") for step, loss in enumerate(losses, 1)]
    assert len(shown) == 16


def test_a_run_goes_on_when_the_reader_of_its_lines_has_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patch, open(writer, "wb", buffering=0) as pipe:
        patch.setattr(sys, "stderr", io.TextIOWrapper(pipe, write_through=True))
        with pytest.raises(BrokenPipeError):
            print("nobody reads this", file=sys.stderr, flush=True)
        record = fl.run(tiny(train__epochs=1), runs=tmp_path, progress=True)
        sys.stderr.detach()
    assert record.status == "finished"


def test_a_gpu_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value is copied when it is asked for, and read when the copy is there."""
    arrived: list[bool] = []

    class Copied:
        def record(self) -> None:
            arrived.append(False)

        def query(self) -> bool:
            return arrived[-1]

    allocate = torch.empty
    monkeypatch.setattr(devices, "runs_ahead", lambda device: True)
    monkeypatch.setattr(devices, "has_events", lambda device: True)
    monkeypatch.setattr(torch.cuda, "Event", Copied)
    monkeypatch.setattr(torch, "empty", lambda size, dtype, pin_memory: allocate(size, dtype=dtype))
    readback = devices.Readback(torch.device("cpu"))
    assert readback.latest(torch.tensor(1.0)) is None
    assert readback.latest(torch.tensor(2.0)) is None, "the first has not arrived"
    arrived[-1] = True
    assert readback.latest(torch.tensor(3.0)) == 1.0
    arrived[-1] = True
    assert readback.latest(torch.tensor(4.0)) == 3.0
    assert len(arrived) == 3


def test_a_device_without_events_is_waited_for_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(devices, "runs_ahead", lambda device: True)
    monkeypatch.setattr(devices.time, "monotonic", lambda: now[0])
    readback = devices.Readback(torch.device("cpu"))
    read = []
    for value in range(5):
        read.append(readback.latest(torch.tensor(float(value))))
        now[0] += 0.5
    assert read == [0.0, 0.0, 2.0, 2.0, 4.0]


def test_the_loss_of_several_processes_is_exchanged_with_their_requests_to_stop() -> None:
    class Two(World):
        def total(self, tensor: torch.Tensor) -> torch.Tensor:
            return 2 * tensor  # the other process has the same numbers

    compute = Compute(torch.device("cpu"), torch.float32, Two(0, 2, 0))
    should_stop = StopRequest(lambda: False, compute)
    assert not should_stop(1, torch.tensor(0.75))
    assert should_stop.loss == 1.5


def test_what_is_shown_where(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose_screen(None), Nowhere)
    assert isinstance(choose_screen(True), Lines)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert isinstance(choose_screen(None), Terminal)
    assert isinstance(choose_screen(False), Nowhere)
    monkeypatch.setenv("RANK", "1")
    assert isinstance(choose_screen(True), Nowhere)
    with pytest.raises(fl.BadInput, match="^progress 'yes' should be True, False or None$"):
        choose_screen("yes")  # type: ignore[arg-type]


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """The outputs of a notebook's cell, each with all the contents that it has had."""
    outputs: list[list[dict[str, str]]] = []

    class Handle:
        def __init__(self, place: int) -> None:
            self.place = place

        def update(self, bundle: dict[str, str], *, raw: bool) -> None:
            assert raw
            outputs[self.place].append(bundle)

    def display(bundle: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        assert raw
        assert display_id
        outputs.append([bundle])
        return Handle(len(outputs) - 1)

    class Shell:
        kernel = object()

    package, module = ModuleType("IPython"), ModuleType("IPython.display")
    package.get_ipython = Shell  # type: ignore[attr-defined]
    module.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr(Notebook, "every", 0.0)
    return outputs


def test_a_run_in_a_notebook_has_one_output(
    notebook: list[list[dict[str, str]]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fl.run(tiny(), runs=tmp_path)
    (contents,) = notebook
    assert len(contents) >= 16
    last = contents[-1]
    assert "\nstep 16  accuracy " in last["text/plain"]
    assert re.search(r"\nepoch 2  16/16  loss \d\.\d{4}  \S+ steps/s", last["text/plain"])
    assert '<progress value="16" max="16"></progress>' in last["text/html"]
    assert capfd.readouterr().err == ""
    fl.run(tiny(), runs=tmp_path, progress=False)
    assert len(notebook) == 1


def test_a_comparison_in_a_notebook_shows_the_bar_of_each_run(
    notebook: list[list[dict[str, str]]], tmp_path: Path
) -> None:
    compare(tmp_path / "c", seeds=1)
    (contents,) = notebook
    assert any("baseline seed 0 <progress" in content["text/html"] for content in contents)
    assert any("oelm seed 0 <progress" in content["text/html"] for content in contents)
    assert "<progress" not in contents[-1]["text/html"], "no run is left"
    assert "run 2 of 2  oelm seed 0  accuracy" in contents[-1]["text/plain"]


def test_a_notebook_escapes_names_and_counts_old_lines(
    notebook: list[list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_SHOWN_LINES", 2)
    screen = Notebook()
    for number in range(5):
        screen.line(f"<b>{number}</b>\x1b")
    assert notebook[0][-1] == {
        "text/plain": "… 3 more above\n<b>3</b>\\x1b\n<b>4</b>\\x1b",
        "text/html": "<pre>… 3 more above\n&lt;b&gt;3&lt;/b&gt;\\x1b\n&lt;b&gt;4&lt;/b&gt;\\x1b"
        "</pre>",
    }


def test_a_terminal_of_ipython_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = ModuleType("IPython")
    package.get_ipython = object
    monkeypatch.setitem(sys.modules, "IPython", package)
    assert isinstance(choose_screen(None), Nowhere)

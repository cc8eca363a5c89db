"""Environment variables that are not what they should be: one line, exit code 2."""

import pytest

from frostlab import BadInput
from frostlab.devices import choose_device
from frostlab.launcher import check_variables, local_world_size, rank, world_size
from frostlab.recipe.settings import Train
from frostlab.storage import cache_folder
from frostlab.training.distributed import process_group

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["x", "", "-1", "1.5", "1e3", "9" * 6000, "٣", "10000000", " 1"])
def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match=f"^the environment variable {name} is '"):
        check_variables()


def test_programs_end_with_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from frostlab.cli.main import main

    monkeypatch.setattr("sys.argv", ["frostlab", "recipes"])
    monkeypatch.setenv("WORLD_SIZE", "x")
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_errors_show_no_terminal_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from frostlab.cli.main import main

    monkeypatch.setattr("sys.argv", ["frostlab", "run", "docstrings-gpt", "--set", "\x1b[2J\n=1"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "\x1b" not in error
    assert error.count("\n") == 1


def test_every_reader_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "x")
    with (
        pytest.raises(BadInput, match="WORLD_SIZE"),
        process_group(choose_device("cpu"), Train()),
    ):
        pass
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (rank(), world_size(), local_world_size()) == (0, 2, 2)


def test_a_cache_without_a_home_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROSTLAB_CACHE", "~nobody-has-this-name/x")
    with pytest.raises(BadInput, match="the cache ~nobody-has-this-name/x: the home folder"):
        cache_folder(None)


@pytest.mark.parametrize("device", ["", "cuda:99999999999999", "gpu", "cpu:x", "\x1b[31m", "meta"])
def test_odd_devices_are_refused(device: str) -> None:
    with pytest.raises(BadInput, match=r"^train\.device"):
        choose_device(device)

"""A .mat file, however damaged, is arrays or one line; the process that reads it may crash."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from scipy import io, sparse

from frostlab.data.eeg import matlab
from frostlab.data.eeg.matlab import MatFiles
from frostlab.errors import BadInput


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.mat"
    io.savemat(path, {"eeg": np.arange(6.0).reshape(2, 3), "n": np.arange(3, dtype=np.int16)})
    return path


def test_arrays_and_cells_come_back(good: Path) -> None:
    cells = np.empty((1, 2), dtype=object)
    cells[0, 0], cells[0, 1] = np.ones((3, 1)), np.zeros((2, 1))
    many = good.with_name("many.mat")
    io.savemat(many, {"stim": cells}, do_compression=True)
    files = MatFiles()
    read = files.read(good, "eeg", "n")
    np.testing.assert_array_equal(read["eeg"][0], np.arange(6.0).reshape(2, 3))
    np.testing.assert_array_equal(read["n"][0], [[0, 1, 2]])
    process = files._process
    assert [array.shape for array in files.read(many, "stim")["stim"]] == [(3, 1), (2, 1)]
    assert files._process is process, "one process reads all files"
    files.close()


BAD = {
    "text": ({"eeg": "words"}, ": eeg holds <U5, not samples"),
    "struct": ({"eeg": {"a": 1}}, "not samples"),
    "complex": ({"eeg": np.ones((2, 2)) * 1j}, ": eeg holds complex128, not samples"),
    "cells of text": ({"eeg": np.array(["a", "bc"], dtype=object)}, "not samples"),
    "sparse": ({"eeg": sparse.eye(3).tocsc()}, ": eeg holds csc_"),
    "another": ({"data": np.ones(3)}, " has no variable eeg; it has data"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_array_of_numbers_is_refused(tmp_path: Path, name: str) -> None:
    variables, message = BAD[name]
    io.savemat(tmp_path / "a.mat", variables)
    with pytest.raises(BadInput) as caught:
        MatFiles().read(tmp_path / "a.mat", "eeg")
    assert message in str(caught.value)


def test_cut_files_and_pipes_are_one_line(good: Path, tmp_path: Path) -> None:
    files, whole = MatFiles(), good.read_bytes()
    for length in (0, 3, 100, 130, 150, len(whole) - 40):
        (tmp_path / "a.mat").write_bytes(whole[:length])
        with pytest.raises(BadInput, match=r"a\.mat (cannot be read|has no variable)"):
            files.read(tmp_path / "a.mat", "eeg", "n")
    os.mkfifo(tmp_path / "b.mat")
    with pytest.raises(BadInput, match="is not a regular file"):
        files.read(tmp_path / "b.mat", "eeg")
    assert files.read(good, "eeg")["eeg"][0].shape == (2, 3), "the process still reads"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import os; os.kill(os.getpid(), 11)", "signal 11"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("import time; time.sleep(60)", "more than"),
        ('print(\'{"shapes": {"eeg": [[-1]]}}\', flush=True)', "the process that reads it ended"),
        ('print(\'{"shapes": {"eeg": [[1 << 40]]}}\', flush=True)', "ended"),
        ("print('[' * 100, flush=True)", "ended"),
    ],
)
def test_a_crash_is_one_line(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, message: str
) -> None:
    script = tmp_path / "program.py"
    script.write_text(f"import sys\nprint('ready', flush=True)\nsys.stdin.readline()\n{program}\n")
    files = MatFiles()
    with monkeypatch.context() as patch:
        patch.setattr(matlab, "PROGRAM", str(script))
        patch.setattr(matlab, "SECONDS", 0.5)
        start = time.monotonic()
        with pytest.raises(BadInput) as caught:
            files.read(good, "eeg")
        assert time.monotonic() - start < 10
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{good} cannot be read: ")
    assert files.read(good, "eeg")["eeg"][0].shape == (2, 3), "the next file has a new process"


def test_the_process_has_little_memory_and_no_torch() -> None:
    code = (
        "import sys, runpy; sys.argv = ['x']; g = runpy.run_path(sys.stdin.readline().strip());"
        "from scipy import io; g['_limit_memory']();"
        "assert 'torch' not in sys.modules and 'frostlab' not in sys.modules;"
        "import numpy as np; np.ones(1 << 22)\n"
        "try: np.ones(1 << 28)\n"
        "except MemoryError: print('refused')"
    )
    run = [sys.executable, "-P", "-c", code]
    done = subprocess.run(run, input=matlab.PROGRAM, capture_output=True, text=True, timeout=60)
    assert done.stdout == "refused\n", done.stderr

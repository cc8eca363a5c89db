"""A .mat file, however damaged, is arrays or one line; the process that reads it may crash."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from scipy import io, sparse

from frostlab.data.eeg import matlab
from frostlab.data.eeg.matlab import MatFiles
from frostlab.data.eeg.readers import read_raw
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
    "text": ({"eeg": "words"}, ": eeg holds <U5, not an array of integers"),
    "struct": ({"eeg": {"a": 1}}, "not an array of integers"),
    "complex": ({"eeg": np.ones((2, 2)) * 1j}, ": eeg holds complex128, not an array of integers"),
    "cells of text": ({"eeg": np.array(["a", "bc"], dtype=object)}, "not an array of integers"),
    "sparse": ({"eeg": sparse.eye(3).tocsc()}, ": eeg holds csc_"),
    "another": ({"data": np.ones(3)}, " has no variable eeg; it has data"),
}


@pytest.fixture(scope="module")
def files() -> Iterator[MatFiles]:
    made = MatFiles()
    yield made
    made.close()


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_array_of_numbers_is_refused(tmp_path: Path, name: str, files: MatFiles) -> None:
    variables, message = BAD[name]
    io.savemat(tmp_path / "a.mat", variables)
    with pytest.raises(BadInput) as caught:
        files.read(tmp_path / "a.mat", "eeg")
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
        pytest.param("import sys; sys.exit(3)", "exit code 3", marks=pytest.mark.slow),
        ("import time; time.sleep(60)", "it took too long"),
        ('print(\'{"shapes": {"eeg": [[-1]]}}\', flush=True)', "the process that reads it ended"),
        *(
            pytest.param(program, "ended", marks=pytest.mark.slow)
            for program in (
                'print(\'{"shapes": {"eeg": [[1 << 40]]}}\', flush=True)',
                "print('[' * 100, flush=True)",
            )
        ),
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
        "from scipy import io; g['_MemoryLimit']().set(g['MEMORY']);"
        "assert 'torch' not in sys.modules and 'frostlab' not in sys.modules;"
        "import numpy as np; np.ones(1 << 22)\n"
        "try: np.ones(1 << 28)\n"
        "except MemoryError: print('refused')"
    )
    run = [sys.executable, "-P", "-c", code]
    done = subprocess.run(run, input=matlab.PROGRAM, capture_output=True, text=True, timeout=60)
    assert done.stdout == "refused\n", done.stderr


SIGNALS = np.random.default_rng(0).standard_normal((3, 500)).astype(np.float32)  # μV


def eeglab(**changes: object) -> dict[str, object]:
    """Return the variables of a .set file with three channels, of which one is EOG."""
    fields = ("labels", "type", "X", "Y", "Z")
    places = np.zeros(3, dtype=[(field, "O") for field in fields])
    for row, (name, kind) in enumerate([("Fz", "EEG"), ("Cz", "EEG"), ("E1", "EOG")]):
        places[row] = (name, kind, 0.05 + 0.01 * row, 0.02, 0.03)
    empty = {name: [] for name in ("event", "icawinv", "icasphere", "icaweights", "icaact")}
    sizes = {"nbchan": 3.0, "trials": 1.0, "pnts": 500.0, "srate": 64.0, "xmin": 0.0, "xmax": 7.8}
    return {"setname": "x", **sizes, **empty, "chanlocs": places, "data": SIGNALS, **changes}


@pytest.mark.parametrize("layout", ["flat", "nested", "two files"])
def test_a_set_file_is_read_as_mne_reads_it(tmp_path: Path, layout: str) -> None:
    mne = pytest.importorskip("mne")
    path = tmp_path / "a.set"
    if layout == "two files":
        SIGNALS.T.tofile(tmp_path / "a.fdt")
    values = eeglab(data="a.fdt") if layout == "two files" else eeglab()
    io.savemat(path, values if layout == "flat" else {"EEG": values})
    read, direct = read_raw(path, MatFiles(mne=True)), mne.io.read_raw(path, verbose="ERROR")
    np.testing.assert_array_equal(read.get_data(), direct.get_data())
    np.testing.assert_allclose(read.get_data(), SIGNALS * 1e-6, rtol=1e-6)
    for raw in (read, direct):
        assert raw.ch_names == ["Fz", "Cz", "E1"]
        assert raw.get_channel_types() == ["eeg", "eeg", "eog"]
        assert raw.info["sfreq"] == 64.0


def test_bad_set_files_are_one_line(tmp_path: Path) -> None:
    pytest.importorskip("mne")
    files, path, other = MatFiles(mne=True), tmp_path / "a.set", tmp_path / "other"
    other.mkdir()
    SIGNALS.T.tofile(other / "b.fdt")

    def refusal(most: int = 1 << 20, **changes: object) -> str:
        io.savemat(path, {"EEG": eeglab(**changes)}, do_compression=True)
        with pytest.raises(BadInput) as caught:
            files.read_set(path, most)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "names data in another folder" in refusal(data="other/b.fdt")
    assert "names data in another folder" in refusal(data=str(other / "b.fdt"))
    assert refusal(most=1000) == f"{path} has more than 1,000 values"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadInput, match=r"a\.set cannot be read"):
        files.read_set(path, 1 << 20)
    io.savemat(path, {"EEG": eeglab()})
    assert files.read_set(path, 1 << 20).signals.shape == (3, 500), "the process still reads"


def test_a_crash_in_a_set_file_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mne")
    io.savemat(tmp_path / "a.set", eeglab())
    script = tmp_path / "program.py"
    script.write_text("import os; print('ready', flush=True); input(); os.kill(os.getpid(), 11)")
    monkeypatch.setattr(matlab, "PROGRAM", str(script))
    with pytest.raises(BadInput, match=r"a\.set cannot be read: .* ended \(signal 11\)"):
        read_raw(tmp_path / "a.set", MatFiles(mne=True))


def test_a_small_set_file_cannot_take_much_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mne")
    program = Path(matlab.PROGRAM).read_text()
    assert "\nMEMORY = 1 << 30 " in program
    script = tmp_path / "program.py"
    script.write_text(program.replace("\nMEMORY = 1 << 30 ", "\nMEMORY = 1 << 26 "))
    monkeypatch.setattr(matlab, "PROGRAM", str(script))
    zeros = np.zeros((3, 4_000_000), np.int8)  # 12 kB on the disk, 96 MB as float64
    path = tmp_path / "a.set"
    io.savemat(path, {"EEG": eeglab(data=zeros, pnts=4e6)}, do_compression=True)
    with pytest.raises(BadInput, match=r"a\.set cannot be read: it takes more than 64 MiB of mem"):
        MatFiles(mne=True).read_set(path, 1 << 28)

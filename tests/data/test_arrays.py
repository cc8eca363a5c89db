"""NumPy files are read in bounded memory: the shape is checked before an array is made."""

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from frostlab.data.arrays import MOST_VALUES, map_npy, read_npy, read_npz
from frostlab.errors import BadInput


def saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def declared(shape: str, kind: str = "<f8", content: bytes = b"\0" * 64) -> bytes:
    head = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + content


@pytest.mark.parametrize("kind", ["<f8", ">f4", "<f2", "<i2", "|u1"])
def test_arrays_come_back(tmp_path: Path, kind: str) -> None:
    array = np.arange(12).reshape(3, 4).astype(kind)
    np.save(tmp_path / "a.npy", array)
    np.save(tmp_path / "f.npy", np.asfortranarray(array))
    np.savez(tmp_path / "a.npz", x=array, y=array[0])
    np.testing.assert_array_equal(read_npy(tmp_path / "a.npy"), array)
    np.testing.assert_array_equal(read_npy(tmp_path / "f.npy"), array)
    read = read_npz(tmp_path / "a.npz")
    assert list(read) == ["x", "y"]
    np.testing.assert_array_equal(read["x"], array)


BAD = {
    "80 GB": (declared("(10000000000,)"), "an array may have 0 to 134,217,728 values"),
    "more than there is": (declared("(9,)"), "is cut off: shape (9,) of float64 takes 72 bytes"),
    "negative": (declared("(-1, -8)"), "an array may have 0 to 134,217,728 values"),
    "negative and zero": (declared("(-1, 0)"), "an array may have 0 to 134,217,728 values"),
    "not whole": (declared("(1.5,)"), "cannot be read"),
    "a scalar": (declared("()"), "not an array of integers"),
    "objects": (declared("(1,)", "|O"), "holds object of shape (1,), not an array of integers"),
    "pickle": (b"cos\nsystem\n(S'true'\ntR.", "cannot be read"),
    "complex": (saved(np.ones(3) * 1j), "holds complex128 of shape (3,), not an array of integers"),
    "text": (saved(np.array(["a"])), "not an array of integers"),
    "records": (saved(np.zeros(2, dtype=[("a", "f8")])), "not an array of integers"),
    "wide numbers": (saved(np.ones(3, np.longdouble)), "of shape (3,), not an array of integers"),
    "empty type": (declared("(3,)", "|V0"), "not an array of integers"),
    "brackets": (declared("(" * 5000), "cannot be read"),
    "a call": (declared("__import__('os').getcwd()"), "cannot be read"),
    "long header": (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b" " * 99, "header is longer"),
    "version": (b"\x93NUMPY\x09\x09" + b" " * 99, "cannot be read"),
    "nothing": (b"", "cannot be read"),
    "an .npz": (b"PK\x03\x04" + b"\0" * 99, "cannot be read"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_array_is_one_line(tmp_path: Path, name: str) -> None:
    content, message = BAD[name]
    path = tmp_path / "a.npy"
    path.write_bytes(content)
    with pytest.raises(BadInput) as caught:
        read_npy(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path} ")
    assert "\n" not in str(caught.value)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as packed:
        packed.writestr("x.npy", content)
    with pytest.raises(BadInput, match="a.npz: 'x'"):
        read_npz(tmp_path / "a.npz")


def test_an_npy_called_npz_and_bombs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(saved(np.ones(3)))
    with pytest.raises(BadInput, match="cannot be read"):
        read_npz(path)
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("x.npy", b"")
    whole = bytearray(path.read_bytes())
    at = whole.rindex(b"PK\x01\x02")
    whole[at + 24 : at + 28] = b"\xfe\xff\xff\xff"  # the declared size
    path.write_bytes(whole)
    with pytest.raises(BadInput, match="unpacks to more than 1 GiB"):
        read_npz(path)


def test_a_small_npz_cannot_become_large(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(1 << 20))  # 8 kB on the disk
    with pytest.raises(BadInput, match="unpacks to more than 100 times its own size"):
        read_npz(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", x=np.zeros(1 << 20))
    assert read_npz(tmp_path / "b.npz")["x"].shape == (1 << 20,)


def test_a_file_with_holes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(declared(f"({MOST_VALUES + 1},)"))
    os.truncate(path, 9 * MOST_VALUES)  # as long as the file says, and without blocks on the disk
    with pytest.raises(BadInput, match=r"an array may have 0 to 134,217,728 values$"):
        read_npy(path)


def test_an_array_can_be_changed(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    array = read_npy(path)
    array += 1
    np.testing.assert_array_equal(array, np.arange(6.0).reshape(2, 3) + 1)


def test_only_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.npy")
    with pytest.raises(BadInput, match="is not a regular file"):
        read_npy(tmp_path / "a.npy")
    with pytest.raises(BadInput, match="cannot be read"):
        read_npy(tmp_path / "b.npy")


def test_a_cached_array_has_its_type(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    assert map_npy(tmp_path / "a.npy", "int64").tolist() == [0, 1, 2]
    with pytest.raises(BadInput, match="holds int64, not int32 or uint16"):
        map_npy(tmp_path / "a.npy", "int32", "uint16")
    for content in (declared("(1,)", "|O"), b"", b"PK\x03\x04", b"\x80\x04N."):
        (tmp_path / "a.npy").write_bytes(content)
        with pytest.raises(BadInput, match="cannot be read|holds object"):
            map_npy(tmp_path / "a.npy", "int64")

"""Readers of NumPy files that check the size of an array before they allocate memory for it."""

import io
import math
import os
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from frostlab.data.files import RATIO, UNPACKED
from frostlab.errors import BadInput, first_line
from frostlab.storage import open_regular

MOST_VALUES = 1 << 27  # the most values of one array; a .npz may unpack to 8 × MOST_VALUES bytes
_HEADER = 10_000  # the most bytes of an array's header, as in NumPy


def read_npy(path: Path) -> NDArray[Any]:
    """Read a .npy file of integers or floats."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            return _read_array(file, size, str(path))
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or first_line(error)}") from error


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Read all arrays of a .npz file; each must hold integers or floats."""
    arrays = {}
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as packed:
            members = packed.infolist()
            unpacked = sum(member.file_size for member in members)
            if unpacked > 8 * MOST_VALUES:
                raise BadInput(f"{path} unpacks to more than {8 * MOST_VALUES >> 30} GiB")
            if unpacked > max(UNPACKED, RATIO * os.fstat(file.fileno()).st_size):
                raise BadInput(
                    f"{path} unpacks to more than {RATIO} times its own size; "
                    "save it with np.savez, which does not compress"
                )
            for member in members:
                name = member.filename.removesuffix(".npy")
                with packed.open(member) as content:
                    raw = content.read(member.file_size + 1)
                arrays[name] = _read_array(io.BytesIO(raw), len(raw), f"{path}: {name!r:.80}")
    except BadInput:
        raise
    except Exception as error:  # zipfile raises many types of errors for a damaged file
        raise BadInput(f"{path} cannot be read ({first_line(error):.300})") from None
    return arrays


def map_npy(path: Path, *kinds: str) -> Any:
    """Memory-map an array of the cache whose dtype is one of `kinds`, such as "int64"."""
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # NumPy raises many types of errors for a damaged file
        raise BadInput(f"{path} cannot be read: {first_line(error):.300}") from None
    if array.dtype.name not in kinds:
        raise BadInput(f"{path} holds {array.dtype}, not {' or '.join(kinds)}")
    return array


def _read_array(file: IO[bytes], size: int, where: str) -> NDArray[Any]:
    """Read an array from a file of `size` bytes; refuse an array that is larger than the file."""
    format = np.lib.format
    try:
        version = format.read_magic(file)
        length = file.read(2 if version == (1, 0) else 4)
        if int.from_bytes(length, "little") > _HEADER:
            raise ValueError(f"its header is longer than {_HEADER} bytes")
        file.seek(-len(length), io.SEEK_CUR)
        read_header = {(1, 0): format.read_array_header_1_0, (2, 0): format.read_array_header_2_0}
        shape, fortran, dtype = read_header[version](file, max_header_size=_HEADER)
    except Exception as error:  # NumPy evaluates the header, which can raise many types of errors
        unknown = "the version of its .npy format is unknown"
        reason = unknown if isinstance(error, KeyError) else first_line(error)
        raise BadInput(f"{where} cannot be read: {reason:.300}") from None
    if dtype.kind not in "fiu" or dtype.itemsize > 8 or not shape:
        raise BadInput(
            f"{where} holds {dtype} of shape {shape}, not an array of integers or floats of up to "
            "64 bits"
        )
    count, left = math.prod(shape), size - file.tell()
    if min(shape) < 0 or count > MOST_VALUES:
        raise BadInput(
            f"{where} has shape {shape!s:.200}; an array may have 0 to {MOST_VALUES:,} values"
        )
    if count * dtype.itemsize > left:
        raise BadInput(
            f"{where} is cut off: shape {shape} of {dtype} takes {count * dtype.itemsize:,} bytes, "
            f"and {left:,} are there"
        )
    values = np.empty(count, dtype)
    if file.readinto(values.view(np.uint8)) != values.nbytes:  # type: ignore[attr-defined]
        raise BadInput(f"{where} was cut off while it was read")
    return values.reshape(shape, order="F" if fortran else "C")

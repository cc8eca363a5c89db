"""Fuzz targets of the plain JSON reader."""

from pathlib import Path

from frostlab.storage import read_json
from fuzz.mutate import Target


def _read(data: bytes, folder: Path) -> None:
    path = folder / "x.json"
    path.write_bytes(data)
    read_json(path)


TARGETS = {"json": Target(lambda: [b'{"a": [1, {"b": null}]}'], _read, "json")}

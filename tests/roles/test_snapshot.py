"""The anatomy as plain values and as a table."""

import json

import frostlab as fl
from zoo import build


def test_an_anatomy_as_json_and_as_a_table() -> None:
    anatomy = fl.freeze(build("gpt_neox")[0], "query", "key")
    data = json.loads(json.dumps(anatomy.to_dict()))
    assert data["frozen"] == anatomy.count("frozen") > 0
    first = next(p for p in data["parts"] if p["role"] == "query")
    assert (first["heads"], first["head_size"], first["layout"]) == (4, 8, "interleaved")
    table = anatomy.table()
    assert "layers[0:2]  2 alike" in table
    assert f"{anatomy.count('frozen'):,}" in table

"""The anatomy as plain values and as a table."""

import json
from dataclasses import replace

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


def test_a_notebook_shows_the_table_escaped() -> None:
    anatomy = replace(fl.freeze(build("gpt_neox")[0], "query", "key"), model="<script>x</script>")
    shown = anatomy._repr_html_()
    assert "<script" not in shown
    assert "&lt;script&gt;x" in shown
    assert f"{anatomy.count('frozen'):,} frozen" in shown
    assert shown.count("layers[0:2]  2 alike") == len(anatomy.layers[0].parts)
    assert repr(anatomy).startswith("Anatomy(<script>x</script>: 2 layers, ")

"""The selection language: the parts that selections name, and the errors of bad ones."""

import pytest
import transformers

import frostlab as fl
from zoo import CASES, build


def keys(model: object, *selections: str) -> set[str]:
    return {part.key for part in fl.anatomy(model).select(*selections)}  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def bert() -> transformers.BertModel:
    return build("bert")[0]  # type: ignore[return-value]


def test_roles_are_unions(bert: transformers.BertModel) -> None:
    both = keys(bert, "query", "key")
    assert both == keys(bert, "query") | keys(bert, "key")
    assert both == {
        f"encoder.layer.{i}.attention.self.{role}.{kind}"
        for i in (0, 1)
        for role in ("query", "key")
        for kind in ("weight", "bias")
    }


def test_layers_slices_and_biases(bert: transformers.BertModel) -> None:
    assert keys(bert, "layers[0]") | keys(bert, "layers[1]") == keys(bert, "layers[0:2]")
    assert keys(bert, "layers[:]") == keys(bert, "layers[::1]") == keys(bert, "layers[-2:]")
    assert keys(bert, "layers[-1].query") == keys(bert, "layers[1].query")
    assert keys(bert, "layers[1].query.bias") == {"encoder.layer.1.attention.self.query.bias"}
    assert keys(bert, "all.bias") == {n for n, _ in bert.named_parameters() if n.endswith(".bias")}
    assert keys(bert, "query.weight") | keys(bert, "query.bias") == keys(bert, "query")
    assert keys(bert, "all") == {n for n, _ in bert.named_parameters()}


def test_taking_away(bert: transformers.BertModel) -> None:
    assert keys(bert, "all", "!query") == keys(bert, "all") - keys(bert, "query")
    assert keys(bert, "!query", "all") == keys(bert, "!query")
    assert keys(bert, "layers[0]", "!norm") == keys(bert, "layers[0]") - keys(bert, "norm")


def test_two_stacks() -> None:
    t5 = build("t5")[0]
    one = keys(t5, "encoder.layers[0]")
    assert one
    assert all(key.startswith("encoder.block.0.") for key in one)
    assert keys(t5, "layers[0]") == one | keys(t5, "decoder.layers[0]")
    assert keys(t5, "cross") >= keys(t5, "cross.query")
    assert keys(t5, "query") == keys(t5, "cross.query") | keys(t5, "self.query")
    assert not keys(t5, "layers[0]") & keys(t5, "position")  # it serves every layer
    clip = build("clip")[0]
    assert all("vision_model" in key for key in keys(clip, "vision.layers[1].query"))


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ("querry", "`querry` is not a role or a stack; did you mean `query`?"),
        ("q", "did you mean `query`?"),
        ("classifier", "did you mean `head`?"),
        ("layers", "did you mean `layers[0]`?"),
        ("encoder.query", "`encoder` in selection `encoder.query` is not a role or a stack"),
        ("gate", "`gate` matches nothing in BertModel"),
        ("cross.query", "`cross.query` matches nothing in BertModel"),
        ("layers[2]", "the model has layers 0 to 1; did you mean `layers[1]`?"),
        ("layers[-3]", "did you mean `layers[0]`?"),
        ("layers[1:5]", "the model has layers 0 to 1"),
        ("layers[1:1]", "is empty"),
        ("layers[a]", "write layers[2], layers[-1] or layers[0:3]"),
        ("layers[]", "write layers[2]"),
        ("layers[0:2:0]", "write layers[2]"),
        ("query.layers[0]", "out of place"),
        ("query.key", "out of place"),
        ("", "is empty"),
        ("!", "is empty"),
        ("que", "did you mean `query`?"),
    ],
)
def test_bad_selections_name_the_problem_and_the_nearest(
    bert: transformers.BertModel, selection: str, message: str
) -> None:
    with pytest.raises(fl.BadInput) as error:
        keys(bert, selection)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("selection", [["query", "key"], None, 3])
def test_selections_are_strings(bert: transformers.BertModel, selection: object) -> None:
    with pytest.raises(fl.BadInput, match="selections are strings"):
        fl.freeze(bert, selection)  # type: ignore[arg-type]


def test_nothing_left_is_an_error(bert: transformers.BertModel) -> None:
    with pytest.raises(fl.BadInput, match="select nothing"):
        keys(bert, "query", "!query")
    with pytest.raises(fl.BadInput, match="no selection"):
        keys(bert)


def test_part_of_shared_layers_is_an_error() -> None:
    albert = build("albert")[0]
    with pytest.raises(fl.BadInput, match=r"2 layers of AlbertModel \(0 to 1\) share enc"):
        keys(albert, "layers[0].query")
    assert keys(albert, "layers[0:2].query") == keys(albert, "query")
    groups = build("albert-two-groups")[0]
    assert len(keys(groups, "layers[2:4].query.weight")) == 1
    with pytest.raises(fl.BadInput, match=r"\(2 to 3\) share"):
        keys(groups, "layers[0:3]")


def test_a_tied_head_names_the_tie() -> None:
    model = transformers.GPT2LMHeadModel(CASES["gpt2"].make_config())
    with pytest.raises(fl.BadInput, match=r"lm_head.weight is tied to .*; add .* to take both$"):
        keys(model, "head")  # without `embedding`, nothing would be left to select
    with pytest.raises(fl.BadInput, match="add `embedding` to take both, or `!embedding` to leave"):
        keys(model, "head", "query")
    assert keys(model, "head", "query", "!embedding") == keys(model, "query")
    assert keys(model, "head", "embedding") == {"transformer.wte.weight"}
    masked = transformers.BertForMaskedLM(CASES["bert"].make_config())
    rest = keys(masked, "head", "!embedding")
    assert "cls.predictions.transform.dense.weight" in rest
    assert "bert.embeddings.word_embeddings.weight" not in rest
    for selections in (("!head",), ("all", "!head")):
        with pytest.raises(fl.BadInput, match="add `!embedding` to remove both"):
            keys(model, *selections)
    assert "transformer.wte.weight" not in keys(model, "!head", "!embedding")
    assert keys(model, "all", "embedding", "!head") == keys(model, "all")
    t5 = transformers.T5ForConditionalGeneration(CASES["t5"].make_config())
    with pytest.raises(fl.BadInput, match="tied to shared.weight"):
        keys(t5, "encoder")


def test_an_untied_head_is_selected() -> None:
    config = CASES["gpt2"].make_config()
    config.tie_word_embeddings = False
    assert keys(transformers.GPT2LMHeadModel(config), "head") == {"lm_head.weight"}


@pytest.mark.parametrize("text", ["query\x1b[31m", "a\nb", "\udc80", "layers[0]." * 1000])
def test_odd_selections_are_refused_in_one_short_line(text: str) -> None:
    from frostlab.roles.selection import parse

    with pytest.raises(fl.BadInput, match="unprintable characters, or more than") as caught:
        parse(text, [])
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200

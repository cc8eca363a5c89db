"""New layers: their values, their places, and an unchanged rest of the model."""

import copy
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import frostlab as fl
from frostlab.models.decoder import Decoder, DecoderConfig
from frostlab.surgery.grow import find_trunk
from frostlab.surgery.split import SplitProjection
from growing import ALL, ENDS_IN_A_NORM, LAYERS, OWN, answers, build, distance

PLACES = ("top", "bottom", 1)
SHAPES = [
    (name, at, layers)
    for name, at, layers in product(ALL, PLACES, (1, 3))
    if (name, at) != ("decoder-after", "bottom")
]


def layers_of(model: nn.Module) -> nn.ModuleList:
    return find_trunk(model, fl.anatomy(model)).layers


@pytest.mark.parametrize(("name", "at", "layers"), SHAPES)
def test_identity_leaves_the_function(name: str, at: Any, layers: int) -> None:
    model = build(name)
    before = answers(model)
    old = {id(p): p.detach().clone() for p in model.parameters()}
    growth = fl.grow(model, layers, at)
    first = {"top": LAYERS, "bottom": 0}.get(at, at)
    assert growth.layers == tuple(range(first, first + layers))
    assert len(layers_of(model)) == LAYERS + layers

    change = distance(before, answers(model))
    assert change < 1e-6
    if name not in ENDS_IN_A_NORM and not growth.changed:
        assert change == 0.0

    found = fl.anatomy(model)
    changed = {id(model.get_parameter(k.partition("[")[0])) for k in growth.changed}
    assert bool(growth.note) == bool(growth.changed)
    kept = [p for p in model.parameters() if id(p) in old]
    assert len(kept) == len(old)
    for parameter in kept:
        assert torch.equal(parameter, old[id(parameter)]) == (id(parameter) not in changed)
    new = [p for p in found.parts if p.layer in growth.layers]
    assert all(any(part.name.startswith(f"{n}.") for n in growth.names) for part in new)
    assert {part.state for part in new} == {"trainable"}


@pytest.mark.parametrize("name", ["decoder-after", "bert"])
def test_identity_between_norms_can_learn(name: str) -> None:
    """Every weight of the new layer that can matter at first gets a gradient."""
    model = build(name)
    growth = fl.grow(model, at=1)
    output = model(torch.randint(3, 99, (3, 12)))
    (output if torch.is_tensor(output) else output[0]).square().mean().backward()
    for part in fl.anatomy(model).select("layers[1]"):
        learns = model.get_parameter(part.name).grad.abs().max() > 0
        assert learns or part.role not in ("output", "down"), part.name
    assert growth.changed == tuple(
        n for n in growth.changed if n.startswith(("blocks.0.norm2.", "encoder.layer.0.output."))
    )


@pytest.mark.parametrize("name", ["gpt", "decoder-after", "bert", "gpt2", "llama"])
def test_random_layers_are_drawn_as_the_model_draws_its_own(name: str) -> None:
    models = [build(name) for _ in range(3)]
    for model, seed in zip(models, (5, 5, 6), strict=True):
        torch.manual_seed(seed)
        assert fl.grow(model, at=1, init="random").changed == ()
    one, same, other = (layers_of(model)[1].state_dict() for model in models)
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not all(torch.equal(one[key], other[key]) for key in one)

    torch.manual_seed(7)
    if name in OWN:  # a fresh model of the new size is the reference
        fresh: nn.Module = type(models[0])(models[0].config)
    else:
        fresh = type(models[0])(copy.deepcopy(models[0].config))
    assert len(layers_of(fresh)) == LAYERS + 1
    for key, wanted in layers_of(fresh)[1].state_dict().items():
        if wanted.ndim == 2:
            assert float(one[key].std()) == pytest.approx(float(wanted.std()), rel=0.1), key
        else:
            assert torch.equal(one[key], wanted), key


@pytest.mark.parametrize(("at", "source"), [("top", 2), (1, 0), ("bottom", 0)])
@pytest.mark.parametrize("name", ["gpt", "decoder-after", "bert-classifier", "gpt2", "llama"])
def test_a_copy_is_of_the_layer_below_or_at_the_bottom_above(
    name: str, at: Any, source: int
) -> None:
    model = build(name)
    wanted = copy.deepcopy(layers_of(model)[source].state_dict())
    state = torch.get_rng_state()
    growth = fl.grow(model, 2, at, "copy")
    assert torch.equal(torch.get_rng_state(), state)
    for index in growth.layers:
        found = layers_of(model)[index].state_dict()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert len({id(p) for p in model.parameters()}) == len(list(model.parameters()))


def test_the_published_decoder_has_its_published_numbers() -> None:
    model = Decoder(DecoderConfig(69830, 64, layers=3, heads=4, hidden=256))
    assert sum(p.numel() for p in model.parameters()) == 9_135_232
    fl.grow(model)
    assert sum(p.numel() for p in model.parameters()) == 9_200_896
    assert fl.freeze(model, "embedding", "layers[0:3]").count("trainable") == 4_534_784


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("init", ["identity", "random", "copy"])
def test_a_grown_model_of_ours_is_one_of_the_new_config(name: str, init: Any) -> None:
    model = build(name)
    config = model.config
    fl.grow(model, 2, 1, init)
    assert model.config == replace(config, layers=LAYERS + 2)
    fresh = type(model)(model.config).eval()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(answers(fresh), answers(model))


def test_new_layers_have_their_neighbours_dtypes_and_mode() -> None:
    model = build("gpt").bfloat16().train()
    for block in model.blocks:
        block.norm1.float()
    model.blocks[2].eval()
    fl.grow(model, 2)
    for block in model.blocks[3:]:
        assert block.norm1.weight.dtype == torch.float32
        assert block.qkv.weight.dtype == block.norm2.weight.dtype == torch.bfloat16
        assert not any(module.training for module in block.modules())
    assert model.blocks[0].training


def test_growing_above_split_frozen_and_orthogonal_layers() -> None:
    model = build("gpt2")
    fl.orthogonalize(model, "query", "key")
    fl.freeze(model, "query", "key", "embedding")
    before, proof = answers(model), fl.audit(model)
    fl.grow(model)
    proof.verify(model)  # nothing below has moved, and names at the top stay
    assert distance(before, answers(model)) == 0.0
    new = layers_of(model)[3]
    assert not any(isinstance(module, SplitProjection) for module in new.modules())
    growth = fl.grow(model, 1, "bottom", "copy")
    first, second = (layers_of(model)[index].attn.c_attn for index in (0, 1))
    assert isinstance(second, SplitProjection)
    assert torch.equal(first.weight, second.weight)
    assert all(p.requires_grad for p in first.parameters())
    with pytest.raises(fl.FrozenWeightsMoved):
        proof.verify(model)
    proof.renewed(model, growth).verify(model)
    found = fl.freeze(model, "query", "key")
    assert {p.state for p in found.select("layers[0].query")} == {"frozen"}
    fl.orthogonalize(model, "layers[0].query", scope="matrix")
    query = layers_of(model)[0].attn.c_attn.weight[:, :32]
    torch.testing.assert_close(query.T @ query, torch.eye(32), rtol=0, atol=1e-5)


def test_an_audit_is_renewed_for_the_norm_that_gave_its_gain_away() -> None:
    model = build("bert-classifier")
    fl.freeze(model, "embedding", "norm")
    proof = fl.audit(model)
    growth = fl.grow(model, at=2)
    norm = "bert.encoder.layer.1.output.LayerNorm"
    assert growth.changed == (f"{norm}.weight", f"{norm}.bias")
    assert norm in growth.note
    assert not model.get_submodule(norm).weight.requires_grad
    with pytest.raises(fl.FrozenWeightsMoved, match=norm):
        proof.verify(model)
    after = proof.renewed(model, growth)
    after.verify(model)
    assert len(after.digests) == len(proof.digests)
    with torch.no_grad():
        model.bert.encoder.layer[3].output.LayerNorm.bias.add_(1.0)  # was layer 2
    with pytest.raises(fl.FrozenWeightsMoved, match=r"1 frozen tensor moved: .*layer\.3\.output"):
        proof.renewed(model, growth)


def test_where_weights_came_from_is_kept_unless_it_depends_on_the_name(tmp_path: Any) -> None:
    model = build("bert")
    base = copy.deepcopy(model)
    fl.orthogonalize(model, "query")
    fl.randomize(model, "key", seed=3)
    fl.freeze(model, "query", "key")
    fl.grow(model, at=1, init="copy")
    fl.save_trainable(model, tmp_path / "delta")
    fl.grow(base, at=1, init="copy")
    with pytest.raises(
        fl.BadInput, match=r"layer\.2\.attention\.self\.key\.weight was frozen and not"
    ):
        fl.load_trainable(base, tmp_path / "delta")
    fl.freeze(model, "layers[0].query", "layers[2:4].query")
    fl.save_trainable(model, tmp_path / "delta")
    fl.load_trainable(base, tmp_path / "delta")
    assert distance(answers(model), answers(base)) < 1e-5


def test_an_optimizer_that_lacks_the_new_layers_is_noticed() -> None:
    model = build("gpt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fl.grow(model)
    model(torch.randint(3, 99, (2, 5))).square().mean().backward()
    optimizer.step()
    with pytest.warns(fl.errors.LeftOutOfOptimizer, match="blocks.3."):
        optimizer.step()


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt", {"layers": 0}, "layers=0 is not a positive integer"),
    ("gpt", {"layers": True}, "layers=True"),
    ("gpt", {"at": -1}, r"at=-1 is not .* an index from 0 to 3"),
    ("gpt", {"at": 4}, r"at=4 is not .* an index from 0 to 3"),
    ("gpt", {"at": "botom"}, "did you mean `bottom`"),
    ("gpt", {"init": "identiy"}, "did you mean `identity`"),
    ("decoder-after", {"at": 0}, r"at 0 is impossible: .* grow above layer 0, or use init="),
]


@pytest.mark.parametrize(("name", "arguments", "message"), REFUSED)
def test_impossible_growth_is_refused_in_one_line(
    name: str, arguments: dict[str, Any], message: str
) -> None:
    model = build(name)
    before, config = answers(model), model.config
    with pytest.raises(fl.BadInput, match=message) as error:
        fl.grow(model, **arguments)
    assert "\n" not in str(error.value)
    assert len(model.blocks) == LAYERS
    assert model.config == config
    assert torch.equal(before, answers(model))


def test_models_whose_layers_cannot_be_found() -> None:
    import transformers

    from zoo import SIZES, TorchModel
    from zoo import build as from_zoo

    empty = transformers.BertModel(transformers.BertConfig(**(SIZES | {"num_hidden_layers": 0})))
    for model in (nn.Linear(3, 3), TorchModel(), from_zoo("roberta")[0], from_zoo("t5")[0], empty):
        with pytest.raises(fl.BadInput, match="supported: frostlab's GPT and Decoder") as error:
            fl.grow(model)
        assert "\n" not in str(error.value)


def test_an_identity_that_would_round_or_that_eps_would_change_is_refused() -> None:
    half = build("bert").bfloat16()
    with pytest.raises(fl.BadInput, match=r"would round the outputs: .* is torch.bfloat16;"):
        fl.grow(half)
    fl.grow(half, init="copy")
    model = Decoder(DecoderConfig(99, 32, layers=2, heads=4, hidden=64)).train()
    with torch.no_grad():  # what the last norm is given becomes small beside its eps
        model.blocks[1].norm1.weight.mul_(0.01)
        model.blocks[1].down.weight.zero_()
    with pytest.raises(
        fl.BadInput, match=r"change outputs by 5\.0e-03: the eps of blocks\.1\.norm2"
    ):
        fl.grow(model)
    assert len(model.blocks) == model.config.layers == 2
    assert all(module.training for module in model.modules())
    fl.grow(model, at=1)  # between the layers nothing is small


def test_adapters_are_refused() -> None:
    peft = pytest.importorskip("peft")
    model = build("bert")
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["query"]), model)
    with pytest.raises(fl.BadInput, match="grow: the model has adapters"):
        fl.grow(model)


@pytest.mark.parametrize("name", ["decoder-after", "gpt2", "llama"])
def test_a_layer_that_cannot_be_built_leaves_the_model(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(name)
    config = copy.deepcopy(model.config)

    def fail(trunk: Any, index: int, beside: nn.Module) -> nn.Module:
        raise MemoryError

    monkeypatch.setattr("frostlab.surgery.grow._build_layer", fail)
    with pytest.raises(MemoryError):
        fl.grow(model)
    assert model.config == config
    assert len(layers_of(model)) == LAYERS

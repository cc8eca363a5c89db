"""freeze sets the state of every parameter, changes nothing else, and can be undone."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2Model

import frostlab as fl
from frostlab.roles.parts import Split
from frostlab.surgery.freeze import frozen_tensors
from frostlab.surgery.split import SplitProjection
from zoo import build, exactly, grads, loss_of, outputs, slow_unless_layout

FUSED = [
    "gpt2",
    "gpt_neox",
    "falcon",
    "falcon-one-kv",
    "falcon-per-head",
    "bloom",
    "mpt",
    "gpt_bigcode",
    "gpt_bigcode-per-head",
    "modernbert",
    "phi3",
    "gpt",
    "conformer",
    "torch",
    "torch-unbiased",
]
SELECTIONS = [
    ("query", "key"),
    ("key",),
    ("query",),
    ("value",),
    ("query.bias", "key"),
    ("all.bias",),
]


@pytest.mark.parametrize("name", slow_unless_layout())
def test_freezing_changes_no_output_and_only_the_gradients_it_should(name: str) -> None:
    model, inputs = exactly(name)
    expected = [o.detach() for o in outputs(model, inputs)]
    loss_of(model, inputs).backward()
    reference = grads(model)
    model.zero_grad()
    for selection in SELECTIONS:
        try:
            frozen = {p.key: p for p in fl.anatomy(model).select(*selection)}
        except fl.BadInput:
            assert any(part.endswith(".bias") for part in selection)  # no such bias here
            continue
        anatomy = fl.freeze(model, *selection)
        assert {p.key for p in anatomy.parts if p.state == "frozen"} == {
            key for key, part in frozen.items() if part.state != "fixed"
        }
        model.zero_grad()
        found = outputs(model, inputs)
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
        loss_of(model, inputs).backward()
        now = grads(model)
        for part in anatomy.parts:
            old, new = reference[part.name], now[part.name]
            if part.rows is not None:
                old, new = part.rows.take(old, part.axis), part.rows.take(new, part.axis)
            if part.state == "trainable":
                scale = reference[part.name].abs().max().clamp(min=1e-3)
                assert (old - new).abs().max() <= 1e-9 * scale, (selection, part.key)
            else:
                assert not new.any(), (selection, part.key)
    fl.thaw(model)
    assert not any(isinstance(m, Split) for m in model.modules())
    for a, b in zip(expected, outputs(model, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("name", slow_unless_layout())
def test_every_parameter_is_stated_and_calls_are_idempotent(name: str) -> None:
    model, _ = build(name)
    fl.freeze(model, "query", "key")
    once = {n: (id(p), p.requires_grad) for n, p in model.named_parameters()}
    fl.freeze(model, "query", "key")
    assert once == {n: (id(p), p.requires_grad) for n, p in model.named_parameters()}
    fl.freeze(model, "value")  # a changed call forgets the one before
    states = {p.key: p.state for p in fl.anatomy(model).parts}
    chosen = {p.key for p in fl.anatomy(model).select("value")}
    assert all((state == "frozen") == (key in chosen) for key, state in states.items()
               if state != "fixed")  # fmt: skip
    next(iter(model.parameters())).requires_grad_(False)  # somebody else's doing
    fl.thaw(model)
    assert {p.state for p in fl.anatomy(model).parts} <= {"trainable", "fixed"}


@pytest.mark.parametrize("name", slow_unless_layout())
def test_checkpoints_are_interchangeable(name: str) -> None:
    model, inputs = build(name)
    other, _ = build(name)
    plain = copy.deepcopy(model.state_dict())
    fl.freeze(model, "query", "key")
    split = copy.deepcopy(model.state_dict())
    assert set(split) == set(plain)
    for key, value in plain.items():
        assert torch.equal(split[key], value), key
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    moved = copy.deepcopy(other.state_dict())
    model.load_state_dict(moved)  # untouched into frozen
    for key, value in model.state_dict().items():
        assert torch.equal(moved[key], value), key
    other.load_state_dict(split)  # frozen into untouched
    for a, b in zip(outputs(other, inputs), outputs(build(name)[0], inputs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_exactly_the_weight_gradients_of_query_and_key_disappear(name: str) -> None:
    length, batch, width, layers = 16, 4, 32, 2
    if name == "bert":
        config = BertConfig(hidden_size=width, num_hidden_layers=layers, num_attention_heads=4,
                            intermediate_size=64, vocab_size=99)  # fmt: skip
        model: nn.Module = BertForSequenceClassification._from_config(
            config, attn_implementation="eager"
        )
    else:
        model = GPT2Model._from_config(
            GPT2Config(n_embd=width, n_layer=layers, n_head=4, vocab_size=99, bos_token_id=1,
                       eos_token_id=2),
            attn_implementation="eager",
        )  # fmt: skip
    ids = torch.randint(3, 99, (batch, length))

    def flops() -> tuple[int, int]:
        with FlopCounterMode(display=False) as counter:
            loss = loss_of(model, {"input_ids": ids})
        forward = counter.get_total_flops()
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        return forward, counter.get_total_flops()

    before = flops()
    fl.freeze(model, "query", "key")
    after = flops()
    assert before[0] == after[0] > 0
    assert before[1] - after[1] == layers * 2 * (2 * batch * length * width * width)


def test_bert_base_counts() -> None:
    with torch.device("meta"):
        model = BertForSequenceClassification(BertConfig(num_labels=3))
    anatomy = fl.anatomy(model).with_frozen("query", "key")
    assert anatomy.count() == 109_484_547
    assert anatomy.count("trainable") == 95_310_339


def test_fixed_positions_stay_fixed() -> None:
    model, _ = build("whisper")
    for anatomy in (fl.freeze(model, "query"), fl.thaw(model)):
        assert [p.name for p in anatomy.fixed] == ["encoder.embed_positions.weight"]
        assert not model.encoder.embed_positions.weight.requires_grad


def test_a_frozen_batch_norm_keeps_its_statistics() -> None:
    model, inputs = build("wav2vec2-conformer")
    norm = model.encoder.layers[0].conv_module.batch_norm
    before = norm.running_mean.clone()
    fl.freeze(model, "norm")
    proof = fl.audit(model)
    model.train()
    outputs(model, inputs)
    assert torch.equal(norm.running_mean, before)
    proof.verify(model)
    fl.freeze(model, "query")
    assert norm.training
    outputs(model, inputs)
    assert not torch.equal(norm.running_mean, before)
    with pytest.raises(fl.FrozenWeightsMoved, match="batch_norm.running_mean"):
        proof.verify(model)


def test_torch_encoder_leaves_its_fused_inference_path_while_split() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 2).double().eval()
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        slow = encoder(x)
        fl.freeze(encoder, "query", "key")
        assert encoder.use_nested_tensor is False
        torch.testing.assert_close(encoder(x), slow, rtol=1e-10, atol=1e-10)
        encoder(x, src_key_padding_mask=mask)
    fl.thaw(encoder)
    assert encoder.use_nested_tensor is True


def test_attention_with_other_key_widths_splits_its_bias() -> None:
    attention = nn.MultiheadAttention(32, 4, kdim=16, vdim=8, batch_first=True).double()
    nn.init.normal_(attention.in_proj_bias)  # torch starts it at 0, which any order of rows passes
    sizes = ((2, 3, 32), (2, 5, 16), (2, 5, 8))
    query, key, value = (torch.randn(*size, dtype=torch.float64) for size in sizes)
    expected = attention(query, key, value)[0]
    fl.freeze(attention, "query", "key")
    found = attention(query, key, value)[0]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    attention(query, key, value)[0].sum().backward()
    assert attention.q_proj_weight.grad is None
    assert attention.v_proj_weight.grad is not None
    state = attention.state_dict()
    fresh = nn.MultiheadAttention(32, 4, kdim=16, vdim=8, batch_first=True)
    assert state.keys() == fresh.state_dict().keys()
    attention.load_state_dict(fresh.state_dict())
    fl.thaw(attention)
    assert type(attention) is nn.MultiheadAttention


def test_a_batch_norm_without_weights_is_frozen_with_everything() -> None:
    model, inputs = build("wav2vec2-conformer")
    layer = model.encoder.layers[0].conv_module
    layer.batch_norm = nn.BatchNorm1d(32, affine=False)
    with pytest.warns(fl.NothingLearns):
        fl.freeze(model, "all")
    proof = fl.audit(model)
    model.train()
    outputs(model, inputs)
    proof.verify(model)
    assert any("batch_norm.running_mean" in name for name in proof.digests)


def test_freezing_everything_warns() -> None:
    model, _ = build("bert")
    with pytest.warns(fl.NothingLearns, match="nothing will learn"):
        fl.freeze(model, "all")
    assert not any(p.requires_grad for p in model.parameters())


def test_a_projection_that_layers_share_is_one_part_and_is_replaced_everywhere() -> None:
    model, inputs = exactly("gpt2")
    model.h[1].attn.c_attn = model.h[0].attn.c_attn
    expected = outputs(model, inputs)
    with pytest.raises(fl.BadInput, match=r"2 layers of GPT2Model \(0 to 1\) share h.0.attn.c_at"):
        fl.freeze(model, "layers[0].query")
    fl.freeze(model, "query")
    assert model.h[1].attn.c_attn is model.h[0].attn.c_attn
    assert isinstance(model.h[0].attn.c_attn, SplitProjection)
    for a, b in zip(expected, outputs(model, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_two_modules_tied_to_one_fused_weight_cannot_be_split() -> None:
    model, _ = build("gpt2")
    model.h[1].attn.c_attn.weight = model.h[0].attn.c_attn.weight
    before = {n: id(p) for n, p in model.named_parameters()}
    with pytest.raises(fl.BadInput, match="tied to h.1.attn.c_attn.weight"):
        fl.freeze(model, "query")
    assert before == {n: id(p) for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", slow_unless_layout(FUSED))
def test_state_dicts_are_divided_into_what_is_frozen_and_what_learns(name: str) -> None:
    model, _ = build(name)
    assert frozen_tensors(model).keys() == {p.name for p in fl.anatomy(model).fixed}
    fl.freeze(model, "query", "key", "norm")
    frozen, state = frozen_tensors(model), model.state_dict()
    assert frozen.keys() <= state.keys()
    assert any(frozen.values()), "fused projections are frozen in part"
    count = 0
    for tensor_name, partly in frozen.items():
        tensor = state[tensor_name]
        if partly is None:
            count += tensor.numel()
            continue
        rows, rest = partly.frozen_rows(tensor), partly.trainable_rows(tensor)
        assert torch.equal(partly.join(rows, rest), tensor)
        count += rows.numel()
    anatomy = fl.anatomy(model)
    ties = sum(p.parameters * len(p.ties) for p in anatomy.parts if p.state != "trainable")
    assert count == anatomy.count("frozen", "fixed") + ties

"""A split projection behaves as the fused one did, in every mode torch has."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import frostlab as fl
from frostlab.roles.parts import Rows, Span, Split
from frostlab.surgery.split import FrozenRows, SplitProjection
from zoo import build, exactly, grads, loss_of, outputs

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


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "torch"])
def test_strict_loading_still_complains(name: str) -> None:
    model, _ = build(name)
    fl.freeze(model, "query", "key")
    state = model.state_dict()
    key = next(k for k in state if "attn.c_attn.w" in k or "query_key_value.w" in k
               or k.endswith("in_proj_weight"))  # fmt: skip
    missing = {k: v for k, v in state.items() if k != key}
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(missing)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict(state | {key + "_": state[key]})
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(state | {key: state[key][:-1]})
    result = model.load_state_dict(missing, strict=False)
    assert result.missing_keys == [key]
    model.load_state_dict(state, assign=True)
    assert fl.anatomy(model).count("frozen") > 0


@pytest.mark.parametrize("name", FUSED)
def test_split_models_survive_deepcopy_pickle_and_dtype(name: str) -> None:
    model, inputs = build(name)
    fl.freeze(model, "query", "key")
    expected = outputs(model, inputs)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for a, b in zip(expected, outputs(twin, inputs), strict=True):
            assert torch.equal(a, b)
        fl.thaw(twin)
        assert not any(isinstance(m, Split) for m in twin.modules())
    model.double()
    assert all(p.dtype == torch.float64 for p in model.parameters())


def test_hooks_on_a_projection_go_on_working() -> None:
    model, inputs = build("gpt2")
    seen: list[int] = []
    projection = model.h[0].attn.c_attn
    projection.register_forward_hook(lambda *_: seen.append(1))
    projection.register_full_backward_hook(lambda *_: seen.append(2))
    fl.freeze(model, "query", "key")
    loss_of(model, inputs).backward()
    fl.thaw(model)
    loss_of(model, inputs).backward()
    assert seen == [1, 2, 1, 2]


def test_the_fused_weight_can_still_be_read() -> None:
    model, _ = build("gpt2")
    weight = model.h[0].attn.c_attn.weight.detach().clone()
    fl.freeze(model, "query", "key")
    split = model.h[0].attn.c_attn
    assert isinstance(split, SplitProjection)
    assert torch.equal(split.weight, weight)
    assert "64 rows frozen" in repr(split)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "torch", "bert"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(name: str, dtype: torch.dtype) -> None:
    """Under autocast a split projection casts as the fused one does, both ways."""
    model, inputs = build(name)

    def run() -> tuple[list[Tensor], dict[str, Tensor]]:
        model.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = loss_of(model, inputs)
            found = outputs(model, inputs)
        loss.backward()
        return found, grads(model)

    expected, reference = run()
    fl.freeze(model, "query", "key")
    found, now = run()
    for a, b in zip(expected, found, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.float(), b.float(), rtol=0.05, atol=0.1)
    for part in fl.anatomy(model).select("value.weight"):
        old, new = reference[part.name], now[part.name]
        if part.rows is not None:
            old, new = part.rows.take(old, part.axis), part.rows.take(new, part.axis)
        assert new.any()
        assert (old - new).norm() <= 0.1 * old.norm(), part.key


def test_two_forwards_before_one_backward_and_second_derivatives() -> None:
    model, _ = exactly("gpt_neox")
    twin = copy.deepcopy(model)
    fl.freeze(model, "query", "key")
    results = []
    for m in (model, twin):
        draw = torch.Generator().manual_seed(1)
        x = torch.randn(2, 3, 32, dtype=torch.float64, generator=draw, requires_grad=True)
        layer = m.layers[0].attention.query_key_value
        y = layer(x).sum() * layer(x * 2).square().mean()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        g.square().sum().backward()
        results.append(x.grad)
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-10)
    part = fl.anatomy(model).select("layers[0].value.weight")[0]
    found, expected = (part.rows.take(grads(m)[part.name]) for m in (model, twin))
    assert expected.abs().max() > 0
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_a_backward_uses_the_rows_of_its_own_forward() -> None:
    """Whatever filled the kept weight since: other tensors, or rows torch no longer watches."""
    model, _ = exactly("gpt_neox")
    fl.freeze(model, "query", "key")
    layer = model.layers[0].attention.query_key_value
    x = torch.randn(2, 32, dtype=torch.float64, requires_grad=True)
    others = [{"trainable_weight": torch.randn_like(layer.trainable_weight)} for _ in range(2)]
    y = torch.func.functional_call(layer, others[0], (x,))
    (expected,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    torch.func.functional_call(layer, others[1], (x,))
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        y = layer(x)
    expected = layer.weight.detach().sum(0)
    with torch.no_grad():
        layer.trainable_weight.add_(1.0)
    layer(x)
    (found,) = torch.autograd.grad(y.sum(), x)
    expected = expected.expand_as(found)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_frozen_rows_that_are_set_to_learn_are_refused() -> None:
    model, inputs = build("gpt2")
    fl.freeze(model, "query", "key")
    model.requires_grad_(True)
    with pytest.raises(fl.BadInput, match=r"requires_grad=True; to train them, call fl\.thaw"):
        outputs(model, inputs)
    fl.thaw(model)
    outputs(model, inputs)


def test_per_example_gradients_through_torch_func() -> None:
    model, _ = exactly("gpt_neox")
    fused = copy.deepcopy(model.layers[0].attention.query_key_value)
    fl.freeze(model, "query", "key")
    split = model.layers[0].attention.query_key_value
    x = torch.randn(4, 3, 32, dtype=torch.float64)

    def loss(parameters: dict[str, Tensor], x: Tensor, layer: nn.Module) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    found = [
        torch.func.vmap(torch.func.grad(loss), (None, 0, None))(
            {n: p.detach() for n, p in layer.named_parameters() if p.requires_grad}, x, layer
        )
        for layer in (split, fused)
    ]
    part = fl.anatomy(model).select("layers[0].value.weight")[0]
    expected = part.rows.take(found[1]["weight"], 1)
    torch.testing.assert_close(found[0]["trainable_weight"], expected, rtol=1e-10, atol=1e-10)


def test_dtypes_mix_no_more_freely_than_in_a_fused_projection() -> None:
    model, _ = build("gpt2")
    fl.freeze(model, "query", "key")
    layer = model.h[0].attn.c_attn
    with pytest.raises(RuntimeError, match="same dtype|dtype"):
        layer(torch.randn(2, 32, dtype=torch.float16))
    assert (layer.in_features, layer.out_features) == (32, 96)
    model.to("meta")
    assert layer(torch.randn(2, 32, device="meta")).shape == (2, 96)


def test_vectors_and_batches_of_any_rank() -> None:
    model, _ = exactly("gpt2")
    fused = copy.deepcopy(model.h[0].attn.c_attn)
    fl.freeze(model, "query", "key")
    split = model.h[0].attn.c_attn
    for shape in ((32,), (3, 32), (2, 3, 32), (2, 2, 2, 32), (0, 32)):
        x = torch.randn(shape, dtype=torch.float64)
        y = split(x)
        if x.dim() > 1:
            torch.testing.assert_close(y, fused(x), rtol=1e-10, atol=1e-10)
        y.sum().backward()


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_the_cache_between_steps_is_never_stale(name: str) -> None:
    """Evaluation in inference mode, new frozen values, other dtypes, functional calls."""
    model, inputs = build(name)
    fl.freeze(model, "query", "key")
    twin = copy.deepcopy(model)
    fl.thaw(twin)

    def same() -> None:
        for a, b in zip(outputs(model, inputs), outputs(twin, inputs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)

    with torch.inference_mode():
        same()
    loss_of(model, inputs).backward()  # and training after it
    for m in (model, twin):
        fl.orthogonalize(m, "query", "key")
    same()
    state = {k: v + 0.5 for k, v in twin.state_dict().items() if v.is_floating_point()}
    for m in (model, twin):
        m.load_state_dict(state, strict=False, assign=True)
    same()
    with torch.no_grad():
        for m in (model, twin):
            for parameter in m.parameters():
                parameter.mul_(0.5)
    same()
    with torch.autocast("cpu", torch.bfloat16):
        outputs(model, inputs)
    same()
    other = {n: p.detach() * 2 for n, p in model.named_parameters()}
    for p in twin.parameters():
        p.data.mul_(2)
    found = torch.func.functional_call(model, other, kwargs=inputs)
    expected = outputs(twin, inputs)
    torch.testing.assert_close(found.last_hidden_state, expected[0], rtol=1e-3, atol=1e-3)


def test_gradient_checkpointing_and_accumulation() -> None:
    for reentrant in (False, True):
        model, inputs = build("gpt2")
        twin = copy.deepcopy(model)
        fl.freeze(model, "query", "key")
        model.train()
        twin.train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for m in (model, twin):
            for module in m.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
            for _ in range(2):
                loss_of(m, inputs).backward()
        part = fl.anatomy(model).select("layers[0].value.weight")[0]
        expected = part.rows.take(grads(twin)[part.name], part.axis)
        found = part.rows.take(grads(model)[part.name], part.axis)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_float64_is_left_alone_by_autocast_as_in_a_plain_linear() -> None:
    model, _ = build("gpt2")
    fl.freeze(model.double(), "query", "key")
    x = torch.randn(2, 32, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.h[0].attn.c_attn(x).dtype == torch.float64


def test_a_thawed_attention_has_its_parameters_in_torchs_order() -> None:
    attention = nn.MultiheadAttention(32, 4, add_bias_kv=True)
    before = [(n, p.shape) for n, p in attention.named_parameters()]
    fl.freeze(attention, "query")
    fl.thaw(attention)
    assert [(n, p.shape) for n, p in attention.named_parameters()] == before


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("spans", [((0, 4),), ((4, 8),), ((0, 8),), ((2, 3), (5, 6))])
def test_kept_tensors_give_the_plain_projection(spans: tuple[Span, ...], compiled: bool) -> None:
    """In float64: output, input gradient, and the gradients of the trainable rows."""
    torch.manual_seed(0)
    rows = Rows(12, 1, spans)
    plain = nn.Linear(5, 12).double()
    split = SplitProjection(copy.deepcopy(plain), FrozenRows(0, rows, rows))
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(2, 3, 12, dtype=torch.float64)
    y = plain(x)
    expected = torch.autograd.grad(y, [x, plain.weight, plain.bias], upstream)
    split.kept = {"weight": plain.weight.detach().clone(), "bias": plain.bias.detach().clone()}
    split.trainable_weight = nn.Parameter(torch.zeros_like(split.trainable_weight))  # type: ignore[arg-type]
    split.trainable_bias = nn.Parameter(torch.zeros_like(plain.bias))
    forward = torch.compile(split, fullgraph=True) if compiled else split
    made = forward(x)
    found = torch.autograd.grad(made, [x, split.trainable_weight, split.trainable_bias], upstream)
    wanted = (y, expected[0], rows.rest().take(expected[1]), expected[2])
    for ours, theirs in zip((made, *found), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)

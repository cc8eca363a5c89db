"""Layers whose norms and GELUs are fused compute what they computed, with torch in the kernels."""

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

import fused_stand_ins
from frostlab.models import fused
from frostlab.models.conformer import Conformer, ConformerConfig
from frostlab.models.fused import joined_attention
from frostlab.models.fused.embedding import embed, fits
from frostlab.models.fused.gelu import gelu, gelu_of
from frostlab.models.fused.joined_linear import joined_linear
from frostlab.models.fused.residual_norm import (
    add,
    add_and_norm,
    apply_linear,
    keep_and_norm,
    residual_norm,
    residual_sum,
)
from frostlab.models.gpt import GPTBlock, GPTConfig
from frostlab.models.stack import take_apart
from frostlab.training.distributed import blocks
from frostlab.training.step.compiled import _compiler_settings
from frostlab.training.step.fusion import (
    fuse_attention,
    fuse_embeddings,
    fuse_gelus,
    fuse_norms,
    fuse_sums,
    share_seeds,
)
from frostlab.training.step.joining import join_linears
from frostlab.training.step.optimizer import Bf16Copies
from packed import build

HALF = torch.bfloat16
WIDTH = 64
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")


class Fused:
    """A backend that rewrites graphs and keeps them; autograd sees the fused operations."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.graphs: list[Graph] = []  # the compiler's, forward and backward
        self.ran: Counter[str] = Counter()  # the operations of these graphs that have run

    def __call__(self, module: GraphModule, inputs: Any) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd

        fuse_norms(module.graph)
        fuse_sums(module.graph)
        fuse_gelus(module.graph)
        join_linears(module.graph)
        fuse_attention(module.graph)
        fuse_embeddings(module.graph)
        share_seeds(module.graph)
        for node in module.graph.nodes:  # what is not fused gets masks of the same kind
            if node.target is F.dropout:
                node.target = fused_stand_ins.seeded_dropout
        module.recompile()
        self.calls += [node.target for node in module.graph.nodes if node.op == "call_function"]
        compiled: Callable[..., Any] = aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep)(
            module, inputs
        )
        return compiled

    def _keep(self, module: GraphModule, inputs: Any) -> Callable[..., Any]:
        from functorch.compile import make_boxed_func

        self.graphs.append(module.graph)
        targets = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]

        def run(*given: Any) -> Any:
            self.ran.update(targets)
            return module(*given)

        compiled: Callable[..., Any] = make_boxed_func(run)
        return compiled


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    fused_stand_ins.use(monkeypatch)
    monkeypatch.setattr(joined_attention, "_DTYPES", (torch.float32, HALF))
    torch._dynamo.reset()


def bert() -> tuple[nn.Module, tuple[Any, ...]]:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    config = BertConfig(hidden_size=WIDTH, num_attention_heads=4, intermediate_size=64)
    config._attn_implementation = "sdpa"
    return BertLayer(config), ()


def gpt() -> tuple[nn.Module, tuple[Any, ...]]:
    return GPTBlock(GPTConfig(width=WIDTH, heads=4, hidden=64, dropout=0.3)), (None,)


def outcome(
    layer: nn.Module, x: Tensor, arguments: tuple[Any, ...], precision: torch.dtype
) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    torch.manual_seed(5)
    with torch.autocast("cpu", HALF, enabled=precision == HALF):
        out = layer(x, *arguments)
    out = out[0] if isinstance(out, tuple) else out
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    out.backward(upstream.to(out.dtype))
    assert x.grad is not None
    found = {"out": out.detach(), "x": x.grad}
    # the gradient of the keys' bias is 0 but for rounding
    named = [(n, p.grad) for n, p in layer.named_parameters() if not n.endswith("key.bias")]
    return found | {n: g for n, g in named if g is not None}


def eager_outcome(
    layer: nn.Module, x: Tensor, arguments: tuple[Any, ...], precision: torch.dtype
) -> dict[str, Tensor]:
    """The outcome of a copy of the layer, with dropout masks drawn as in the fused operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", fused_stand_ins.seeded_dropout)
        patch.setattr(F, "scaled_dot_product_attention", fused_stand_ins.seeded_attention)
        return outcome(copy.deepcopy(layer), x, arguments, precision)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], limit: float) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        error = float((found[name].float() - value.float()).norm() / value.float().norm())
        assert error < limit, (name, error)


@pytest.mark.parametrize("make", [bert, gpt])
@pytest.mark.parametrize("precision", [torch.float32, HALF], ids=["float32", "bf16"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_a_fused_layer_is_the_same_function(
    make: Callable[[], tuple[nn.Module, tuple[Any, ...]]], precision: torch.dtype, training: bool
) -> None:
    """With the same seeds of dropout, which the fused operations draw in the same order."""
    torch.manual_seed(0)
    layer, arguments = make()
    layer.train(training)
    x, backend = torch.randn(2, 6, WIDTH), Fused()
    wanted = eager_outcome(layer, x, arguments, precision)
    layer.compile(backend=backend)
    found = outcome(layer, x, arguments, precision)
    assert_same(found, wanted, 3e-2 if precision == HALF else 1e-5)
    assert backend.calls.count(residual_norm) == 2
    assert backend.calls.count(residual_sum) == (make is gpt)
    assert backend.calls.count(gelu) == (precision == HALF)
    assert backend.calls.count(joined_attention.attend) == 1
    assert F.layer_norm not in backend.calls


@pytest.mark.parametrize("frozen", ["query key", "key", "value", "query key value"])
@pytest.mark.parametrize("precision", [torch.float32, HALF], ids=["float32", "bf16"])
def test_attention_with_frozen_projections_is_the_same_function(
    frozen: str, precision: torch.dtype
) -> None:
    """The frozen rows come first in the joined product, so the columns are in another order."""
    torch.manual_seed(0)
    layer, _ = bert()
    for name, p in layer.named_parameters():
        p.requires_grad_(not any(f".{word}." in name for word in frozen.split()))
    x, backend = torch.randn(2, 6, WIDTH), Fused()
    wanted = eager_outcome(layer, x, (), precision)
    layer.compile(backend=backend)
    assert_same(outcome(layer, x, (), precision), wanted, 3e-2 if precision == HALF else 1e-5)
    assert backend.calls.count(joined_attention.attend) == 1


@pytest.mark.parametrize("precision", [torch.float32, HALF], ids=["float32", "bf16"])
def test_fused_embeddings_are_the_same_function(precision: torch.dtype) -> None:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertEmbeddings

    torch.manual_seed(0)
    config = BertConfig(vocab_size=50, hidden_size=WIDTH, max_position_embeddings=8)
    layer, backend = BertEmbeddings(config), Fused()
    ids = torch.randint(50, (3, 8))
    ids[:, 6:] = 0  # padding, whose embedding does not learn

    def found(layer: nn.Module) -> dict[str, Tensor]:
        torch.manual_seed(5)
        with torch.autocast("cpu", HALF, enabled=precision == HALF):
            out = layer(input_ids=ids)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
        out.backward(upstream)
        gradients = {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
        return {"out": out.detach()} | gradients

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", fused_stand_ins.seeded_dropout)
        wanted = found(copy.deepcopy(layer))
    layer.compile(backend=backend)
    assert_same(found(layer), wanted, 1e-5)
    assert (backend.calls.count(embed), backend.calls.count(F.embedding)) == (3, 0)
    assert backend.calls.count(residual_norm) == 1


def test_seeds_of_one_layer_are_drawn_together() -> None:
    backend = Fused()
    layer, _ = bert()
    layer.train().compile(backend=backend)
    outcome(layer, torch.randn(2, 6, WIDTH), (), torch.float32)
    assert backend.calls.count(fused.draw_seeds) == 1
    layer.eval()
    backend.calls.clear()
    outcome(layer, torch.randn(2, 6, WIDTH), (), torch.float32)
    assert backend.calls.count(fused.draw_seeds) == 0


class Counted(nn.Module):
    """A layer with a statistic that is counted in place, as batch norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        return self.norm(x + self.linear(x))


class ReadTwice(nn.Module):
    """A sum that is read between it and its norm, and a dropout that would be drawn later."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        total = x + F.dropout(self.linear(x), 0.5)
        other = F.dropout(total.exp(), 0.5)
        return self.norm(total) + other + total


class WrittenTo(nn.Module):
    """A sum that is changed in place before its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        total = x + self.linear(x)
        total[:, 0] *= 2
        return self.norm(total) + total


class DroppedBeforeWriting(nn.Module):
    """A dropout of a map's output, which then changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        dropped = F.dropout(hidden, 0.5)
        hidden.mul_(5.0)
        return x + dropped


class Attending(nn.Module):
    """Attention over the columns of one map, or over three maps, with something between them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.joint = kind, nn.Linear(64, 192)
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "three maps":
            query, key, value = self.query(x), self.key(x), self.value(x).mul_(3.0)
        else:
            query, key, value = self.joint(x).split(64, -1)
        scale = 0.3
        if self.kind == "operator":
            query = self.joint(x)[..., :64]
            query *= 3.0
        elif self.kind == "method":
            query = self.joint(x)[..., :64].mul_(3.0)
        elif self.kind == "in place":
            value = F.relu(self.joint(x)[..., :64], True)
        elif self.kind == "negative scale":
            scale = -0.3
        elif self.kind == "float":
            query, key, value = self.joint(x).float().split(64, -1)
        if self.kind == "three dimensions":
            return F.scaled_dot_product_attention(query, key, value)
        heads = [part.unflatten(-1, (4, 16)).transpose(1, 2) for part in (query, key, value)]
        mixed = F.scaled_dot_product_attention(*heads, scale=scale)
        return mixed.transpose(1, 2).flatten(2)


class Scaled(nn.Module):
    """Attention whose scale is a setting that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.joint, self.scale = nn.Linear(64, 192), 0.25

    def forward(self, x: Tensor) -> Tensor:
        heads = (p.unflatten(-1, (4, 16)).transpose(1, 2) for p in self.joint(x).split(64, -1))
        mixed = F.scaled_dot_product_attention(*heads, scale=self.scale)
        return mixed.transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    "kind",
    ["operator", "method", "in place", "three maps", "negative scale", "three dimensions", "float"],
)
def test_attention_that_does_not_fit_stays(kind: str) -> None:
    torch.manual_seed(0)
    layer, x, backend = Attending(kind), torch.randn(2, 6, WIDTH), Fused()
    precision = HALF if kind == "float" else torch.float32
    wanted = outcome(copy.deepcopy(layer), x, (), precision)
    layer.compile(backend=backend)
    assert_same(outcome(layer, x, (), precision), wanted, 3e-2 if precision == HALF else 1e-4)
    assert backend.calls.count(joined_attention.attend) == 0


def test_a_scale_that_changes() -> None:
    torch.manual_seed(0)
    layer, x = Scaled(), torch.randn(2, 6, WIDTH)
    compiled = torch.compile(layer, backend=Fused())
    for layer.scale in (0.25, 0.3, 0.4):
        torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-5)


class Dropping(nn.Module):
    """A residual sum with a dropout, before a norm."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout, self.linear, self.norm = dropout, nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + F.dropout(self.linear(x), self.dropout))


@pytest.mark.parametrize("as_in_a_step", [True, False])
def test_the_second_dropout_of_a_process_compiles_too(as_in_a_step: bool) -> None:
    """By default, torch makes it an input of the code; in a step, it is fused like the first."""
    settings = _compiler_settings if as_in_a_step else nullcontext
    for dropout in (0.25, 0.5):
        torch.manual_seed(0)
        layer, x, backend = Dropping(dropout), torch.randn(3, 8), Fused()
        wanted = eager_outcome(layer, x, (), torch.float32)
        layer.compile(backend=backend)
        with settings():
            assert_same(outcome(layer, x, (), torch.float32), wanted, 1e-5)
        assert residual_norm in backend.calls
        if as_in_a_step:
            assert fused_stand_ins.seeded_dropout not in backend.calls


def test_float64_embeddings_keep_their_exact_gradient() -> None:
    weight = nn.Embedding(4, WIDTH).weight
    assert fits(weight)
    assert not fits(nn.Parameter(weight.detach().double()))


def test_kernels_start_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Tensor] = []

    def on_device_of(tensor: Tensor) -> AbstractContextManager[None]:
        started.append(tensor)
        return nullcontext()

    monkeypatch.setattr("frostlab.models.fused.on_device_of", on_device_of)
    block, (mask,) = gpt()
    x = torch.randn(2, 6, WIDTH)
    block.train().compile(backend=Fused())
    outcome(block, x, (mask,), HALF)
    # forward and backward of two norms with a sum, one sum, one GELU and one attention
    assert len(started) == 2 * (2 + 1 + 1 + 1)
    assert all(isinstance(tensor, Tensor) for tensor in started)


def test_one_id() -> None:
    module = nn.Embedding(5, WIDTH)
    found = torch.compile(lambda i: module(i) * 2, backend=Fused())(torch.tensor(2))
    found.sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.sum(1).tolist() == [0, 0, 2 * WIDTH, 0, 0]


@pytest.mark.parametrize("make", [Counted, ReadTwice, WrittenTo, DroppedBeforeWriting])
def test_what_a_rewrite_could_break_stays(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    layer, x = make(), torch.randn(3, 8)
    wanted = eager_outcome(layer, x, (), torch.float32)
    layer.compile(backend=Fused())
    assert_same(outcome(layer, x, (), torch.float32), wanted, 1e-5)
    assert [int(steps) for steps in layer.buffers()] in ([], [1])


def test_operations_outside_a_compiler_are_the_same_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block of GPT calls the operations itself if it is not compiled, on CUDA."""
    torch.manual_seed(0)
    block, (mask,) = gpt()
    block.train()
    x = torch.randn(2, 6, WIDTH)
    wanted = eager_outcome(block, x, (mask,), HALF)
    seen = []

    class AsOnCuda(Tensor):
        is_cuda = True

    monkeypatch.setattr("frostlab.models.fused.chosen", lambda function, *_: function)

    def called(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Tensor, *arguments: Any) -> Any:
            seen.append(function.__name__)
            return function(x.as_subclass(AsOnCuda), *arguments)

        return call

    for function in (keep_and_norm, add_and_norm, add, gelu_of):
        owner = "frostlab.models.gpt." + function.__name__
        if function is gelu_of:
            on_cuda = called(lambda inputs, linear, how: gelu_of(linear, inputs, how))
            monkeypatch.setattr(
                owner, lambda linear, inputs, how, f=on_cuda: f(inputs, linear, how)
            )
        else:
            monkeypatch.setattr(owner, called(function))
    found = eager_outcome(block, x, (mask,), HALF)
    assert_same(found, wanted, 3e-2)
    assert len(seen) == 4


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own
@pytest.mark.parametrize("frozen", [(), ("key",), ("query", "key")])
def test_a_layer_reads_copies_that_lie_side_by_side_without_copying_them(
    frozen: tuple[str, ...],
) -> None:
    """And it casts none of them; in the second layer, the code of the first one runs."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=20, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=96,
    )  # fmt: skip
    torch.manual_seed(0)
    model = BertForSequenceClassification(config).eval()
    for name, p in model.named_parameters():
        p.requires_grad_(not any(f".{word}." in name for word in frozen))
    copies, ids, backend = Bf16Copies(model), torch.arange(12).view(2, 6), Fused()

    def gradients() -> dict[str, Tensor]:
        copies.clear()
        model.zero_grad()
        with copies.in_place(), torch.autocast("cpu", HALF):
            model(ids).logits.square().sum().backward()
        found = {name: copies.gradient(p) for name, p in model.named_parameters()}
        # the gradient of the keys' bias is 0 but for rounding
        return {n: g for n, g in found.items() if g is not None and not n.endswith("key.bias")}

    wanted = gradients()
    for layer in model.bert.encoder.layer:
        layer.compile(backend=backend)
    found = gradients()
    assert_same(found, wanted, 3e-2)
    assert backend.calls.count(joined_linear) == 1
    assert backend.calls.count(joined_attention.attend) == 1
    forward, _ = backend.graphs
    casts = [node for node in forward.nodes if node.target is torch.ops.aten._to_copy.default]
    assert [node.args[0].meta["val"].shape for node in casts] == [(2, 6, WIDTH)]  # the input
    backend.ran.clear()
    with torch.profiler.profile(acc_events=True) as profile:
        gradients()
    assert backend.ran["frostlab.joined_linear.default"] == 2
    assert backend.ran["frostlab.joined_linear_backward.default"] == 2
    assert "aten::cat" not in {event.name for event in profile.events()}


def a_model(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model in eval mode, and its inputs."""
    torch.manual_seed(0)
    if name.startswith("conformer"):
        variant: Any = name.split()[1]
        model: nn.Module = Conformer(ConformerConfig(variant=variant))
        return model.eval(), {"eeg": torch.randn(2, 64, 64), "subject": torch.randint(2, (2,))}
    return build(name).eval(), {"input_ids": torch.randint(5, 60, (3, 12))}


def test_a_map_whose_forward_was_replaced_is_called() -> None:
    linear, x = nn.Linear(4, 4), torch.ones(2, 4)
    assert apply_linear(linear, x)[1] is linear.bias
    linear.forward = lambda x: 2 * x  # type: ignore[method-assign]
    assert torch.equal(apply_linear(linear, x)[0], 2 * x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own
@pytest.mark.parametrize("precision", [torch.float32, HALF], ids=["float32", "bf16"])
@pytest.mark.parametrize(
    "name",
    ["gpt classifier", "gpt", "decoder", "bert classifier", "gpt2", "llama",
     "conformer frostlab", "conformer published"],
)  # fmt: skip
def test_every_model_computes_the_same_after_all_rewrites(
    name: str, precision: torch.dtype
) -> None:
    model, inputs = a_model(name)
    other, backend = copy.deepcopy(model), Fused()
    stack = take_apart(other)
    named = [getattr(other, part) for part in getattr(other, "compiled_parts", ())]
    for part in [*(stack.parts if stack else ()), *named, *blocks(other)]:
        part.compile(backend=backend)
    sides = []
    for side in (model, other):
        with torch.autocast("cpu", HALF, enabled=precision == HALF):
            out = side(**inputs)
        out = out if isinstance(out, Tensor) else out.logits
        out.float().square().mean().backward()
        gradients = [p.grad for p in side.parameters() if p.grad is not None]
        sides.append([out.detach(), *gradients])
    assert len(sides[0]) == len(sides[1])
    for found, wanted in zip(*reversed(sides), strict=True):
        error = float((found.float() - wanted.float()).norm() / (wanted.float().norm() + 1e-6))
        assert error < (3e-2 if precision == HALF else 1e-5)
    fused_calls = (residual_norm, residual_sum, joined_linear)
    assert any(call in backend.calls for call in fused_calls)

"""Reading a model by a probe leaves it as it was, to the bit."""

import random
import weakref
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import frostlab as fl
from cases import slow_unless
from frostlab.roles import read
from labelled import LABELLED, disagreements, expected
from odd_places import NormalisedBefore, around

MODELS: dict[str, Callable[[], nn.Module]] = {
    name: LABELLED[name].build
    for name in (
        "granite", "codegen", "deepseek_v3", "squeezebert", "swin", "levit", "hubert", "mbart",
        "longformer", "qwen3_next", "raw-parameters", "fused-view-split", "tied-query-key",
    )
}  # fmt: skip
MODELS["weight-norm"] = lambda: around(NormalisedBefore)
# a first pass fills caches of these, or computes statistics; one is refused
DEFAULT = {"granite", "levit", "raw-parameters", "weight-norm", "tied-query-key"}
HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)  # fmt: skip


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def kept(value: Any) -> Any:
    """Return what must stay the same about an attribute of a module."""
    if isinstance(value, Tensor):
        return id(value), value._version, bits(value)
    if isinstance(value, dict):
        return id(value), [(key, kept(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | set):
        return id(value), [kept(item) for item in value]
    if hasattr(value, "to_dict"):
        return id(value), repr(value.to_dict()), value._attn_implementation
    return id(value)


def photograph(model: nn.Module) -> dict[str, Any]:
    """Return all that a reader could have changed."""
    seen: dict[str, Any] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        grad = parameter.grad
        seen[f"parameter {name}"] = (
            kept(parameter), parameter.requires_grad, None if grad is None else kept(grad),
        )  # fmt: skip
    for name, buffer in model.named_buffers(remove_duplicate=False):
        seen[f"buffer {name}"] = kept(buffer)
    for path, module in model.named_modules(remove_duplicate=False):
        seen[f"module {path}"] = type(module), module.training, kept(vars(module))
        for name in HOOKS:
            seen[f"{name} {path}"] = list(getattr(module, name).items())
    seen["torch's generator"] = bits(torch.get_rng_state())
    seen["Python's generator"] = random.getstate()
    seen["numpy's generator"] = repr(np.random.get_state())
    seen["settings"] = (
        torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return seen


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [key for key in {**before, **after} if before.get(key) != after.get(key)]


def refuse(*_: Any) -> None:
    raise AssertionError("a hook of the user's was called")


@pytest.mark.parametrize("name", slow_unless(DEFAULT, MODELS))
def test_a_model_is_left_bit_identical(name: str) -> None:
    model = MODELS[name]()
    modules = list(model.modules())
    model.train()
    for module in modules[::3]:
        module.training = False
    parameters = list(model.parameters())
    for parameter in parameters[::2]:
        parameter.grad = torch.ones_like(parameter)
    parameters[1].requires_grad_(False)
    leaf = next(module for module in reversed(modules) if list(module.parameters(recurse=False)))
    for module in (model, leaf):  # the user's own hooks: a forward pass of the model calls them
        module.register_forward_hook(refuse)
        module.register_forward_pre_hook(refuse)
        module.register_full_backward_hook(refuse)
        module.register_state_dict_post_hook(refuse)
    read._FOUND_BY_CONFIG.clear()
    before = photograph(model)
    if LABELLED.get(name) is not None and LABELLED[name].refused:
        with pytest.raises(fl.UnknownArchitecture):
            fl.anatomy(model)
    else:
        assert fl.anatomy(model).evidence.method == "probe"
    assert differences(before, photograph(model)) == []


def test_reading_a_split_model_leaves_it_as_it_was() -> None:
    model = MODELS["fused-view-split"]()
    fl.freeze(model, "query", "key")
    model(torch.arange(12).view(2, 6))  # fills the caches of the split projections
    before = photograph(model)
    read._FOUND.clear()
    assert fl.anatomy(model).count("frozen")
    assert differences(before, photograph(model)) == []


@pytest.mark.parametrize("name", ["beit", "levit"])  # a cache of numbers, and one of weights
def test_a_model_whose_first_pass_fills_caches_is_read_at_once(name: str) -> None:
    model = LABELLED[name].build()
    first = fl.anatomy(model)
    assert disagreements(expected(LABELLED[name], model), first.parts, model) == []
    read._FOUND.clear()
    read._FOUND_BY_CONFIG.clear()
    assert fl.anatomy(model) == first


class Counting(nn.Module):
    """An attention with state that a forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.output = nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32)
        self.register_buffer("steps", torch.zeros(()))
        self.calls, self.shapes = 0, list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.calls += 1
        self.shapes.append(x.shape)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        query, key, value = self.project(x).unflatten(-1, (3, 4, 8)).transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.output(mixed.transpose(1, 2).flatten(-2))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(99, 32), nn.Linear(32, 99)
        self.blocks = nn.ModuleList([Counting(), Counting()])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(x)
        return logits


def by_closure(model: Any) -> None:
    before, log = model.forward, list[int]()

    def forward(ids: Tensor) -> Tensor:
        nonlocal total
        total += 1
        log.append(total)
        logits: Tensor = before(ids)
        return logits

    total = 0
    model.forward, model.log = forward, log


def by_default(model: Any) -> None:
    block = model.blocks[0]
    block.forward = lambda x, before=block.forward: before(x)


def by_keyword(model: Any) -> None:
    def forward(x: Tensor, *, before: Any = model.blocks[1].forward) -> Any:
        return before(x)

    model.blocks[1].forward = forward


def by_partial(model: Any) -> None:
    def forward(before: Any, scale: float, ids: Tensor) -> Any:
        return before(ids) * scale + model.head.weight.sum() * 0

    model.forward = partial(forward, model.forward, 2.0)


def by_list(model: Any) -> None:
    model.steps = [lambda x, i=i: x + model.blocks[i](x) for i in range(2)]

    def forward(ids: Tensor) -> Any:
        return model.head(model.steps[1](model.steps[0](model.words(ids))))

    model.forward = forward


def by_weak_reference(model: Any) -> None:
    model.blocks[1].parent = weakref.ref(model)
    model.blocks[1].forward = lambda x: Counting.forward(model.blocks[1].parent().blocks[1], x)


def by_recursion(model: Any) -> None:
    def through(x: Tensor, number: int = 0) -> Any:
        return through(x + model.blocks[number](x), number + 1) if number < 2 else model.head(x)

    model.forward = lambda ids: through(model.words(ids))


def by_cache(model: Any) -> None:
    model.once = lru_cache(maxsize=4)(model.blocks[0].forward)
    model.blocks[0].forward = lambda x: model.once(x)


def by_global(model: Any) -> None:
    space: dict[str, Any] = {"before": model.forward, "block": model.blocks[0]}
    exec("def forward(ids): return before(ids) + 0 * block(0 * ids[..., None].float()).sum() "
         "if ids.ndim > 2 else before(ids)", space)  # fmt: skip
    model.forward = space["forward"]


REPLACED = (
    by_closure, by_default, by_keyword, by_partial, by_list, by_weak_reference, by_recursion,
    by_cache, by_global,
)  # fmt: skip


@pytest.mark.parametrize("replace", REPLACED, ids=lambda replace: replace.__name__)
def test_functions_that_refer_to_the_model_run_on_the_copy(
    replace: Callable[[nn.Module], None],
) -> None:
    expected_parts = fl.anatomy(Small()).parts
    model: Any = Small().train()
    replace(model)
    model.register_forward_hook(refuse)
    model.blocks[0].register_forward_pre_hook(refuse)
    before = photograph(model)
    anatomy = fl.anatomy(model)
    assert differences(before, photograph(model)) == []
    assert anatomy.evidence.method == "probe"
    assert anatomy.parts == expected_parts
    assert all(block.calls == 0 for block in model.blocks)
    model._forward_hooks.clear()
    model.blocks[0]._forward_pre_hooks.clear()
    model(torch.arange(12).view(2, 6))
    assert all(block.calls == 1 for block in model.blocks), "the model itself is as it was"


def test_a_model_that_no_copy_can_stand_for_is_refused() -> None:
    model: Any = Small().train()

    class Elsewhere:
        blocks = model.blocks

    model.forward = lambda ids: model.head(Elsewhere.blocks[0](model.words(ids)))
    before = photograph(model)
    with pytest.raises(fl.UnknownArchitecture, match="runs a Counting of the model itself"):
        fl.anatomy(model)
    assert differences(before, photograph(model)) == []


FROM_FILE = np.random.default_rng(0)
WITHOUT_STATE = random.SystemRandom()  # draws from the system, so that there is nothing to restore


class Drawing(Small):
    generator = torch.Generator()
    older = np.random.RandomState(3)

    def forward(self, ids: Tensor) -> Tensor:
        random.random()
        np.random.rand()
        torch.rand(1)
        torch.rand(1, generator=Drawing.generator)
        self.older.rand()
        FROM_FILE.random()
        WITHOUT_STATE.random()
        return super().forward(ids)


def test_generators_that_the_forward_pass_draws_from_stay_as_they_are() -> None:
    model: Any = Drawing()
    own = random.Random(5)
    before = model.forward

    def forward(ids: Tensor) -> Any:
        own.random()
        return before(ids)

    model.forward = forward

    def states() -> list[Any]:
        numpys = (np.random.get_state(legacy=False), Drawing.older.get_state(legacy=False))
        return [
            random.getstate(), own.getstate(), repr(numpys), repr(FROM_FILE.bit_generator.state),
            bits(torch.get_rng_state()), bits(Drawing.generator.get_state()),
        ]  # fmt: skip

    first = states()
    assert fl.anatomy(model).evidence.method == "probe"
    assert states() == first
    model(torch.arange(12).view(2, 6))
    assert not [a for a, b in zip(first, states(), strict=True) if a == b]


class Dropping(Small):
    """Leaves out layers by chance, as in stochastic depth."""

    def __init__(self, draw: Callable[[], float], rate: float) -> None:
        super().__init__()
        self.draw, self.rate = draw, rate

    def forward(self, ids: Tensor) -> Any:
        x = self.words(ids)
        for block in self.blocks:
            if self.draw() < self.rate:
                x = block(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("draw", "rate"),
    [(random.random, 0.8), (lambda: float(np.random.rand()), 0.6)],
    ids=["python", "numpy"],
)
def test_layers_that_are_left_out_by_chance(draw: Callable[[], float], rate: float) -> None:
    random.seed(1)
    np.random.seed(5)
    found = {part.name: part.role for part in fl.anatomy(Dropping(draw, rate)).parts}
    assert found == {part.name: part.role for part in fl.anatomy(Small()).parts}


def test_a_compiled_submodule_is_read_without_compiling_it() -> None:
    model: Any = Small()
    plain = fl.anatomy(model).parts
    calls: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append("compiled")
        return graph.forward

    model.blocks[0] = torch.compile(model.blocks[0], backend=backend)
    found = fl.anatomy(model).parts
    assert [(p.role, p.rows, p.heads) for p in found] == [(p.role, p.rows, p.heads) for p in plain]
    assert calls == []

"""Reading a model by a probe leaves it as it was, to the bit."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
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

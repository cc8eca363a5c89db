"""The same truths on CUDA; `make gpu` runs these where there is one."""

import copy

import pytest
import torch
from torch import nn

import frostlab as fl
from frostlab.surgery.orthogonal import orthonormal, orthonormal_each
from zoo import build, loss_of, outputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
FUSED = ("gpt2", "gpt_neox", "falcon", "modernbert", "phi3", "gpt", "torch")


def on_gpu(name: str) -> tuple[nn.Module, dict]:
    model, inputs = build(name)
    return model.cuda(), {k: v.cuda() for k, v in inputs.items()}


@pytest.mark.parametrize("source", ["weights", "gaussian"])
@pytest.mark.parametrize("name", ["bert", *FUSED])
def test_surgery_gives_the_same_weights_as_on_the_cpu(name: str, source: str) -> None:
    here, _ = build(name)
    there, _ = on_gpu(name)
    for model in (here, there):
        fl.orthogonalize(model, "query", "key", source=source, seed=3)
        fl.randomize(model, "value", seed=3, std="match")
    limit = 1e-6 if source == "gaussian" else 2e-5
    for key, value in here.state_dict().items():
        assert (there.state_dict()[key].cpu() - value).abs().max() <= limit, key


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("name", FUSED)
def test_split_equals_fused(name: str, precision: str) -> None:
    model, inputs = on_gpu(name)
    if precision == "bfloat16":
        model = model.bfloat16()
        inputs = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    twin = copy.deepcopy(model)
    fl.freeze(model, "query", "key")
    results = []
    for m in (model, twin):
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "autocast"):
            found = outputs(m, inputs)
            loss = loss_of(m, inputs)
        loss.backward()
        results.append(found)
    tolerance = (
        {"rtol": 1e-4, "atol": 1e-4} if precision == "float32" else {"rtol": 0.1, "atol": 0.2}
    )
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, **tolerance)
    values = fl.anatomy(model).select("value.weight")
    assert values
    for part in values:
        split, fused = model.get_submodule(part.name.rpartition(".")[0]), twin
        grad = next(p.grad for n, p in split.named_parameters() if p.requires_grad and p.ndim == 2
                    and p.grad is not None and ("v_proj" in n or "trainable" in n))  # fmt: skip
        whole = fused.get_parameter(part.name).grad
        expected = part.rows.take(whole, part.axis)
        assert (grad.reshape(expected.shape) - expected).norm() <= (
            1e-4 if precision == "float32" else 0.1
        ) * expected.norm()


def test_factorising_hard_matrices() -> None:
    torch.manual_seed(0)
    good = torch.randn(6, 16, 128, device="cuda")
    good[1] *= torch.logspace(0, -6, 16, device="cuda")[:, None]
    good[2, 5] = good[2, 2]
    good[3] = 0
    made = orthonormal(good).double()
    assert (made @ made.mT - torch.eye(16, device="cuda").double()).abs().max() <= 1e-5
    half, _ = on_gpu("llama")
    half = half.bfloat16()
    fl.orthogonalize(half, "query", "key")


def test_many_at_once_are_the_same_as_one_by_one() -> None:
    torch.manual_seed(0)
    stacks = [torch.randn(n, 8, 64, device="cuda") for n in (2, 3, 2)]
    stacks += [torch.randn(2, 16, 64, device="cuda"), torch.randn(2, 8, 64)]
    for made, stack in zip(orthonormal_each(iter(stacks)), stacks, strict=True):
        assert made.device == stack.device
        torch.testing.assert_close(made, orthonormal(stack), rtol=0, atol=1e-6)


def test_a_program_that_allows_tf32_gets_full_precision_here() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        torch.manual_seed(0)
        made = orthonormal(torch.randn(4, 64, 1024, device="cuda")).double()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert (made @ made.mT - torch.eye(64, device="cuda").double()).abs().max() <= 2e-6


@pytest.mark.parametrize("name", ["bert", "gpt2", "gpt_neox", "llama"])
def test_captured_steps_leave_frozen_bits_alone(name: str) -> None:
    """200 replays of a whole training step as one CUDA graph."""
    model, inputs = on_gpu(name)
    model.set_attn_implementation("sdpa")  # eager masks are made on the host
    fl.orthogonalize(model, "query", "key")
    fl.freeze(model, "query", "key")
    proof = fl.audit(model)
    start = copy.deepcopy(model.state_dict())
    eager = copy.deepcopy(model)

    def optimizer_of(m: nn.Module) -> torch.optim.Optimizer:
        learning = [p for p in m.parameters() if p.requires_grad]
        return torch.optim.AdamW(learning, lr=1e-4, weight_decay=0.1, capturable=True, fused=True)

    optimizer = optimizer_of(model)

    def step() -> torch.Tensor:
        loss = loss_of(model, inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for _ in range(200):
        graph.replay()
    proof.verify(model)
    assert torch.isfinite(loss)
    moved = [k for k, v in model.state_dict().items() if not torch.equal(start[k], v)]
    assert len(moved) > 10

    other = optimizer_of(eager)
    for _ in range(203):
        loss_of(eager, inputs).backward()
        other.step()
        other.zero_grad()
    for key, value in eager.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-2, atol=1e-3)

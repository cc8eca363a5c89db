"""New values for weights: equal to a plain QR loop, in every layout, from any source."""

import copy
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import frostlab as fl
from frostlab.roles.parts import Part
from frostlab.roles.read import survey
from frostlab.surgery.orthogonal import householder, orthonormal
from zoo import build, slow_unless_layout


def plain_qr(rows: Tensor) -> Tensor:
    """The sources' method on one head (s × n), in float64: QR of the transpose, signs fixed."""
    tall = rows.double().T if rows.shape[0] <= rows.shape[1] else rows.double()
    q, r = torch.linalg.qr(tall)
    sign = torch.sign(r.diagonal())
    sign[sign == 0] = 1.0
    q = q * sign
    return q.T if rows.shape[0] <= rows.shape[1] else q


def heads_of(model: torch.nn.Module, part: Part) -> Tensor:
    """A part's values as (heads, size, in)."""
    _, slots = survey(model)
    value = slots[part.name].read(part.rows).clone()
    assert part.heads is not None
    return (value.t() if part.axis else value).unflatten(0, (-1, part.heads.size))


def orthogonality_error(matrix: Tensor) -> float:
    matrix = matrix.double()
    gram = matrix @ matrix.mT if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT @ matrix
    return float((gram - torch.eye(gram.shape[-1]).double()).abs().max())


@pytest.mark.parametrize("name", slow_unless_layout())
def test_every_layout_equals_a_plain_qr_of_each_head(name: str) -> None:
    model, _ = build(name)
    parts = fl.anatomy(model).select("query.weight", "key.weight")
    untouched = {n: p.clone() for n, p in model.named_parameters()}
    before = {part.key: heads_of(model, part) for part in parts}
    fl.orthogonalize(model, "query", "key")
    for part in parts:
        after = heads_of(model, part)
        assert after.shape[0] == part.heads.of(part.role)  # type: ignore[union-attr]
        for old, new in zip(before[part.key], after, strict=True):
            assert orthogonality_error(new) <= 1e-5
            torch.testing.assert_close(new.double(), plain_qr(old), rtol=0, atol=1e-4)
    touched = {part.name for part in parts}
    fused = {part.name for part in parts if part.rows is not None}
    for n, parameter in model.named_parameters():
        if n not in touched:
            assert torch.equal(parameter, untouched[n]), f"{n} was touched"
    for part in fl.anatomy(model).parts:
        if part.name in fused and part.role not in ("query", "key"):
            old = part.rows.take(untouched[part.name], part.axis)  # type: ignore[union-attr]
            assert torch.equal(survey(model)[1][part.name].read(part.rows), old)


def test_frozen_split_weights_can_be_orthogonalised_too() -> None:
    first, second = build("gpt_neox")[0], build("gpt_neox")[0]
    fl.freeze(first, "query", "key")
    fl.orthogonalize(first, "query", "key")
    fl.orthogonalize(second, "query", "key")
    for key, value in second.state_dict().items():
        assert torch.equal(first.state_dict()[key], value)


def test_heads_larger_than_the_input_get_orthonormal_columns() -> None:
    model, _ = build("t5-wide-heads")  # 48 rows a head on a width of 32
    part = fl.anatomy(model).select("encoder.layers[0].query")[0]
    before = heads_of(model, part)
    fl.orthogonalize(model, "query")
    after = heads_of(model, part)
    assert after.shape[1:] == (48, 32)
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new.T @ new, torch.eye(32), rtol=0, atol=1e-5)
        torch.testing.assert_close(new.double(), plain_qr(old), rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", slow_unless_layout())
def test_the_identity_gives_every_head_its_rows(name: str) -> None:
    model, _ = build(name)
    parts = fl.anatomy(model).select("query.weight", "key.weight")
    fl.orthogonalize(model, "query", "key", source="identity")
    for part in parts:
        heads = heads_of(model, part)
        width = heads.shape[-1]
        for number, head in enumerate(heads):
            if len(head) > width:  # the identity above zeros
                assert torch.equal(head, torch.eye(len(head), width)), (part.key, number)
                continue
            for row, values in enumerate(head):
                wanted = torch.zeros(width)
                wanted[(number * len(head) + row) % width] = 1.0
                assert torch.equal(values, wanted), (part.key, number, row)
            assert torch.equal(head @ head.T, torch.eye(len(head)))


@torch.no_grad()
def test_the_identity_of_square_grouped_and_wide_projections() -> None:
    square, _ = build("decoder")
    state = torch.get_rng_state()
    fl.orthogonalize(square, "query", "key", source="identity")
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(square.blocks[0].query.weight, torch.eye(32))
    assert torch.equal(square.blocks[1].key.weight, torch.eye(32))
    grouped, _ = build("llama")  # 4 query heads, 2 key heads of 8
    fl.orthogonalize(grouped, "key", source="identity")
    key = grouped.layers[0].self_attn.k_proj.weight
    assert torch.equal(key, torch.eye(32)[: len(key)])
    tall, _ = build("t5-wide-heads")  # 48 rows a head on a width of 32
    fl.orthogonalize(tall, "query", source="identity")
    part = fl.anatomy(tall).select("encoder.layers[0].query")[0]
    for head in heads_of(tall, part):
        assert torch.equal(head, torch.eye(48, 32))
    fl.orthogonalize(square, "up", scope="matrix", source="identity")
    assert torch.equal(square.blocks[0].up.weight, torch.eye(64, 32))
    fl.orthogonalize(square, "down", scope="matrix", source="identity")
    assert torch.equal(square.blocks[0].down.weight, torch.eye(32, 64))


def test_the_identity_does_not_read_the_weights() -> None:
    model, _ = build("bert")
    weight = model.encoder.layer[0].attention.self.query.weight
    with torch.no_grad():
        weight.fill_(torch.nan)
    fl.orthogonalize(model, "query", source="identity")
    assert torch.equal(weight, torch.eye(32))


def test_a_frozen_identity_is_made_again_instead_of_stored(tmp_path: Path) -> None:
    model, _ = build("gpt2")
    base = copy.deepcopy(model)
    fl.orthogonalize(model, "query", "key", source="identity")
    fl.freeze(model, "query", "key")
    fl.save_trainable(model, tmp_path / "delta")
    fl.load_trainable(base, tmp_path / "delta")
    for key, value in model.state_dict().items():
        assert torch.equal(base.state_dict()[key], value), key


def test_scope_matrix_covers_all_heads_at_once() -> None:
    model, _ = build("gpt2")
    fl.orthogonalize(model, "query", scope="matrix")
    part = fl.anatomy(model).select("query.weight")[0]
    whole = heads_of(model, part).flatten(0, 1)
    assert orthogonality_error(whole) <= 1e-5
    fl.orthogonalize(model, "up", scope="matrix")
    with pytest.raises(fl.BadInput, match=r'has no heads; use scope="matrix"'):
        fl.orthogonalize(model, "up")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_dtype_is_factorised_in_float32_or_better(dtype: torch.dtype) -> None:
    model, _ = build("llama")
    model.to(dtype)
    part = fl.anatomy(model).select("query.weight")[0]
    old = heads_of(model, part)
    fl.orthogonalize(model, "query", "key")
    new = heads_of(model, part)
    assert new.dtype == dtype
    for a, b in zip(old, new, strict=True):
        torch.testing.assert_close(b.double(), plain_qr(a).to(dtype).double(), rtol=0, atol=1e-3)


def test_a_gaussian_source_depends_on_the_seed_alone() -> None:
    def made(seed: int, *selection: str) -> Tensor:
        model, _ = build("gpt2")
        torch.manual_seed(seed + 17)
        fl.orthogonalize(model, *selection, source="gaussian", seed=seed)
        return heads_of(model, fl.anatomy(model).select("query.weight")[0])

    first = made(3, "query", "key")
    assert torch.equal(first, made(3, "query"))
    assert not torch.equal(first, made(4, "query", "key"))
    assert orthogonality_error(first) <= 1e-6


def test_the_global_random_state_never_moves() -> None:
    model, _ = build("bert")
    state = torch.get_rng_state()
    threads = torch.get_num_threads()
    fl.orthogonalize(model, "query", source="gaussian", seed=1)
    fl.randomize(model, "key", seed=1)
    fl.orthogonalize(model, "value")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


THREADS_PROGRAM = """
import sys, torch
torch.set_num_threads(int(sys.argv[1]))
from transformers import BertConfig, BertModel
import frostlab as fl
from frostlab.surgery.origin import digest
model = BertModel(BertConfig(num_hidden_layers=1, vocab_size=99)).double()  # no rounding hides
fl.orthogonalize(model, "query", "key", source="gaussian", seed=5)
fl.orthogonalize(model, "value", source="gaussian", scope="matrix", seed=5)
fl.randomize(model, "up", seed=5, std=0.1)
print([digest(p) for n, p in model.named_parameters()
       if n.endswith(("query.weight", "key.weight", "value.weight", "intermediate.dense.weight"))])
"""


@pytest.mark.slow
def test_random_bits_do_not_depend_on_the_thread_count() -> None:
    """In float64, where the factorisation of a whole matrix does differ if threads share it."""
    found = {
        subprocess.run(
            [sys.executable, "-c", THREADS_PROGRAM, threads],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"OMP_NUM_THREADS": threads},
        ).stdout
        for threads in ("1", "2")
    }
    assert len(found) == 1
    assert found.pop().count("'") == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hard_matrices_fall_back_and_still_come_out_orthonormal(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    good = torch.randn(8, 64)
    scaled = good * torch.logspace(0, -6, 8)[:, None]  # ill-conditioned
    repeated = good.clone()
    repeated[5] = repeated[2]  # rank-deficient
    nearly = good.clone()
    nearly[5] = nearly[2] + 1e-5 * torch.randn(64)
    batch = torch.stack([good, scaled, repeated, torch.zeros(8, 64), nearly]).to(dtype)
    made = orthonormal(batch)
    assert made.dtype == dtype
    for matrix in made:
        assert orthogonality_error(matrix) <= 1e-5
    for index in (0, 1):
        expected = plain_qr(batch[index])
        torch.testing.assert_close(made[index].double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("condition", [1.0, 3.0, 10.0, 30.0, 1e2, 1e3, 1e4, 1e5, 1e6, 1e8])
@pytest.mark.parametrize("shape", [(64, 768), (128, 1024), (16, 16), (1, 8)])
def test_every_condition_number_comes_out_orthonormal(
    condition: float, shape: tuple[int, int]
) -> None:
    torch.manual_seed(2)
    u, _, v = torch.linalg.svd(torch.randn(3, *shape, dtype=torch.float64), full_matrices=False)
    spread = torch.logspace(0, -math.log10(condition), shape[0], dtype=torch.float64)
    made = orthonormal(((u * spread) @ v).float())
    assert max(orthogonality_error(m) for m in made) <= 1e-5


def test_square_heads_whose_condition_is_poor() -> None:
    torch.manual_seed(0)
    square = torch.randn(16, 128, 128)
    made = orthonormal(square)
    assert max(orthogonality_error(m) for m in made) <= 1e-5
    for old, new in zip(square, made, strict=True):
        condition = float(torch.linalg.cond(old.double()))
        limit = 1e-6 * condition
        assert (new.double() - plain_qr(old)).abs().max() <= limit


def test_householder_counts_a_zero_as_positive() -> None:
    made = householder(torch.zeros(1, 2, 3))
    assert (made[0].diagonal() > 0).all()
    assert orthogonality_error(made[0]) <= 1e-6


def test_the_matmul_precision_of_the_program_is_put_back() -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        orthonormal(torch.randn(2, 64, 256))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_randomize_with_a_deviation_or_the_norm_that_was_there() -> None:
    model, _ = build("gpt_neox")
    fl.randomize(model, "query", std=0.02, seed=1)
    part = fl.anatomy(model).select("query.weight")[0]
    value = heads_of(model, part)
    assert abs(float(value.std()) - 0.02) < 0.002
    assert abs(float(value.mean())) < 0.002
    key = fl.anatomy(model).select("key.weight")[0]
    norm = heads_of(model, key).double().norm()
    fl.randomize(model, "key", std="match", seed=1)
    new = heads_of(model, key)
    torch.testing.assert_close(new.double().norm(), norm, rtol=1e-6, atol=0)
    assert not torch.allclose(new, heads_of(build("gpt_neox")[0], key))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: fl.orthogonalize(m, "query", scope="heads"), "did you mean `head`"),
        (lambda m: fl.orthogonalize(m, "query", source="gauss"), "did you mean `gaussian`"),
        (lambda m: fl.orthogonalize(m, "query", seed=1.5), "seed=1.5 is not an integer"),
        (lambda m: fl.orthogonalize(m, "query.bias"), "selects only biases"),
        (lambda m: fl.orthogonalize(m, "norm", scope="matrix"), "is not a matrix"),
        (lambda m: fl.randomize(m, "query", std=-1), "neither a positive number"),
        (lambda m: fl.randomize(m, "query", std="same"), "neither a positive number"),
        (lambda m: fl.randomize(m, "query", std=True), "neither a positive number"),
        (lambda m: fl.randomize(m, "query", std="orthonormals"), "did you mean `orthonormal`"),
        (lambda m: fl.randomize(m, "up", std="orthonormal"), 'has no heads; use std="match"'),
        (lambda m: fl.randomize(m, "querry"), "did you mean `query`"),
        (lambda m: fl.randomize(m), "no selection"),
    ],
)
def test_bad_calls_change_nothing(call: object, message: str) -> None:
    model, _ = build("bert")
    before = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(fl.BadInput) as error:
        call(model)  # type: ignore[operator]
    assert message in str(error.value)
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


def test_weights_that_are_not_numbers_are_refused() -> None:
    model, _ = build("bert")
    for bad in (float("nan"), float("inf")):
        with torch.no_grad():
            model.encoder.layer[1].attention.self.query.weight[3, 3] = bad
        before = model.encoder.layer[0].attention.self.query.weight.clone()
        with pytest.raises(fl.BadInput, match="layer.1.*has NaN or infinite values"):
            fl.orthogonalize(model, "query")
        with pytest.raises(fl.BadInput, match="layer.1.*has NaN or infinite values"):
            fl.randomize(model, "query", std="match")
        assert torch.equal(model.encoder.layer[0].attention.self.query.weight, before)


@pytest.mark.parametrize("scale", [1e-22, 1e-15, 1e15, 1e22])
def test_tiny_and_huge_weights(scale: float) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(2, 16, 64)
    made = orthonormal(matrix * scale)
    assert max(orthogonality_error(m) for m in made) <= 1e-5
    torch.testing.assert_close(made, orthonormal(matrix), rtol=0, atol=1e-5)


def test_fixed_positions_cannot_be_drawn_again() -> None:
    with pytest.raises(fl.BadInput, match="is never trained"):
        fl.randomize(build("whisper")[0], "encoder.position")

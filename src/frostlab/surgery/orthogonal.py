"""New values for weights: orthonormal rows, per head or per matrix, or random draws.

The orthonormal rows come from the current weights, from a Gaussian draw, or from the identity. A
part is a parameter, or the rows of a parameter that have one role, such as query.

A Cholesky pass multiplies a matrix X by the inverse Cholesky factor of X·Xᵀ, which makes its rows
orthonormal up to rounding. `orthonormal` uses one pass for well-conditioned matrices, two passes
for other matrices, and torch's QR for those that are nearly singular or that two passes leave
imprecise.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from frostlab.devices import on_gpu
from frostlab.errors import BadInput, nearest
from frostlab.roles.parts import ATTENTION_INPUTS, Part, Slot
from frostlab.roles.read import survey
from frostlab.storage import derive_seed
from frostlab.surgery.freeze import refuse_untouchable, refuse_wrapped
from frostlab.surgery.origin import Origin, record_origin

Scope = Literal["head", "matrix"]
Source = Literal["weights", "gaussian", "identity"]

_ONE_PASS = 16.0  # up to this condition number, one Cholesky pass is precise enough
_COLUMNS_AT_ONCE = 512  # columns per partial product of X·Xᵀ on a GPU
_TINY = 1e-12  # a batch is rescaled if a matrix's largest entry is below this or above 1 / this
_AT_ONCE = 2**28  # about how many elements a GPU factorises in one batch: 1 GiB of float32
_SINGULAR = 1e6  # above this condition number, QR replaces Cholesky
# the largest accepted |Q·Qᵀ − I| after two passes
_LARGEST_ERROR = {torch.float32: 2e-6, torch.float64: 1e-13}


def orthogonalize(
    model: nn.Module,
    *selections: str,
    scope: Scope = "head",
    source: Source = "weights",
    seed: int = 0,
) -> None:
    """Make the rows of the selected weights orthonormal; biases are kept.

    If there are more rows than columns, the columns become orthonormal instead.

    Args:
        scope: "head" makes the rows of each head orthonormal, "matrix" all rows of the matrix.
        source: "weights" factorises the current values, "gaussian" a draw from `seed`. "identity"
            draws nothing: the rows of all heads, in order, become the rows of the identity, which
            are repeated if there are more rows than columns; so heads may be equal. A head, or
            with scope="matrix" the matrix, that has more rows than columns becomes the identity
            with rows of zeros below it.
    """
    _check_choice("scope", scope, ("head", "matrix"))
    _check_choice("source", source, ("weights", "gaussian", "identity"))
    origin = Origin("orthogonalize", scope=scope, source=source, seed=_seed(source, seed))
    _rewrite(model, selections, origin)


def randomize(
    model: nn.Module,
    *selections: str,
    seed: int = 0,
    std: float | Literal["match", "orthonormal"] = 0.02,
) -> None:
    """Draw the selected weights from a normal distribution; biases are kept.

    Args:
        std: the standard deviation; or "match" to keep the Frobenius norm of the current values;
            or "orthonormal" to give each head the Frobenius norm that `orthogonalize` gives it,
            so that the results of the two functions differ only in orthogonality.
    """
    number = isinstance(std, int | float) and not isinstance(std, bool)
    if std not in ("match", "orthonormal") and not (number and 0 < float(std) < math.inf):
        raise BadInput(
            f'randomize: std={std!r} is neither a positive number nor "match" nor "orthonormal"'
            f"{nearest(str(std), ('match', 'orthonormal'))}"
        )
    _rewrite(model, selections, Origin("randomize", std=std, seed=_seed("gaussian", seed)))


def _seed(source: str, seed: int) -> int | None:
    """Return the seed, or None if the source of the values is not a draw."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**63:
        raise BadInput(f"seed={seed!r:.60} is not an integer of at most 64 bits")
    return seed if source == "gaussian" else None


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        listed = " or ".join(f'"{choice}"' for choice in choices)
        raise BadInput(f"{name}={value!r} is not {listed}{nearest(str(value), choices)}")


def _rewrite(model: nn.Module, selections: tuple[str, ...], origin: Origin) -> None:
    """Write new values into the selected weights, and record their origin."""
    verb = origin.method
    refuse_wrapped(model, verb)
    anatomy, slots = survey(model)
    refuse_untouchable(model, slots.values(), verb)
    parts = [part for part in anatomy.select(*selections) if part.kind == "weight"]
    if not parts:
        raise BadInput(f"{verb}: {', '.join(selections)} selects only biases, which are kept")
    for part in parts:
        _check_matrix(part, origin)
    if origin.reads_weights:
        for part in parts:
            _check_finite(part, slots[part.name], origin)
    for part, value in zip(parts, _renew(parts, slots, origin), strict=True):
        slots[part.name].write(value, part.rows)
        record_origin(model, part, slots[part.name], origin)


def _check_matrix(part: Part, origin: Origin) -> None:
    if part.state == "fixed":
        raise BadInput(
            f"{origin.method}: {part.key} is never trained: it is a constant, such as a table of "
            "sinusoids, or the model does not use it"
        )
    if len(part.shape) < 2 or any(size > 1 for size in part.shape[2:]) or part.axis > 1:
        raise BadInput(f"{origin.method}: {part.key} ({part.role}) is not a matrix")
    if part.heads is None and (origin.scope == "head" or origin.std == "orthonormal"):
        instead = 'scope="matrix"' if origin.method == "orthogonalize" else 'std="match"'
        lies = " whose rows lie together" if part.role in ATTENTION_INPUTS else ""
        raise BadInput(
            f"{origin.method}: {part.key} ({part.role}) has no heads{lies}; use {instead} for it"
        )


def renewed(part: Part, slot: Slot, origin: Origin) -> Tensor:
    """Return the values that the call in `origin` would give a part, without writing them."""
    _check_matrix(part, origin)
    if origin.reads_weights:
        _check_finite(part, slot, origin)
    return next(_renew([part], {part.name: slot}, origin))


def _renew(parts: list[Part], slots: dict[str, Slot], origin: Origin) -> Iterator[Tensor]:
    """Yield the new values of each part, in the shape of the part."""
    values: Iterator[Tensor]
    if origin.source == "identity":
        values = (_identity(_stacked(p, _read(p, slots[p.name]), origin)) for p in parts)
    elif origin.seed is None:
        stacks = (_stacked(p, _exact(_read(p, slots[p.name])), origin) for p in parts)
        values = (stack.flatten(0, 1) for stack in orthonormal_each(stacks))
    else:
        values = (_random(p, _read(p, slots[p.name]), origin) for p in parts)
    for part, rows in zip(parts, values, strict=True):
        yield (rows.t() if part.axis else rows).reshape(part.shape)


def _check_finite(part: Part, slot: Slot, origin: Origin) -> None:
    if not bool(slot.read(part.rows).isfinite().all()):
        raise BadInput(f"{origin.method}: {part.key} has NaN or infinite values")


def _read(part: Part, slot: Slot) -> Tensor:
    """Return a part's values as (rows, in), even if the weight is stored as (in, out).

    A convolution over one token is a matrix with further axes of size 1.
    """
    rows = slot.read(part.rows).flatten(1)
    return rows.t() if part.axis else rows


def _exact(rows: Tensor) -> Tensor:
    """Return float64 rows as they are, and other rows in float32."""
    return rows if rows.dtype == torch.float64 else rows.float()


def _stacked(part: Part, rows: Tensor, origin: Origin) -> Tensor:
    """Return the matrix of each head (heads, size, in); with scope="matrix", (1, rows, in)."""
    if origin.scope == "matrix":
        return rows.unsqueeze(0)
    assert part.heads is not None
    return rows.unflatten(0, (part.heads.of(part.role), part.heads.size))


def _identity(stack: Tensor) -> Tensor:
    """Return rows of the identity for heads (heads, size, in), one head below the other."""
    heads, size, width = stack.shape
    if size > width:
        return torch.eye(size, width, dtype=stack.dtype, device=stack.device).repeat(heads, 1)
    rows = torch.arange(heads * size, device=stack.device) % width
    return torch.eye(width, dtype=stack.dtype, device=stack.device)[rows]


def _random(part: Part, current: Tensor, origin: Origin) -> Tensor:
    """Draw the new values of a part, in the shape of its current values.

    Drawing in float64 on the CPU with one thread makes the values independent of the device and
    of the number of threads.
    """
    assert origin.seed is not None
    generator = torch.Generator().manual_seed(derive_seed(origin.seed, part.key))
    with _one_thread(), torch.no_grad():
        draw = torch.randn(current.shape, generator=generator, dtype=torch.float64)
        if origin.method == "orthogonalize":
            draw = orthonormal(_stacked(part, draw, origin)).flatten(0, 1)
        elif origin.std == "match":
            norm = current.detach().to("cpu", torch.float64).norm()
            draw *= norm / draw.norm()
        elif origin.std == "orthonormal":
            heads = _stacked(part, draw, origin)  # (heads, size, in)
            # the norm of a head with orthonormal rows, or orthonormal columns if size > in
            norm = math.sqrt(min(heads.shape[1:]))
            draw = (heads * (norm / heads.norm(dim=(1, 2), keepdim=True))).flatten(0, 1)
        else:
            assert isinstance(origin.std, int | float)
            draw *= origin.std
    return draw.to(current.device)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def orthonormal(matrices: Tensor) -> Tensor:
    """Return matrices with orthonormal rows, or columns if there are more rows than columns.

    Args:
        matrices: (batch, s, n), float32 or float64.
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        return orthonormal(matrices.mT).mT
    with _exact_matmul(matrices.device):
        largest = torch.linalg.vector_norm(matrices, math.inf, (-1, -2), keepdim=True)
        extreme = (largest < _TINY) | (largest > 1 / _TINY)  # squares would under- or overflow
        if bool(extreme.any()):
            matrices = matrices / torch.where(largest > 0, largest, 1.0)
        return _orthonormal_rows(matrices)


def orthonormal_each(stacks: Iterable[Tensor]) -> Iterator[Tensor]:
    """Apply `orthonormal` to stacks (batch, s, n).

    On a GPU, successive stacks of equal s and n are factorised together.
    """
    group: list[Tensor] = []
    for stack in stacks:
        if group and not _joins(group, stack):
            yield from _factorised(group)
            group = []
        group.append(stack)
    if group:
        yield from _factorised(group)


def _joins(group: list[Tensor], stack: Tensor) -> bool:
    """Return whether a stack can be factorised together with a group."""
    first = group[0]
    alike = (first.shape[1:], first.dtype, first.device) == (
        stack.shape[1:], stack.dtype, stack.device,
    )  # fmt: skip
    return on_gpu(stack) and alike and len(group) * first.numel() < _AT_ONCE


def _factorised(group: list[Tensor]) -> Iterator[Tensor]:
    rows = orthonormal(group[0] if len(group) == 1 else torch.cat(group))
    yield from rows.split([len(stack) for stack in group])


def _orthonormal_rows(x: Tensor) -> Tensor:
    """Return orthonormal rows for matrices (batch, s, n) with s ≤ n."""
    basis, condition = _cholesky_pass(x)
    twice = condition > _ONE_PASS
    if bool(twice.any()):
        basis[twice], _ = _cholesky_pass(basis[twice])
        failed = twice & ((condition > _SINGULAR) | (_departure(basis) > _LARGEST_ERROR[x.dtype]))
        if bool(failed.any()):
            basis[failed] = householder(x[failed])
    return basis


def _cholesky_pass(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the new rows, and an upper bound on the condition number of x (∞ if Cholesky failed).

    The (s, s) matrices are float64; only the products with x are in x's dtype.
    """
    lower, info = torch.linalg.cholesky_ex(_gram(x))  # (B, s, s)
    identity = torch.eye(x.shape[-2], dtype=torch.float64, device=x.device).expand_as(lower)
    lower = torch.where((info == 0)[:, None, None], lower, identity)
    inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
    condition = _norm_bound(lower) * _norm_bound(inverse)
    condition = condition.masked_fill((info != 0) | ~condition.isfinite(), torch.inf)
    return inverse.to(x.dtype) @ x, condition


def _gram(x: Tensor) -> Tensor:
    """Return X·Xᵀ in float64.

    On a GPU, a float32 product over many columns loses precision. So if the number of columns is a
    multiple of `_COLUMNS_AT_ONCE`, products over that many columns each are summed in float64.
    """
    if not on_gpu(x) or x.dtype == torch.float64 or x.shape[-1] % _COLUMNS_AT_ONCE:
        return (x @ x.mT).double()
    runs = x.unflatten(-1, (-1, _COLUMNS_AT_ONCE)).transpose(-3, -2)  # (B, n / run, s, run)
    return (runs @ runs.mT).sum(-3, dtype=torch.float64)


def _norm_bound(matrix: Tensor) -> Tensor:
    """Return √(‖·‖₁·‖·‖∞), an upper bound on the spectral norm."""
    size = matrix.abs()
    return (size.sum(-1).amax(-1) * size.sum(-2).amax(-1)).sqrt()


def _departure(rows: Tensor) -> Tensor:
    """Return the largest entry of |Q·Qᵀ − I| for each matrix Q."""
    identity = torch.eye(rows.shape[-2], dtype=torch.float64, device=rows.device)
    return (_gram(rows) - identity).abs().amax((-1, -2))


def householder(matrices: Tensor) -> Tensor:
    """Return orthonormal rows by float64 QR, even for rank-deficient matrices."""
    q, r = torch.linalg.qr(matrices.mT.double())
    diagonal = r.diagonal(dim1=-2, dim2=-1)
    sign = torch.where(diagonal < 0, -1.0, 1.0).to(q)  # makes R's diagonal ≥ 0, as with Cholesky
    return (q * sign.unsqueeze(-2)).mT.to(matrices.dtype)


@contextmanager
def _exact_matmul(device: torch.device) -> Iterator[None]:
    """Compute matmuls in full float32, whatever precision the program has set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False), torch.no_grad():
            yield
    finally:
        torch.set_float32_matmul_precision(before)

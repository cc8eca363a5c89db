"""Orthonormal bases, many at once: Cholesky where it is safe, Householder where it is not.

For rows X (s × n, s ≤ n) with X·Xᵀ = L·Lᵀ, the rows of L⁻¹·X are orthonormal, and they are the
Q of the QR factorisation of Xᵀ whose R has a positive diagonal: the sign convention of the
OELM papers. One pass loses orthogonality as the square of the condition number, so
ill-conditioned matrices get a second pass, and those Cholesky cannot do get Householder.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_ONE_PASS = 16.0  # bound on the condition number up to which one pass keeps full precision
_RUN = 512
_TINY = 1e-12
_AT_ONCE = 2**28  # numbers a GPU factorises together: 1 GiB of float32
_SINGULAR = 1e6  # bound from which Cholesky is not trusted
_LIMIT = {torch.float32: 2e-6, torch.float64: 1e-13}  # acceptable |Q·Qᵀ − 1|


def orthonormal(matrices: Tensor) -> Tensor:
    """Return orthonormal rows (columns, where there are more rows than columns).

    Args:
        matrices: (batch, s, n), float32 or float64.
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        return orthonormal(matrices.mT).mT
    with _exact_matmul(matrices.device):
        largest = torch.linalg.vector_norm(matrices, math.inf, (-1, -2), keepdim=True)
        if bool(
            ((largest < _TINY) | (largest > 1 / _TINY)).any()
        ):  # squares would under- or overflow
            matrices = matrices / torch.where(largest > 0, largest, 1.0)
        return _orthonormal_rows(matrices)


def orthonormal_each(stacks: Iterable[Tensor]) -> Iterator[Tensor]:
    """Factorise stacks (batch, s, n) in turn; on a GPU several neighbours of a shape at once."""
    group: list[Tensor] = []
    for stack in stacks:
        if group and not _fits(group, stack):
            yield from _factorised(group)
            group = []
        group.append(stack)
    if group:
        yield from _factorised(group)


def _fits(group: list[Tensor], stack: Tensor) -> bool:
    first = group[0]
    alike = (first.shape[1:], first.dtype, first.device) == (
        stack.shape[1:], stack.dtype, stack.device,
    )  # fmt: skip
    return stack.is_cuda and alike and len(group) * first.numel() < _AT_ONCE


def _factorised(group: list[Tensor]) -> Iterator[Tensor]:
    made = orthonormal(group[0] if len(group) == 1 else torch.cat(group))
    yield from made.split([len(stack) for stack in group])


def _orthonormal_rows(x: Tensor) -> Tensor:
    basis, condition = _pass(x)
    again = condition > _ONE_PASS
    if bool(again.any()):
        basis[again], _ = _pass(basis[again])
        failed = again & ((condition > _SINGULAR) | (_departure(basis) > _LIMIT[x.dtype]))
        if bool(failed.any()):
            basis[failed] = householder(x[failed])
    return basis


def _pass(x: Tensor) -> tuple[Tensor, Tensor]:
    """One Cholesky pass: the new rows, and a bound on the condition number (∞: it failed).

    The small matrices are float64, so that only the large products round to x's precision.
    """
    lower, info = torch.linalg.cholesky_ex(_gram(x))  # (B, s, s)
    identity = torch.eye(x.shape[-2], dtype=torch.float64, device=x.device).expand_as(lower)
    lower = torch.where((info == 0)[:, None, None], lower, identity)
    inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
    condition = _norm_bound(lower) * _norm_bound(inverse)
    condition = condition.masked_fill((info != 0) | ~condition.isfinite(), torch.inf)
    return inverse.to(x.dtype) @ x, condition


def _gram(x: Tensor) -> Tensor:
    """X·Xᵀ in float64; on a GPU from products over short runs, as it sums long ones plainly."""
    if not x.is_cuda or x.dtype == torch.float64 or x.shape[-1] % _RUN:
        return (x @ x.mT).double()
    runs = x.unflatten(-1, (-1, _RUN)).transpose(-3, -2)  # (B, n / run, s, run)
    return (runs @ runs.mT).sum(-3, dtype=torch.float64)


def _norm_bound(matrix: Tensor) -> Tensor:
    """√(‖·‖₁·‖·‖∞), never less than the spectral norm."""
    size = matrix.abs()
    return (size.sum(-1).amax(-1) * size.sum(-2).amax(-1)).sqrt()


def _departure(rows: Tensor) -> Tensor:
    identity = torch.eye(rows.shape[-2], dtype=torch.float64, device=rows.device)
    return (_gram(rows) - identity).abs().amax((-1, -2))


def householder(matrices: Tensor) -> Tensor:
    """The same rows by torch's QR in float64; rank-deficient input still gives a basis."""
    q, r = torch.linalg.qr(matrices.mT.double())
    diagonal = r.diagonal(dim1=-2, dim2=-1)
    sign = torch.where(diagonal < 0, -1.0, 1.0).to(q)  # the sign of 0 counts as +1
    return (q * sign.unsqueeze(-2)).mT.to(matrices.dtype)


@contextmanager
def _exact_matmul(device: torch.device) -> Iterator[None]:
    """Full float32 products, whatever the program around us allows."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False), torch.no_grad():
            yield
    finally:
        torch.set_float32_matmul_precision(before)

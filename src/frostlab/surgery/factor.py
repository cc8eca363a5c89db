"""Orthonormal bases, many at once: Cholesky where it is safe, Householder where it is not.

For rows X (s × n, s ≤ n) with X·Xᵀ = L·Lᵀ, the rows of L⁻¹·X are orthonormal, and they are the
Q of the QR factorisation of Xᵀ whose R has a positive diagonal: the sign convention of the
OELM papers. One pass loses orthogonality as the square of the condition number, so
ill-conditioned matrices get a second pass, and those Cholesky cannot do get Householder.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_ONE_PASS = 8.0  # condition number up to which one pass keeps full precision
_LIMIT = {torch.float32: 2e-6, torch.float64: 1e-13}  # acceptable |Q·Qᵀ − 1|


def orthonormal(matrices: Tensor) -> Tensor:
    """Return orthonormal rows (columns, where there are more rows than columns).

    Args:
        matrices: (batch, s, n), float32 or float64.
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        return orthonormal(matrices.mT).mT
    with _exact_matmul(matrices.device):
        return _orthonormal_rows(matrices)


def _orthonormal_rows(x: Tensor) -> Tensor:
    basis, good, condition = _pass(x)
    again = good & (condition > _ONE_PASS)
    if bool(again.any()):
        once = basis[again]
        twice, fine, _ = _pass(once)
        error = _departure(twice)
        basis[again] = twice
        good[again] = fine & (error <= _LIMIT[x.dtype])
    if not bool(good.all()):
        basis[~good] = householder(x[~good])
    return basis


def _pass(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One Cholesky pass: the new rows, whether it worked, a bound on the condition number."""
    gram = x @ x.mT  # (B, s, s)
    lower, info = torch.linalg.cholesky_ex(gram)
    good = info == 0
    lower = torch.where(good[:, None, None], lower, torch.eye(x.shape[-2]).to(x))
    identity = torch.eye(x.shape[-2]).to(x).expand_as(lower)
    inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
    condition = _norm_bound(lower) * _norm_bound(inverse)
    good &= condition.isfinite() & (condition < 0.1 * torch.finfo(x.dtype).eps ** -0.5)
    return inverse @ x, good, condition


def _norm_bound(matrix: Tensor) -> Tensor:
    """√(‖·‖₁·‖·‖∞), never less than the spectral norm."""
    size = matrix.abs()
    return (size.sum(-1).amax(-1) * size.sum(-2).amax(-1)).sqrt()


def _departure(rows: Tensor) -> Tensor:
    identity = torch.eye(rows.shape[-2]).to(rows)
    return (rows @ rows.mT - identity).abs().amax((-1, -2))


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

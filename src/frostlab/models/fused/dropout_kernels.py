"""Dropout inside Triton kernels: whether an element is kept follows from its place and a seed.

No mask is stored, because the backward kernels compute it again. A row of elements has two keys, of
which `keys_of` mixes the seed and the row's number; `dropped_out` mixes them with an element's
place. Both use the multipliers and shifts of lowbias32, C. Wellons' permutation of 32-bit integers.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def _mixed(number):
    number ^= number >> 16
    number *= 0x7FEB352D
    number ^= number >> 15
    number *= 0x846CA68B
    return number ^ (number >> 16)


@triton.jit
def keys_of(seed, row):
    """Return the two keys of a row, or of rows; `seed` points to one 64-bit integer."""
    value = tl.load(seed)
    low = value.to(tl.uint32)
    high = (value >> 32).to(tl.uint32)
    first = _mixed(_mixed(row.to(tl.uint32) + low) ^ high)
    return first, _mixed(first + 0x9E3779B9)


@triton.jit  # type: ignore[untyped-decorator]
def dropped_out(value, first, second, place, threshold: tl.constexpr):
    """Return elements of a row after dropout: 0, or the value over the probability to be kept.

    An element is dropped if its random number, of 32 bits, is below the threshold. `place` are the
    elements' places in the row.
    """
    number = place.to(tl.uint32) * 0x9E3779B1 + first
    number = (number ^ (number >> 16)) * 0x7FEB352D
    number = (number ^ (number >> 15) ^ second) * 0x846CA68B
    scale: tl.constexpr = 4294967296.0 / (4294967296 - threshold)
    return tl.where(number >= threshold, value * scale, 0.0)


def threshold_of(dropout: float) -> int:
    """Return the threshold of `dropped_out` for a probability of dropout."""
    return min(round(dropout * 2**32), 2**32 - 1)

"""Triton kernels of a depthwise convolution along time over (B, T, C), and of its gradients.

A row is a time step. A program is one warp with a block of channels, two per lane, and no lane
needs the values of another. The taps (the weights of the convolution) and the sums stay in
registers. Rows of the input are loaded one by one; each is converted to float32 once and used for
all sums that need it. With 16 output rows per program and 31 taps, a row is thus loaded by 46 / 16
= 2.9 programs on average, mostly from the caches, and not 31 times. The loops over rows and taps
are unrolled, which takes a few seconds to compile.
"""

# Triton cannot unpack tuples, so they are extended with +.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, CHANNELS = 16, 64  # time steps and channels that a program computes at once
STEPS = 8  # blocks of rows that a program adds up for the gradient of the taps


@triton.jit(do_not_specialize=["length"])  # type: ignore[untyped-decorator]
def _convolve(  # type: ignore[no-untyped-def]
    x, weights, bias, out, length,
    width: tl.constexpr, kernel: tl.constexpr, biased: tl.constexpr, flipped: tl.constexpr,
    rows: tl.constexpr, channels: tl.constexpr,
):  # fmt: skip
    """Compute `rows` time steps of a block of channels; `flipped` reverses the taps.

    Reads rows + kernel − 1 rows of x and the block's taps, and writes `rows` rows.
    """
    first = tl.program_id(0) * rows
    channel = tl.program_id(1) * channels + tl.arange(0, channels)
    inside = channel < width
    begin = tl.program_id(2).to(tl.int64) * length * width
    taps = ()
    for k in tl.static_range(kernel):
        place = kernel - 1 - k if flipped else k
        taps = taps + (tl.load(weights + place * width + channel, inside, 0.0).to(tl.float32),)
    start = tl.full((channels,), 0.0, tl.float32)
    if biased:
        start += tl.load(bias + channel, inside, 0.0).to(tl.float32)
    sums = ()
    for _ in tl.static_range(rows):
        sums = sums + (start,)
    place = x + begin + (first - kernel // 2) * width + channel
    for s in tl.static_range(rows + kernel - 1):
        row = first + s - kernel // 2
        known = inside & (row >= 0) & (row < length)
        value = tl.load(place + s * width, known, 0.0).to(tl.float32)
        added = ()
        for t in tl.static_range(rows):
            if s - t < 0 or s - t >= kernel:
                added = added + (sums[t],)
            else:
                added = added + (sums[t] + value * taps[s - t],)
        sums = added
    place = out + begin + first * width + channel
    for t in tl.static_range(rows):
        known = inside & (first + t < length)
        tl.store(place + t * width, sums[t].to(out.dtype.element_ty), known)


@triton.jit(do_not_specialize=["length"])  # type: ignore[untyped-decorator]
def _correlate(  # type: ignore[no-untyped-def]
    gradient, x, sums, length,
    width: tl.constexpr, kernel: tl.constexpr, steps: tl.constexpr,
    rows: tl.constexpr, channels: tl.constexpr,
):  # fmt: skip
    """Add up the gradients of taps and bias over `steps` blocks of `rows` time steps.

    Reads these rows of the gradient, and of x the same rows and kernel − 1 more per block; writes
    kernel + 1 values per channel, the last one for the bias.
    """
    first = tl.program_id(0) * steps * rows
    channel = tl.program_id(1) * channels + tl.arange(0, channels)
    inside = channel < width
    begin = tl.program_id(2).to(tl.int64) * length * width
    zero = tl.full((channels,), 0.0, tl.float32)
    total, totals = zero, ()
    for _ in tl.static_range(kernel):
        totals = totals + (zero,)
    for step in range(steps):
        block = first + step * rows
        upstream = ()
        place = gradient + begin + block * width + channel
        for t in tl.static_range(rows):
            known = inside & (block + t < length)
            upstream = upstream + (tl.load(place + t * width, known, 0.0).to(tl.float32),)
            total += upstream[t]
        place = x + begin + (block - kernel // 2) * width + channel
        for s in tl.static_range(rows + kernel - 1):
            row = block + s - kernel // 2
            known = inside & (row >= 0) & (row < length)
            value = tl.load(place + s * width, known, 0.0).to(tl.float32)
            added = ()
            for k in tl.static_range(kernel):
                if s - k < 0 or s - k >= rows:
                    added = added + (totals[k],)
                else:
                    added = added + (totals[k] + value * upstream[s - k],)
            totals = added
    part = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    place = sums + part.to(tl.int64) * (kernel + 1) * width + channel
    for k in tl.static_range(kernel):
        tl.store(place + k * width, totals[k], inside)
    tl.store(place + kernel * width, total, inside)


def convolve(x: Tensor, taps: Tensor, bias: Tensor | None, flipped: bool) -> Tensor:
    """Convolve contiguous x (B, T, C) with taps (kernel, C), padded with zeros to T outputs.

    Reads x about once and writes as much. Sums are float32, and the result has the dtype of x.
    `flipped` reverses the taps, which gives the gradient of x from the gradient of the result.
    """
    batch, length, width = x.shape
    out = torch.empty_like(x)
    if x.numel():
        _convolve[triton.cdiv(length, ROWS), triton.cdiv(width, CHANNELS), batch](
            x, taps, bias, out, length, width=width, kernel=len(taps), biased=bias is not None,
            flipped=flipped, rows=ROWS, channels=CHANNELS, num_warps=1,
        )  # fmt: skip
    return out


def correlate(gradient: Tensor, x: Tensor, kernel: int) -> Tensor:
    """Return the gradients of taps and bias in float32, (kernel + 1, C), the bias last.

    Reads the gradient of the result and x about once, both contiguous (B, T, C), and writes
    kernel + 1 sums per channel and program. These are added in a fixed order, so the result is
    the same every time.
    """
    batch, length, width = x.shape
    parts = triton.cdiv(length, ROWS * STEPS)
    sums = x.new_empty(batch * parts, kernel + 1, width, dtype=torch.float32)
    if x.numel():
        _correlate[parts, triton.cdiv(width, CHANNELS), batch](
            gradient, x, sums, length, width=width, kernel=kernel, steps=STEPS, rows=ROWS,
            channels=CHANNELS, num_warps=1,
        )  # fmt: skip
    return sums.sum(0)

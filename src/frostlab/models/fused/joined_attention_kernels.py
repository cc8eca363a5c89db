"""Triton kernels of attention, forward and backward, that read and write one joined tensor.

The tensor (B, T, 3 · width) holds the queries, keys and values of each token side by side, as the
product of a joined linear map yields them. The gradient gets the same layout, so that nothing is
transposed, copied or concatenated. A block is a number of tokens that a program holds at once. The
sums over tokens of the gradient, which are the gradient of the map's bias, are written as shares.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from frostlab.devices import multiprocessors
from frostlab.models.fused.dropout_kernels import dropped_out, keys_of, threshold_of
from frostlab.models.fused.sum_kernels import add_shares

LONGEST_WHOLE = 128  # tokens; the scores of so many fit into the registers of one program
_LEVELS = 64  # rows of a program of `_attend_levels`
# From this many programs of `_attend_backward` per multiprocessor, three of them at once are faster
# than two, although they have fewer registers each.
_MANY, _REGISTERS = 8, 168
_fitting: dict[Any, int] = {}  # for each kernel and device, the number of the first tiles that fit
_LOG2 = 1.4426950408889634  # exp(x) = 2^(x · log₂ e), and the device computes powers of 2


@triton.jit  # type: ignore[untyped-decorator]
def _masked(scores, row, column, length, causal: tl.constexpr, ragged: tl.constexpr):
    """Return the scores, −∞ where a row's token may not see a column's token."""
    if causal:
        scores = tl.where(column <= row, scores, -float("inf"))
    if ragged:
        scores = tl.where(column < length, scores, -float("inf"))
    return scores


@triton.jit  # type: ignore[untyped-decorator]
def _load(begin, token, unit, length, stride: tl.constexpr, ragged: tl.constexpr):
    if ragged:
        return tl.load(begin + token * stride + unit, token < length, 0.0)
    return tl.load(begin + token * stride + unit)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(
    query, begin_key, begin_value, peak, total, mixed, row, start, stop, length, first, second,
    stride: tl.constexpr, size: tl.constexpr, keys: tl.constexpr, scale: tl.constexpr,
    threshold: tl.constexpr, causal: tl.constexpr, ragged: tl.constexpr,
):  # fmt: skip
    """Attend from a block of rows to the tokens from `start` to `stop`."""
    unit = tl.arange(0, size)
    for at in range(start, stop, keys):
        column = at + tl.arange(0, keys)
        key = _load(begin_key, column[None, :], unit[:, None], length, stride, ragged)
        scores = tl.dot(query, key)
        scores = _masked(scores, row[:, None], column[None, :], length, causal, ragged)
        higher = tl.maximum(peak, tl.max(scores, 1) * scale)
        chances = tl.exp2(scores * scale - higher[:, None])
        falling = tl.exp2(peak - higher)
        total = total * falling + tl.sum(chances, 1)
        if threshold > 0:
            place = row[:, None] * length + column[None, :]
            chances = dropped_out(chances, first, second, place, threshold)
        value = _load(begin_value, column[:, None], unit[None, :], length, stride, ragged)
        mixed = tl.dot(chances.to(value.dtype), value, mixed * falling[:, None])
        peak = higher
    return peak, total, mixed


@triton.jit(do_not_specialize=["length"])  # type: ignore[untyped-decorator]
def _attend_forward(
    joined, out, stats, seed, length,
    query_at: tl.constexpr, key_at: tl.constexpr, value_at: tl.constexpr, heads: tl.constexpr,
    size: tl.constexpr, scale: tl.constexpr, threshold: tl.constexpr, causal: tl.constexpr,
    ragged: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr,
):  # fmt: skip
    """Attend from a block of rows of one head; also write log₂ of each row's sum of powers."""
    width: tl.constexpr = heads * size
    stride: tl.constexpr = 3 * width
    blocks = tl.cdiv(length, rows)
    number = tl.program_id(0) // blocks  # of the head in the batch
    block = blocks - 1 - tl.program_id(0) % blocks  # under a causal mask, the longest first
    head = number % heads
    batch = number // heads
    begin = joined + batch.to(tl.int64) * length * stride + head * size
    row = block * rows + tl.arange(0, rows)
    unit = tl.arange(0, size)
    query = _load(begin + query_at, row[:, None], unit[None, :], length, stride, ragged)
    peak = tl.full((rows,), -float("inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    mixed = tl.zeros((rows, size), tl.float32)
    first, second = 0, 0
    if threshold > 0:
        first, second = keys_of(seed, number)
    if causal:
        before = block * rows
        peak, total, mixed = _attend(
            query, begin + key_at, begin + value_at, peak, total, mixed, row, 0, before, length,
            first, second, stride, size, keys, scale, threshold, False, False,
        )  # fmt: skip
        peak, total, mixed = _attend(
            query, begin + key_at, begin + value_at, peak, total, mixed, row, before,
            before + rows, length, first, second, stride, size, keys, scale, threshold, True,
            ragged,
        )  # fmt: skip
    else:
        peak, total, mixed = _attend(
            query, begin + key_at, begin + value_at, peak, total, mixed, row, 0, length, length,
            first, second, stride, size, keys, scale, threshold, False, ragged,
        )  # fmt: skip
    mixed = (mixed / total[:, None]).to(out.dtype.element_ty)
    place = out + (batch.to(tl.int64) * length + row[:, None]) * width + head * size + unit[None, :]
    stat = stats + number.to(tl.int64) * length + row
    if ragged:
        tl.store(place, mixed, row[:, None] < length)
        tl.store(stat, peak + tl.log2(total), row < length)
    else:
        tl.store(place, mixed)
        tl.store(stat, peak + tl.log2(total))


@triton.jit  # type: ignore[untyped-decorator]
def _store(
    gradient, begin, share, token, unit, length, stride: tl.constexpr, ragged: tl.constexpr,
    summed: tl.constexpr,
):  # fmt: skip
    """Store a block's gradient of queries, keys or values, and its sum over the tokens."""
    gradient = gradient.to(begin.dtype.element_ty)
    if ragged:
        tl.store(begin + token * stride + unit, gradient, token < length)
    else:
        tl.store(begin + token * stride + unit, gradient)
    if summed:
        # rows after the last token are 0
        size: tl.constexpr = gradient.shape[1]
        tl.store(share + tl.arange(0, size), tl.sum(gradient.to(tl.float32), 0))


@triton.jit  # type: ignore[untyped-decorator]
def _row_values(begin, row, length, ragged: tl.constexpr):
    if ragged:
        return tl.load(begin + row, row < length, 0.0)
    return tl.load(begin + row)


@triton.jit(do_not_specialize=["length", "count"])  # type: ignore[untyped-decorator]
def _attend_whole_backward(
    joined, upstream, stats, seed, by_joined, shares, length, count,
    query_at: tl.constexpr, key_at: tl.constexpr, value_at: tl.constexpr, heads: tl.constexpr,
    size: tl.constexpr, scale: tl.constexpr, threshold: tl.constexpr, causal: tl.constexpr,
    ragged: tl.constexpr, summed: tl.constexpr, rows: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a head's queries, keys and values at once, one head after another.

    There are `count` heads in the batch. The tokens of the next head are loaded meanwhile.
    """
    width: tl.constexpr = heads * size
    stride: tl.constexpr = 3 * width
    token = tl.arange(0, rows)
    unit = tl.arange(0, size)[None, :]
    for at in tl.range(tl.program_id(0), count, tl.num_programs(0), num_stages=stages):
        number = tl.full((), at, tl.int64)
        head = number % heads
        batch = number // heads
        offset = batch * length * stride + head * size
        begin = joined + offset
        query = _load(begin + query_at, token[:, None], unit, length, stride, ragged)
        key = _load(begin + key_at, token[:, None], unit, length, stride, ragged)
        value = _load(begin + value_at, token[:, None], unit, length, stride, ragged)
        above = upstream + batch * length * width + head * size
        above = _load(above, token[:, None], unit, length, width, ragged)
        stat = _row_values(stats + number * length, token, length, ragged)
        scores = tl.dot(query, tl.trans(key))
        scores = _masked(scores, token[:, None], token[None, :], length, causal, ragged)
        chances = tl.exp2(scores * scale - stat[:, None])
        by_chances = tl.dot(above, tl.trans(value))
        used = chances
        if threshold > 0:
            first, second = keys_of(seed, number)
            place = token[:, None] * length + token[None, :]
            used = dropped_out(chances, first, second, place, threshold)
            by_chances = dropped_out(by_chances, first, second, place, threshold)
        level = tl.sum(chances * by_chances, 1)
        # `scale` contains log₂ e, which the gradient of the scores does not
        by_scores = chances * (by_chances - level[:, None]) * (scale / 1.4426950408889634)
        used = used.to(query.dtype)
        by_scores = by_scores.to(query.dtype)
        target = by_joined + offset
        share = shares + batch.to(tl.int64) * stride + head * size
        _store(
            tl.dot(tl.trans(used), above), target + value_at, share + value_at, token[:, None],
            unit, length, stride, ragged, summed,
        )  # fmt: skip
        _store(
            tl.dot(tl.trans(by_scores), query), target + key_at, share + key_at, token[:, None],
            unit, length, stride, ragged, summed,
        )  # fmt: skip
        _store(
            tl.dot(by_scores, key), target + query_at, share + query_at, token[:, None], unit,
            length, stride, ragged, summed,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _add_by_keys(
    by_key, by_value, key, value, begin_query, above, stats, levels, column, start, stop, length,
    first, second,
    width: tl.constexpr, size: tl.constexpr, rows: tl.constexpr, scale: tl.constexpr,
    threshold: tl.constexpr, causal: tl.constexpr, ragged: tl.constexpr,
):  # fmt: skip
    """Add the part of queries `start` to `stop` to the gradients of a block of keys and values."""
    unit = tl.arange(0, size)
    for at in range(start, stop, rows):
        row = at + tl.arange(0, rows)
        query = _load(begin_query, row[:, None], unit[None, :], length, 3 * width, ragged)
        stat = _row_values(stats, row, length, ragged)
        scores = tl.dot(key, tl.trans(query))  # (keys, rows)
        scores = _masked(scores, row[None, :], column[:, None], length, causal, False)
        chances = tl.exp2(scores * scale - stat[None, :])
        upstream = _load(above, row[:, None], unit[None, :], length, width, ragged)
        by_chances = tl.dot(value, tl.trans(upstream))
        used = chances
        if threshold > 0:
            place = row[None, :] * length + column[:, None]
            used = dropped_out(chances, first, second, place, threshold)
            by_chances = dropped_out(by_chances, first, second, place, threshold)
        by_value = tl.dot(used.to(upstream.dtype), upstream, by_value)
        level = _row_values(levels, row, length, ragged)
        by_scores = chances * (by_chances - level[None, :])
        by_key = tl.dot(by_scores.to(query.dtype), query, by_key)
    return by_key, by_value


@triton.jit  # type: ignore[untyped-decorator]
def _add_by_queries(
    by_query, query, upstream, stat, level, begin_key, begin_value, row, start, stop, length,
    first, second,
    width: tl.constexpr, size: tl.constexpr, keys: tl.constexpr, scale: tl.constexpr,
    threshold: tl.constexpr, causal: tl.constexpr, ragged: tl.constexpr,
):  # fmt: skip
    """Add the part of keys `start` to `stop` to the gradient of a block of queries."""
    unit = tl.arange(0, size)
    for at in range(start, stop, keys):
        column = at + tl.arange(0, keys)
        key = _load(begin_key, column[:, None], unit[None, :], length, 3 * width, ragged)
        value = _load(begin_value, column[:, None], unit[None, :], length, 3 * width, ragged)
        scores = tl.dot(query, tl.trans(key))
        scores = _masked(scores, row[:, None], column[None, :], length, causal, ragged)
        chances = tl.exp2(scores * scale - stat[:, None])
        by_chances = tl.dot(upstream, tl.trans(value))
        if threshold > 0:
            place = row[:, None] * length + column[None, :]
            by_chances = dropped_out(by_chances, first, second, place, threshold)
        by_scores = chances * (by_chances - level[:, None])
        by_query = tl.dot(by_scores.to(key.dtype), key, by_query)
    return by_query


@triton.jit(do_not_specialize=["length"])  # type: ignore[untyped-decorator]
def _attend_levels(
    upstream, out, levels, length,
    heads: tl.constexpr, size: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Write each query's level: the mean gradient of its scores, weighted by the attention."""
    width: tl.constexpr = heads * size
    blocks = tl.cdiv(length, rows)
    number = tl.program_id(0) // blocks  # of the head in the batch
    token = tl.program_id(0) % blocks * rows + tl.arange(0, rows)
    head = number % heads
    batch = number // heads
    place = (batch.to(tl.int64) * length + token[:, None]) * width + head * size
    place += tl.arange(0, size)[None, :]
    inside = token[:, None] < length
    product = tl.load(upstream + place, inside, 0.0).to(tl.float32)
    product *= tl.load(out + place, inside, 0.0).to(tl.float32)
    place = number.to(tl.int64) * length + token
    tl.store(levels + place, tl.sum(product, 1), token < length)


@triton.jit(do_not_specialize=["length"])  # type: ignore[untyped-decorator]
def _attend_backward(
    joined, upstream, stats, levels, seed, by_joined, shares, length,
    query_at: tl.constexpr, key_at: tl.constexpr, value_at: tl.constexpr, heads: tl.constexpr,
    size: tl.constexpr, scale: tl.constexpr, threshold: tl.constexpr, causal: tl.constexpr,
    ragged: tl.constexpr, summed: tl.constexpr, outer: tl.constexpr, inner: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of keys and values, then of the same block of queries.

    Under a causal mask, the first part is long for early blocks and the second for late ones, so
    that all programs take about equally long.
    """
    width: tl.constexpr = heads * size
    stride: tl.constexpr = 3 * width
    # `scale` contains log₂ e, which the gradient of the scores does not
    plain_scale: tl.constexpr = scale / 1.4426950408889634
    blocks = tl.cdiv(length, outer)
    number = tl.program_id(0) // blocks  # of the head in the batch
    block = tl.program_id(0) % blocks
    head = number % heads
    batch = number // heads
    offset = batch.to(tl.int64) * length * stride + head * size
    begin = joined + offset
    above = upstream + batch.to(tl.int64) * length * width + head * size
    stats += number.to(tl.int64) * length
    levels += number.to(tl.int64) * length
    first, second = 0, 0
    if threshold > 0:
        first, second = keys_of(seed, number)
    start = block * outer
    token = start + tl.arange(0, outer)
    unit = tl.arange(0, size)[None, :]
    target = by_joined + offset
    share = shares + (batch * blocks + block).to(tl.int64) * stride + head * size

    key = _load(begin + key_at, token[:, None], unit, length, stride, ragged)
    value = _load(begin + value_at, token[:, None], unit, length, stride, ragged)
    by_key = tl.zeros((outer, size), tl.float32)
    by_value = tl.zeros((outer, size), tl.float32)
    after = 0
    if causal:
        after = start + outer
        by_key, by_value = _add_by_keys(
            by_key, by_value, key, value, begin + query_at, above, stats, levels, token, start,
            after, length, first, second, width, size, inner, scale, threshold, True, ragged,
        )  # fmt: skip
    by_key, by_value = _add_by_keys(
        by_key, by_value, key, value, begin + query_at, above, stats, levels, token, after,
        length, length, first, second, width, size, inner, scale, threshold, False, ragged,
    )  # fmt: skip
    if ragged:  # keys after the last token have got a gradient
        by_key = tl.where(token[:, None] < length, by_key, 0.0)
        by_value = tl.where(token[:, None] < length, by_value, 0.0)
    _store(by_value, target + value_at, share + value_at, token[:, None], unit, length, stride,
           ragged, summed)  # fmt: skip
    _store(by_key * plain_scale, target + key_at, share + key_at, token[:, None], unit, length,
           stride, ragged, summed)  # fmt: skip

    query = _load(begin + query_at, token[:, None], unit, length, stride, ragged)
    gradient = _load(above, token[:, None], unit, length, width, ragged)
    stat = _row_values(stats, token, length, ragged)
    level = _row_values(levels, token, length, ragged)
    by_query = tl.zeros((outer, size), tl.float32)
    before = length
    if causal:
        before = start
        by_query = _add_by_queries(
            by_query, query, gradient, stat, level, begin + key_at, begin + value_at, token,
            start, start + outer, length, first, second, width, size, inner, scale, threshold,
            True, ragged,
        )  # fmt: skip
    by_query = _add_by_queries(
        by_query, query, gradient, stat, level, begin + key_at, begin + value_at, token, 0,
        before, length, first, second, width, size, inner, scale, threshold, False,
        ragged and not causal,
    )  # fmt: skip
    _store(by_query * plain_scale, target + query_at, share + query_at, token[:, None], unit,
           length, stride, ragged, summed)  # fmt: skip


def attend(
    joined: Tensor, seed: Tensor | None, starts: list[int], size: int, scale: float, dropout: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend with the queries, keys and values in joined (B, T, 3 · width).

    `starts` are their first columns, and `size` is the number of columns of a head. Return
    (B, T, width), and log₂ of each row's sum of powers, which the backward pass needs.
    """
    batch, length, stride = joined.shape
    heads = stride // 3 // size
    out = joined.new_empty(batch, length, heads * size)
    stats = joined.new_empty(batch * heads, length, dtype=torch.float32)

    def launch(tiles: dict[str, int]) -> None:
        _attend_forward[(triton.cdiv(length, tiles["rows"]) * batch * heads,)](
            joined, out, stats, seed, length, *starts, heads=heads, size=size,
            scale=scale * _LOG2, threshold=threshold_of(dropout), causal=causal,
            ragged=length % tiles["rows"] > 0, **tiles,
        )  # fmt: skip

    if out.numel():
        _launch_first(launch, _forward_tiles(length), ("forward", joined.device, size))
    return out, stats


def differentiate(
    upstream: Tensor, joined: Tensor, out: Tensor, stats: Tensor, seed: Tensor | None,
    starts: list[int], size: int, scale: float, dropout: float, causal: bool, summed: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradient of `joined` and, if `summed`, its sum over all tokens in float32."""
    batch, length, stride = joined.shape
    heads = stride // 3 // size
    by_joined = torch.empty_like(joined)
    sums = joined.new_empty(stride if summed else 0, dtype=torch.float32)
    if not joined.numel():
        return by_joined, sums.zero_()
    programs = batch * heads
    fixed: dict[str, Any] = {
        "heads": heads, "size": size, "scale": scale * _LOG2, "threshold": threshold_of(dropout),
        "causal": causal, "summed": summed,
    }  # fmt: skip

    def launch(tiles: dict[str, int]) -> None:
        whole = "rows" in tiles
        rows = tiles["rows"] if whole else tiles["outer"]
        blocks = triton.cdiv(length, rows)
        shares = sums.new_empty(batch * blocks if summed else 0, 1, stride)
        options = {**fixed, **tiles, "ragged": length % rows > 0}
        if whole:
            _attend_whole_backward[(min(programs, multiprocessors(joined.device)),)](
                joined, upstream, stats, seed, by_joined, shares, length, programs, *starts,
                **options,
            )  # fmt: skip
        else:
            levels = torch.empty_like(stats)
            _attend_levels[(triton.cdiv(length, _LEVELS) * programs,)](
                upstream, out, levels, length, heads=heads, size=size, rows=_LEVELS, num_warps=4
            )
            many = blocks * programs >= _MANY * multiprocessors(joined.device)
            if many and not dropout and torch.version.hip is None:  # an option of CUDA alone
                options["maxnreg"] = _REGISTERS
            _attend_backward[(blocks * programs,)](
                joined, upstream, stats, levels, seed, by_joined, shares, length, *starts,
                **options,
            )  # fmt: skip
        if summed:
            add_shares(shares, [sums])

    _launch_first(launch, _backward_tiles(length), ("backward", joined.device, size, length))
    return by_joined, sums


def _launch_first(
    launch: Callable[[dict[str, int]], None], choices: list[dict[str, int]], key: Any
) -> None:
    """Launch with the first tiles that fit into the device's shared memory; remember which fit."""
    for number in range(_fitting.get(key, 0), len(choices)):
        try:
            launch(choices[number])
        except OutOfResources:
            if number + 1 == len(choices):
                raise
            continue
        _fitting[key] = number
        return


def _forward_tiles(length: int) -> list[dict[str, int]]:
    """Return the tiles of `_attend_forward`, the fastest first; others need less shared memory."""
    most = max(16, triton.next_power_of_2(length))
    return [
        {"rows": min(64, most), "keys": min(keys, most), "num_warps": 4, "num_stages": stages}
        for keys, stages in ((64, 3), (32, 2), (16, 1))
    ]


def _backward_tiles(length: int) -> list[dict[str, int]]:
    """Return the tiles of the backward pass; short sequences may be held whole."""
    rows = max(16, triton.next_power_of_2(length))
    whole = [
        {"rows": rows, "stages": stages, "num_warps": 8 if rows > 64 else 4} for stages in (3, 2, 1)
    ]
    blocks = [
        {"outer": min(64, rows), "inner": min(inner, rows), "num_warps": 4, "num_stages": stages}
        for inner, stages in ((64, 2), (32, 2), (16, 1))
    ]
    return [*(whole if length <= LONGEST_WHOLE else []), *blocks]

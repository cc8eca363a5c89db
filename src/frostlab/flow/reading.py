"""Turns the numbers a probe left on the device into reports, without waiting for them."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from frostlab.flow.facts import Report
from frostlab.flow.places import Watched
from frostlab.flow.probe import Probe


@dataclass(frozen=True)
class _Awaited:
    """Numbers on their way to the host."""

    step: int
    numbers: Tensor
    arrived: Any  # a CUDA event, or None where they are here
    sizes: dict[str, int]
    watched: Watched
    reached: tuple[bool, ...]
    ends: tuple[int, ...]
    more: Callable[[list[float]], dict[str, Any]]


class Mailbox:
    """Reports that were sent for and have not arrived, in order."""

    def __init__(self) -> None:
        self._awaited: deque[_Awaited] = deque()

    def send(
        self,
        step: int,
        probe: Probe,
        more: Tensor | None = None,
        read: Callable[[list[float]], dict[str, Any]] = lambda numbers: {},
    ) -> None:
        """Bring a probe's numbers to the host in one copy, `more` of other origin behind them."""
        numbers = probe.values
        if more is not None:
            numbers = torch.cat([numbers, more.to(numbers)])
        arrived = None
        if numbers.device.type == "cuda":
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            host.copy_(numbers, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(numbers.device))
        else:
            host = numbers.to("cpu", copy=True)
        sizes = {name: len(view) for name, view in probe.views.items()}
        watched = probe.watched
        self._awaited.append(
            _Awaited(step, host, arrived, sizes, watched, tuple(probe.reached), probe.ends, read)
        )

    def collect(self, wait: bool) -> list[Report]:
        """What has arrived; all of it, if told to wait. Steps that were skipped leave nothing."""
        found = []
        while self._awaited:
            first = self._awaited[0]
            if first.arrived is not None:
                if not wait and not first.arrived.query():
                    break
                first.arrived.synchronize()
            self._awaited.popleft()
            if (report := _read(first)) is not None:
                found.append(report)
        return found


def _read(sent: _Awaited) -> Report | None:
    numbers = sent.numbers.tolist()
    raw, at = {}, 0
    for name, size in sent.sizes.items():
        raw[name], at = numbers[at : at + size], at + size
    if raw["stopped"][0] > 0:
        return None
    watched = sent.watched
    learning = {bit.part for bit in watched.bits}
    reached = {bit.part for bit in watched.bits if sent.reached[bit.parameter]}
    values = {
        name: tuple(_root(x) if i in learning else math.nan for i, x in enumerate(raw[name]))
        for name in ("gradient", "before_clip", "weight", "update")
    }
    for name in ("gradient", "before_clip"):
        values[name] = tuple(x if i in reached else math.nan for i, x in enumerate(values[name]))
    values |= _comparisons(raw)
    return Report(
        step=sent.step,
        values=values,
        rates=tuple(raw["rates"]),
        unreached=tuple(bit.tensor for bit in watched.bits if not sent.reached[bit.parameter]),
        largest=_sizes(sent, raw["largest"]),
        ranges={
            watched.names[p]: high + low
            for p, high, low in zip(watched.front, raw["high"], raw["low"], strict=True)
        },
        broken=_broken(learning, reached, values),
        **sent.more(numbers[at:]),
    )


def _comparisons(raw: dict[str, list[float]]) -> dict[str, tuple[float, ...]]:
    """With the start, and with the gradient before."""
    change, cosine = [], []
    for moved, along, origin in zip(raw["moved"], raw["along"], raw["origin"], strict=True):
        change.append(_over(_root(moved), _root(origin)))
        # |now|² = |now - start|² + 2 now·start - |start|²
        cosine.append(_over(along, _root(origin) * _root(moved + 2 * along - origin)))
    agreement = [
        _over(product, _root(now) * _root(before))
        for product, now, before in zip(raw["agree"], raw["energy"], raw["former"], strict=True)
    ]
    return {"change": tuple(change), "cosine": tuple(cosine), "agreement": tuple(agreement)}


def _broken(
    learning: set[int], reached: set[int], values: dict[str, tuple[float, ...]]
) -> tuple[int, ...]:
    """Parts of which a number that was measured is none."""
    return tuple(
        i for i in sorted(learning)
        if not math.isfinite(values["weight"][i]) or not math.isfinite(values["update"][i])
        or (i in reached and not math.isfinite(values["gradient"][i]))
    )  # fmt: skip


def _sizes(sent: _Awaited, largest: list[float]) -> dict[str, float]:
    """The mean of max |g| over the tensors of each end."""
    size = dict(zip(sent.ends, largest, strict=True))
    found = {}
    for end in ("front", "back", "output"):
        own = [size[i] for i in getattr(sent.watched, end) if sent.reached[i]]
        found[end] = sum(own) / len(own) if own else math.nan
    return found


def _root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan


def _over(number: float, by: float) -> float:
    return number / by if by else math.nan

"""Measurement of every n-th optimizer step, by optimizer hooks or by calls in the training loop.

A measured step gives a report, with numbers for each part (all tensors of one role in one layer, or
outside the layers). A `Probe` measures on the device, a `ReportQueue` copies the numbers to the
host asynchronously, and `FrozenDigests` shows whether frozen weights changed.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from frostlab.devices import has_events
from frostlab.errors import BadInput, FrozenWeightsMoved, UnknownArchitecture
from frostlab.flow.activity import Activity
from frostlab.flow.measurements import Flow, GroupFacts, PartFacts, Report
from frostlab.flow.probe import Gradient, Probe, own_gradient
from frostlab.flow.tensors import Layout, fingerprint, former_indices, read_layout
from frostlab.roles.parts import gathered
from frostlab.roles.read import unwrapped
from frostlab.surgery.audit import Audit, frozen_audit
from frostlab.surgery.origin import digest
from frostlab.surgery.stale import changes

OnReport = Callable[[int, Report, Sequence[PartFacts]], None]


def watch(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    every_n_steps: int = 10,
    *,
    distance: bool = False,
    gradient_cosine: bool = False,
    dead_units: bool = False,
    attention_entropy: bool = False,
    verify: bool = True,
    gradient: Gradient = own_gradient,
    on_report: OnReport | None = None,
) -> "LiveFlow":
    """Measure which parts of a model learn: `with fl.watch(model, optimizer) as flow: train()`.

    Args:
        model: the model to train.
        optimizer: the optimizer, or several optimizers in the order in which they step.
        every_n_steps: the interval n: gradient, weight and update norms of every trainable part
            are measured at steps 1, 1 + n, 1 + 2n, …
        distance: measure the distance from the initial weights; keeps a copy of them.
        gradient_cosine: measure the cosine between the gradients of two successive measured steps;
            keeps a copy of the gradients.
        dead_units: measure the fractions of dead units (almost 0 throughout the batch) and of
            saturated activations (close to a bound, such as ±1 of tanh).
        attention_entropy: measure the entropy of each attention head, except inside
            nn.MultiheadAttention.
        verify: check at the end, by digests, that the frozen weights did not change.
        gradient: a function that returns a parameter's gradient; default: its `.grad`.
        on_report: a function that is called with the step, the report and the parts for each
            report, e.g. `TensorBoard(folder).flow`.
    """
    optimizers: list[Any] = [*optimizer] if isinstance(optimizer, Sequence) else [optimizer]
    if not optimizers or not all(isinstance(o, Optimizer) for o in optimizers):
        raise BadInput("watch: the optimizer is not a torch.optim.Optimizer; pass one that is")
    if not isinstance(every_n_steps, int) or every_n_steps < 1:
        raise BadInput(
            f"watch: every_n_steps is {every_n_steps}; pass a whole number above 0, such as 10"
        )
    if (dead_units or attention_entropy) and _is_compiled(model):
        raise BadInput("watch: dead_units and attention_entropy need a model without torch.compile")
    make_probe = partial(
        Probe, optimizers=optimizers, distance=distance, gradient_cosine=gradient_cosine,
        gradient=gradient,
    )  # fmt: skip
    make_activity = partial(Activity, model, dead_units, attention_entropy)
    return LiveFlow(model, optimizers, every_n_steps, make_probe, make_activity, verify, on_report)


def _is_compiled(model: nn.Module) -> bool:
    return any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        for module in model.modules()
    )


class LiveFlow(Flow):
    """A flow that is being measured; use it as a context manager, or call `start` and `stop`."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        every_n_steps: int,
        make_probe: Callable[[Layout], Probe],
        make_activity: Callable[[Callable[[], bool]], Activity],
        verify: bool,
        on_report: OnReport | None,
    ) -> None:
        super().__init__(type(unwrapped(model)).__name__, type(optimizers[0]).__name__)
        self.every_n_steps = every_n_steps
        self.step = 0  # steps taken so far
        self.first = 0  # the steps first + 1, first + 1 + n, first + 1 + 2n, … are measured
        self._model, self._optimizers = model, tuple(optimizers)
        self._make_probe, self._verify, self._on_report = make_probe, verify, on_report
        self._activity, self._queue = make_activity(self.is_due), ReportQueue()
        self._hooks: list[Any] = []
        self._digests: FrozenDigests | None = None
        self._probe: Probe | None = None
        self._changes = changes(self._model)
        self._in_step = self._measuring = self._has_closure = False
        self._read_layout()

    def __enter__(self) -> "LiveFlow":
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, hooks: bool = True) -> "LiveFlow":
        """Begin to measure.

        Args:
            hooks: whether to measure in optimizer hooks; if not, the training loop must call
                `before_step` and `after_step`.
        """
        if self._hooks:
            raise BadInput("watch: this flow is already watching; stop it first")
        if self._verify:
            self._digests = FrozenDigests(self._model)
        if not hooks:
            self._hooks = self._activity.unit_hooks()
            return self
        self._hooks = [
            self._optimizers[0].register_step_pre_hook(self._before_first),
            *(
                optimizer.register_step_pre_hook(partial(self._before_later, number))
                for number, optimizer in enumerate(self._optimizers[1:], 1)
            ),
            self._optimizers[-1].register_step_post_hook(self._after_last),
            *self._activity.hooks(),
        ]
        return self

    def stop(self) -> None:
        """Remove the hooks, wait for the last reports and, with `verify`, check frozen weights."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._collect(wait=True)
        if self._digests is not None:
            with suppress(BadInput):  # raised if no parameter is trainable any more
                self.refresh()
            self._verify_frozen()
            self.verified, self._digests = True, None
        self._probe = None

    @property
    def reports(self) -> list[Report]:
        """The reports so far, without those that `take` removed; waits for pending reports."""
        self._collect(wait=True)
        return self._reports

    def take(self) -> list[Report]:
        """Remove and return the reports that have arrived, without waiting."""
        self._collect(wait=False)
        taken, self._reports = self._reports, []
        return taken

    def is_due(self) -> bool:
        """Return whether the current step, or between steps the next step, is measured."""
        if self._in_step:
            return self._measuring
        return (self.step - self.first) % self.every_n_steps == 0

    def before_clip(self) -> None:
        """Measure gradient norms; call this before clipping."""
        if self.is_due() and (probe := self._probe_or_none()) is not None:
            probe.before_clip()

    def before_step(self, clip_factor: Tensor | None = None, gradients: bool = True) -> None:
        """Measure before an optimizer step; see `Probe.before_step`."""
        self._in_step = False  # if the previous step failed, it is still True
        self._measuring = self.is_due()
        self.step += 1
        self._in_step = True
        probe = self._probe_or_none() if self._measuring else None
        self._measuring = probe is not None
        if probe is not None:
            probe.before_step(clip_factor, gradients)

    def after_step(self, gradients: bool = False) -> None:
        """Measure after an optimizer step, with the probe of `before_step`."""
        self._in_step = False
        if self._measuring and self._probe is not None:
            self._measuring = False
            self._probe.after_step(gradients)
            self._send(self._probe)

    def count(self, measured: bool) -> None:
        """Count a step that a CUDA graph replayed.

        Args:
            measured: whether the graph also ran the probe.
        """
        self.step += 1
        if measured:
            self._send(self.probe)

    def listening(self) -> AbstractContextManager[Any]:
        """Return a context that measures attention in a forward pass; see `Activity.listening`."""
        return self._activity.listening()

    @property
    def probe(self) -> Probe:
        """The probe for the currently trainable parameters."""
        self.refresh()
        assert self._probe is not None
        return self._probe

    def refresh(self) -> None:
        """Read the layout again if the trainable parameters or optimizer groups have changed."""
        if (
            self._probe is None
            or self._changes != changes(self._model)
            or self._fingerprint != fingerprint(self._model, self._optimizers)
        ):
            self._read_layout()

    def _read_layout(self) -> None:
        """Divide the model into parts, and make a probe for its trainable parameters."""
        self._collect(wait=True)  # pending reports refer to the old parts
        layout = read_layout(self._model, self._optimizers)
        if not layout.parameters:
            raise BadInput("watch: nothing requires a gradient, so nothing can learn; freeze less")
        self.parts, self._fingerprint = layout.parts, layout.fingerprint
        self.groups = tuple(
            GroupFacts.of(group, type(optimizer).__name__)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        )
        former, self._probe = self._probe, self._make_probe(layout)
        self._changes = changes(self._model)
        if former is None:
            return
        self._probe.start_as(former)
        if [p.name for p in former.layout.parts] != [p.name for p in layout.parts]:
            # parts were added or renamed: assign the earlier reports to the new parts
            indices = former_indices(former.layout, layout)
            self._reports = [report.reindexed(indices) for report in self._reports]
        elif self._digests is not None:
            self._verify_frozen()
        if self._digests is not None:
            self._digests = FrozenDigests(self._model)  # of the parameters that are frozen now

    def _verify_frozen(self) -> None:
        """Compare parameters that are still frozen with their digests; record changed parts."""
        assert self._digests is not None
        moved = self._digests.moved(self._model, self.parts)
        self.moved = tuple(dict.fromkeys((*self.moved, *moved)))

    def _probe_or_none(self) -> Probe | None:
        """Return the probe, or None if the whole model is frozen now."""
        try:
            return self.probe
        except BadInput:
            return None

    def _send(self, probe: Probe) -> None:
        self._queue.send(self.step, probe, self._activity.numbers(), self._activity.reader())
        self._collect(wait=False)

    def _collect(self, wait: bool) -> None:
        for report in self._queue.collect(wait):
            self._reports.append(report)
            if self._on_report is not None:
                self._on_report(report.step, report, self.parts)

    def _before_first(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._has_closure = _has_closure(args, kwargs)
        self.before_step(gradients=not self._has_closure)

    def _before_later(self, number: int, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Measure a later optimizer's gradients, which may not exist when the first one steps."""
        self._has_closure |= _has_closure(args, kwargs)
        if self._measuring and self._probe is not None and not self._has_closure:
            self._probe.measure_gradients(number)

    def _after_last(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.after_step(gradients=self._has_closure)


def _has_closure(args: Any, kwargs: Any) -> bool:
    arguments = [*args[1:], *kwargs.values()]  # args[0] is the optimizer
    return any(callable(argument) for argument in arguments)


@dataclass(frozen=True)
class _PendingReport:
    """The numbers of one report while they are copied to the host."""

    step: int
    numbers: Tensor
    arrived: Any  # a CUDA event, or None if the numbers are already on the host
    sizes: dict[str, int]  # name → length of each quantity of the probe, in the order in `numbers`
    layout: Layout
    reached: tuple[bool, ...]  # whether each parameter had a gradient
    extremes: tuple[int, ...]  # indices of the parameters whose max |g| was measured
    read_activity: Callable[[list[float]], dict[str, Any]]  # see `Activity.reader`


class ReportQueue:
    """A queue of reports that were measured but not yet read on the host."""

    def __init__(self) -> None:
        self._pending: deque[_PendingReport] = deque()

    def send(
        self,
        step: int,
        probe: Probe,
        activity: Tensor | None,
        read_activity: Callable[[list[float]], dict[str, Any]],
    ) -> None:
        """Copy the numbers of a probe and of `activity` to the host in one transfer."""
        numbers = probe.values
        if activity is not None:
            numbers = torch.cat([numbers, activity.to(numbers)])
        arrived = None
        if has_events(numbers.device):
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            host.copy_(numbers, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(numbers.device))
        else:
            host = numbers.to("cpu", copy=True)
        sizes = {name: len(view) for name, view in probe.views.items()}
        self._pending.append(
            _PendingReport(
                step, host, arrived, sizes, probe.layout, tuple(probe.reached), probe.extremes,
                read_activity,
            )
        )  # fmt: skip

    def collect(self, wait: bool) -> list[Report]:
        """Return the reports that have arrived; with `wait`, wait for all of them first."""
        reports = []
        while self._pending:
            first = self._pending[0]
            if first.arrived is not None:
                if not wait and not first.arrived.query():
                    break
                first.arrived.synchronize()
            self._pending.popleft()
            if (report := _read_report(first)) is not None:
                reports.append(report)
        return reports


def _read_report(pending: _PendingReport) -> Report | None:
    """Turn a probe's numbers into a report, or return None if the optimizer skipped the step."""
    numbers = pending.numbers.tolist()
    raw, start = {}, 0
    for name, size in pending.sizes.items():
        raw[name], start = numbers[start : start + size], start + size
    if raw["stopped"][0] > 0:
        return None
    layout = pending.layout
    trainable = {s.part for s in layout.slices}
    reached = {s.part for s in layout.slices if pending.reached[s.parameter]}
    values = {
        name: tuple(_root(x) if i in trainable else math.nan for i, x in enumerate(raw[name]))
        for name in ("gradient", "before_clip", "weight", "update")
    }
    for name in ("gradient", "before_clip"):
        values[name] = tuple(x if i in reached else math.nan for i, x in enumerate(values[name]))
    values |= _cosines_and_distance(raw)
    return Report(
        step=pending.step,
        values=values,
        rates=tuple(raw["rates"]),
        unreached=tuple(s.tensor for s in layout.slices if not pending.reached[s.parameter]),
        largest=_mean_largest(pending, raw["largest"]),
        ranges={
            layout.names[p]: high + low  # max - min: `low` is -min
            for p, high, low in zip(layout.front, raw["high"], raw["low"], strict=True)
        },
        broken=_broken_parts(trainable, reached, values),
        **pending.read_activity(numbers[start:]),
    )


def _cosines_and_distance(raw: dict[str, list[float]]) -> dict[str, tuple[float, ...]]:
    distance, weight_cosine = [], []
    for moved, along, origin in zip(raw["moved"], raw["along"], raw["origin"], strict=True):
        distance.append(_quotient(_root(moved), _root(origin)))
        # |now|² = |now - start|² + 2 now·start - |start|²
        weight_cosine.append(_quotient(along, _root(origin) * _root(moved + 2 * along - origin)))
    gradient_cosine = [
        _quotient(product, _root(now) * _root(before))
        for product, now, before in zip(raw["agree"], raw["energy"], raw["former"], strict=True)
    ]
    return {
        "distance": tuple(distance),
        "weight_cosine": tuple(weight_cosine),
        "gradient_cosine": tuple(gradient_cosine),
    }


def _broken_parts(
    trainable: set[int], reached: set[int], values: dict[str, tuple[float, ...]]
) -> tuple[int, ...]:
    """Return indices of the parts whose weight, update or gradient norm is NaN or infinite."""
    return tuple(
        i for i in sorted(trainable)
        if not math.isfinite(values["weight"][i]) or not math.isfinite(values["update"][i])
        or (i in reached and not math.isfinite(values["gradient"][i]))
    )  # fmt: skip


def _mean_largest(pending: _PendingReport, largest: list[float]) -> dict[str, float]:
    """Return front, back and output → the mean of max |g| over their parameters with a gradient."""
    by_parameter = dict(zip(pending.extremes, largest, strict=True))
    means = {}
    for depth in ("front", "back", "output"):
        parameters = [i for i in getattr(pending.layout, depth) if pending.reached[i]]
        sizes = [by_parameter[i] for i in parameters]
        means[depth] = sum(sizes) / len(sizes) if sizes else math.nan
    return means


def _root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan


def _quotient(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


class FrozenDigests:
    """Digests of the frozen weights: an `Audit`, or a dict if the architecture is unknown."""

    def __init__(self, model: nn.Module) -> None:
        self._audit: Audit | None = None
        self._digests: dict[str, str] = {}  # parameter name → digest
        try:
            self._audit = frozen_audit(model)
        except UnknownArchitecture:
            frozen = (n for n, p in unwrapped(model).named_parameters() if not p.requires_grad)
            self._digests = {name: _digest(model, name) for name in frozen}
        except BadInput:
            pass  # nothing is frozen

    def moved(self, model: nn.Module, parts: Sequence[PartFacts]) -> list[str]:
        """Return the names of the parts with a frozen tensor that changed."""
        names = {n for n, value in self._digests.items() if _digest(model, n) != value}
        if self._audit is not None:
            try:
                self._audit.verify(model)
            except FrozenWeightsMoved as error:
                names = set(error.names)
        return [p.name for p in parts if names & (set(p.tensors) - set(p.learning))]


def _digest(model: nn.Module, name: str) -> str:
    return digest(gathered(unwrapped(model).get_parameter(name).detach()))

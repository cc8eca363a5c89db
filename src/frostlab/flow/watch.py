"""Measures every n-th optimizer step of any loop, through the optimizer's own hooks."""

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

from frostlab.errors import BadInput, FrozenWeightsMoved, UnknownArchitecture
from frostlab.flow.activity import Activity
from frostlab.flow.measurements import Flow, GroupFacts, PartFacts, Report
from frostlab.flow.probe import Gradient, Probe, own_gradient
from frostlab.flow.tensors import Watched, flags_of, former_places, look
from frostlab.roles.parts import gathered
from frostlab.roles.read import unwrapped
from frostlab.surgery.audit import Audit, audit
from frostlab.surgery.origin import digest
from frostlab.surgery.stale import changes

Tell = Callable[[int, Report, Sequence[PartFacts]], None]


class Watch(Flow):
    """A flow that is being written: a context manager, or `start` and `stop` around a loop."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        every_n_steps: int,
        distance: bool,
        gradient_cosine: bool,
        dead_units: bool,
        attention_entropy: bool,
        verify: bool,
        gradient: Gradient,
        on_report: Tell | None,
    ) -> None:
        super().__init__(type(unwrapped(model)).__name__, type(optimizers[0]).__name__)
        self.every_n_steps, self.step, self.first = (
            every_n_steps,
            0,
            0,
        )  # the step before the first one watched
        self._model, self._optimizers, self._verify = model, tuple(optimizers), verify
        self._settings: dict[str, Any] = {
            "distance": distance, "gradient_cosine": gradient_cosine, "gradient": gradient
        }  # fmt: skip
        self._mailbox, self._on_report = Mailbox(), on_report
        self._activity = Activity(model, dead_units, attention_entropy, self.is_due)
        self._hooks: list[Any] = []
        self._proof: Proof | None = None
        self._probe: Probe | None = None
        self._changes = changes()
        self._inside = self._measuring = self._closed_over = False
        self._look()

    def _look(self) -> None:
        """See which parts there are, and who learns now."""
        self._collect(wait=True)  # reports belong to the parts they were made of
        watched = look(self._model, self._optimizers)
        if not watched.parameters:
            raise BadInput("watch: nothing requires a gradient; freeze less, or nothing will learn")
        self.parts, self._flags = watched.parts, watched.flags
        self.groups = tuple(
            GroupFacts.of(group, type(each).__name__)
            for each in self._optimizers
            for group in each.param_groups
        )
        former, self._probe = self._probe, Probe(watched, self._optimizers, **self._settings)
        self._changes = changes()
        if former is None:
            return
        self._probe.start_as(former)
        if [p.name for p in former.watched.parts] != [p.name for p in watched.parts]:
            places = former_places(former.watched, watched)  # layers were added
            self._reports = [report.reindexed(places) for report in self._reports]
        elif self._proof is not None:
            self._prove()
        if self._proof is not None:
            self._proof = Proof(self._model)  # of what is frozen from now on

    def _prove(self) -> None:
        """Compare what is still frozen with its digests."""
        assert self._proof is not None
        found = self._proof.moved(self._model, self.parts)
        self.moved = tuple(dict.fromkeys((*self.moved, *found)))

    def __enter__(self) -> "Watch":
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, by_hand: bool = False) -> "Watch":
        """Begin to watch; `by_hand`: the loop itself calls `before_step` and `after_step`."""
        if self._hooks:
            raise BadInput("watch: this flow is already watching; stop it first")
        if self._verify:
            self._proof = Proof(self._model)
        if by_hand:
            self._hooks = self._activity.unit_hooks()
            return self
        self._hooks = [
            self._optimizers[0].register_step_pre_hook(self._before),
            *(
                each.register_step_pre_hook(partial(self._between, turn))
                for turn, each in enumerate(self._optimizers[1:], 1)
            ),
            self._optimizers[-1].register_step_post_hook(self._after),
            *self._activity.hooks(),
        ]
        return self

    def stop(self) -> None:
        """End watching: hooks and copies go, frozen weights are compared with their digests."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._collect(wait=True)
        if self._proof is not None:
            with suppress(BadInput):  # nothing learns any more
                self.refresh()
            self._prove()
            self.verified, self._proof = True, None
        self._probe = None

    @property
    def reports(self) -> list[Report]:
        """What has been measured so far; waits for what is on its way."""
        self._collect(wait=True)
        return self._reports

    def _collect(self, wait: bool) -> None:
        for report in self._mailbox.collect(wait):
            self._reports.append(report)
            if self._on_report is not None:
                self._on_report(report.step, report, self.parts)

    def take(self) -> list[Report]:
        """Hand over what has arrived, without waiting; the flow does not keep it."""
        self._collect(wait=False)
        taken, self._reports = self._reports, []
        return taken

    def listening(self) -> AbstractContextManager[Any]:
        """Around a forward pass of a loop that goes by hand: `entropy` is seen within."""
        return self._activity.listening()

    def before_clip(self) -> None:
        """Call this before clipping, and the gradient's norm before it is known too."""
        if self.is_due() and (probe := self._awake()) is not None:
            probe.before_clip()

    def before_step(self, share: Tensor | None = None, gradients: bool = True) -> None:
        """A step is about to be taken; hooks call this, or a loop that has none (see `Probe`)."""
        self._inside = False  # a step that failed may have left it so
        self._measuring = self.is_due()
        self.step += 1
        self._inside = True
        probe = self._awake() if self._measuring else None
        self._measuring = probe is not None
        if probe is not None:
            probe.before_step(share, gradients)

    def after_step(self, gradients: bool = False) -> None:
        """The step has been taken."""
        self._inside = False
        if self._measuring and self._probe is not None:
            self._measuring = False
            self._probe.after_step(gradients)  # the one that has seen what was before
            self._send(self._probe)

    def count(self, measured: bool) -> None:
        """A step has been taken, and a graph has run the probe in it, or one without."""
        self.step += 1
        if measured:
            self._send(self.probe)

    def _send(self, probe: Probe) -> None:
        self._mailbox.send(self.step, probe, self._activity.numbers(), self._activity.read())
        self._collect(wait=False)

    def _awake(self) -> Probe | None:
        """What measures, unless all of the model has been frozen meanwhile."""
        try:
            return self.probe
        except BadInput:
            return None

    @property
    def probe(self) -> Probe:
        """What measures; made anew where freezing or thawing has changed who learns."""
        self.refresh()
        assert self._probe is not None
        return self._probe

    def refresh(self) -> None:
        """Look anew if freezing or thawing has changed who learns."""
        changed = self._changes != changes() or self._flags != flags_of(
            self._model, self._optimizers
        )
        if self._probe is None or changed:
            self._look()

    def is_due(self) -> bool:
        """Whether the step that is being taken, or else the next one, is measured."""
        return (
            self._measuring if self._inside else (self.step - self.first) % self.every_n_steps == 0
        )

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._closed_over = _has_closure(args, kwargs)
        self.before_step(gradients=not self._closed_over)

    def _between(self, turn: int, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The gradients of an optimizer that steps after others may not have been there before."""
        self._closed_over |= _has_closure(args, kwargs)
        if self._measuring and self._probe is not None and not self._closed_over:
            self._probe.measure_gradients(turn)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.after_step(gradients=self._closed_over)


def _has_closure(args: Any, kwargs: Any) -> bool:
    given = [*args[1:], *kwargs.values()]  # the first is the optimizer itself
    return any(callable(each) for each in given)


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
    on_report: Tell | None = None,
) -> Watch:
    """Watch which parts of a model learn: `with fl.watch(model, optimizer) as flow: train()`.

    Steps 1, 1 + every, 1 + 2 every … are measured: gradient, weight and update norms a part.
    `change` adds the distance from the start and keeps a copy of what learns; `agreement` the
    cosine between successive gradients and keeps a copy of them; `units` dead and saturated units;
    `entropy` that of every attention head. `verify` compares digests of what is frozen at the end.
    `gradient` says where a parameter's gradient lies, if it is not in `.grad`. `tell` is called
    with each report as it arrives, such as `TensorBoard(folder).flow`.
    """
    optimizers: list[Any] = [*optimizer] if isinstance(optimizer, Sequence) else [optimizer]
    if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
        raise BadInput("watch: the optimizer is no torch.optim.Optimizer; give the one that steps")
    if not isinstance(every_n_steps, int) or every_n_steps < 1:
        raise BadInput(
            f"watch: every_n_steps is {every_n_steps}; give a whole number from 1 on, such as 10"
        )
    if (dead_units or attention_entropy) and _is_compiled(model):
        raise BadInput(
            "watch: dead_units and attention_entropy need the model before torch.compile"
        )
    return Watch(
        model,
        optimizers,
        every_n_steps,
        distance,
        gradient_cosine,
        dead_units,
        attention_entropy,
        verify,
        gradient,
        on_report,
    )


def _is_compiled(model: nn.Module) -> bool:
    return any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        for module in model.modules()
    )


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
    distance, weight_cosine = [], []
    for moved, along, origin in zip(raw["moved"], raw["along"], raw["origin"], strict=True):
        distance.append(_over(_root(moved), _root(origin)))
        # |now|² = |now - start|² + 2 now·start - |start|²
        weight_cosine.append(_over(along, _root(origin) * _root(moved + 2 * along - origin)))
    gradient_cosine = [
        _over(product, _root(now) * _root(before))
        for product, now, before in zip(raw["agree"], raw["energy"], raw["former"], strict=True)
    ]
    return {
        "distance": tuple(distance),
        "weight_cosine": tuple(weight_cosine),
        "gradient_cosine": tuple(gradient_cosine),
    }


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


class Proof:
    """The digests of what is frozen: an audit, or parameter by parameter without an anatomy."""

    def __init__(self, model: nn.Module) -> None:
        self._audit: Audit | None = None
        self._digests: dict[str, str] = {}
        try:
            self._audit = audit(model)
        except UnknownArchitecture:
            frozen = (n for n, p in unwrapped(model).named_parameters() if not p.requires_grad)
            self._digests = {name: _digest(model, name) for name in frozen}
        except BadInput:
            pass  # nothing is frozen

    def moved(self, model: nn.Module, parts: Sequence[PartFacts]) -> list[str]:
        """The parts that hold a tensor whose bits changed."""
        names = {n for n, value in self._digests.items() if _digest(model, n) != value}
        if self._audit is not None:
            try:
                self._audit.verify(model)
            except FrozenWeightsMoved as error:
                names = set(error.names)
        return [p.name for p in parts if names & (set(p.tensors) - set(p.learning))]


def _digest(model: nn.Module, name: str) -> str:
    return digest(gathered(unwrapped(model).get_parameter(name).detach()))

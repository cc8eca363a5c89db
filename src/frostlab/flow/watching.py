"""Measures every n-th optimizer step of any loop, through the optimizer's own hooks."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from frostlab.anatomy import unwrapped
from frostlab.errors import BadInput
from frostlab.flow.activity import Activity
from frostlab.flow.facts import GroupFacts, PartFacts, Report
from frostlab.flow.flow import Flow
from frostlab.flow.places import flags_of, former_places, look
from frostlab.flow.probe import Gradient, Probe
from frostlab.flow.proof import Proof
from frostlab.flow.reading import Mailbox
from frostlab.surgery.stale import changes

Tell = Callable[[int, Report, Sequence[PartFacts]], None]


class Watch(Flow):
    """A flow that is being written: a context manager, or `start` and `stop` around a loop."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        every: int,
        change: bool,
        agreement: bool,
        units: bool,
        entropy: bool,
        verify: bool,
        gradient: Gradient,
        tell: Tell | None,
    ) -> None:
        super().__init__(type(unwrapped(model)).__name__, type(optimizers[0]).__name__)
        self.every, self.step, self.first = every, 0, 0  # the step before the first one watched
        self._model, self._optimizers, self._verify = model, tuple(optimizers), verify
        self._settings: dict[str, Any] = {
            "change": change, "agreement": agreement, "gradient": gradient
        }  # fmt: skip
        self._mailbox, self._tell = Mailbox(), tell
        self._activity = Activity(model, units, entropy, self.is_due)
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
            self._reports = [report.at(places) for report in self._reports]
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
            if self._tell is not None:
                self._tell(report.step, report, self.parts)

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
        return self._measuring if self._inside else (self.step - self.first) % self.every == 0

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

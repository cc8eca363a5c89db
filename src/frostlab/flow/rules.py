"""The words a part can be called, and every threshold that decides between them."""

from dataclasses import dataclass

LEARNING, SLOW, STILL = "learning", "slow", "not learning"
EXPLODING, FROZEN, SCALED = "exploding", "frozen on purpose", "scaled away by the optimizer"
DECAYING, MOVED = "moved by weight decay alone", "frozen, yet moved"
UNKNOWN = "not measured yet"
WORDS = (LEARNING, SLOW, STILL, EXPLODING, FROZEN, SCALED, DECAYING, MOVED, UNKNOWN)


@dataclass(frozen=True)
class Rules:
    """The thresholds.

    Ratios are update/weight, without what weight decay explains, and as they would be at the
    highest learning rate of the flow; medians over the last reports.
    """

    window: int = 5  # reports
    fewest: int = 2  # reports before a part is said to stand still: zeros hold others up at first
    still: float = 1e-6  # below: not learning, if others move
    asleep: float = 1e-9  # below, everywhere: nothing learns
    decayed: float = 2.0  # times what decay alone would move: up to here decay may explain it
    drowned: float = 1e-4  # gradient, of its sum with decay: below, normalised decay explains it
    slow: float = 0.01  # of the median of its peers
    apart: float = 1e-3  # of the median of all others, for parts that are not alike
    vanishing: float = 1e-4  # gradient, of the largest in the model: the cause is named
    underflow: float = 1e-12  # the smallest gradient, of the largest: a zero then vanished too
    leap: float = 1.0  # update/weight above: exploding
    growth: float = 1e3  # times the gradient of the first report, part and whole: exploding
    scale: float = 10.0  # times the gradients of both layers beside it, steadily
    steady: float = 0.5  # largest departure of the logarithm of that factor
    alike: float = 2.0  # times the update/weight of its peers: no more than this is "alike"
    saturated: float = 0.5  # share of activations: named as a cause
    steady_reports: int = 4  # fewer do not tell a steady factor
    peers: int = 2  # fewer are no peers: all other parts are asked
    normalising: tuple[str, ...] = (
        "Adam",
        "AdamW",
        "KernelAdamW",
        "NAdam",
        "RAdam",
        "Adamax",
        "RMSprop",
        "Adagrad",
        "Adafactor",
        "Lion",
        "Muon",
    )


@dataclass(frozen=True)
class Verdict:
    """A word for a part, why, and what to try."""

    word: str
    why: str
    hint: str = ""

    @property
    def accident(self) -> bool:
        """Whether the part fails to learn though nobody asked for that."""
        return self.word in (STILL, DECAYING)

    @property
    def alarming(self) -> bool:
        """Whether somebody should look."""
        return self.word not in (LEARNING, FROZEN, SCALED, UNKNOWN)

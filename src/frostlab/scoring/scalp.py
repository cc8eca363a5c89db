"""Where channels sit on the head, seen from above, and a smooth map over it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from frostlab.errors import BadInput
from frostlab.scoring.drawing import Rows
from frostlab.scoring.recording import Floats

_RIM = 1.15  # of the head's radius: how far the map goes
_LIMIT = 1.3  # of the head's radius: channels beyond are on the face or the neck


def scalp_positions(channels: Sequence[str]) -> dict[str, tuple[float, float]]:
    """x (to the right) and y (to the nose) of each channel; the head's circle has radius 1.

    The positions are those of the montage of MNE that knows every name. The angle from the top of
    the head becomes the distance from the middle, so that the circle runs through the ears.
    """
    try:
        import mne
    except ImportError:
        raise BadInput("a scalp map needs mne; pip install 'frostlab[eeg]'") from None
    built_in = mne.channels.get_builtin_montages()
    dense = "colin27_1005" if "colin27_1005" in built_in else "standard_1005"  # older MNE
    montages = ("biosemi64", "biosemi128", dense)
    missing: list[str] = []
    for name in montages:
        places = mne.channels.make_standard_montage(name).get_positions()["ch_pos"]
        known = {each.lower(): place for each, place in places.items()}
        unknown = [each for each in channels if each.lower() not in known]
        if not unknown:
            middle = np.array([0.0, *_middle(np.array(list(places.values())))])
            return {each: _flat(known[each.lower()] - middle) for each in channels}
        missing = unknown if not missing or len(unknown) < len(missing) else missing
    raise BadInput(
        f"no montage of {', '.join(montages)} knows channel {missing[0]}, so there is no map"
    )


def scalp_rows(
    importance: ArrayLike, places: Sequence[tuple[float, float]], cells: int = 64
) -> Rows:
    """A smooth map through the channels: cells of a grid within the head's rim."""
    from scipy.interpolate import RBFInterpolator  # takes a while to load

    values, known = np.asarray(importance, np.float64), np.array(places, np.float64)
    near = np.hypot(*known.T) <= _LIMIT
    try:
        smooth = RBFInterpolator(known[near], values[near], kernel="thin_plate_spline")
    except (ValueError, np.linalg.LinAlgError):  # fewer than three, or all on one line
        raise BadInput(f"{near.sum()} channels on the head do not span a map") from None
    side = 2 * _RIM / cells
    middles = -_RIM + side * (np.arange(cells) + 0.5)
    grid = np.stack(np.meshgrid(middles, middles), -1).reshape(-1, 2)
    grid = grid[np.hypot(*grid.T) <= _RIM]
    found = np.clip(smooth(grid), values.min(), values.max())
    half = side / 2
    return [
        {"x": x - half, "x2": x + half, "y": y - half, "y2": y + half, "importance": value}
        for (x, y), value in zip(grid.tolist(), found.tolist(), strict=True)
    ]


def _middle(places: Floats) -> tuple[float, float]:
    """y and z of the centre of the sphere that fits the electrodes best."""
    square = (places**2).sum(1)
    rows = np.column_stack([2 * places, np.ones(len(places))])
    solved = np.linalg.lstsq(rows, square, rcond=None)[0]
    return float(solved[1]), float(solved[2])


def _flat(place: Floats) -> tuple[float, float]:
    x, y, z = place
    around = float(np.hypot(x, y))
    far = float(np.arctan2(around, z)) / (np.pi / 2)
    return (far * float(x) / around, far * float(y) / around) if around > 1e-9 else (0.0, 0.0)

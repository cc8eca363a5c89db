"""Where the electrodes of a 64-channel cap are, and what a dipole in a round head shows there."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Inclination from the top and azimuth from the right ear, in degrees: BioSemi's cap of 64.
_CAP = """
Fp1 92 108 AF7 92 126 AF3 74 115 F1 50 112 F3 60 129 F5 75 139 F7 92 144 FT7 92 162
FC5 72 159 FC3 50 152 FC1 32 135 C1 23 180 C3 46 180 C5 69 180 T7 92 180 TP7 92 -162
CP5 72 -159 CP3 50 -152 CP1 32 -135 P1 50 -112 P3 60 -129 P5 75 -139 P7 92 -144 P9 115 -144
PO7 92 -126 PO3 74 -115 O1 92 -108 Iz 115 -90 Oz 92 -90 POz 69 -90 Pz 46 -90 CPz 23 -90
Fpz 92 90 Fp2 92 72 AF8 92 54 AF4 74 65 AFz 69 90 Fz 46 90 F2 50 68 F4 60 51
F6 75 41 F8 92 36 FT8 92 18 FC6 72 21 FC4 50 28 FC2 32 45 FCz 23 90 Cz 0 0
C2 23 0 C4 46 0 C6 69 0 T8 92 0 TP8 92 -18 CP6 72 -21 CP4 50 -28 CP2 32 -45
P2 50 -68 P4 60 -51 P6 75 -41 P8 92 -36 P10 115 -36 PO8 92 -54 PO4 74 -65 O2 92 -72
""".split()  # noqa: SIM905 (a table reads better)

BIOSEMI64: tuple[str, ...] = tuple(_CAP[::3])
BIOSEMI128: tuple[str, ...] = tuple(f"{bank}{n}" for bank in "ABCD" for n in range(1, 33))


def channel_names(count: int) -> tuple[str, ...]:
    """Return the cap's names where the number of channels says which cap, else numbers."""
    known = {64: BIOSEMI64, 128: BIOSEMI128}
    return known.get(count, tuple(str(n) for n in range(1, count + 1)))


@cache
def positions() -> Array:
    """Return the 64 electrodes on the unit sphere: x to the right ear, y to the nose, z up."""
    tilt = np.radians(np.array(_CAP[1::3], dtype=float))
    turn = np.radians(np.array(_CAP[2::3], dtype=float))
    sides = (np.sin(tilt) * np.cos(turn), np.sin(tilt) * np.sin(turn), np.cos(tilt))
    return np.stack(sides, axis=1)  # (64, 3)


def topographies(places: Array, moments: Array) -> Array:
    """Return what dipoles show at the electrodes, average-referenced: (64, dipoles)."""
    apart = positions()[:, None, :] - places[None]  # (64, dipoles, 3)
    distance = np.linalg.norm(apart, axis=2)
    shown: Array = (apart * moments[None]).sum(axis=2) / distance**3
    return shown - shown.mean(axis=0)

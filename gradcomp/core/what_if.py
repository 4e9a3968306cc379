"""Ratios of what-if runs in text: ``"1,2,4,8"``, or for sharded models weights x gradients, ``"1,2,4x1,2,4"``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradcomp.core.errors import ConfigError

#: The largest ratio: one value of an exchange bucket travels, so the network costs nothing but latency.
NOTHING = float(1 << 30)
#: The most ratios of a list.
MOST = 16


@dataclass(frozen=True)
class Ratios:
    """The ratios of a what-if run, ascending; ``is_grid``: each of weights is combined with each of gradients."""

    weights: tuple[float, ...]
    gradients: tuple[float, ...]
    is_grid: bool


def parse(text: str) -> Ratios:
    """Parse the text of a setting; ConfigError for anything but lists of distinct numbers in [1, 2**30] and ``inf``."""
    parts = [_list(part, text) for part in text.lower().split("x")]
    if len(parts) > 2:
        raise ConfigError(f"{text!r}: there are weights x gradients and no third list")
    return Ratios(parts[0], parts[-1], len(parts) == 2)


def _list(part: str, text: str) -> tuple[float, ...]:
    try:
        found = [float(one) for one in part.split(",")]
    except ValueError:
        raise ConfigError(f"{text!r}: expected ratios such as 1,2,4,8 or 1,2,4x1,2,4") from None
    return checked(found, repr(text))


def checked(ratios: Sequence[float], what: str) -> tuple[float, ...]:
    """Return the ratios in ascending order, with NOTHING for infinity.

    ConfigError, which begins with ``what``, for ratios that are out of range, repeated, too many or none.
    """
    ratios = [NOTHING if ratio == math.inf else float(ratio) for ratio in ratios]
    if not all(1 <= ratio <= NOTHING for ratio in ratios):
        raise ConfigError(f"{what}: a ratio must be in [1, 2**30], or inf")
    if len(set(ratios)) < len(ratios) or not 1 <= len(ratios) <= MOST:
        raise ConfigError(f"{what}: there must be 1 to {MOST} ratios, all different")
    return tuple(sorted(ratios))


def shown(ratio: float) -> str:
    """Return a ratio as the setting has it."""
    return "inf" if ratio == NOTHING else f"{ratio:g}"

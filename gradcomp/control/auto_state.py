"""The saved state of Auto, and the log line that explains a choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradcomp.compress import Compressor, Identity
from gradcomp.control.base import Doubles
from gradcomp.control.phased import Phase, PhasedState
from gradcomp.core.levels import level_text, short_name
from gradcomp.core.vectors import Floats
from gradcomp.reduce.model import Network

#: A fitted rate above this one means that messages of the probe's size cost only their latency.
_MOST_GBIT = 1000


@dataclass(frozen=True)
class Limits:
    """The numeric arguments of :class:`gradcomp.control.auto.Auto`, described there."""

    warmup_steps: int
    hidden: float
    drift: float
    check_every: int


@dataclass
class AutoState(PhasedState):
    """The state of Auto: ``choice`` is the current one in string form.

    ``predicted``: seconds of a step by choice, at the last decision. ``baseline``: the step time that later ones are
    compared with. ``before``: the previous choice and its step time, until they were compared. ``position``: by layer
    name, the last exchange bucket that the layer is in, -1 if it is in none. ``table``: the observations of all ranks.
    """

    world: int
    choice: str
    decisions: int
    predicted: list[float]
    reason: str
    network: Network | None
    baseline: float | None
    before: tuple[str, float] | None
    buckets: int
    position: dict[str, int] | None
    table: Doubles | None

    def is_complete(self, shape: tuple[int, int]) -> bool:
        """Returns true if all that the phase needs is present; a table must have the given shape."""
        if self.phase in (Phase.OBSERVE, Phase.CRUISE):
            return True
        if self.position is None or (self.phase is not Phase.PROBE and self.network is None):
            return False
        if self.phase in (Phase.DECIDE, Phase.ANNOUNCE):
            return self.table is not None and self.table.shape == shape
        return self.phase in (Phase.PROBE, Phase.SHARE)


def explain(
    state: AutoState,
    compressors: Sequence[Compressor],
    chosen: int,
    compute_and_exposed: Sequence[float],
    between_hosts: bool,
) -> str:
    """Returns the prediction for the choice and for the others, and the measurements that it was made from."""
    network, names = state.network, names_of(compressors)
    assert network is not None, "the choice was made from it"
    milliseconds = [f"{1e3 * seconds:.1f}" for seconds in state.predicted]
    compute, exposed = (f"{1e3 * seconds:.1f}" for seconds in compute_and_exposed)
    others = ", ".join(f"{names[i]} {time}" for i, time in enumerate(milliseconds) if i != chosen)
    alpha, beta = (
        (network.alpha, network.beta) if between_hosts else (network.local_alpha, network.local_beta)
    )
    rate = 8e-9 / beta
    speed = f"{rate:.3g}" if rate <= _MOST_GBIT else f"above {_MOST_GBIT}"
    return (
        f"{names[chosen]}: {milliseconds[chosen]} ms a step predicted, {exposed} of them exposed"
        f"{f', against {others}' if others else ''}; link {speed} Gbit/s, {1e3 * alpha:.2f} ms; "
        f"compute {compute} ms"
    )


def names_of(compressors: Sequence[Compressor]) -> list[str]:
    """Returns short names, or string forms if short names would be ambiguous."""
    short = []
    for compressor in compressors:
        family = compressor.family_string()
        name = "none" if isinstance(compressor, Identity) else short_name(family)
        short.append(f"{name} {level_text(family, compressor.level)}".strip())
    return short if len(set(short)) == len(short) else [c.to_string() for c in compressors]


def median(rows: Sequence[Floats], width: int = 1) -> Doubles:
    """Returns the median of each column; NaN if there is no row."""
    if not rows:
        return np.full(width, np.nan)
    return np.median(np.stack(rows).astype(np.float64), axis=0)

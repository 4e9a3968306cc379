"""Deep Gradient Compression sends what exceeds a sampled threshold of each rank's momentum (Lin et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gradcomp.compress.base import Compressor, Traits, check_momentum_factor
from gradcomp.compress.checks import check_flag, check_number, check_whole
from gradcomp.compress.identity import Identity
from gradcomp.compress.registry import register
from gradcomp.compress.sparse.threshold import EstimatedThreshold, Floats
from gradcomp.compress.wrappers.momentum import LocalClip, MomentumCorrection
from gradcomp.compress.wrappers.schedule import DensitySchedule
from gradcomp.core.errors import ConfigError
from gradcomp.kernels.codec import Sizes, Table
from gradcomp.kernels.devices import Device

#: The warm-up has these densities, as far as they are above the final one.
WARMUP_DENSITIES = (0.25, 0.0625, 0.015625, 0.004)

# A sampled rank r estimates k with a relative deviation of about 1 / sqrt(r).
_LEAST_RANK = 10


@register("dgc")
@dataclass(frozen=True)
class DGC(EstimatedThreshold):
    """Send the elements above a threshold that a sample of each layer gives, of each rank's clipped momentum.

    u_t = m u_{t-1} + clip(g_t);  p_t = u_t + e_t;  t = magnitude of rank density x m among m sampled |p|;  S = {i:
    |p_i| >= t}, or the k = round(density n) largest of them;  e_{t+1} = p_t outside of S;  u_t = 0 inside of S.

    ``momentum_factor``: m; 0: no momentum; ``"optimizer"``: the momentum of the layer's group in the optimizer, as in
    :class:`MomentumCorrection`. If m is a number and the optimizer also has momentum, the step raises
    ConfigError. ``mask``: reset the momentum of what was sent to zero. ``clip``: the largest norm as in
    :class:`LocalClip`; None: no clipping. ``sample``: the share of a layer that is sampled, in strides of round(1 /
    sample) from an offset that varies with the step; layers with fewer than 10 sampled elements above the threshold are
    read whole, which selects as :class:`TopK` does, because their sample would say little. ``warmup_steps``: the
    densities 25, 6.25, 1.5625 and 0.4%, as far as they are above ``density``, hold for warmup_steps // L steps each,
    where L is their number. A remainder of the division is not warm-up.

    Wire: at most k values and coded indices, and their count (4 bytes per layer): one round, or two where a payload
    grows.
    State: a residual and, with momentum, u per layer: 16 bytes per element.
    Errors: ConfigError for a density or sample outside (0, 1], a momentum that is neither in [0, 1) nor the
    optimizer's, a warm-up of fewer steps than it has densities, and what LocalClip refuses.
    Source: Lin et al. 2018 as used in Abrahamyan et al. 2021, section V-A, and Tyagi and Swany 2023, section IV.
    Differs: strides instead of random samples; clipping per layer; no Nesterov form; warm-up in steps instead of
    epochs.
    """

    density: float = 0.001
    momentum_factor: float | str = 0.9
    mask: bool = True
    clip: float | None = None
    sample: float = 0.01
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_momentum_factor(self.momentum_factor, "the momentum factor")
        check_flag("mask", self.mask)
        check_number("sample", self.sample, "(0, 1]")
        check_whole("warmup_steps", self.warmup_steps, 0)
        if 0 < self.warmup_steps < (least := len(self._warmup_levels)):
            raise ConfigError(
                f"a warm-up through {least} densities needs at least as many steps, got {self.warmup_steps}"
            )
        self.dense(Identity())  # raises for what the wrappers refuse

    @cached_property
    def traits(self) -> Traits:
        return Traits(
            keeps_residual=self.feedback,
            contributes=True,
            momentum=self.momentum_factor,
            masks_momentum=self.mask and bool(self.momentum_factor),
            clip_norm=self.clip,
        )

    def dense(self, exact: Compressor) -> Compressor:
        if self.momentum_factor:
            exact = MomentumCorrection(exact, self.momentum_factor, self.mask)
        return exact if self.clip is None else LocalClip(exact, self.clip)

    @property
    def _warmup_levels(self) -> tuple[float, ...]:
        return tuple(level for level in WARMUP_DENSITIES if level > self.density)

    @property
    def _schedule(self) -> DensitySchedule | None:
        levels = self._warmup_levels
        if not self.warmup_steps or not levels:
            return None
        return DensitySchedule(replace(self, warmup_steps=0), levels, self.warmup_steps // len(levels))

    def at_step(self, step: int) -> Compressor:
        """Return itself without a warm-up, at the step's density."""
        return self._schedule.at_step(step) if self._schedule else replace(self, warmup_steps=0)

    def bare(self) -> Compressor:
        return replace(self, momentum_factor=0.0, clip=None, warmup_steps=0)

    @property
    def changes(self) -> tuple[int, ...]:
        """Return the end of every part of the warm-up."""
        return self._schedule.changes if self._schedule else ()

    def thresholds(self, device: Device, table: Table, wanted: Sizes, step: int) -> Floats:
        """Estimate thresholds from a sample, or from all of a layer that is too small for one."""
        stride = round(1 / self.sample)
        found = np.zeros(len(table), dtype=np.float32)
        sampled = wanted >= _LEAST_RANK * stride
        for rows, distance in ((sampled, stride), (~sampled, 1)):
            if rows.any():
                estimates = np.empty(int(rows.sum()), dtype=np.float32)
                device.kernels.sample_thresholds(
                    table[rows], wanted[rows], estimates, stride=distance, phase=step % distance
                )
                found[rows] = estimates
        found[wanted == table["length"]] = 0  # send it whole, whatever was sampled
        return found

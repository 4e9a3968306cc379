"""Rank 0 measures one layer's gradient now and then, for the run log: its norm, its residual's, and its error."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from time import perf_counter

import numpy as np

from gradcomp.compress import Compressor
from gradcomp.compress.lowrank.base import LowRank
from gradcomp.compress.policy import assigned
from gradcomp.control.distortion.errors import errors
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Plan
from gradcomp.core.run_lines import Sample
from gradcomp.core.vectors import Floats, Vector
from gradcomp.exchange.layout import Bucket
from gradcomp.exchange.memory import StepMemory
from gradcomp.exchange.thread import in_background
from gradcomp.kernels.codec import Group
from gradcomp.kernels.devices import Device

logger = logging.getLogger("gradcomp")

#: At most this share of the time goes into copying and measuring samples.
_SHARE = 0.0015
#: A sample has at most so many elements; of a longer one that is not of low rank the first ones are measured.
_MOST_ELEMENTS = 1 << 20


class LayerSamples:
    """Copies the gradient and residual of one layer before it is encoded, and measures them in the background.

    The layers that travel compressed take turns. Of a layer that is larger than an exchange bucket, one slice is
    measured. The next sample waits until copying and measuring have taken no more than 0.15% of the
    time since the first one. Calls come from the engine's thread.

    Memory: 8 bytes per element of a sample, at most 8 MiB on the gradients' device, and as much again and what the
    compressor takes while it is measured on the host.
    """

    def __init__(
        self, layers: tuple[LayerSpec, ...], device: Device, seed: int, write: Callable[[Sample], None]
    ) -> None:
        self._layers, self._device, self._seed, self._write = layers, device, seed, write
        self._layer = 0  # whose turn it is
        self._looked: int | None = None  # the step in which its sample became due
        self._began = perf_counter()
        self._spent = 0.0
        self._next_at = 0.0  # when the next sample may be taken
        self._work: Future[float] | None = None
        self._arena: Vector | None = None

    def look(self, step: int, plan: Plan, bucket: Bucket, memory: StepMemory, scale: float) -> None:
        """Take a sample from a bucket that is about to be encoded, if one is due and the layer is in this bucket."""
        begin = perf_counter()
        if begin < self._next_at or (self._work is not None and not self._ready(begin)):
            return
        layer = self._layer
        if layer not in bucket.layers:
            self._looked = step if self._looked is None else self._looked
            if step > self._looked + 1:  # sparse gradients do not come with a bucket
                self._pass_on()
            return
        self._pass_on()
        compressor = assigned(plan.assignments[layer])
        for group in () if compressor.traits.exact else bucket.groups:
            rows = np.flatnonzero(group.layers == layer)
            if len(rows):
                self._take(step, layer, compressor, group, int(rows[0]), memory, scale)
        self._account(perf_counter() - begin)

    def _ready(self, now: float) -> bool:
        """Return whether the last sample is measured and the next one is due."""
        assert self._work is not None, "a sample was taken"
        if not self._work.done():
            return False
        self._account(self._work.result())
        self._work = None
        return now >= self._next_at

    def _pass_on(self) -> None:
        self._layer, self._looked = (self._layer + 1) % len(self._layers), None

    def _account(self, seconds: float) -> None:
        self._spent += seconds
        self._next_at = self._began + self._spent / _SHARE

    def _take(
        self,
        step: int,
        layer: int,
        compressor: Compressor,
        group: Group,
        row: int,
        memory: StepMemory,
        scale: float,
    ) -> None:
        """Copy a segment of a group and start to measure it; do nothing for one without a gradient."""
        spec, table = self._layers[layer], group.table.copy()
        memory.gradients(table, group.layers)
        memory.residuals(table, group)
        table = table[row : row + 1]
        elements = int(table["length"][0])
        if table["gradient"][0] == 0 or elements == 0:
            return
        if elements > _MOST_ELEMENTS:
            if isinstance(compressor.bare(), LowRank):
                return
            elements = table["length"] = _MOST_ELEMENTS
        shape = spec.shape if elements == spec.size else (elements,)
        arena = self._memory(elements)
        has_residual = bool(group.feedback)
        for part, column in enumerate(("gradient", "residual")[: 1 + has_residual]):
            self._copy(table, column, scale, arena.part(part * elements, (part + 1) * elements))
        sample = LayerSpec(spec.name, shape)

        def work() -> float:
            begin = perf_counter()
            try:
                found = measured(
                    step, layer, compressor, sample, arena.read(0, 2 * elements), has_residual, self._seed
                )
            except Exception as error:  # noqa: BLE001 - what the log cannot tell must not end the training
                logger.warning(
                    "the run log has no further samples of layers: %s: %s", type(error).__name__, error
                )
                return math.inf
            if found is not None:
                self._write(found)
            return perf_counter() - begin

        self._work = in_background(self._device.bound(work))

    def _copy(self, table: np.ndarray, column: str, scale: float, to: Vector) -> None:
        """Copy what ``column`` refers to, as float32; a gradient is scaled, a residual is not."""
        kernels, flags = self._device.kernels, np.zeros(1, dtype=np.uint8)
        given = table.copy()
        if column == "residual":
            given["gradient"] = 0
        else:
            given["residual"] = 0
        given["next_residual"] = to.address
        kernels.contribute(given, flags, np.full(1, scale, dtype=np.float32), decay=1.0)

    def _memory(self, elements: int) -> Vector:
        """Return memory for a gradient and a residual; it grows to that of the largest sample."""
        if self._arena is None or self._arena.size < 2 * elements:
            self._arena = self._device.zeros(2 * elements)
        return self._arena


def measured(
    step: int,
    layer: int,
    compressor: Compressor,
    spec: LayerSpec,
    values: Floats,
    has_residual: bool,
    seed: int,
) -> Sample | None:
    """Return the norms of a gradient and its residual, which follows it in ``values``, and the error of their sum.

    It is None if a value is not finite.
    """
    gradient, residual = values[: spec.size], values[spec.size :]
    total = gradient + residual if has_residual else gradient
    parts = (gradient, residual, total) if has_residual else (gradient, total)
    with np.errstate(all="ignore"):
        norms = [float(np.linalg.norm(part.astype(np.float64))) for part in parts]
    if not all(map(math.isfinite, norms)):
        return None
    error = None
    with suppress(ConfigError):
        lost = float(errors((compressor,), spec, total, seed)[0])
        error = lost / norms[-1] if math.isfinite(lost) and norms[-1] else None
    shown = [float(f"{norm:.4g}") for norm in norms]
    return Sample(
        step, layer, shown[0], shown[1] if has_residual else None, None if error is None else round(error, 5)
    )

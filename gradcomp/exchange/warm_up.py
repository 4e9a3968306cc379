"""A rehearsal before the first step of a plan assembles the device's calls and loads their kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gradcomp.core.layers import LayerSpec
from gradcomp.core.state import Residuals
from gradcomp.core.trace import Statistics, Trace
from gradcomp.exchange.arrivals import Arrivals
from gradcomp.exchange.bucket import BucketProgram
from gradcomp.exchange.memory import Addresses, StepMemory, Times
from gradcomp.kernels.codec import Table
from gradcomp.kernels.devices import Device
from gradcomp.kernels.step import StepContext
from gradcomp.reduce.header import PRESENT, BucketFlags, HeaderId

_SOME_BYTES = 256
_ADDRESSES = ("gradient", "residual", "next_residual", "output")


class _Anywhere(StepMemory):
    """Stands for gradients and means that do not exist yet: all slices of all layers have one address."""

    def place(self, bases: Addresses, table: Table, offsets: Addresses | None = None) -> Addresses:
        return bases


def rehearse(
    programs: Sequence[BucketProgram],
    device: Device,
    layers: Sequence[LayerSpec],
    context: StepContext,
    residuals: Residuals,
) -> None:
    """Go through a step in which nothing runs on the device and nothing is sent; do nothing on the host.

    A program goes on until something depends on what kernels find. What it needs after that is loaded in the first
    step.
    """
    if device.driver is None or not programs:
        return
    context = replace(context, momenta=np.zeros(len(layers)))
    memory = device.driver.allocate(_SOME_BYTES)
    arrivals = Arrivals(layers)
    arrivals.gradients[:] = arrivals.outputs[:] = memory.address
    times = Times(Trace(1), Statistics())
    with device.kernels.rehearsing():
        for program in programs:
            bucket = program.bucket
            flags = BucketFlags(np.full(len(bucket.layers) + 1, PRESENT, dtype=np.uint8))
            binding = _Anywhere(bucket, context, flags, arrivals, residuals, lambda layer: 0, times)
            program.rehearse(HeaderId(0, 0, bucket.number, False), context, binding, flags)
            for group in bucket.groups:  # these addresses are freed now
                for table in (group.table, group.inputs):
                    for column in _ADDRESSES:
                        table[column] = 0

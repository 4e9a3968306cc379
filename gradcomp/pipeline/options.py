"""What a pipeline is made with beside layers, a plan and a transport, and what it goes on from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradcomp.compress.policy import Schedule
from gradcomp.control.base import ControllerRun
from gradcomp.core.plan import Plan
from gradcomp.core.state import Fields, Residuals
from gradcomp.core.topology import Topology
from gradcomp.kernels.devices import HOST, Device
from gradcomp.pipeline.layout import Bucket
from gradcomp.pipeline.switching import Switch
from gradcomp.reduce.model import Network


@dataclass(frozen=True)
class Options:
    """What may differ between pipelines of one job; the same on all ranks, but for ``on_complete`` and ``device``.

    ``average=False`` hands out the sum over ranks instead of the mean. ``on_complete(bucket)`` is called when a
    bucket's means are in the outputs. ``order_step``: the step in which rank 0's order of arrival becomes the order of
    the buckets. ``schedule``: asked with a step and a version, the plan that begins then. ``topology``: who shares a
    host; by default all do. ``network``: measured constants; ``reduction="auto"`` needs them where there are several
    hosts. ``device``: where gradients and means are, and so the state.
    """

    average: bool = True
    on_complete: Callable[[Bucket], None] | None = None
    order_step: int = 0
    schedule: Schedule | None = None
    topology: Topology | None = None
    network: Network | None = None
    controller: ControllerRun | None = None
    device: Device = HOST


@dataclass(frozen=True)
class Resumption:
    """Where a pipeline goes on: a checkpoint's state, or that of a pipeline with fewer layers. Layers by number.

    ``residuals``, ``fields`` and ``learning_rate`` replace the pipeline's own; without them these are kept.
    ``switch``: a change of compression that is not through; no controller decides beside it.
    """

    step: int
    order: Sequence[int]
    plan: Plan
    cold: frozenset[int] = frozenset()
    sparse: frozenset[int] = frozenset()
    streak: Sequence[int] | None = None
    residuals: Residuals | None = None
    fields: Fields | None = None
    learning_rate: float | None = None
    switch: Switch | None = None

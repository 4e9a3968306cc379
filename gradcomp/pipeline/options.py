"""A pipeline is made with options, and resumes from the state of an earlier run."""

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
    """Holds a pipeline's options, which are the same on all ranks, but for ``on_complete`` and ``device``.

    ``average=False`` hands out the sum over ranks instead of the mean. ``on_complete(bucket)`` is called when a
    bucket's means are in the outputs. In step ``order_step`` rank 0's order of arrival becomes the order of the
    buckets. ``schedule(step, version)`` returns the plan that begins then, or None. ``topology`` says who shares a
    host; by default all do. ``network`` has measured constants, which ``reduction="auto"`` needs with several
    hosts. ``device`` holds gradients and means, and so the state.
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
    """Holds what a pipeline resumes from: a checkpoint's state, or that of a pipeline with fewer layers.

    Layers are given by number. ``residuals``, ``fields`` and ``learning_rate`` replace the pipeline's own, which
    are kept where these are None. ``switch`` is an unfinished change of compression; no controller decides beside
    it.
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

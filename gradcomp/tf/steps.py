"""The steps of an exchange: what the ops of a traced function do while it runs, and eager mode at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from gradcomp import kernels
from gradcomp.core.errors import StateError
from gradcomp.engine import Exchanger
from gradcomp.job.keeper import Keeper
from gradcomp.job.runtime import Runtime
from gradcomp.job.sparse import mean_of_rows
from gradcomp.pipeline.digests import CRC32C, Digests
from gradcomp.tf.bridge import Array, lent
from gradcomp.tf.call import Site
from gradcomp.tf.landing import Landing
from gradcomp.tf.memory import Memory
from gradcomp.tf.tensors import bytes_of


class _Step:
    """A step that is open: who called it, what has been handed in, and where the means go."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.submitted: set[int] = set()  # numbers of groups
        self.means: dict[int, Any] = {}  # values of the memory's
        self.rows: dict[int, tuple[Array, Array]] = {}


class Steps:
    """One step after the other: groups of gradients are submitted, then groups of means collected, then it is finished.

    Submits may come from any threads, in any order; so may collects. :meth:`attach` comes first. ``divisor``: of the
    sums of sparse layers.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        names: Sequence[str],
        dtypes: Sequence[Any],
        divisor: float,
        predivide: float,
        memory: Memory,
    ) -> None:
        self._variables = variables
        self._names = names
        self._shapes = [tuple(variable.shape) for variable in variables]
        self._dtypes = [np.dtype(dtype.as_numpy_dtype) for dtype in dtypes]
        self._divisor = divisor
        self._predivide = predivide
        self._memory = memory
        self.landing = Landing()
        self._lock = threading.RLock()
        self._step: _Step | None = None
        self._count = 0
        self._failed: Exception | None = None  # here, for which the other ranks were told to stop

    def attach(self, state: Runtime, exchanger: Exchanger, keeper: Keeper) -> None:
        """What the steps are made with."""
        self._runtime = state
        self._exchanger = exchanger
        self._keeper = keeper

    def allocate(self, layer: int) -> int:
        """Room for the mean of a layer that only other ranks had (engine's thread)."""
        assert self._step is not None, "the step that the engine works at"
        mean = self._step.means[layer] = self._memory.room(layer)
        return self._memory.address(mean)

    def submit(self, site: Site, number: int, scale: float, rate: float, *values: Any) -> None:
        """Hand in a group's gradients, which must stay as they are until the step ends.

        The step's first group opens it, its last one flushes it.
        """
        with self._lock:
            self.check()
            with self.failing():
                step = self._opened(site, number, scale, rate)
                for layer, parts in site.take(number, values):
                    self._hand_in(step, layer, parts)
                step.submitted.add(number)
                if len(step.submitted) == len(site.groups):
                    self._exchanger.flush()

    def digests_now(self) -> Future[Digests]:
        """They are taken at once: TensorFlow updates a variable as soon as its own mean is there."""
        future: Future[Digests] = Future()
        future.set_result(self.digests())
        return future

    def digests(self) -> Digests:
        """What the variables hold."""
        with tf.init_scope():
            values = [kernels.crc32c(bytes_of(variable.numpy())) for variable in self._variables]
        return Digests(CRC32C, dict(zip(self._names, values, strict=True)))

    def _opened(self, site: Site, number: int, scale: float, rate: float) -> _Step:
        step = self._step
        if step is None:
            self._keeper.before_step()
            self._exchanger.open(scale * self._predivide, rate)
            self.landing.open(self._exchanger.pipeline.layout)
            step = self._step = _Step(site)
        if step.site is not site or number in step.submitted:
            raise StateError(
                "the last exchange did not come to its end: after a step that failed there is no other"
            )
        return step

    def _hand_in(self, step: _Step, layer: int, parts: Sequence[Any]) -> None:
        exchanger, memory = self._exchanger, self._memory
        if len(parts) == 2:
            step.rows[layer] = (lent(parts[0]), lent(parts[1]))
            exchanger.submit_absent(layer, sparse=True)
            return
        gradient = memory.value(parts[0])
        if tuple(gradient.shape) != self._shapes[layer]:
            raise StateError(
                f"layer {self._names[layer]!r} has shape {self._shapes[layer]}, and its gradient "
                f"{tuple(gradient.shape)}"
            )
        if layer in exchanger.pipeline.sparse:
            raise StateError(
                f"layer {self._names[layer]!r} had sparse gradients before and has a dense one now"
            )
        mean = step.means[layer] = memory.room(layer)
        exchanger.submit(layer, memory.address(gradient), memory.address(mean), gradient)

    def collect(self, layers: Sequence[int]) -> list[Any]:
        """Wait for the means of these layers, when all groups have been submitted."""
        self.landing.wait(layers)
        assert self._step is not None, "collects come before the step's end"
        return [self._step.means[layer] for layer in layers]

    def finish(self, site: Site) -> list[Array]:
        """End the step and commit it, when all means have been collected.

        Row numbers and values of every sparse layer, and one number more, for an op must have an output.
        """
        with self._lock, self.failing():
            exchanger = self._exchanger
            exchanger.pipeline.statistics.exposed_seconds += self.landing.waited_seconds
            result = exchanger.wait()
            step, self._step = self._step, None
            assert step is not None, "a step that ends was open"
            mixed = np.flatnonzero(result.present & result.sparse).tolist()
            if mixed:
                raise StateError(
                    f"layer {self._names[mixed[0]]!r} has a sparse gradient on one rank and a dense one on another"
                )
            means = {layer: self._mean_of_rows(layer, step) for layer in sorted(exchanger.pipeline.sparse)}
            there = {i for i, rows in means.items() if rows is not None} | set(
                np.flatnonzero(result.present).tolist()
            )
            if missing := sorted(there.intersection(site.absent)):
                raise StateError(
                    f"another rank has a gradient of {self._names[missing[0]]!r}, and this one has none: all ranks "
                    "must have gradients of the same variables"
                )
            exchanger.commit()
            self._count += 1
            rows = [array for layer in site.sparse for array in means[layer] or ()]
            return [*rows, np.zeros((), dtype=np.int64)]

    def _mean_of_rows(self, layer: int, step: _Step) -> tuple[Array, Array] | None:
        return mean_of_rows(
            self._exchanger,
            self._names[layer],
            self._shapes[layer],
            self._dtypes[layer],
            step.rows.get(layer),
            self._divisor,
        )

    def check(self) -> None:
        """Raise why there can be no step any more."""
        error = self._failed or self._exchanger.error
        if error is not None:
            raise error

    @contextmanager
    def failing(self) -> Iterator[None]:
        """The other ranks wait for what this one cannot bring after an error in here: tell them."""
        try:
            yield
        except Exception as error:
            if self._exchanger.error is None:
                self._failed = error
                self._exchanger.abort(f"rank {self._runtime.rank}: {type(error).__name__}: {error}")
            raise

    def settle(self) -> None:
        """Raise why there can be no step any more, or StateError in the midst of one."""
        if self._step is not None or self._count:
            self.check()
        if self._step is not None:
            raise StateError("a step is open: save and load between steps")

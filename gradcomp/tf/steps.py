"""The steps of an exchange, called by the ops of a traced function while it runs, and directly in eager mode."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gradcomp import kernels
from gradcomp.core.errors import StateError
from gradcomp.job import momentum
from gradcomp.job.adapter import Words
from gradcomp.job.momentum import Group
from gradcomp.job.step_driver import StepDriver
from gradcomp.kernels.segments import DTYPE_NUMBERS
from gradcomp.pipeline import Submission
from gradcomp.pipeline.digests import CRC32C, NO_SAY, Digests
from gradcomp.pipeline.fingerprint import NOTHING, Fingerprint, SoonFingerprint
from gradcomp.tf.bridge import Array, lent
from gradcomp.tf.call import Site
from gradcomp.tf.landing import Landing
from gradcomp.tf.memory import Memory
from gradcomp.tf.tensors import bytes_of


class _Step:
    """An open step: its site (None in ``join()``), the groups that were submitted, and the memory of the means."""

    def __init__(self, site: Site | None) -> None:
        self.site = site
        self.submitted: set[int] = set()  # numbers of groups
        self.means: dict[int, Any] = {}  # layer -> a value of the Memory


class Steps:
    """Makes steps: groups of gradients are submitted, then groups of means collected, then the step is finished.

    Implements :class:`gradcomp.job.adapter.Adapter` and :class:`gradcomp.job.joining.Joinable`. Submits may
    come from any threads, in any order; so may collects. :meth:`attach` must be called first.
    ``optimizers_momentum`` returns the optimizer's momentum, if there is an optimizer.
    """

    words = Words("a step is open: save and load between steps")

    def __init__(
        self,
        variables: Sequence[Any],
        names: Sequence[str],
        dtypes: Sequence[Any],
        predivide: float,
        memory: Memory,
        scalars: Callable[[], Mapping[str, float]],
        optimizers_momentum: Callable[[], Group] | None = None,
    ) -> None:
        self._variables = variables
        self._names = names
        self._shapes = [tuple(variable.shape) for variable in variables]
        self._dtypes = [np.dtype(dtype.as_numpy_dtype) for dtype in dtypes]
        self._predivide = predivide
        self._memory = memory
        self._scalars = scalars
        self._table = np.zeros(len(variables), dtype=kernels.SEGMENT)
        self._table["dtype"] = [DTYPE_NUMBERS[dtype.name] for dtype in self._dtypes]
        self._table["length"] = [math.prod(shape) for shape in self._shapes]
        self._momentum = optimizers_momentum
        self.landing = Landing()
        #: The engine tells this object when exchange buckets have their means.
        self.listener = self.landing
        self._lock = threading.RLock()
        self._step: _Step | None = None
        #: Loss scale, times the predivide factor, and learning rate of the last step.
        self._last = predivide, 0.0
        self._stands_in = False

    def attach(self, driver: StepDriver) -> None:
        self.driver = driver

    # -- called by ops --------------------------------------------------------------------------------------------

    def submit(self, site: Site, number: int, scale: float, learning_rate: float, *values: Any) -> None:
        """Submit a group's gradients, which must not change until the step ends.

        The step's first group opens it, its last one flushes it.
        """
        with self._lock:
            if self._step is None:
                self.momenta()  # checked first, so that a problem that all ranks share is raised by all of them
            self.driver.check()
            with self.driver.telling():
                step = self._opened(site, number, scale, learning_rate)
                for layer, parts in site.take(number, values):
                    self._hand_in(step, layer, parts)
                step.submitted.add(number)
                if len(step.submitted) == len(site.groups):
                    self.driver.flush()

    def _opened(self, site: Site, number: int, scale: float, learning_rate: float) -> _Step:
        step = self._step
        if step is None:
            self._last = scale * self._predivide, learning_rate
            step = self._open(site)
        if step.site is not site or number in step.submitted:
            raise StateError(
                "the last exchange did not end: no step is possible after a step that failed; start the job again from "
                "a checkpoint"
            )
        return step

    def _open(self, site: Site | None) -> _Step:
        self.driver.open(*self._last, self.momenta())
        self.landing.open(self.driver.exchanger.pipeline.layout)
        self._step = _Step(site)
        return self._step

    def momenta(self) -> npt.NDArray[np.float64] | None:
        """Return the optimizer's momentum by layer.

        Raises ConfigError, and tells the other ranks, if the momentum would be applied twice.
        """
        if self._momentum is None:
            return None
        pipeline = self.driver.exchanger.pipeline
        with self.driver.telling():
            if not pipeline.is_open:
                pipeline.lay_out()
            of_one_group = np.zeros(len(self._names), dtype=np.int64)
            return momentum.momenta(pipeline, [self._momentum()], of_one_group)[0]

    def drain(self) -> None:
        """Raise the error of a step that failed; between ops no step is open."""
        self.driver.rest()

    def stand_in(self) -> None:
        """Take part in a step without a gradient, and drop its means."""
        with self._lock:
            self.driver.check()
            self._stands_in = True
            try:
                with self.driver.telling():
                    self._open(None)
                    self.driver.flush()
                    self.driver.wait()
                    self._step = None
                    self.driver.commit()
            finally:
                self._stands_in = False

    def _hand_in(self, step: _Step, layer: int, parts: Sequence[Any]) -> None:
        driver, memory = self.driver, self._memory
        if len(parts) == 2:
            rows = lent(parts[0]), lent(parts[1])
            driver.submit_rows(layer, lambda: rows)
            return
        gradient = memory.value(parts[0])
        if tuple(gradient.shape) != self._shapes[layer]:
            raise StateError(
                f"layer {self._names[layer]!r} has shape {self._shapes[layer]}, and its gradient "
                f"{tuple(gradient.shape)}"
            )
        driver.refuse_dense(layer)
        mean = step.means[layer] = memory.allocate(layer)
        driver.submit(Submission(layer, memory.address(gradient), memory.address(mean), gradient))

    def collect(self, layers: Sequence[int]) -> list[Any]:
        """Wait for the means of these layers, when all groups have been submitted."""
        with self.driver.exchanger.waited_for():
            self.landing.wait(layers)
        assert self._step is not None, "collect() comes before finish()"
        return [self._step.means[layer] for layer in layers]

    def finish(self, site: Site) -> list[Array]:
        """End the step and commit it, when all means have been collected.

        Returns row numbers and values of every sparse layer, and one more number, because an op must have an
        output.
        """
        with self._lock, self.driver.telling():
            self.driver.exchanger.pipeline.statistics.exposed_seconds += self.landing.waited_seconds
            means = self.driver.wait()
            self._step = None
            there = {layer for layer, rows in means.rows.items() if rows is not None} | set(
                np.flatnonzero(means.result.present).tolist()
            )
            if missing := sorted(there.intersection(site.absent)):
                raise StateError(
                    f"another rank has a gradient of {self._names[missing[0]]!r}, and this one has none: all ranks "
                    "must have gradients of the same variables"
                )
            self.driver.commit()
            rows = [
                array
                for layer in site.sparse
                if (found := means.rows[layer]) is not None
                for array in (found[0], found[1].astype(self._dtypes[layer], copy=False))
            ]
            return [*rows, np.zeros((), dtype=np.int64)]

    # -- gradcomp.job.adapter.Adapter -----------------------------------------------------------------------------

    def allocate(self, layer: int) -> int:
        """Allocate memory for the mean of a layer that only other ranks had (on the engine's thread)."""
        assert self._step is not None, "the engine works on an open step"
        mean = self._step.means[layer] = self._memory.allocate(layer)
        return self._memory.address(mean)

    def digests(self) -> Digests:
        with tf.init_scope():
            values = [kernels.crc32c(bytes_of(variable.numpy())) for variable in self._variables]
        return Digests(CRC32C, dict(zip(self._names, values, strict=True)))

    def begin_digests(self) -> Future[Digests]:
        """Compute digests at once, because TensorFlow updates a variable as soon as its own mean is there.

        A rank in ``join()`` contributes none.
        """
        future: Future[Digests] = Future()
        future.set_result(NO_SAY if self._stands_in else self.digests())
        return future

    def fingerprint(self, turn: int) -> SoonFingerprint:
        """Sample at once, for the same reason as :meth:`begin_digests`; a rank in ``join()`` contributes nothing."""
        if self._stands_in:
            return NOTHING
        values = np.zeros(len(self._table), dtype=np.uint32)
        with tf.init_scope():
            held = [self._memory.value(tf.convert_to_tensor(variable)) for variable in self._variables]
            self._table["gradient"] = [self._memory.address(value) for value in held]
            kernels.sample(self._table, values, turn=turn & 0xFFFFFFFF)
        return Fingerprint(values, json.dumps([{"learning rate": self._last[1], **self._scalars()}]))

    def means_complete(self) -> None:
        """Do nothing: the engine's thread has woken the ops that wait for means."""

    def finalise(self) -> bool:
        """Return True: steps end in :meth:`finish`, so no gradient waits for one."""
        return True

"""The steps of an exchange: what the ops of a traced function do while it runs, and eager mode at once."""

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
    """A step that is open: who called it (nobody in ``join()``), what has been handed in, and where the means go."""

    def __init__(self, site: Site | None) -> None:
        self.site = site
        self.submitted: set[int] = set()  # numbers of groups
        self.means: dict[int, Any] = {}  # values of the memory's


class Steps:
    """One step after the other: groups of gradients are submitted, then groups of means collected, then it is finished.

    An :class:`gradcomp.job.adapter.Adapter`, and a :class:`gradcomp.job.joining.Joinable`. Submits may come from any
    threads, in any order; so may collects. :meth:`attach` comes first. ``optimizers_momentum``: if there is an
    optimizer.
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
        #: Hears of means.
        self.listener = self.landing
        self._lock = threading.RLock()
        self._step: _Step | None = None
        #: The last step's scale and learning rate.
        self._last = predivide, 0.0
        self._stands_in = False

    def attach(self, driver: StepDriver) -> None:
        """``driver``: what takes the steps."""
        self.driver = driver

    # -- what ops do ----------------------------------------------------------------------------------------------

    def submit(self, site: Site, number: int, scale: float, learning_rate: float, *values: Any) -> None:
        """Hand in a group's gradients, which must stay as they are until the step ends.

        The step's first group opens it, its last one flushes it.
        """
        with self._lock:
            if self._step is None:
                self.momenta()  # first of all: what is wrong on all ranks all of them say, whoever finds it first
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
                "the last exchange did not come to its end: after a step that failed there is no other"
            )
        return step

    def _open(self, site: Site | None) -> _Step:
        self.driver.open(*self._last, self.momenta())
        self.landing.open(self.driver.exchanger.pipeline.layout)
        self._step = _Step(site)
        return self._step

    def momenta(self) -> npt.NDArray[np.float64] | None:
        """The optimizer's momentum by layer; ConfigError, which the others hear of, if it would act twice."""
        if self._momentum is None:
            return None
        pipeline = self.driver.exchanger.pipeline
        with self.driver.telling():
            if not pipeline.is_open:
                pipeline.lay_out()
            of_one_group = np.zeros(len(self._names), dtype=np.int64)
            return momentum.momenta(pipeline, [self._momentum()], of_one_group)[0]

    def drain(self) -> None:
        """Raise the error of a step that failed; none is under way where no op runs."""
        self.driver.rest()

    def stand_in(self) -> None:
        """Take part in a step without a gradient, and forget its means."""
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
        assert self._step is not None, "collects come before the step's end"
        return [self._step.means[layer] for layer in layers]

    def finish(self, site: Site) -> list[Array]:
        """End the step and commit it, when all means have been collected.

        Row numbers and values of every sparse layer, and one number more, for an op must have an output.
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

    # -- what the driver asks, see gradcomp.job.adapter.Adapter -----------------------------------------------

    def allocate(self, layer: int) -> int:
        """Memory for the mean of a layer that only other ranks had (engine's thread)."""
        assert self._step is not None, "the step that the engine works at"
        mean = self._step.means[layer] = self._memory.allocate(layer)
        return self._memory.address(mean)

    def digests(self) -> Digests:
        """What the variables hold."""
        with tf.init_scope():
            values = [kernels.crc32c(bytes_of(variable.numpy())) for variable in self._variables]
        return Digests(CRC32C, dict(zip(self._names, values, strict=True)))

    def begin_digests(self) -> Future[Digests]:
        """They are taken at once: TensorFlow updates a variable as soon as its own mean is there.

        A rank that has joined has no say.
        """
        future: Future[Digests] = Future()
        future.set_result(NO_SAY if self._stands_in else self.digests())
        return future

    def fingerprint(self, turn: int) -> SoonFingerprint:
        """Taken at once, as digests are; a rank that has joined has no say."""
        if self._stands_in:
            return NOTHING
        values = np.zeros(len(self._table), dtype=np.uint32)
        with tf.init_scope():
            held = [self._memory.value(tf.convert_to_tensor(variable)) for variable in self._variables]
            self._table["gradient"] = [self._memory.address(value) for value in held]
            kernels.sample(self._table, values, turn=turn & 0xFFFFFFFF)
        return Fingerprint(values, json.dumps([{"learning rate": self._last[1], **self._scalars()}]))

    def means_complete(self) -> None:
        """Nothing is left to do: the engine's thread has woken the ops that wait for means."""

    def finalise(self) -> bool:
        """A step ends where it is finished."""
        return True

"""The steps of an exchange, called by ops of a traced function or in eager mode: groups, waits and memory."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gradcomp.core.errors import GradcompError, StateError
from gradcomp.exchange.arrivals import Submission
from gradcomp.exchange.driver import StepDriver, Words
from gradcomp.exchange.fingerprint import CRC32C, NO_SAY, NOTHING, DeferredFingerprint, Digests, Fingerprint
from gradcomp.exchange.layout import Bucket, Layout
from gradcomp.job import momentum
from gradcomp.job.momentum import Group
from gradcomp.kernels.devices import HOST
from gradcomp.kernels.segments import DTYPE_NUMBERS, SEGMENT
from gradcomp.tf import bridge
from gradcomp.tf.bridge import Array, bytes_of, lent
from gradcomp.tf.layers import Place, address_of

#: For each variable a tensor, ``tf.IndexedSlices``, or None.
Gradients = list[Any]

_SOMEWHERE = np.zeros(1)


class Site:
    """A call of ``exchange``: layers by number, and the groups in which they are submitted.

    ``absent`` lists layers without a gradient, ``sparse`` those with ``tf.IndexedSlices``, in the order of
    the groups.
    """

    def __init__(self, gradients: Gradients, groups: Sequence[Sequence[int]]) -> None:
        self._tensors = {i: _tensors_of(g) for i, g in enumerate(gradients) if g is not None}
        self._counts = {layer: len(tensors) for layer, tensors in self._tensors.items()}
        self.groups = groups
        self.absent = [i for i, gradient in enumerate(gradients) if gradient is None]
        self.sparse = [i for group in self.groups for i in group if self._counts[i] == 2]

    def dense(self, number: int) -> list[int]:
        return [layer for layer in self.groups[number] if self._counts[layer] == 1]

    def inputs(self, number: int) -> tuple[list[Any], list[Any]]:
        """Return the tensors of the group's sparse gradients, and of its dense ones; drops the references to them."""
        rows, dense = (
            [
                tensor
                for layer in self.groups[number]
                if self._counts[layer] == count
                for tensor in self._tensors.pop(layer)
            ]
            for count in (2, 1)
        )
        return rows, dense

    def take(self, number: int, values: Sequence[Any]) -> Iterator[tuple[int, Sequence[Any]]]:
        """Yield the group's layers with the values of their tensors, which are in the order of :meth:`inputs`."""
        row, gradient = 0, 2 * sum(self._counts[layer] == 2 for layer in self.groups[number])
        for layer in self.groups[number]:
            if self._counts[layer] == 2:
                yield layer, values[row : row + 2]
                row += 2
            else:
                yield layer, values[gradient : gradient + 1]
                gradient += 1


def groups_of(gradients: Gradients, shapes: Sequence[Sequence[int]], group_elements: int) -> list[list[int]]:
    """Group layers in the order in which the graph makes their gradients.

    A group ends once it has ``group_elements`` elements. There is at least one group, because one must open
    the exchange.
    """
    present = [i for i, gradient in enumerate(gradients) if gradient is not None]
    places = dict(zip(present, _places([gradients[i] for i in present]), strict=True))
    groups: list[list[int]] = [[]]
    elements = 0
    for layer in sorted(present, key=places.__getitem__):
        if elements >= group_elements:
            groups.append([])
            elements = 0
        groups[-1].append(layer)
        elements += math.prod(shapes[layer])
    return groups


def _places(gradients: Gradients) -> list[tuple[int, int]]:
    """Return for each gradient the depth of the graph that makes it, and its op's number there."""
    depth: dict[Any, int] = {}
    graph = tf.compat.v1.get_default_graph()
    while graph is not None and graph not in depth:
        depth[graph] = -len(depth)
        graph = getattr(graph, "outer_graph", None)
    numbers = {graph: {op: i for i, op in enumerate(graph.get_operations())} for graph in depth}
    tensors = [_tensors_of(gradient)[-1] for gradient in gradients]
    return [
        (depth.get(tensor.graph, 0), numbers.get(tensor.graph, {}).get(tensor.op, 0))
        if isinstance(tensor, tf.Tensor) and hasattr(tensor, "graph")
        else (-len(depth), 0)
        for tensor in tensors
    ]


def _tensors_of(gradient: Any) -> list[Any]:
    if isinstance(gradient, tf.IndexedSlices):
        return [gradient.indices, gradient.values]
    return [gradient]


class Landing:
    """A :class:`gradcomp.exchange.settings.Listener` on which several threads may wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._slices = np.zeros(0, dtype=np.int64)  # by layer: number of slices without a mean
        self._error: GradcompError | None = None
        self._waiting = 0
        self._since = 0.0
        self.waited_seconds = 0.0  # time of the open step in which at least one thread waited

    def open(self, layout: Layout) -> None:
        """Begin a step whose layers lie in exchange buckets as ``layout`` says."""
        self._slices = np.array([len(buckets) for buckets in layout.buckets_of], dtype=np.int64)
        self.waited_seconds = 0.0

    def wait(self, layers: Sequence[int]) -> None:
        """Block until the means of these layers are there; raises the error of a failed exchange."""
        rows = np.array(layers, dtype=np.int64)
        with self._changed:
            if not self._waiting:
                self._since = perf_counter()
            self._waiting += 1
            self._changed.wait_for(lambda: self._error is not None or not self._slices[rows].any())
            self._waiting -= 1
            if not self._waiting:
                self.waited_seconds += perf_counter() - self._since
            if self._error is not None:
                raise self._error

    def bucket_complete(self, bucket: Bucket) -> None:
        with self._changed:
            self._slices[bucket.layers] -= 1
            self._changed.notify_all()

    def failed(self, error: GradcompError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()


class HostMemory:
    """Converts tensors to values that the engine reads and writes: arrays that TensorFlow lends and takes over."""

    #: The device whose kernels work on this memory.
    device = HOST

    def __init__(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[Any]) -> None:
        self._pool = bridge.Pool(shapes, [dtype.as_numpy_dtype for dtype in dtypes])

    def op(
        self, function: Callable[..., Any], head: Sequence[Any], tensors: Sequence[Any], dtypes: Sequence[Any]
    ) -> list[Any]:
        """Return the outputs of an op in the traced function that calls ``function``.

        Its arguments are the head, as arrays, and the tensors, as values. It returns a list of values of
        these dtypes, or an array for one dtype. See :func:`gradcomp.tf.bridge.op`.
        """
        with tf.device("CPU:0"):
            return bridge.op(function, [*head, *tensors], dtypes)

    def value(self, given: Any) -> Any:
        """Return the value of an op's argument, or of a tensor in eager mode; do not write to it."""
        return lent(given)

    def address(self, value: Any) -> int:
        """Return a value's address, valid while the value is referred to; never 0: an empty one has any address."""
        return int(value.ctypes.data or _SOMEWHERE.ctypes.data)

    def allocate(self, layer: int) -> Any:
        """Return a value for the layer's mean that nothing else uses."""
        return self._pool.take(layer)

    def tensor(self, value: Any) -> Any:
        """Return the tensor that a value becomes in eager mode."""
        return bridge.taken_over(value)


class DeviceMemory:
    """Does as :class:`HostMemory` does; values are eager tensors of a GPU, all in TensorFlow's own memory."""

    def __init__(self, place: Place, shapes: Sequence[Sequence[int]], dtypes: Sequence[Any]) -> None:
        self.device = place.device
        self._place = place.name
        self._dtypes = dtypes
        with tf.init_scope():
            with tf.device("CPU:0"):
                self._shapes = [tf.constant(shape, tf.int32) for shape in shapes]
            with tf.device(self._place):
                self._zeros = {dtype: tf.zeros((), dtype) for dtype in set(dtypes)}

    def op(
        self, function: Callable[..., Any], head: Sequence[Any], tensors: Sequence[Any], dtypes: Sequence[Any]
    ) -> list[Any]:
        """Make two calls: one on the host, which takes the head if there is one, then one on the GPU.

        So the head is not copied to the GPU and back. The turn keeps the calls of another step from running
        between the two.
        """
        if not head:
            with tf.device(self._place):
                return bridge.eager_op(function, tensors, dtypes)
        taken: list[tuple[Any, ...]] = []

        def take(*values: Any) -> Any:
            taken[:] = [values]
            return np.zeros((), dtype=np.int64)

        def call(_: Any, *values: Any) -> Any:
            return function(*taken.pop(), *values)

        with tf.device("CPU:0"):
            token = bridge.op(take, head, [tf.int64])[0]
        with tf.device(self._place):
            return bridge.eager_op(call, [token, *tensors], dtypes)

    def value(self, given: Any) -> Any:
        """Return the tensor, copied to this GPU if it was computed elsewhere."""
        if given.backing_device == self._place:
            return given
        with tf.device(self._place):
            return tf.identity(given)

    def address(self, value: Any) -> int:
        """Return the tensor's address; some address on the device for an empty one, which may have no memory."""
        found = address_of(value) or address_of(self._zeros[value.dtype])
        driver = self.device.driver
        if driver is not None and not driver.reaches(found):
            raise StateError(f"a tensor on {value.backing_device} is not in the memory of {self.device.name}")
        return found

    def allocate(self, layer: int) -> Any:
        """Allocate by ``tf.fill``, because TensorFlow's ``Empty`` does not exist for all dtypes."""
        with tf.device(self._place):
            return tf.fill(self._shapes[layer], self._zeros[self._dtypes[layer]])

    def tensor(self, value: Any) -> Any:
        return value


Memory = HostMemory | DeviceMemory


@dataclass
class _Step:
    """An open step: its site (None in ``join()``), the groups that were submitted, and the memory of the means."""

    site: Site | None
    submitted: set[int] = field(default_factory=set)  # numbers of groups
    means: dict[int, Any] = field(default_factory=dict)  # layer -> a value of the memory


class Steps:
    """Makes steps: groups of gradients are submitted, then groups of means collected, then the step is finished.

    Implements :class:`gradcomp.exchange.driver.Adapter` and :class:`gradcomp.job.joining.Joinable`. Submits may
    come from any threads, in any order; so may collects. ``driver`` must be set first.
    ``optimizers_momentum`` returns the optimizer's momentum, if there is an optimizer.
    """

    words = Words("a step is open: save and load between steps")
    driver: StepDriver

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
        self._table = np.zeros(len(variables), dtype=SEGMENT)
        self._table["dtype"] = [DTYPE_NUMBERS[dtype.name] for dtype in self._dtypes]
        self._table["length"] = [math.prod(shape) for shape in self._shapes]
        self._momentum = optimizers_momentum
        #: The engine tells this object when exchange buckets have their means.
        self.listener = Landing()
        self._lock = threading.RLock()
        self._step: _Step | None = None
        #: Loss scale, times the predivide factor, and learning rate of the last step.
        self._last = predivide, 0.0
        self._stands_in = False

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
        self.listener.open(self.driver.exchanger.pipeline.layout)
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
            self.listener.wait(layers)
        assert self._step is not None, "collect() comes before finish()"
        return [self._step.means[layer] for layer in layers]

    def finish(self, site: Site) -> list[Array]:
        """End the step and commit it, when all means have been collected.

        Returns row numbers and values of every sparse layer, and one more number, because an op must have an
        output.
        """
        with self._lock, self.driver.telling():
            self.driver.exchanger.pipeline.statistics.exposed_seconds += self.listener.waited_seconds
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

    # -- gradcomp.exchange.driver.Adapter -----------------------------------------------------------------------------

    def allocate(self, layer: int) -> int:
        """Allocate memory for the mean of a layer that only other ranks had (on the engine's thread)."""
        assert self._step is not None, "the engine works on an open step"
        mean = self._step.means[layer] = self._memory.allocate(layer)
        return self._memory.address(mean)

    def digests(self) -> Digests:
        with tf.init_scope():
            values = [HOST.kernels.crc32c(bytes_of(variable.numpy())) for variable in self._variables]
        return Digests(CRC32C, dict(zip(self._names, values, strict=True)))

    def begin_digests(self) -> Future[Digests]:
        """Compute digests at once, because TensorFlow updates a variable as soon as its own mean is there.

        A rank in ``join()`` contributes none.
        """
        future: Future[Digests] = Future()
        future.set_result(NO_SAY if self._stands_in else self.digests())
        return future

    def fingerprint(self, turn: int) -> DeferredFingerprint:
        """Sample at once, for the same reason as :meth:`begin_digests`; a rank in ``join()`` contributes nothing."""
        if self._stands_in:
            return NOTHING
        values = np.zeros(len(self._table), dtype=np.uint32)
        with tf.init_scope():
            held = [self._memory.value(tf.convert_to_tensor(variable)) for variable in self._variables]
            self._table["gradient"] = [self._memory.address(value) for value in held]
            self._memory.device.kernels.sample(self._table, values, turn=turn & 0xFFFFFFFF)
        return Fingerprint(values, json.dumps([{"learning rate": self._last[1], **self._scalars()}]))

    def means_complete(self) -> None:
        """Do nothing: the engine's thread has woken the ops that wait for means."""

    def finalise(self) -> bool:
        """Return True: steps end in :meth:`finish`, so no gradient waits for one."""
        return True

"""``Exchange``: means over ranks of the gradients of a list of variables, in eager mode and inside tf.function."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gradcomp.compress import Compressor, Policy
from gradcomp.core.errors import StateError
from gradcomp.exchange.arrivals import Submission
from gradcomp.exchange.driver import Words
from gradcomp.exchange.exchanger import Exchanger
from gradcomp.exchange.fingerprint import CRC32C, NO_SAY, NOTHING, DeferredFingerprint, Digests, Fingerprint
from gradcomp.exchange.means_listener import MeansListener
from gradcomp.job import joining, runtime, start
from gradcomp.job.launch import Ranks
from gradcomp.job.momentum import Group
from gradcomp.job.momentum import momenta as momenta_of
from gradcomp.job.process_sets import members
from gradcomp.job.reduce_op import Average
from gradcomp.job.settings import Arguments
from gradcomp.kernels.devices import HOST
from gradcomp.kernels.segments import DTYPE_NUMBERS, SEGMENT
from gradcomp.tf import bridge
from gradcomp.tf.bridge import Array, bytes_of, lent, plain, refuse_graph, the_turn
from gradcomp.tf.groups import Gradients, Site, groups_of
from gradcomp.tf.layers import specs
from gradcomp.tf.memory import DeviceMemory, HostMemory, Memory, place_of


@dataclass
class _Step:
    """An open step: its site (None in ``join()``), the groups that were submitted, and the memory of the means."""

    site: Site | None
    submitted: set[int] = field(default_factory=set)  # numbers of groups
    means: dict[int, Any] = field(default_factory=dict)  # layer -> a value of the memory


#: Most steps in which a controller waits for losses while none is measured.
MOST_STEPS_UNMEASURED = 500
#: The optimizer's momentum by layer, if there is any before compression.
Momenta = npt.NDArray[np.float64] | None


class Exchange:
    """The exchange of the gradients of a fixed list of variables, step after step.

    Construction is collective over the ranks of ``process_set``; :func:`gradcomp.tf.DistributedGradientTape` documents
    the arguments and the errors. ``scalars`` returns the optimizer's settings without its learning rate, which ranks
    compare. ``names`` are the layers' names, for variables whose names differ from those in a saved state. ``momentum``
    returns the optimizer's, if there is an optimizer. ``optimizer`` applies the means; losses are measured after its
    steps. If all variables are on one GPU, gradients are exchanged there,
    else on the host, see :func:`gradcomp.tf.memory.place_of`.

    Every exchange commits when its means are returned, because they are applied at once; one with a value that is not
    finite does not. In some steps the ranks compare the variables at the beginning of the next exchange.

    A step consists of three kinds of calls, in a graph each made by an op: groups of gradients are submitted, then
    groups of means collected, then the step is finished. Submits may come from any threads, in any order; so may
    collects. Implements :class:`gradcomp.exchange.driver.Adapter` and :class:`gradcomp.job.joining.Joinable`.
    """

    words = Words("a step is open: save and load between steps")

    def __init__(
        self,
        variables: Sequence[Any],
        arguments: Arguments,
        *,
        ranks: Ranks | None = None,
        names: Sequence[str] | None = None,
        scalars: Callable[[], Mapping[str, float]] = dict,
        momentum: Callable[[], Group] | None = None,
        optimizer: Any = None,
    ) -> None:
        state = runtime.current()
        ranks = members(arguments.process_set) if ranks is None else ranks
        if len(ranks) > 1:
            refuse_graph("the exchange of gradients")
        self._variables = list(variables)
        self._arguments = arguments
        self._scalars = scalars
        self._momentum = momentum
        self._optimizer = optimizer
        self._shapes = [tuple(variable.shape) for variable in self._variables]
        #: The engine tells this object when exchange buckets have their means.
        self.listener = MeansListener()
        self._lock = threading.RLock()
        self._step: _Step | None = None
        #: What :meth:`begin` submitted.
        self._begun: Site | None = None
        #: Loss scale, times the predivide factor, and learning rate of the last step.
        self._last = arguments.gradient_predivide_factor, 0.0
        self._stands_in = False
        #: The step after which losses were measured last, and the steps since then in which the controller waited.
        self._measured, self._unmeasured = -1, 0

        def validate() -> tuple[start.Proposal, list[Any], Memory]:
            proposal = start.propose(
                *(arguments.check(), specs(self._variables, names), 0, arguments.controller),
                what_if=state.what_if(ranks),
                measures_losses=arguments.sensitivity is not None,
            )
            if arguments.sensitivity is not None:
                arguments.sensitivity.check(self._variables)
            dtypes = [tf.as_dtype(layer.dtype) for layer in proposal.layers]
            place = place_of(self._variables) if len(ranks) > 1 else None
            if place is None:
                return proposal, dtypes, HostMemory(self._shapes, dtypes)
            return proposal, dtypes, DeviceMemory(*place, self._shapes, dtypes)

        (proposal, self._dtypes, self._memory), transport = start.validate_together(state, ranks, validate)
        self._layers = proposal.layers
        self._table = np.zeros(len(self._layers), dtype=SEGMENT)
        self._table["dtype"] = [DTYPE_NUMBERS[layer.dtype] for layer in self._layers]
        self._table["length"] = [math.prod(shape) for shape in self._shapes]
        if transport is None:
            start.say_what_is_bypassed(proposal.policy)
        else:
            the_turn()  # a variable that is first made during a trace would cost a second trace
        self.driver = start.start(
            state, ranks, transport, proposal, self, self._shapes, arguments, device=self._memory.device
        )
        #: The exchanger, with the pipeline and the compression state; None in a world of one.
        self.exchanger: Exchanger | None = self.driver.exchanger if self.driver.attached else None
        #: Gives the compression state to :func:`gradcomp.tf.save` and takes it from ``load``.
        self.checkpoint_manager = self.driver.checkpoint_manager
        # A world of one has no groups.
        self._group_elements = self.exchanger.pipeline.config.slice_elements if self.exchanger else 0
        joining.register(self)
        if arguments.sensitivity is not None:
            arguments.sensitivity.serve(self)

    def set_compression(self, compression: Policy | Compressor | str) -> None:
        """Change the compression, see :meth:`gradcomp.tf.DistributedOptimizer.set_compression`."""
        policy = self._arguments.policy_of(compression)
        start.set_compression(self.checkpoint_manager, self.exchanger, self._layers, policy)

    def measure_losses(self) -> None:
        """Let the controller measure losses that it decides by, once after each step, while no step is open. Local."""
        if self.exchanger is None or self.exchanger.closed or self._arguments.sensitivity is None:
            return
        controller, step = self.exchanger.pipeline.controller, self.checkpoint_manager.step
        if controller is None or step == self._measured:
            return
        self._measured, self._unmeasured = step, 0
        summands = 1 if self._arguments.op is Average else controller.environment.world
        changes = partial(self._arguments.sensitivity.changes, self._variables, self._optimizer, summands)
        with self.driver.telling(), tf.init_scope():
            controller.probe(changes)

    def _refuse_unmeasured(self) -> None:
        """Raise StateError if the controller waits for losses that nobody measures."""
        assert self.exchanger is not None, "a step was made"
        controller = self.exchanger.pipeline.controller
        if self._arguments.sensitivity is None or controller is None or not controller.awaits_losses:
            return
        self._unmeasured += 1
        if self._unmeasured > MOST_STEPS_UNMEASURED:
            raise StateError(
                f"{controller.name} has waited for losses for {self._unmeasured} steps: call measure() of the "
                "Sensitivity after each step in a tf.function of your own, or with a tape; in fit(), lower "
                "steps_per_execution"
            )

    @plain
    def exchange(self, gradients: Sequence[Any], scale: Any = 1.0, learning_rate: Any = 0.0) -> list[Any]:
        """Return the mean, or sum, over ranks of every gradient, in the same order.

        ``gradients`` has one entry for each variable: a tensor of its shape and dtype, ``tf.IndexedSlices``, or None if
        this rank has none. IndexedSlices give IndexedSlices, None gives None. ``scale`` is the loss scale that the
        gradients, and then the means, contain; residuals are kept without it. ``learning_rate`` is for residuals that
        follow it.

        Collective, in eager mode and inside tf.function; all ranks must take a branch that contains an exchange. Inside
        tf.function calls run in program order, and an error while it runs arrives as one of TensorFlow's, whose text
        has the class and the message, see :func:`gradcomp.tf.bridge.typed_errors`. In a world of one gradients are
        returned as they are. Raises ConfigError if the function is compiled by XLA, and StateError for a gradient of
        another shape or dtype, and if another rank has a gradient of a variable where this one has None.
        """
        if len(gradients) != len(self._variables):
            raise StateError(f"{len(gradients)} gradients for {len(self._variables)} variables")
        if self.exchanger is None:
            self.checkpoint_manager.before_step()  # in tf.function only while it is traced
            return list(gradients)
        if self._begun is None:
            given = self._ready(gradients)
            if not tf.executing_eagerly():
                return self._traced(given, scale, learning_rate)
            self._begun = self._submit_all(given, scale, learning_rate)
        site, self._begun = self._begun, None
        means: list[Any] = [None] * len(gradients)
        for layer, value in zip(site.dense[0], self._collect(site.dense[0]), strict=True):
            means[layer] = self._memory.tensor(value)
        return self._with_rows(means, site, [tf.constant(array) for array in self._finish(site)])

    def begin(self, gradients: Sequence[Any], learning_rate: Any = 0.0) -> None:
        """Submit gradients in eager mode; the next :meth:`exchange` waits for their means, and submits none itself.

        They must not change until then. Local. In a world of one nothing happens.
        """
        if self.exchanger is not None:
            self._begun = self._submit_all(self._ready(gradients), 1.0, learning_rate)

    def _ready(self, gradients: Sequence[Any]) -> Gradients:
        """Return the gradients in a form that can be exchanged now; else raise, as :meth:`exchange` says."""
        refuse_graph("the exchange of gradients")
        self._momenta()
        self.driver.check()
        with self.driver.telling():
            return [self._checked(layer, gradient) for layer, gradient in enumerate(gradients)]

    def _submit_all(self, gradients: Gradients, scale: Any, learning_rate: Any) -> Site:
        # The last variables' gradients come first in a backward pass, and a graph has them in this order too.
        site = Site(gradients, [[i for i in reversed(range(len(gradients))) if gradients[i] is not None]])
        rows, dense = site.inputs(0)
        self._submit(site, 0, None, scale, learning_rate, *rows, *dense)
        return site

    def _traced(self, gradients: Gradients, scale: Any, learning_rate: Any) -> list[Any]:
        """Add a submit op for each group, then their collect ops, then the op that ends the step.

        A collect op blocks one of TensorFlow's threads. There may be one only, so every submit op comes
        before the first.
        """
        site = Site(gradients, groups_of(gradients, self._shapes, self._group_elements))
        turn = the_turn()
        head = [turn.read_value(), tf.cast(scale, tf.float32), tf.cast(learning_rate, tf.float32)]
        means: list[Any] = [None] * len(gradients)
        submits = []
        for number in range(len(site.dense)):
            rows, dense = site.inputs(number)
            submit = partial(self._submit, site, number)
            submits += self._memory.op(submit, [*head, *rows], dense, [tf.int64])
        with tf.control_dependencies(submits):
            # The first submit op compares the variables. What writes to one without its mean, as weight decay does,
            # waits for this reader of it.
            for variable in self._variables:
                tf.raw_ops.VarIsInitializedOp(resource=bridge.handle_of(variable))
            for layers in filter(None, site.dense):
                dtypes = [self._dtypes[layer] for layer in layers]
                outputs = self._memory.op(partial(self._collect, layers), [], [], dtypes)
                for layer, mean in zip(layers, outputs, strict=True):
                    mean.set_shape(self._shapes[layer])
                    means[layer] = mean
        arrived = [*submits, *(mean for mean in means if mean is not None)]
        with tf.control_dependencies(arrived), tf.device("CPU:0"):
            dtypes = [dtype for layer in site.sparse for dtype in (tf.int64, self._dtypes[layer])]
            rows = bridge.op(partial(self._finish, site), [], [*dtypes, tf.int64])
        with tf.control_dependencies(rows):
            turn.assign_add(1)
        return self._with_rows(means, site, rows)

    def _checked(self, layer: int, gradient: Any) -> Any:
        """Return the gradient in a form that can be exchanged; StateError for another dtype."""
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices) and self._arguments.sparse_as_dense:
            rows = self._shapes[layer][0]
            gradient = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, rows)
        elif not isinstance(gradient, tf.IndexedSlices):
            gradient = tf.convert_to_tensor(gradient)
        if gradient.dtype != self._dtypes[layer]:
            raise StateError(
                f"layer {self._layers[layer].name!r} is {self._dtypes[layer].name}, and its gradient "
                f"{gradient.dtype.name}"
            )
        return gradient

    def _with_rows(self, means: list[Any], site: Site, rows: Sequence[Any]) -> list[Any]:
        for number, layer in enumerate(site.sparse):
            index, values = rows[2 * number : 2 * number + 2]
            index.set_shape([None])
            values.set_shape([None, *self._shapes[layer][1:]])
            means[layer] = tf.IndexedSlices(values, index, tf.constant(self._shapes[layer], dtype=tf.int64))
        return means

    # -- a step, by ops or in eager mode --------------------------------------------------------------------------

    def _submit(self, site: Site, number: int, _: Any, scale: Any, learning_rate: Any, *values: Any) -> Array:
        """Submit a group's gradients, which must not change until the step ends.

        The step's first group opens it, its last one flushes it. The third argument is the turn, which only orders
        ops. The result is a number, because an op must have an output.
        """
        with self._lock:
            # Checked first, so that a problem that all ranks share is raised by all of them.
            momenta = self._momenta() if self._step is None else None
            self.driver.check()
            with self.driver.telling():
                step = self._step
                if step is None:
                    self._last = (
                        float(scale) * self._arguments.gradient_predivide_factor,
                        float(learning_rate),
                    )
                    step = self._open(site, momenta)
                if step.site is not site or number in step.submitted:
                    raise StateError(
                        "the last exchange did not end: no step is possible after a step that failed; start the job "
                        "again from a checkpoint"
                    )
                for layer, parts in site.take(number, values):
                    self._hand_in(step, layer, parts)
                step.submitted.add(number)
                if len(step.submitted) == len(site.dense):
                    self.driver.flush()
        return np.zeros((), dtype=np.int64)

    def _open(self, site: Site | None, momenta: Momenta) -> _Step:
        self.driver.open(*self._last, momenta)
        self.listener.open(self.driver.exchanger.pipeline.layout)
        self._step = _Step(site)
        return self._step

    def _momenta(self) -> Momenta:
        """Return the optimizer's momentum by layer.

        Raises ConfigError, and tells the other ranks, if the momentum would be applied twice.
        """
        if self._momentum is None:
            return None
        pipeline = self.driver.exchanger.pipeline
        with self.driver.telling():
            if not pipeline.is_open:
                pipeline.lay_out()
            of_one_group = np.zeros(len(self._layers), dtype=np.int64)
            return momenta_of(pipeline, [self._momentum()], of_one_group)[0]

    def _hand_in(self, step: _Step, layer: int, parts: Sequence[Any]) -> None:
        if len(parts) == 2:
            rows = lent(parts[0]), lent(parts[1])
            self.driver.submit_rows(layer, lambda: rows)
            return
        gradient = self._memory.value(parts[0])
        if tuple(gradient.shape) != self._shapes[layer]:
            raise StateError(
                f"layer {self._layers[layer].name!r} has shape {self._shapes[layer]}, and its gradient "
                f"{tuple(gradient.shape)}"
            )
        self.driver.refuse_dense(layer)
        mean = step.means[layer] = self._memory.allocate(layer)
        self.driver.submit(
            Submission(layer, self._memory.address(gradient), self._memory.address(mean), gradient)
        )

    def _collect(self, layers: Sequence[int]) -> list[Any]:
        """Wait for the means of these layers, when all groups have been submitted."""
        with self.driver.exchanger.waited_for():
            self.listener.wait(layers)
        assert self._step is not None, "means are collected before the step is finished"
        return [self._step.means[layer] for layer in layers]

    def _finish(self, site: Site) -> list[Array]:
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
                    f"another rank has a gradient of {self._layers[missing[0]].name!r}, and this one has none: all "
                    "ranks must have gradients of the same variables"
                )
            self.driver.commit()
            self._refuse_unmeasured()
            rows = [
                array
                for layer in site.sparse
                if (found := means.rows[layer]) is not None
                for array in (found[0], found[1].astype(self._dtypes[layer].as_numpy_dtype, copy=False))
            ]
            return [*rows, np.zeros((), dtype=np.int64)]

    # -- gradcomp.job.joining.Joinable ----------------------------------------------------------------------------

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
                    self._open(None, self._momenta())
                    self.driver.flush()
                    self.driver.wait()
                    self._step = None
                    self.driver.commit()
            finally:
                self._stands_in = False

    # -- gradcomp.exchange.driver.Adapter -----------------------------------------------------------------------------

    def allocate(self, layer: int) -> int:
        """Allocate memory for the mean of a layer that only other ranks had (on the engine's thread)."""
        assert self._step is not None, "the engine works on an open step"
        mean = self._step.means[layer] = self._memory.allocate(layer)
        return self._memory.address(mean)

    def digests(self) -> Digests:
        with tf.init_scope():
            values = [HOST.kernels.crc32c(bytes_of(variable.numpy())) for variable in self._variables]
        return Digests(CRC32C, dict(zip((layer.name for layer in self._layers), values, strict=True)))

    def begin_digests(self) -> Future[Digests]:
        """Compute digests at once, because TensorFlow updates a variable as soon as its own mean has arrived.

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
        """Return True: steps end in :meth:`_finish`, so no gradient waits for one."""
        return True

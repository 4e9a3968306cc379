"""``Exchange``: the means over ranks of the gradients of a list of variables, in eager mode and inside tf.function."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from gradcomp.compress import Compression, Compressor, Policy, as_policy
from gradcomp.control import Controller
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.core.scheme import parse
from gradcomp.engine import Exchanger
from gradcomp.job import runtime
from gradcomp.job.checkpoint import Keeper
from gradcomp.job.process_sets import Members, members
from gradcomp.job.reduce_op import Average, ReduceOp, Sum
from gradcomp.job.report import Reporter
from gradcomp.job.serving import refuse_servers
from gradcomp.job.start import Proposal, comparison_is_due, propose, start, validate_together
from gradcomp.tf import bridge
from gradcomp.tf.call import Gradients, Site, groups_of
from gradcomp.tf.landing import Landing
from gradcomp.tf.layers import specs
from gradcomp.tf.ordered import plain, refuse_xla, the_turn
from gradcomp.tf.sparse import mean_of_rows

Array = bridge.Array


class _Step:
    """An exchange that is open: who called it, what has been handed in, and where the means go."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.submitted: set[int] = set()  # numbers of groups
        self.means: dict[int, Array] = {}
        self.rows: dict[int, tuple[Array, Array]] = {}


class Exchange:
    """The exchange of the gradients of a fixed list of variables, step after step.

    Construction is collective over the ranks of ``process_set``: see :func:`gradcomp.tf.DistributedGradientTape` for
    the arguments and the errors. ``predivide``: gradients are divided by it before the exchange, the mean multiplied
    after.

    Every exchange commits when its means are handed out, for they are applied right away; one with a value that is not
    finite does not. At the beginning of the next one the ranks compare the variables, in the steps in which that is due.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        compression: Policy | Compressor | str = Compression.none,
        *,
        op: ReduceOp = Average,
        predivide: float = 1.0,
        sparse_as_dense: bool = False,
        process_set: Members = None,
        reduction: str | None = None,
        controller: Controller | str | None = None,
    ) -> None:
        self._runtime = state = runtime.current()
        #: Numbers, in the job, of the ranks that exchange.
        self.ranks = members(process_set)
        self._variables = list(variables)
        self._predivide = predivide
        self._sparse_as_dense = sparse_as_dense
        self._divisor = float(len(self.ranks)) if op is Average else 1.0

        def validate() -> Proposal:
            if op not in (Average, Sum):
                raise ConfigError(f"op must be Average or Sum, got {op!r}")
            if not predivide > 0 or (predivide != 1.0 and op is not Average):
                raise ConfigError(
                    "gradient_predivide_factor must be positive, and needs op=Average if it is not 1"
                )
            if reduction is not None:
                parse(reduction)
            refuse_servers(reduction or state.config.reduction, len(self.ranks), "gradcomp.tf")
            return propose(as_policy(compression), specs(self._variables), 0, controller)

        proposal, transport = validate_together(state, self.ranks, validate)
        self._names = [layer.name for layer in proposal.layers]
        self._shapes = [tuple(variable.shape) for variable in self._variables]
        self._dtypes = [tf.as_dtype(layer.dtype) for layer in proposal.layers]
        the_turn()  # made in the midst of a trace, it would cost a second trace
        self._pool = bridge.Pool(self._shapes, [dtype.as_numpy_dtype for dtype in self._dtypes])
        self._landing = Landing()
        self._lock = threading.RLock()
        self._step: _Step | None = None
        self._steps = 0
        #: The exchanger, with the pipeline and the compression state; None in a world of one.
        self.exchanger: Exchanger | None = None
        self.reporter: Reporter | None = None
        if transport is not None:
            self.exchanger, self.reporter = start(
                state,
                self.ranks,
                transport,
                proposal,
                self._allocate,
                average=op is Average,
                listener=self._landing,
                reduction=reduction,
                arguments={
                    "sparse_as_dense": sparse_as_dense,
                    "gradient_predivide_factor": predivide,
                },
            )
        elif changing := [c for c in proposal.policy.compressors if c.momentum or c.clip_norm is not None]:
            runtime.logger.warning(
                "a world of one rank: %s is bypassed, its momentum and clipping as well",
                changing[0].to_string(),
            )
        #: Where :func:`gradcomp.tf.save` finds the compression state.
        self.keeper = Keeper(
            proposal.layers,
            proposal.plan,
            state.config,
            self.exchanger,
            self._settle,
            unit=predivide,
            ranks=self.ranks,
        )

    @plain
    def exchange(self, gradients: Sequence[Any], scale: Any = None, rate: Any = None) -> list[Any]:
        """The mean, or sum, over ranks of every gradient, in the same order.

        ``gradients``: one for each variable: a tensor of its shape and dtype, ``tf.IndexedSlices``, or None if this
        rank has none. Of IndexedSlices come IndexedSlices, of None comes None. ``scale``: the loss scale that the
        gradients, and then the means, contain; residuals are kept without it. ``rate``: the learning rate, for
        residuals that follow it.

        Collective, in eager mode and inside tf.function; a branch that holds an exchange must be taken by all ranks.
        Inside tf.function calls run in program order, and what goes wrong while it runs arrives as an error of
        TensorFlow's, in whose text class and message stand: see :func:`typed_errors`. In a world of one gradients are
        returned as they are. Raises ConfigError where the function is compiled by XLA, and StateError for a gradient of
        another shape or dtype, and where another rank has a gradient of a variable of which this one has None.
        """
        if len(gradients) != len(self._variables):
            raise StateError(f"{len(gradients)} gradients for {len(self._variables)} variables")
        exchanger = self.exchanger
        if exchanger is None:
            return list(gradients)
        refuse_xla("the exchange of gradients")
        if exchanger.error is not None:
            raise exchanger.error
        with self._failing():
            given: Gradients = [self._checked(layer, gradient) for layer, gradient in enumerate(gradients)]
        if tf.executing_eagerly():
            return self._now(given, scale, rate)
        return self._traced(given, scale, rate)

    # -- eager mode -----------------------------------------------------------------------------------------------

    def _now(self, gradients: Gradients, scale: Any, rate: Any) -> list[Any]:
        # The last variables' gradients come first in a backward pass: the order in which a graph would have them.
        site = Site(gradients, [[i for i in reversed(range(len(gradients))) if gradients[i] is not None]])
        values = [bridge.lent(tensor) for tensor in site.inputs(0)]
        self._submit(site, 0, _number(scale, 1.0), _number(rate, 0.0), *values)
        del values
        arrays = self._collect(site.dense(0))
        means: list[Any] = [None] * len(gradients)
        for layer, array in zip(site.dense(0), arrays, strict=True):
            means[layer] = bridge.taken_over(array)
        rows = [tf.constant(array) for array in self._finish(site)]
        return self._with_rows(means, site, rows)

    # -- inside tf.function ---------------------------------------------------------------------------------------

    def _traced(self, gradients: Gradients, scale: Any, rate: Any) -> list[Any]:
        """A submit op for each group, then the collect ops, then the one that ends the step.

        A collect blocks a thread of TensorFlow's. If there is one only, every submit must come before the first.
        """
        site = Site(gradients, groups_of(gradients, self._shapes, self._runtime.config.slice_elements))
        turn = the_turn()
        head = [turn.read_value(), _tensor(scale, 1.0), _tensor(rate, 0.0)]
        with tf.device("CPU:0"):
            submits = [
                bridge.op(
                    partial(self._submit_after, site, number), [*head, *site.inputs(number)], [tf.int64]
                )[0]
                for number in range(len(site.groups))
            ]
            means: list[Any] = [None] * len(gradients)
            with tf.control_dependencies(submits):
                for number in range(len(site.groups)):
                    layers = site.dense(number)
                    outputs = layers and bridge.op(
                        partial(self._collect, layers), [], [self._dtypes[layer] for layer in layers]
                    )
                    for layer, mean in zip(layers, outputs, strict=True):
                        mean.set_shape(self._shapes[layer])
                        means[layer] = mean
            with tf.control_dependencies([*submits, *(mean for mean in means if mean is not None)]):
                dtypes = [dtype for layer in site.sparse for dtype in (tf.int64, self._dtypes[layer])]
                rows = bridge.op(partial(self._finish, site), [], [*dtypes, tf.int64])
        with tf.control_dependencies(rows):
            turn.assign_add(1)
        return self._with_rows(means, site, rows[:-1])

    def _submit_after(self, site: Site, number: int, _: Any, scale: Any, rate: Any, *values: Array) -> Array:
        self._submit(site, number, float(scale), float(rate), *values)
        return np.zeros((), dtype=np.int64)

    # -- what the ops do ------------------------------------------------------------------------------------------

    def _submit(self, site: Site, number: int, scale: float, rate: float, *values: Array) -> None:
        """Hand in a group's gradients; the step's first group opens it, its last one flushes it."""
        with self._lock:
            if self._step is None:
                self._compare_variables()
            with self._failing():
                step = self._opened(site, number, scale, rate)
                for layer, parts in site.take(number, values):
                    self._hand_in(step, layer, parts)
                step.submitted.add(number)
                if len(step.submitted) == len(site.groups):
                    self._exchanger.flush()

    def _opened(self, site: Site, number: int, scale: float, rate: float) -> _Step:
        step = self._step
        if step is None:
            self.keeper.before_step()
            self._exchanger.open(scale * self._predivide, rate)
            self._landing.open(self._exchanger.pipeline.layout)
            step = self._step = _Step(site)
        if step.site is not site or number in step.submitted:
            raise StateError(
                "the last exchange did not come to its end: a step that failed cannot be followed by another"
            )
        return step

    def _hand_in(self, step: _Step, layer: int, parts: Sequence[Array]) -> None:
        exchanger = self._exchanger
        if len(parts) == 2:
            step.rows[layer] = (parts[0], parts[1])
            exchanger.submit_absent(layer, sparse=True)
            return
        gradient = np.asarray(parts[0])  # a scalar may come as one of NumPy's
        if gradient.shape != self._shapes[layer]:
            raise StateError(
                f"layer {self._names[layer]!r} has shape {self._shapes[layer]}, and a gradient of shape {gradient.shape}"
            )
        if layer in exchanger.pipeline.sparse:
            raise StateError(
                f"layer {self._names[layer]!r} had sparse gradients before and has a dense one now"
            )
        mean = step.means[layer] = self._pool.take(layer)
        exchanger.submit(layer, gradient.ctypes.data or mean.ctypes.data, mean.ctypes.data, gradient)

    def _allocate(self, layer: int) -> int:
        """Room for the mean of a layer that only other ranks had (engine's thread)."""
        assert self._step is not None, "the step that the engine works at"
        mean = self._step.means[layer] = self._pool.take(layer)
        return int(mean.ctypes.data)

    def _collect(self, layers: Sequence[int]) -> list[Array]:
        """Wait for the means of these layers."""
        self._landing.wait(layers)
        assert self._step is not None, "collects come before the step's end"
        return [self._step.means[layer] for layer in layers]

    def _finish(self, site: Site) -> list[Array]:
        """End the step and commit it; the rows of sparse layers, and one number more, for an op must have an output."""
        with self._lock, self._failing():
            exchanger = self._exchanger
            exchanger.pipeline.statistics.exposed_seconds += self._landing.waited_seconds
            result = exchanger.wait()
            step, self._step = self._step, None
            assert step is not None, "a step that ends was open"
            mixed = np.flatnonzero(result.present & result.sparse).tolist()
            if mixed:
                raise StateError(
                    f"layer {self._names[mixed[0]]!r} has a sparse gradient on one rank and a dense one on another"
                )
            means = {layer: self._mean_of_rows(layer, step) for layer in sorted(exchanger.pipeline.sparse)}
            there = result.present.copy()
            there[[layer for layer, rows in means.items() if rows is not None]] = True
            missing = [layer for layer in site.absent if there[layer]]
            if missing:
                raise StateError(
                    f"another rank has a gradient of {self._names[missing[0]]!r}, and this one has none: all ranks must "
                    "have gradients of the same variables"
                )
            exchanger.commit()
            self._steps += 1
            assert self.reporter is not None, "an exchanger comes with a reporter"
            self.reporter.after_step()
            rows = [array for layer in site.sparse for array in means[layer] or ()]
            return [*rows, np.zeros((), dtype=np.int64)]

    def _mean_of_rows(self, layer: int, step: _Step) -> tuple[Array, Array] | None:
        return mean_of_rows(
            self._exchanger,
            self._names[layer],
            self._shapes[layer],
            np.dtype(self._dtypes[layer].as_numpy_dtype),
            step.rows.get(layer),
            self._divisor,
        )

    def _compare_variables(self) -> None:
        """The fingerprint of what the last step has made of the variables, if it is due."""
        if self._steps and comparison_is_due(self._runtime.config, self._steps):
            with tf.init_scope():
                digests = [
                    zlib.crc32(np.ascontiguousarray(v.numpy()).view(np.uint8)) for v in self._variables
                ]
            self._exchanger.fingerprint(np.array(digests, dtype=np.uint32))

    # -- the rest -------------------------------------------------------------------------------------------------

    @property
    def _exchanger(self) -> Exchanger:
        assert self.exchanger is not None, "in a world of one nothing is exchanged"
        return self.exchanger

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """The other ranks wait for what this one cannot bring: tell them."""
        try:
            yield
        except Exception as error:
            if self._exchanger.error is None:
                self._exchanger.abort(f"rank {self._runtime.rank}: {type(error).__name__}: {error}")
            raise

    def _checked(self, layer: int, gradient: Any) -> Any:
        """The gradient in a form that can be exchanged."""
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices) and self._sparse_as_dense:
            rows = self._shapes[layer][0]
            gradient = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, rows)
        elif not isinstance(gradient, tf.IndexedSlices):
            gradient = tf.convert_to_tensor(gradient)
        dtype = gradient.values.dtype if isinstance(gradient, tf.IndexedSlices) else gradient.dtype
        if dtype != self._dtypes[layer]:
            raise StateError(
                f"layer {self._names[layer]!r} is {self._dtypes[layer].name}, and its gradient {dtype.name}"
            )
        return gradient

    def _with_rows(self, means: list[Any], site: Site, rows: Sequence[Any]) -> list[Any]:
        for number, layer in enumerate(site.sparse):
            index, values = rows[2 * number : 2 * number + 2]
            index.set_shape([None])
            values.set_shape([None, *self._shapes[layer][1:]])
            means[layer] = tf.IndexedSlices(values, index, tf.constant(self._shapes[layer], dtype=tf.int64))
        return means

    def _settle(self) -> None:
        """StateError in the midst of a step."""
        if self.exchanger is not None and self.exchanger.error is not None:
            raise self.exchanger.error
        if self._step is not None:
            raise StateError("a step is open: save and load between steps")


def _number(value: Any, default: float) -> float:
    return default if value is None else float(value)


def _tensor(value: Any, default: float) -> Any:
    return tf.constant(default, tf.float32) if value is None else tf.cast(value, tf.float32)

"""``Exchange``: means over ranks of the gradients of a list of variables, in eager mode and inside tf.function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from gradcomp.compress import Compressor, Policy, as_policy
from gradcomp.core.errors import StateError
from gradcomp.exchange.exchanger import Exchanger
from gradcomp.job import joining, runtime
from gradcomp.job.momentum import Group
from gradcomp.job.process_sets import members
from gradcomp.job.settings import Arguments
from gradcomp.job.start import (
    Proposal,
    propose,
    say_what_is_bypassed,
    set_compression,
    start,
    validate_together,
)
from gradcomp.tf import bridge
from gradcomp.tf.bridge import plain, refuse_graph, the_turn
from gradcomp.tf.layers import place_of, specs
from gradcomp.tf.steps import DeviceMemory, Gradients, HostMemory, Memory, Site, Steps, groups_of


class Exchange:
    """The exchange of the gradients of a fixed list of variables, step after step.

    Construction is collective over the ranks of ``process_set``; :func:`gradcomp.tf.DistributedGradientTape` documents
    the arguments and the errors. ``scalars`` returns the optimizer's settings without its learning rate, which ranks
    compare. ``names`` are the layers' names, for variables whose names differ from those in a saved state. ``momentum``
    returns the optimizer's, if there is an optimizer. If all variables are on one GPU, gradients are exchanged there,
    else on the host, see :func:`gradcomp.tf.layers.place_of`.

    Every exchange commits when its means are returned, because they are applied at once; one with a value that is not
    finite does not. In some steps the ranks compare the variables at the beginning of the next exchange.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        arguments: Arguments,
        *,
        names: Sequence[str] | None = None,
        scalars: Callable[[], Mapping[str, float]] = dict,
        momentum: Callable[[], Group] | None = None,
    ) -> None:
        state = runtime.current()
        #: The ranks of the job that exchange.
        self.ranks = members(arguments.process_set)
        if len(self.ranks) > 1:
            refuse_graph("the exchange of gradients")
        self._variables = list(variables)
        self._sparse_as_dense = arguments.sparse_as_dense
        self._shapes = [tuple(variable.shape) for variable in self._variables]

        def validate() -> tuple[Proposal, Memory]:
            proposal = propose(arguments.check(), specs(self._variables, names), 0, arguments.controller)
            dtypes = [tf.as_dtype(layer.dtype) for layer in proposal.layers]
            place = place_of(self._variables) if len(self.ranks) > 1 else None
            if place is None:
                return proposal, HostMemory(self._shapes, dtypes)
            return proposal, DeviceMemory(place, self._shapes, dtypes)

        (proposal, self._memory), transport = validate_together(state, self.ranks, validate)
        self._layers = proposal.layers
        self._names = [layer.name for layer in proposal.layers]
        self._dtypes = [tf.as_dtype(layer.dtype) for layer in proposal.layers]
        self._steps = Steps(
            self._variables,
            self._names,
            self._dtypes,
            arguments.gradient_predivide_factor,
            self._memory,
            scalars,
            momentum,
        )
        if transport is None:
            say_what_is_bypassed(proposal.policy)
        else:
            the_turn()  # a variable that is first made during a trace would cost a second trace
        self._driver = start(
            state,
            self.ranks,
            transport,
            proposal,
            self._steps,
            self._shapes,
            arguments,
            device=self._memory.device,
        )
        self._steps.driver = self._driver
        #: The exchanger, with the pipeline and the compression state; None in a world of one.
        self.exchanger: Exchanger | None = self._driver.exchanger if self._driver.attached else None
        #: Gives the compression state to :func:`gradcomp.tf.save` and takes it from ``load``.
        self.checkpoint_manager = self._driver.checkpoint_manager
        # A world of one has no groups.
        self._group_elements = self.exchanger.pipeline.config.slice_elements if self.exchanger else 0
        joining.register(self._steps)

    def set_compression(self, compression: Policy | Compressor | str) -> None:
        """Change the compression, see :meth:`gradcomp.tf.DistributedOptimizer.set_compression`."""
        set_compression(self.checkpoint_manager, self.exchanger, self._layers, as_policy(compression))

    @plain
    def exchange(self, gradients: Sequence[Any], scale: Any = None, learning_rate: Any = None) -> list[Any]:
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
            return list(gradients)
        refuse_graph("the exchange of gradients")
        self._steps.momenta()
        self._driver.check()
        with self._driver.telling():
            given: Gradients = [self._checked(layer, gradient) for layer, gradient in enumerate(gradients)]
        if tf.executing_eagerly():
            return self._now(given, scale, learning_rate)
        return self._traced(given, scale, learning_rate)

    def _now(self, gradients: Gradients, scale: Any, learning_rate: Any) -> list[Any]:
        # The last variables' gradients come first in a backward pass, and a graph has them in this order too.
        site = Site(gradients, [[i for i in reversed(range(len(gradients))) if gradients[i] is not None]])
        rows, dense = site.inputs(0)
        numbers = (
            1.0 if scale is None else float(scale),
            0.0 if learning_rate is None else float(learning_rate),
        )
        self._steps.submit(site, 0, *numbers, *rows, *dense)
        means: list[Any] = [None] * len(gradients)
        for layer, value in zip(site.dense(0), self._steps.collect(site.dense(0)), strict=True):
            means[layer] = self._memory.tensor(value)
        return self._with_rows(means, site, [tf.constant(array) for array in self._steps.finish(site)])

    def _traced(self, gradients: Gradients, scale: Any, learning_rate: Any) -> list[Any]:
        """Add a submit op for each group, then their collect ops, then the op that ends the step.

        A collect op blocks one of TensorFlow's threads. There may be one only, so every submit op comes
        before the first.
        """
        site = Site(gradients, groups_of(gradients, self._shapes, self._group_elements))
        numbers = range(len(site.groups))
        turn = the_turn()
        head = [turn.read_value(), _tensor(scale, 1.0), _tensor(learning_rate, 0.0)]
        means: list[Any] = [None] * len(gradients)
        submits = []
        for number in numbers:
            rows, dense = site.inputs(number)
            submit = partial(self._submit, site, number)
            submits += self._memory.op(submit, [*head, *rows], dense, [tf.int64])
        with tf.control_dependencies(submits):
            for layers in filter(None, map(site.dense, numbers)):
                dtypes = [self._dtypes[layer] for layer in layers]
                outputs = self._memory.op(partial(self._steps.collect, layers), [], [], dtypes)
                for layer, mean in zip(layers, outputs, strict=True):
                    mean.set_shape(self._shapes[layer])
                    means[layer] = mean
        arrived = [*submits, *(mean for mean in means if mean is not None)]
        with tf.control_dependencies(arrived), tf.device("CPU:0"):
            dtypes = [dtype for layer in site.sparse for dtype in (tf.int64, self._dtypes[layer])]
            rows = bridge.op(partial(self._steps.finish, site), [], [*dtypes, tf.int64])
        with tf.control_dependencies(rows):
            turn.assign_add(1)
        return self._with_rows(means, site, rows)

    def _submit(self, site: Site, number: int, _: Any, scale: Any, learning_rate: Any, *values: Any) -> Any:
        self._steps.submit(site, number, float(scale), float(learning_rate), *values)
        return np.zeros((), dtype=np.int64)

    def _checked(self, layer: int, gradient: Any) -> Any:
        """Return the gradient in a form that can be exchanged; StateError for another dtype."""
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices) and self._sparse_as_dense:
            rows = self._shapes[layer][0]
            gradient = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, rows)
        elif not isinstance(gradient, tf.IndexedSlices):
            gradient = tf.convert_to_tensor(gradient)
        if gradient.dtype != self._dtypes[layer]:
            raise StateError(
                f"layer {self._names[layer]!r} is {self._dtypes[layer].name}, and its gradient {gradient.dtype.name}"
            )
        return gradient

    def _with_rows(self, means: list[Any], site: Site, rows: Sequence[Any]) -> list[Any]:
        for number, layer in enumerate(site.sparse):
            index, values = rows[2 * number : 2 * number + 2]
            index.set_shape([None])
            values.set_shape([None, *self._shapes[layer][1:]])
            means[layer] = tf.IndexedSlices(values, index, tf.constant(self._shapes[layer], dtype=tf.int64))
        return means


def _tensor(value: Any, default: float) -> Any:
    return tf.constant(default, tf.float32) if value is None else tf.cast(value, tf.float32)

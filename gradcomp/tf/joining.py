"""``join``: ranks that are out of data stand in for the others' steps, and all ranks end with the same variables."""

from __future__ import annotations

from types import TracebackType
from typing import Any, TypeVar, overload

import keras
import numpy as np
import tensorflow as tf

from gradcomp.core.errors import ConfigError, StateError
from gradcomp.job import joining, runtime
from gradcomp.job.joining import Context, Divide
from gradcomp.job.process_sets import ProcessSet
from gradcomp.tf import keras_model
from gradcomp.tf.bridge import plain, run
from gradcomp.tf.local_steps import LocalSteps
from gradcomp.tf.objects import broadcast_object, broadcast_variables

Self = TypeVar("Self", bound="JoinContext")


@overload
def join() -> Any: ...


@overload
def join(model: Any, *others: Any, divide: Divide = "all") -> JoinContext: ...


@plain
def join(model: Any = None, *others: Any, divide: Divide = "all") -> Any:
    """Let ranks have unequal numbers of batches: ``with join(model, optimizer):`` around the loop, in eager mode.

    A rank that leaves the block takes part in the steps that others still take, without a gradient: it sends its
    residual, and does not step. In allreduces it contributes zeros. Once all ranks have left, all have the variables of
    a rank that trained last. Residuals stay each rank's own. An error in the block is raised at once, without waiting.

        g_mean = (1/N) sum over ranks of g_i, where g_i = 0 on ranks that have left; N: all ranks, or those in the block

    In ``model.fit`` the callback :class:`gradcomp.tf.callbacks.Join` does this in every epoch.

    ``join()`` is Horovod's: a rank that is out of data calls it, and it returns, on all ranks, the rank that joined
    last, from which the program broadcasts: an integer, or inside a tf.function an int32 scalar. That rank took part in
    most steps; of several such ranks it is the one that joined after most collectives, and of several the highest.

    Args:
        model: a built model, whose weights and optimizers are sent, or an optimizer or a variable.
        others: further models, optimizers and variables, and a :class:`LocalSteps` of the model.
        divide: ``"all"`` divides by the number of all ranks, so that a rank's samples weigh the same in every step.
            ``"active"`` divides by the number of ranks that still train.

    Collective, at the beginning and at the end: over the ranks of the optimizers, else over all. Wire: one comparison
    at the beginning; the messages of the other ranks' exchanges; with ``divide="active"`` one number a step; at the end
    all these variables. Unused, it costs nothing.
    Raises ConfigError on every rank for arguments that cannot work, such as an optimizer that is not built, residuals
    that follow the learning rate, and ``divide="active"`` with ``op=Sum``, and on the rank that calls it for a
    collective other than allreduce after another rank has left; PlanMismatchError if the arguments differ, StateError
    before ``init``, TransportError if a rank fails.
    """
    if model is not None:
        return JoinContext([model, *others], divide)
    if tf.executing_eagerly() or runtime.size() == 1:
        return joining.join()

    return run("join", lambda: [np.asarray(joining.join(), np.int32)], [], [tf.int32])[0]


class JoinContext:
    """Implements what :func:`join` returns for a model, an optimizer or a variable: a context manager."""

    def __init__(self, given: list[Any], divide: Divide) -> None:
        for each in given:
            if not isinstance(each, keras.Model | keras.optimizers.Optimizer | LocalSteps) and not hasattr(
                each, "assign"
            ):
                raise ConfigError(
                    f"join takes models, optimizers, LocalSteps and variables, got {type(each).__name__}"
                )
        self._given = given
        self._local = [each for each in given if isinstance(each, LocalSteps)]
        self._divide = divide
        self._context: Context | None = None
        #: The rank whose variables all ranks have since the end of the context; -1 before.
        self.last = -1

    def __enter__(self: Self) -> Self:
        """Compare the arguments over ranks."""
        if self._context is not None:
            raise StateError("this join context has begun and not ended")
        if not tf.executing_eagerly():
            raise ConfigError("with join(...) is for loops in eager mode, not inside a tf.function")
        problem = None
        for one in self._given:
            if isinstance(one, keras.Model) and not keras_model.build_optimizers(one):
                problem = "the model is not built, and a rank without batches would never build it"
            elif isinstance(one, keras.optimizers.Optimizer) and not one.built:
                problem = "the optimizer is not built: call optimizer.build(model.trainable_variables) first"
            elif isinstance(one, LocalSteps) and not one.fragments:
                problem = "LocalSteps has not begun: give it to fit as a callback, too"
        cores = self._cores()
        of_cores = {core.ranks for core in cores}
        if len(of_cores) > 1:
            problem = "the optimizers exchange with different ranks: join one after the other"
        everyone = runtime.current().everyone
        context = Context(of_cores.pop() if len(of_cores) == 1 else everyone, self._divide)
        given = [core.exchanger for core in cores if core.exchanger is not None]
        # Without a distributed optimizer it is tapes that exchange, and nothing tells which.
        context.begin([type(one).__name__ for one in self._given], problem, given if cores else None)
        self._context = context
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stand in for this rank until all have left, then take over the variables of a rank that trained last."""
        assert self._context is not None, "the context has begun"
        context, self._context = self._context, None
        try:
            if error is None:
                for one in self._local:
                    one.settle()
                self.last = context.join()
                if len(context.ranks) > 1:
                    among = ProcessSet(context.ranks)
                    broadcast_variables(self._variables(), self.last, process_set=among)
                    for one in self._local:
                        one.progress = broadcast_object(one.progress, self.last, process_set=among)
        finally:
            context.end()

    def _cores(self) -> list[Any]:
        """Return what wrapping has added to the distributed optimizers that are given, or in models that are."""
        found = []
        for one in self._given:
            if isinstance(one, keras.Model):
                optimizers = list(keras_model.optimizers_of(one).values())
            elif isinstance(one, LocalSteps):
                optimizers = [fragment.optimizer for fragment in one.fragments]
            else:
                optimizers = [one]
            found += [core for each in optimizers if (core := keras_model.core_of(each)) is not None]
        return found

    def _variables(self) -> list[Any]:
        found: dict[int, Any] = {}
        for one in self._given:
            if isinstance(one, keras.Model):
                variables = keras_model.variables_of(one)
            elif isinstance(one, LocalSteps):
                variables = one.variables
            elif isinstance(one, keras.optimizers.Optimizer):
                inner = getattr(one, "inner_optimizer", one)
                variables = [*inner._trainable_variables, *one.variables]
            else:
                variables = [one]
            found.update((id(variable), variable) for variable in variables)
        return list(found.values())

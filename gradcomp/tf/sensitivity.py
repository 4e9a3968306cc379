"""``Sensitivity`` measures the training loss with some variables' steps changed, without a trace in training."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from gradcomp.core.errors import ConfigError
from gradcomp.core.vectors import Floats
from gradcomp.job import runtime
from gradcomp.tf.bridge import FLOATS, name_of, plain
from gradcomp.tf.local import key_of


class Sensitivity:
    """The training loss on a batch that is held back, for ``LGreCo(metric="loss")``.

        x, y = next(batches)
        cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64")
        sensitivity = gc.Sensitivity(model, lambda model: cross_entropy(y, model(x, training=True)))
        optimizer = gc.DistributedOptimizer(optimizer, ..., controller=..., sensitivity=sensitivity)

    Losses are computed between two steps, on the training thread. ``fit``, ``train_on_batch`` and an eager ``apply`` do
    it by themselves; after a step in a tf.function of your own, and with a tape, call :meth:`measure`.

    The loss is traced once, with values in place of the model's variables, one of them perturbed, and no variable is
    assigned. Values and layers are float64, because float32 rounds many changes away. All passes draw the same numbers
    from ``keras.random``; ops of ``tf.random`` draw new ones. Functions that the loss calls are traced into it, even
    if they are compiled with ``jit_compile=True``. While it is traced, no other thread may call the model.

    Args:
        model: the ``keras.Model`` whose variables the optimizer has, built.
        loss: called with the model, and returns the mean loss of the batch, a tensor of one number. It is called once,
            in a graph. Each rank may hold another batch. An object of ``keras.losses`` needs ``dtype="float64"``, else
            it casts.
        optimizer: the optimizer that applies the means of a tape; ``DistributedOptimizer`` is one itself.
        double: False computes in the layers' own types, for layers that cannot compute in float64, and where that takes
            too long. Changes below about 1e-7 of the loss are then noise.

    Memory: 8 bytes an element of the model while losses are computed; with ``double=False`` 4 of the largest layer.
    Raises ConfigError for anything else.
    """

    def __init__(
        self, model: Any, loss: Callable[[Any], Any], *, optimizer: Any = None, double: bool = True
    ) -> None:
        if not isinstance(model, keras.layers.Layer):
            raise ConfigError(f"sensitivity: expected a keras.Model, got {type(model).__name__}")
        if not callable(loss):
            raise ConfigError(f"sensitivity: expected a function of the model, got {loss!r:.80}")
        if optimizer is not None and not isinstance(optimizer, keras.optimizers.Optimizer):
            raise ConfigError(
                f"sensitivity: expected a keras.optimizers.Optimizer, got {type(optimizer).__name__}"
            )
        self._model, self._loss, self._double = model, loss, double
        #: The optimizer that applies a tape's means.
        self.optimizer = optimizer
        self._variables: list[Any] = []
        self._places: dict[int, int] = {}
        self._function: Any = None
        self._exchanges: weakref.WeakSet[Any] = weakref.WeakSet()

    @plain
    def measure(self) -> None:
        """Compute the next losses that the controller wants, if it wants any; once after each step.

        Local. Raises ConfigError inside a tf.function, and for a loss that is not one number.
        """
        if not tf.executing_eagerly():
            raise ConfigError("sensitivity: measure() is called between steps, outside of a tf.function")
        for exchange in list(self._exchanges):
            exchange.measure_losses()

    def serve(self, exchange: Any) -> None:
        """Let :meth:`measure` measure for this exchange, as long as that exists."""
        self._exchanges.add(exchange)

    def check(self, variables: Sequence[Any]) -> None:
        """Raise ConfigError unless the model has these variables."""
        held = list(self._model.variables)
        places = {key_of(variable): place for place, variable in enumerate(held)}
        for variable in variables:
            if key_of(variable) not in places:
                raise ConfigError(
                    f"sensitivity: the model has no variable {name_of(variable)!r} of the optimizer"
                )
        if places != self._places:
            self._variables, self._places, self._function = held, places, None

    def changes(
        self, variables: Sequence[Any], optimizer: Any, summands: int, cells: Sequence[tuple[int, Floats]]
    ) -> list[float]:
        """Return by how much the loss changes for each layer and error: see :data:`gradcomp.control.base.Probe`.

        ``summands`` is the number of ranks if their gradients are summed, 1 if they are averaged.
        """
        values = [self._value(variable) for variable in self._variables]
        before = self._loss_with(values)
        found = []
        for layer, error in cells:
            variable = variables[layer]
            place, missing = self._places[key_of(variable)], tf.reshape(error, variable.shape)
            moved = values.copy()
            moved[place] = _moved(values[place], missing, summands, optimizer, variable)
            found.append(self._loss_with(moved) - before)
        return found

    def _value(self, variable: Any) -> Any:
        value = tf.convert_to_tensor(variable)
        return tf.cast(value, tf.float64) if self._double and value.dtype.is_floating else value

    def _loss_with(self, values: list[Any]) -> float:
        if self._function is None:
            self._function = self._trace([tf.TensorSpec.from_tensor(value) for value in values])
        found = self._function(values)
        _check_number(found)
        return float(tf.cast(found, tf.float64).numpy().item())

    def _trace(self, specs: list[Any]) -> Any:
        def loss_with(values: list[Any]) -> Any:
            with _Values(self._variables, values):
                loss = self._loss(self._model)
            _check_number(loss)
            if self._double and loss.dtype != tf.float64:
                raise ConfigError(
                    f"sensitivity: the loss is {loss.dtype.name}, so something in it casts to that: give objects of "
                    'keras.losses dtype="float64", or give Sensitivity(..., double=False)'
                )
            return loss

        with _tracing(self._model, self._double):
            traced = tf.function(loss_with, autograph=False).get_concrete_function(specs)
        if self._double and (casts := _casts(traced)):
            runtime.logger.warning(
                "sensitivity: %s narrows float64 on the way to the loss: changes below 1e-7 of the loss are noise",
                casts[0],
            )
        return traced


class _Values(keras.StatelessScope):
    """Gives variables these values while it is entered; others keep theirs, and none is assigned."""

    def __init__(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        super().__init__(collect_losses=True)
        self.state_mapping.update(zip(map(id, variables), values, strict=True))

    def get_current_value(self, variable: Any) -> Any:
        found = super().get_current_value(variable)
        return variable._value if found is None else found

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Keep the new value of a variable, in the type of the old one, for the rest of the pass."""
        variable, value = update
        held = self.state_mapping.get(id(variable))
        super().add_update((variable, value if held is None else tf.cast(value, held.dtype)))


@contextmanager
def _tracing(model: Any, double: bool) -> Iterator[None]:
    """Let a function of the model be traced with all that it calls, and then put everything back."""
    layers: list[Any] = model._flatten_layers()
    layers += [layer._functional for layer in layers if getattr(layer, "_functional", None) is not None]
    losses = [(layer, list(layer._losses), set(layer._loss_ids)) for layer in layers]
    wide = [layer for layer in layers if double and keras.backend.is_float_dtype(layer.compute_dtype)]
    # Models inside of models cast their inputs to the types that these had when they were made.
    inputs = [tensor for layer in wide for tensor in getattr(layer, "_inputs", ())]
    inputs += [layer for layer in wide if isinstance(layer, keras.layers.InputLayer)]
    inputs = [each for each in inputs if keras.backend.is_float_dtype(each.dtype)]
    policies, dtypes = [layer._dtype_policy for layer in wide], [each._dtype for each in inputs]
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    inline = tf.config.functions_run_eagerly()
    try:
        for layer in wide:
            layer._dtype_policy = keras.DTypePolicy("float64")
        for each in inputs:
            each._dtype = "float64"
        # A function that was traced before has captured the variables, so their values would have no effect in it.
        tf.config.run_functions_eagerly(True)
        yield
    finally:
        tf.config.run_functions_eagerly(inline)
        for each, dtype in zip(inputs, dtypes, strict=True):
            each._dtype = dtype
        for layer, policy in zip(wide, policies, strict=True):
            layer._dtype_policy = policy
        for layer, own, ids in losses:
            layer._losses[:] = own
            layer._loss_ids.clear()
            layer._loss_ids.update(ids)
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


def _casts(function: Any) -> list[str]:
    """Return the names of the ops on the way to the loss that cast float64 to a narrower type."""
    found, seen, ahead = [], set(), [output.op for output in function.graph.outputs]
    while ahead:
        op = ahead.pop()
        if op.name in seen:
            continue
        seen.add(op.name)
        if op.type == "Cast" and op.inputs[0].dtype == tf.float64 and op.outputs[0].dtype in FLOATS[:-1]:
            found.append(op.name)
        ahead += [tensor.op for tensor in op.inputs]
    return found


def _check_number(loss: Any) -> None:
    one = tf.is_tensor(loss) and loss.shape.num_elements() in (None, 1)
    if not one:
        raise ConfigError(
            f"sensitivity: the loss must be a tensor of one number, got {type(loss).__name__}"
            + (f" of shape {loss.shape}" if tf.is_tensor(loss) else "")
        )


def _moved(kept: Any, gradient: Any, factor: int, optimizer: Any, variable: Any) -> Any:
    """Return where a variable would be without a step for a multiple of this gradient, momentum included."""
    momentum = float(getattr(optimizer, "momentum", 0.0) or 0.0)
    step = factor * float(tf.convert_to_tensor(optimizer.learning_rate)) / (1 - momentum)
    missing = tf.cast(gradient, tf.float64)
    squares = getattr(optimizer, "_velocities", None) or getattr(optimizer, "_accumulators", None)
    if squares:
        square = tf.cast(tf.convert_to_tensor(squares[optimizer._get_variable_index(variable)]), tf.float64)
        epsilon, decay = getattr(optimizer, "epsilon", 0.0) or 0.0, getattr(optimizer, "beta_2", None)
        if decay is None:  # RMSprop and Adagrad
            missing /= tf.sqrt(square + epsilon)
        else:
            taken = int(optimizer.iterations)
            missing *= np.sqrt(1 - decay**taken if taken else 1.0) / (tf.sqrt(square) + epsilon)
    return tf.cast(tf.cast(kept, tf.float64) + step * missing, kept.dtype)


def check_sensitivity(given: Any) -> None:
    """Raise ConfigError unless this is None or a Sensitivity."""
    if given is not None and not isinstance(given, Sensitivity):
        raise ConfigError(
            f"sensitivity must be a gradcomp.tf.Sensitivity(model, loss), got {type(given).__name__}"
        )

"""A rank that trains a Keras model, compiled, with TensorFlow over MPI."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from faults.draw import STEPS
from faults.rank import Rank, full_directory

import gradcomp.tf as gc


def main() -> None:
    """Train."""
    rank = Rank()
    with rank.reporting(), gc.typed_errors():
        gc.init(**rank.settings)
        if rank.fails("ends at once"):
            return
        rank.tamper()
        _train(rank)


def _train(rank: Rank) -> None:
    keras.utils.set_random_seed(1)
    model = _model(rank)
    optimizer = gc.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), **rank.compression(gc))
    model.compile(optimizer=optimizer, loss="mse")
    steps = rank.trial.step + 1 if rank.fails("uneven end", "uneven end, metric") else STEPS
    for rank.step in range(steps):
        _step(rank, model, optimizer)
    if rank.trial.fault == "uneven end, metric":
        gc.allreduce(np.ones(1, np.float32))
    if rank.trial.seed % 2:
        gc.shutdown()  # or it runs at exit


def _step(rank: Rank, model: Any, optimizer: Any) -> None:
    data = np.random.default_rng(1000 * rank.step + rank.number)
    x, y = data.standard_normal((8, 8)).astype(np.float32), data.standard_normal((8, 4)).astype(np.float32)
    if rank.does("NaN"):
        x[0, 0] = np.nan
    if rank.does("skip before backward"):
        return
    rank.at("forward")
    if rank.has_begun("other rate"):
        optimizer.learning_rate = 0.01
    for _ in range(2 if rank.does("double backward") else 1):
        model.train_on_batch(x, y)
        rank.applied([np.asarray(v) for v in model.trainable_variables])
    rank.at("step")
    if rank.trial.fault == "disk full" and rank.step == rank.trial.step:
        gc.save(full_directory(), optimizer)


def _model(rank: Rank) -> Any:
    @tf.custom_gradient
    def fault(x: Any) -> Any:
        def backward(gradient: Any) -> Any:
            def moment(values: Any) -> Any:
                rank.at("backward")
                return values

            same = tf.numpy_function(moment, [gradient], tf.float32)
            same.set_shape(gradient.shape)
            return same

        return tf.identity(x), backward

    class Fault(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return fault(x)

        def compute_output_shape(self, shape: Any) -> Any:
            return shape

    hidden = [keras.layers.Dense(12 if rank.fails("other model") else 16, activation="tanh", name="first")]
    hidden.append(keras.layers.Dense(16, activation="tanh", name="second"))
    if rank.fails("other order of layers"):
        hidden.reverse()
    return keras.Sequential([keras.layers.Input((8,)), *hidden, Fault(), keras.layers.Dense(4, name="last")])

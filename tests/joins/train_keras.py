"""Trains as a trial says, on one rank, under TensorFlow: by ``fit`` with the callback, or by a tape."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from configurations import ROWS
from joins.draw import Trial
from keras_checks import new_names

import gradcomp.tf as gc


def run(trial: Trial) -> None:
    """Train, and assert that all ranks have the same after every epoch. Collective."""
    new_names()
    keras.utils.set_random_seed(trial.seed)
    model = keras.Sequential(
        [
            keras.layers.Input((9,)),
            keras.layers.Dense(17),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3),
        ]
    )
    rate = keras.optimizers.schedules.CosineDecay(0.01, 60) if trial.schedules else 0.01
    kind = {"SGD": keras.optimizers.SGD, "AdamW": keras.optimizers.AdamW, "Adam": keras.optimizers.Adam}
    optimizer = kind[trial.optimizer](rate, global_clipnorm=0.5 if trial.clips else None)
    how = {
        "compression": gc.Policy(
            ROWS[trial.row].compressor, filter=gc.Filter(min_elements=0, min_dimensions=0, exclude_kinds=())
        ),
        "reduction": trial.reduction,
        "controller": trial.controller or None,
    }
    if trial.frontend == "fit":
        optimizer = gc.DistributedOptimizer(optimizer, backward_passes_per_step=trial.passes, **how)
        model.compile(optimizer=optimizer, loss="mse")
    else:
        optimizer.build(model.trainable_variables)
    step = _step_of(trial, model, optimizer, how)
    step(0, 2, [])  # a tape begins to exchange in its first step, in which all ranks take part
    for epoch, batches in enumerate(trial.batches):
        count = batches[gc.rank()]
        if trial.frontend == "fit":
            joining = [gc.callbacks.Join(trial.divide), gc.callbacks.MetricAverage()]
            step(100 * (epoch + 1), max(count, 1), joining)
        else:
            with gc.join(model, optimizer, divide=trial.divide):
                step(100 * (epoch + 1), count, [])
        assert_all_equal(trial, model, optimizer)
    step(1000, 2, [])
    assert_all_equal(trial, model, optimizer, trained=True)


def _step_of(trial: Trial, model: Any, optimizer: Any, how: dict[str, Any]) -> Any:
    def fit(first: int, count: int, callbacks: list[Any]) -> None:
        count *= trial.passes
        parts = [data(first + number) for number in range(count)]
        x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
        model.fit(x, y, batch_size=4, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)

    @tf.function
    def by_tape(x: Any, y: Any) -> Any:
        with gc.DistributedGradientTape(tf.GradientTape(), **how) as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return gc.allreduce(loss, name="loss")

    def steps(first: int, count: int, _: list[Any]) -> None:
        for number in range(count):
            by_tape(*map(tf.constant, data(first + number)))

    return fit if trial.frontend == "fit" else steps


def data(number: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(10 * number + gc.rank())
    x, y = generator.standard_normal((4, 9)), generator.standard_normal((4, 3))
    return x.astype(np.float32), y.astype(np.float32)


def assert_all_equal(trial: Trial, model: Any, optimizer: Any, *, trained: bool = False) -> None:
    """Collective: weights and optimizer variables, the rate too, are equal on all ranks, bit for bit."""
    weights = model.trainable_variables if trained else model.variables  # statistics are each rank's own
    mine = b"".join(variable.numpy().tobytes() for variable in [*weights, *optimizer.variables])
    for rank, theirs in enumerate(gc.allgather_object(mine)):
        assert theirs == mine, f"{trial}: ranks {rank} and {gc.rank()} differ"
    assert all(np.isfinite(variable.numpy()).all() for variable in model.trainable_variables), trial

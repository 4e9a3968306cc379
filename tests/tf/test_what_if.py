"""What-if runs under TensorFlow: Keras optimizers and tapes exchange by fake compression."""

# ruff: noqa: E402

from __future__ import annotations

import pytest
from batch import on_ranks
from logs import logged

tf = pytest.importorskip("tensorflow")

import keras
from keras_checks import ENV, assert_alike, compiled, data, fit, model
from small_torch import shared_folder

import gradcomp.tf as gc
from gradcomp.control.what_if import FIRST_STEPS


def families(pipeline) -> set[str]:
    return {assignment.compressor.partition(":")[0] for assignment in pipeline.plan.assignments}


@on_ranks(2, env=ENV, what_if="1,4")
def test_a_keras_optimizer_keeps_its_momentum_runs_the_ratios_and_saves_nothing():
    x, y, *_ = data()
    ours = model()
    optimizer = gc.DistributedOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9),
        compression=gc.MomentumCorrection(gc.TopK(0.1), factor="optimizer"),
    )
    with logged() as lines:
        fit(compiled(optimizer, ours), x, y)
        optimizer.set_compression("none")
        fit(compiled(optimizer, ours), x, y)
    assert any("does not change its compression" in line for line in lines) == (gc.rank() == 0)
    assert any("training is worthless" in line for line in lines) == (gc.rank() == 0)
    assert_alike(ours.weights, optimizer.variables)
    exchanger = optimizer._gradcomp.exchanger
    assert families(exchanger.pipeline) == {"fake"}
    assert any(variable.numpy().any() for variable in optimizer.variables[2:])  # Keras's own momentum
    assert [point.label for point in exchanger.pipeline.controller.points] == ["1", "4", "inf"]
    with shared_folder() as directory, pytest.raises(gc.StateError, match="worthless"):
        gc.save(directory, optimizer)


@on_ranks(2, env=ENV, what_if="1,4")
def test_a_tape_is_faked_too():
    ours = model()
    x, *_ = data()
    sent = []
    for _ in range(FIRST_STEPS + 2 * 10 + 1):
        with tf.GradientTape() as plain:
            loss = tf.reduce_mean(tf.square(ours(x) - 1.0))
        tape = gc.DistributedGradientTape(plain, compression="quantize:bits=4")
        means = tape.gradient(loss, ours.trainable_variables)
        sent.append(sum(int(tf.math.count_nonzero(mean)) for mean in means))
    size = sum(int(tf.size(variable)) for variable in ours.trainable_variables)
    assert sent[FIRST_STEPS:] == [size] * 10 + [-(-size // 4)] * 10 + [1]

"""``join`` under TensorFlow: ranks with unequal numbers of batches; the others' steps and allreduces go on."""

# ruff: noqa: E402

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batch import on_ranks

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow: pip install gradcomp[tf-cpu]")

import keras
from joins.draw import draw
from joins.train_keras import run as train_by
from keras_checks import ONE_THREAD, new_names

import gradcomp.tf as gc
from gradcomp.job import runtime


def model_of(words: bool = False) -> Any:
    """Its layers are called the same on all ranks, whatever models those have made before."""
    keras.utils.set_random_seed(1)
    new_names()
    first = keras.layers.Embedding(11, 6) if words else keras.layers.Dense(6, activation="tanh")
    return keras.Sequential([keras.Input((4,)), first, keras.layers.Flatten(), keras.layers.Dense(3)])


def data(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(100 * rank + step)
    x, y = generator.integers(0, 11, (8, 4)), generator.standard_normal((8, 3))
    return x.astype(np.float32), y.astype(np.float32)


def loss_of(model: Any, x: Any, y: Any) -> Any:
    return tf.reduce_mean(tf.square(model(x, training=True) - y))


def batches(rank: int) -> int:
    return 2 + 2 * rank


def bits(model: Any) -> bytes:
    return b"".join(variable.numpy().tobytes() for variable in model.variables)


def assert_equal_on_all_ranks(model: Any) -> None:
    assert len(set(gc.allgather_object(bits(model)))) == 1


def one_process(words: bool, world: int) -> list[np.ndarray]:
    """What the rank with most batches comes to: a rank that has joined adds zeros, and N stays N."""
    model = model_of(words)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    for step in range(batches(world - 1)):
        with tf.GradientTape() as tape:
            losses = [loss_of(model, *data(r, step)) for r in range(world) if step < batches(r)]
            loss = tf.add_n(losses) / world
        gradients = tape.gradient(loss, model.trainable_variables)
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        optimizer.apply_gradients(zip(dense, model.trainable_variables, strict=True))
    return [variable.numpy() for variable in model.trainable_variables]


def check_training(words: bool, compression: str, mode: Any) -> None:
    """Two epochs by a tape, with an allreduce in every step, and one more after all ranks are equal again."""
    model = model_of(words)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)

    @mode
    def step(x, y):
        with gc.DistributedGradientTape(tf.GradientTape(), compression=compression) as tape:
            loss = loss_of(model, x, y)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return gc.allreduce(loss, name="loss")

    for epoch in range(2):
        for number in range(batches(gc.rank())):
            step(*map(tf.constant, data(gc.rank(), number)))
        mine = bits(model)
        last = gc.join()
        assert last == gc.size() - 1
        assert bits(model) == mine, "a rank that has joined keeps its variables"
        if compression == "none" and epoch == 0 and gc.rank() == last:
            for variable, wanted in zip(
                model.trainable_variables, one_process(words, gc.size()), strict=True
            ):
                np.testing.assert_allclose(variable, wanted, rtol=1e-5, atol=1e-6)
        gc.broadcast_variables(model.variables, root_rank=last)
        gc.broadcast_variables(optimizer.variables, root_rank=last)
    step(*map(tf.constant, data(gc.rank(), 0)))
    assert_equal_on_all_ranks(model)


@on_ranks(2, env=ONE_THREAD)
def test_the_others_train_on_until_all_have_joined():
    check_training(False, "none", tf.function)


@pytest.mark.full
@on_ranks(3, env=ONE_THREAD)
def test_three_ranks_with_sparse_gradients_join_one_after_the_other():
    check_training(True, "none", tf.function)


@pytest.mark.parametrize("compression", ["quantize:bits=4,bucket_size=32", "topk:density=0.2"])
@on_ranks(2, env=ONE_THREAD)
def test_compression_goes_on_too(compression):
    check_training(False, compression, lambda function: function)


@on_ranks(2, env=ONE_THREAD)
def test_keras_fit_on_unequal_numbers_of_batches():
    """The second time with another optimizer: the first one's exchange has ended on no rank."""
    model = model_of()
    count = batches(gc.rank())
    x, y = (np.concatenate(parts) for parts in zip(*(data(gc.rank(), i) for i in range(count)), strict=True))
    for _ in range(2):
        adam = keras.optimizers.Adam(0.01)
        optimizer = gc.DistributedOptimizer(adam, compression="quantize:bits=8,bucket_size=32")
        model.compile(optimizer=optimizer, loss="mse")
        model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0)
        last = gc.join()
        assert last == 1
        gc.broadcast_variables(model.variables + model.optimizer.variables, root_rank=last)
    assert_equal_on_all_ranks(model)
    assert int(model.optimizer.iterations) == batches(1)


@on_ranks(2, env=ONE_THREAD)
def test_a_fit_that_fails_leaves_no_context_behind():
    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise ArithmeticError

    model = model_of()
    model.compile(optimizer=gc.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    model.optimizer.build(model.trainable_variables)
    x, y = data(gc.rank(), 0)
    join = gc.callbacks.Join("active")
    with pytest.raises(ArithmeticError):
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[join, Fail()])
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[join])
    assert runtime.current().contexts == []
    assert_equal_on_all_ranks(model)


@on_ranks(2, env=ONE_THREAD)
def test_join_is_an_op_inside_a_function():
    for number in range(2 * gc.rank()):
        assert gc.allreduce(tf.constant(1.0), op=gc.Sum, name=str(number)) == 1.0
    assert int(tf.function(gc.join)()) == 1
    gc.barrier()


@on_ranks(2, env=ONE_THREAD)
def test_what_cannot_go_on_without_a_rank_is_an_error_that_says_so():
    if gc.rank() == 1:
        for call in (lambda: gc.allgather(tf.ones(1)), lambda: gc.broadcast(tf.ones(1), 0), gc.barrier):
            with pytest.raises(gc.ConfigError, match="rank 0 has joined, and only takes part in allreduce"):
                call()
    gc.join()


# ------------------------------------------------------------------------------------ with join(model), and fit


@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("frontend", ["fit", "tape"])
@on_ranks(2, env=ONE_THREAD)
def test_ranks_that_join_at_random_moments_end_with_equal_variables(frontend, seed):
    """Families, reductions, controllers and optimizers are drawn too; ``make joins`` draws more."""
    train_by(draw(seed, gc.size(), (frontend,)))


@pytest.mark.parametrize("divide", ["all", "active"])
@on_ranks(2, env=ONE_THREAD)
def test_an_epoch_of_fit_ends_with_what_one_process_computes(divide):
    """Rank 1 has two batches more in each of two epochs, and validates with the weights that all have."""
    model = model_of()
    optimizer = gc.DistributedOptimizer(keras.optimizers.AdamW(0.05, global_clipnorm=0.3))
    model.compile(optimizer=optimizer, loss="mse")
    count = batches(gc.rank())
    x, y = (np.concatenate(parts) for parts in zip(*(data(gc.rank(), i) for i in range(count)), strict=True))
    joining = gc.callbacks.Join(divide)
    seen: list[bytes] = []
    before = keras.callbacks.LambdaCallback(on_test_begin=lambda logs: seen.append(bits(model)))
    model.fit(
        x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[joining, before],
        validation_data=data(9, 9),
    )  # fmt: skip
    assert [len(set(of_ranks)) for of_ranks in zip(*gc.allgather_object(seen), strict=True)] == [1, 1]
    expected = model_of()
    plain = keras.optimizers.AdamW(0.05, global_clipnorm=0.3)
    for step in [*range(batches(1))] * 2:
        with tf.GradientTape() as tape:
            losses = [loss_of(expected, *data(r, step)) for r in range(2) if step < batches(r)]
            loss = tf.add_n(losses) / (len(losses) if divide == "active" else 2)
        plain.apply(tape.gradient(loss, expected.trainable_variables), expected.trainable_variables)
    for variable, wanted in zip(model.trainable_variables, expected.trainable_variables, strict=True):
        np.testing.assert_allclose(variable, wanted, rtol=1e-4, atol=1e-3)
    assert_equal_on_all_ranks(model)
    assert int(optimizer.iterations) == 2 * batches(1)


@on_ranks(2, env=ONE_THREAD)
def test_what_cannot_join_is_refused_on_all_ranks_at_the_beginning():
    model = model_of()
    with pytest.raises(gc.PlanMismatchError):
        gc.join(model, divide=["all", "active"][gc.rank()]).__enter__()
    sums = gc.DistributedOptimizer(keras.optimizers.SGD(), op=gc.Sum)
    sums.build(model.trainable_variables)
    for make, text in (
        (lambda: gc.join(3), "takes models, optimizers, LocalSteps and variables"),
        (lambda: gc.join(keras.Sequential([keras.layers.Dense(1)])), "the model is not built"),
        (lambda: gc.join(keras.optimizers.SGD()), "the optimizer is not built"),
        (lambda: gc.join(sums, divide="active"), "is for means"),
        (lambda: gc.join(model, divide="most"), 'divide must be "all" or "active"'),
    ):
        with pytest.raises(gc.ConfigError, match=text):
            make().__enter__()
    with gc.join(model) as joined:
        pass
    assert joined.last == 1

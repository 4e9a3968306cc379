"""``DistributedGradientTape``: a model trains on several ranks as it would on one with all their data."""

# ruff: noqa: E402

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from batch import on_ranks

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow: pip install gradcomp[tf-cpu]")
pytest.importorskip("torch", reason="needs torch: pip install gradcomp[torch]")

import keras
from keras_checks import MODES, ONE_THREAD, world_of_one

from gradcomp import Quantize, TopK
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.job import runtime
from gradcomp.tf import optimizer as tf_optimizer
from gradcomp.tf import tape as tapes
from gradcomp.tf.tape import DistributedGradientTape

ROWS = 8


def model_of(words: bool) -> Any:
    keras.utils.set_random_seed(1)
    if words:
        inner = [keras.layers.Embedding(40, 6), keras.layers.LSTM(10)]
    else:
        inner = [keras.layers.Dense(32, activation="tanh"), keras.layers.LayerNormalization()]
    return keras.Sequential([keras.Input((12,)), *inner, keras.layers.Dense(5)])


def batch(step: int, words: bool) -> tuple[np.ndarray, np.ndarray]:
    """The data of all ranks."""
    generator = np.random.default_rng(step)
    rows = ROWS * runtime.size()
    x = generator.integers(0, 40, (rows, 12)) if words else generator.standard_normal((rows, 12))
    return x.astype(np.float32), generator.integers(0, 5, rows)


def train(model: Any, mode: str, words: bool, wrap: Callable[[Any], Any], own: slice, steps: int = 12) -> int:
    """Returns how often the step was traced."""
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    traces = []

    def step(x, y):
        traces.append(1)
        with wrap(tf.GradientTape()) as tape:
            losses = keras.losses.sparse_categorical_crossentropy(
                y, model(x, training=True), from_logits=True
            )
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    run = MODES[mode](step)
    for number in range(steps):
        x, y = batch(number, words)
        run(tf.constant(x[own]), tf.constant(y[own]))
    return len(traces)


def mine() -> slice:
    return slice(ROWS * runtime.rank(), ROWS * (runtime.rank() + 1))


def check(mode: str, words: bool, **arguments: Any) -> None:
    ours, alone = model_of(words), model_of(words)
    traces = train(ours, mode, words, functools.partial(DistributedGradientTape, **arguments), mine())
    if mode == "graph":
        assert traces == 1
    assert_same_on_all_ranks(ours)
    if runtime.rank() > 0:
        return  # its weights are rank 0's
    train(alone, mode, words, lambda tape: tape, slice(None))
    for weight, other in zip(ours.trainable_variables, alone.trainable_variables, strict=True):
        np.testing.assert_allclose(weight.numpy(), other.numpy(), rtol=1e-4, atol=1e-5)


def assert_same_on_all_ranks(model: Any) -> None:
    (exchange,) = exchanges(model.trainable_variables)
    assert exchange.exchanger is not None
    digest = b"".join(variable.numpy().tobytes() for variable in model.trainable_variables)
    assert set(exchange.exchanger.allgather_bytes(digest)) == {digest}


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2, env=ONE_THREAD)
def test_ranks_train_as_one_would_with_all_data(mode: str) -> None:
    check(mode, words=False)


@pytest.mark.parametrize(
    "as_dense", [pytest.param(False, id="gathered"), pytest.param(True, id="dense", marks=pytest.mark.full)]
)
@on_ranks(2, env=ONE_THREAD)
def test_an_embedding_and_an_lstm(as_dense: bool) -> None:
    check("graph", words=True, sparse_as_dense=as_dense)


@pytest.mark.parametrize("as_dense", [False, True], ids=["gathered", "dense"])
@on_ranks(2, env=ONE_THREAD)
def test_rows_arrive_as_rows_or_dense(as_dense: bool) -> None:
    table = tf.Variable(tf.ones([5, 2]))
    with DistributedGradientTape(tf.GradientTape(), sparse_as_dense=as_dense) as tape:
        loss = tf.reduce_sum(tf.gather(table, [0, 3, 3 + runtime.rank()]))
    mean = tape.gradient(loss, table)
    assert isinstance(mean, tf.IndexedSlices) != as_dense
    np.testing.assert_allclose(tf.convert_to_tensor(mean)[:, 0], [1.0, 0.0, 0.0, 1.5, 0.5])


@on_ranks(2, env=ONE_THREAD)
def test_compressed_training_is_the_same_on_all_ranks_and_learns() -> None:
    model = model_of(words=False)
    x, y = batch(0, words=False)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    before = float(loss(y, model(x)))
    wrap = functools.partial(DistributedGradientTape, compression=TopK(density=0.1))
    assert train(model, "graph", False, wrap, mine(), steps=30) == 1
    assert float(loss(y, model(x))) < before
    assert_same_on_all_ranks(model)

    # A tape outside of the traced function reads what those inside of it exchange.
    metrics = wrap(tf.GradientTape()).compression_metrics()
    assert metrics["gradcomp/steps"] == 30
    (exchange,) = exchanges(model.trainable_variables)
    assert metrics["gradcomp/ratio"] == exchange.exchanger.pipeline.statistics.ratio
    unused = DistributedGradientTape(tf.GradientTape(), compression=Quantize(7))
    assert unused.compression_metrics()["gradcomp/steps"] == 0
    other = tf.Variable([1.0])
    with wrap(tf.GradientTape()) as tape:
        square = other * other
    tape.gradient(square, other)
    assert tape.compression_metrics(other)["gradcomp/steps"] == 1
    assert tape.compression_metrics(model.trainable_variables)["gradcomp/steps"] == 30
    with pytest.raises(StateError, match="tapes with these arguments have 2 exchanges"):
        tape.compression_metrics()


@pytest.mark.parametrize("distributed", ["tape", "optimizer"])
@on_ranks(2, batch="compared", env={"GRADCOMP_FINGERPRINT_EVERY_STEPS": "1"})
def test_decay_waits_until_the_variables_are_compared(distributed: str) -> None:
    """Decay does not use the means, so nothing but our order makes it wait; ranks in which it did not differ."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(64, "relu") for _ in range(12)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    optimizer = keras.optimizers.AdamW(1e-3, weight_decay=0.5)
    if distributed == "optimizer":
        optimizer = tf_optimizer.DistributedOptimizer(optimizer)
    optimizer.build(model.trainable_variables)
    wrap = DistributedGradientTape if distributed == "tape" else lambda tape: tape

    @tf.function
    def step(x):
        with wrap(tf.GradientTape()) as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    drawn = np.random.default_rng(runtime.rank())
    for _ in range(40):
        step(tf.constant(drawn.standard_normal((32, 64)), tf.float32))
    if distributed == "tape":
        assert_same_on_all_ranks(model)


# ------------------------------------------------------------------------- which exchange


def exchanges(variables) -> list[Any]:
    """Those that tapes have made for these variables."""
    return [exchange for _, exchange in tapes._known.get(tuple(map(id, variables)), [])]


def gradients(sources: Any, **arguments: Any) -> Any:
    """Of half the sum of squares, times rank + 1, which are the sources' values times that."""
    factor = float(runtime.rank() + 1)
    with DistributedGradientTape(tf.GradientTape(), **arguments) as tape:
        loss = factor * tf.add_n([tf.reduce_sum(v * v) / 2 for v in tf.nest.flatten(sources)])
    return tape.gradient(loss, sources)


@on_ranks(2, env=ONE_THREAD)
def test_tapes_with_the_same_variables_and_arguments_share_an_exchange() -> None:
    pair = [tf.Variable(tf.ones([50, 40])), tf.Variable(tf.ones([40]))]
    for _ in range(3):
        gradients(pair, compression=Quantize(bits=4))
    (exchange,) = exchanges(pair)
    assert exchange.exchanger.pipeline.step == 3
    gradients(pair, compression=Quantize(bits=3))
    gradients(pair, compression="quantize:bits=4")
    assert len(exchanges(pair)) == 2
    assert exchange.exchanger.pipeline.step == 4
    assert not exchanges(pair[:1])


@on_ranks(2, env=ONE_THREAD)
def test_gradients_have_the_structure_of_the_sources() -> None:
    one, other = tf.Variable(tf.ones([3, 2])), tf.Variable(2 * tf.ones([4]))
    found = gradients({"a": one, "b": [other]})
    np.testing.assert_allclose(found["a"], 1.5 * np.ones((3, 2)))
    np.testing.assert_allclose(found["b"][0], 3.0 * np.ones(4))


@on_ranks(2, env=ONE_THREAD)
def test_the_tape_is_still_a_tape() -> None:
    weight = tf.Variable(tf.ones([3]))
    with DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        loss = tf.reduce_sum(weight * float(runtime.rank()))
    assert isinstance(tape, tf.GradientTape)
    assert [v is weight for v in tape.watched_variables()] == [True]
    for _ in range(2):
        np.testing.assert_allclose(tape.gradient(loss, [weight])[0], 0.5 * np.ones(3))


# ------------------------------------------------------------------------- bad input


@on_ranks(2, env=ONE_THREAD)
def test_bad_arguments() -> None:
    with pytest.raises(ConfigError, match=r"expected a tf\.GradientTape"):
        DistributedGradientTape(3)  # type: ignore[type-var]
    with pytest.raises(StateError, match="already a DistributedGradientTape"):
        DistributedGradientTape(DistributedGradientTape(tf.GradientTape()))
    weight = tf.Variable(tf.ones([3]))
    with pytest.raises(ConfigError, match="more than once"):
        gradients([weight, weight])
    point = tf.ones([3])
    with DistributedGradientTape(tf.GradientTape()) as tape:
        tape.watch(point)
        loss = tf.reduce_sum(point)
    with pytest.raises(ConfigError, match="expected variables"):
        tape.gradient(loss, [point])


@on_ranks(2, env=ONE_THREAD)
def test_xla_cannot_call_out() -> None:
    """Neither to make an exchange nor to use one."""
    new, exchanged = tf.Variable(tf.ones([3])), tf.Variable(tf.ones([3]))
    gradients(exchanged)
    for weight in (new, exchanged):
        with pytest.raises(ConfigError, match="jit_compile=False"):
            tf.function(lambda weight=weight: gradients(weight), jit_compile=True)()


def test_variables_made_in_every_step_are_an_error_before_they_are_too_many(monkeypatch, caplog) -> None:
    monkeypatch.setattr(tapes, "MOST_EXCHANGES", 3)
    with world_of_one(), caplog.at_level("WARNING", "gradcomp"):
        for _ in range(3):
            gradients(tf.Variable(tf.ones([3])))
        assert "exchange of its own (number 2), without their residuals" in caplog.text
        with pytest.raises(StateError, match="make the model and its variables once"):
            gradients(tf.Variable(tf.ones([3])))

"""Keras optimizers on means over ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batch import on_ranks

pytest.importorskip("tensorflow")

ENV = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}

#: By name: the optimizer and its arguments, those of ``compile``. The first three have all that the others have.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "together": (
        "SGD",
        {
            "learning_rate": "schedule",
            "momentum": 0.9,
            "nesterov": True,
            "global_clipnorm": 0.05,
            "use_ema": True,
            "ema_overwrite_frequency": 3,
            "loss_scale_factor": 256.0,
        },
        {},
    ),
    "steps_per_execution": (
        "AdamW",
        {"weight_decay": 0.1, "epsilon": 1e-3},
        {"steps_per_execution": 4},
    ),
    "eager": (
        "SGD",
        {"momentum": 0.9, "gradient_accumulation_steps": 2, "clipnorm": 0.05},
        {"run_eagerly": True},
    ),
    "sgd": ("SGD", {"momentum": 0.9, "nesterov": True}, {}),
    "adam": ("Adam", {"epsilon": 1e-3}, {}),
    "global_clipnorm": ("SGD", {"global_clipnorm": 0.05}, {}),
    "ema": ("SGD", {"use_ema": True, "ema_overwrite_frequency": 3}, {}),
    "accumulation": ("SGD", {"gradient_accumulation_steps": 2, "clipnorm": 0.05}, {}),
    "loss_scale_factor": ("SGD", {"loss_scale_factor": 256.0}, {}),
    "schedule": ("SGD", {"learning_rate": "schedule"}, {}),
}


def _optimizer(kind: str, arguments: dict[str, Any]) -> Any:
    import keras

    arguments = {"learning_rate": 0.1, **arguments}
    if arguments["learning_rate"] == "schedule":
        arguments["learning_rate"] = keras.optimizers.schedules.ExponentialDecay(0.2, 2, 0.5)
    return getattr(keras.optimizers, kind)(**arguments)


@pytest.mark.parametrize(
    "name", [*list(CASES)[:3], *(pytest.param(name, marks=pytest.mark.full) for name in list(CASES)[3:])]
)
@on_ranks(2, env=ENV)
def test_fit_is_that_of_one_process_with_the_whole_batch(name: str) -> None:
    from keras_checks import assert_alike, data, fit, model

    from gradcomp.job import runtime
    from gradcomp.tf.optimizer import DistributedOptimizer

    kind, arguments, compiling = CASES[name]
    x, y, whole_x, whole_y = data()
    ours, alone = model(), model()
    start = [w.copy() for w in ours.get_weights()]
    optimizer = DistributedOptimizer(_optimizer(kind, arguments))
    ours.compile(optimizer=optimizer, loss="mse", **compiling)
    fit(ours, x, y)
    assert_alike(ours.weights, optimizer.variables)
    assert optimizer.statistics().steps == 8 // arguments.get("gradient_accumulation_steps", 1)
    if runtime.rank() > 0:
        return  # its weights are rank 0's
    alone.compile(optimizer=_optimizer(kind, arguments), loss="mse", **compiling)
    fit(alone, whole_x, whole_y, batch=8)
    for mine, other, before in zip(ours.get_weights(), alone.get_weights(), start, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=2e-6)
        assert np.abs(mine - before).max() > 1e-4  # there was something to agree about


@pytest.mark.parametrize(
    "name",
    [
        "accumulated",
        "scaled",
        *(pytest.param(n, marks=pytest.mark.full) for n in ("rows", "dense", "clipped")),
    ],
)
@on_ranks(2, env=ENV)
def test_embeddings(name: str) -> None:
    import keras
    from keras_checks import assert_alike, fit

    from gradcomp.job import runtime
    from gradcomp.tf.optimizer import DistributedOptimizer

    def build() -> Any:
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        return keras.Sequential(
            [
                keras.layers.Input((4,)),
                keras.layers.Embedding(9, 5),
                keras.layers.Flatten(),
                keras.layers.Dense(2),
            ]
        )

    def make() -> Any:
        inner = keras.optimizers.SGD(
            0.05,
            momentum=0.9,
            gradient_accumulation_steps=2 if name == "accumulated" else None,
            global_clipnorm=0.1 if name == "clipped" else None,
        )
        return keras.optimizers.LossScaleOptimizer(inner) if name == "scaled" else inner

    generator = np.random.default_rng(4)
    x, y = generator.integers(0, 9, (4, 2, 3, 4)), generator.standard_normal((4, 2, 3, 2)).astype(np.float32)
    ours = build()
    optimizer = DistributedOptimizer(make(), sparse_as_dense=name == "dense")
    ours.compile(optimizer=optimizer, loss="mse")
    rank = runtime.rank()
    fit(ours, x[:, rank].reshape(-1, 4), y[:, rank].reshape(-1, 2), batch=3)
    assert_alike(ours.weights, optimizer.variables)
    if name == "clipped":
        return  # Keras takes the norm of a row that comes twice for that of two rows, we send it once
    if rank > 0:
        return
    alone = build()
    alone.compile(optimizer=make(), loss="mse")
    fit(alone, x.reshape(-1, 4), y.reshape(-1, 2), batch=6)
    for mine, other in zip(ours.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.full)])
@on_ranks(2, env=ENV)
def test_mixed_precision_with_compression(policy: str) -> None:
    import keras
    from keras_checks import assert_alike, compression, data, fit, model

    from gradcomp.tf.optimizer import Distributed, DistributedOptimizer

    x, y, _, _ = data()
    ours = model(policy=policy)
    optimizer = DistributedOptimizer(keras.optimizers.Adam(0.02), compression=compression())
    ours.compile(optimizer=optimizer, loss="mse")
    losses = fit(ours, x, y, epochs=3).history["loss"]
    assert isinstance(ours.optimizer, Distributed)
    assert_alike(ours.weights, ours.optimizer.variables)
    assert losses[-1] < losses[0]
    assert optimizer.statistics().steps == 24
    assert optimizer.statistics().ratio > 1.5
    scaled = isinstance(ours.optimizer, keras.optimizers.LossScaleOptimizer)
    assert scaled == (policy == "mixed_float16")


@on_ranks(2, env=ENV)
def test_an_overflow_on_one_rank_is_skipped_by_all() -> None:
    import keras
    from keras_checks import assert_alike, data, fit, model

    from gradcomp.job import runtime
    from gradcomp.tf.optimizer import DistributedOptimizer

    x, y, _, _ = data()
    ours = model()
    optimizer = DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), initial_scale=1024.0)
    )
    ours.compile(optimizer=optimizer, loss="mse")
    fit(ours, x, y)
    assert float(optimizer.dynamic_scale) == 1024
    before = ours.get_weights()
    if runtime.rank() == 1:
        x = x.copy()
        x[:4] = np.inf
    fit(ours, x[:4], y[:4])
    assert float(optimizer.dynamic_scale) == 512
    assert all(np.array_equal(a, b) for a, b in zip(before, ours.get_weights(), strict=True))
    assert_alike(ours.weights, optimizer.variables)


@on_ranks(2, env=ENV)
def test_passes_are_summed() -> None:
    import keras
    from keras_checks import assert_alike, data, fit, model

    from gradcomp.core.errors import ConfigError
    from gradcomp.job import runtime
    from gradcomp.tf.optimizer import DistributedOptimizer

    x, y, whole_x, whole_y = data()
    ours, alone = model(), model()
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.05), backward_passes_per_step=2)
    ours.compile(optimizer=optimizer, loss="mse")
    fit(ours, x, y)
    assert_alike(ours.weights)
    if runtime.rank() == 0:
        alone.compile(optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), loss="mse")
        fit(alone, whole_x, whole_y, batch=8)
        for mine, other in zip(ours.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=2e-6)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps=3"):
        DistributedOptimizer(
            keras.optimizers.SGD(0.1, gradient_accumulation_steps=3), backward_passes_per_step=2
        )
    built = keras.optimizers.SGD(0.1)
    built.build(ours.trainable_variables)
    with pytest.raises(ConfigError, match="built without accumulators"):
        DistributedOptimizer(built, backward_passes_per_step=2)


@on_ranks(2, env=ENV)
def test_nothing_is_traced_after_the_second_step() -> None:
    import keras
    from keras_checks import assert_alike, data, model

    from gradcomp.tf.optimizer import DistributedOptimizer

    class Counting(keras.Model):
        traces = 0

        def train_step(self, batch: Any) -> Any:
            Counting.traces += 1
            return super().train_step(batch)

    x, y, _, _ = data()
    inner = model()
    ours = Counting(inner.inputs, inner.outputs)
    ours.compile(optimizer=DistributedOptimizer(keras.optimizers.Adam(0.1)), loss="mse")
    for _ in range(2):
        ours.train_on_batch(x[:4], y[:4])
    counted = Counting.traces
    for _ in range(4):
        ours.train_on_batch(x[:4], y[:4])
    assert Counting.traces == counted <= 2
    assert_alike(ours.weights)


@on_ranks(2, env=ENV)
def test_loops_of_ones_own() -> None:
    import keras
    import tensorflow as tf
    from keras_checks import assert_alike, compression, data, model

    from gradcomp.tf.optimizer import DistributedOptimizer

    x, y, _, _ = data()
    results = []
    for traced in (False, True):
        ours = model()
        optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), compression=compression())

        def step(a: Any, b: Any, ours: Any = ours, optimizer: Any = optimizer) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(ours(a) - b))
            optimizer.apply(tape.gradient(loss, ours.trainable_variables), ours.trainable_variables)

        run = tf.function(step) if traced else step
        for i in range(0, len(x), 4):
            run(tf.constant(x[i : i + 4]), tf.constant(y[i : i + 4]))
        assert_alike(ours.weights, optimizer.variables)
        results.append(ours.get_weights())
    for eager, graph in zip(*results, strict=True):
        np.testing.assert_allclose(eager, graph, rtol=1e-3, atol=1e-4)


@on_ranks(2, env=ENV)
def test_two_optimizers_over_the_same_variables_leave_ranks_alike() -> None:
    """Each exchanges the gradients that it is given, into means of their own."""
    import keras
    import tensorflow as tf
    from keras_checks import assert_alike, compression, data, model

    from gradcomp.tf.optimizer import DistributedOptimizer

    x, y, _, _ = data()
    ours = model()
    whole = DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression())
    stage = DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression())
    for _ in range(4):
        for optimizer, variables in (
            (whole, ours.trainable_variables),
            (stage, ours.trainable_variables[-2:]),
        ):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(ours(x) - y))
            optimizer.apply(tape.gradient(loss, variables), variables)
    assert_alike(ours.weights)
    assert whole.statistics().steps == stage.statistics().steps == 4


@on_ranks(2, env=ENV)
def test_a_variable_that_no_rank_has_a_gradient_of_is_left_alone() -> None:
    import keras
    import tensorflow as tf
    from keras_checks import assert_alike, data, model

    from gradcomp.tf.optimizer import DistributedOptimizer

    x, y, _, _ = data()
    ours = model()
    unused = keras.Variable(np.ones(3, np.float32), name="unused")
    optimizer = DistributedOptimizer(keras.optimizers.AdamW(0.1, weight_decay=0.5))
    variables = [unused, *ours.trainable_variables]
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(ours(x) - y))
        with pytest.warns(UserWarning, match="Gradients do not exist"):
            optimizer.apply(tape.gradient(loss, variables), variables)
    assert np.array_equal(np.asarray(unused), np.ones(3))
    assert_alike(variables)
    assert optimizer.statistics().steps == 2


@on_ranks(2, env=ENV)
def test_what_cannot_be_distributed() -> None:
    import keras
    import tensorflow as tf
    from keras_checks import data, fit, model

    from gradcomp.core.errors import ConfigError, StateError
    from gradcomp.tf.optimizer import Distributed, DistributedOptimizer

    x, y, _, _ = data()
    optimizer = keras.optimizers.SGD(0.1)
    assert DistributedOptimizer(optimizer) is optimizer
    assert isinstance(optimizer, Distributed)
    assert isinstance(optimizer, keras.optimizers.SGD)
    for again in (optimizer, keras.optimizers.LossScaleOptimizer(optimizer)):
        with pytest.raises(StateError, match="already"):
            DistributedOptimizer(again)
    for wrong in ("sgd", None, tf.Variable(1.0)):
        with pytest.raises(ConfigError, match=r"expected a keras\.optimizers\.Optimizer"):
            DistributedOptimizer(wrong)
    with pytest.raises(StateError, match="not built"):
        optimizer.compression_state()
    ours = model()
    with pytest.raises(ConfigError, match="jit_compile=False"):
        ours.compile(optimizer=optimizer, loss="mse", jit_compile=True)
    ours.compile(optimizer=optimizer, loss="mse")
    assert ours.jit_compile is False
    fit(ours, x, y)
    rebuilt = model()
    rebuilt.compile(optimizer=optimizer, loss="mse")
    with pytest.raises(StateError, match="needs a new optimizer"):
        fit(rebuilt, x, y)
    by_hand = model()
    by_hand.compile(
        optimizer=keras.optimizers.LossScaleOptimizer(DistributedOptimizer(keras.optimizers.SGD(0.1))),
        loss="mse",
    )
    with pytest.raises(ConfigError, match="the other way round"):
        fit(by_hand, x, y)
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope(), pytest.raises(ConfigError, match="strategies"):
        DistributedOptimizer(keras.optimizers.SGD(0.1))
    plain = model()  # the layer around keras.Model leaves other optimizers alone
    plain.compile(optimizer="sgd", loss="mse", jit_compile=True)
    assert plain.jit_compile
    plain.compile(optimizer="sgd", loss="mse")
    fit(plain, x, y)


@on_ranks(2, env=ENV)
def test_ranks_that_start_from_different_weights_say_so_by_name() -> None:
    import keras
    from keras_checks import data, fit, model

    from gradcomp.core.errors import StateError
    from gradcomp.job import runtime
    from gradcomp.tf.optimizer import DistributedOptimizer

    x, y, _, _ = data()
    ours = model(seed=runtime.rank())
    ours.compile(optimizer=DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    with pytest.raises(StateError, match=r"dense.*/kernel"):
        fit(ours, x, y)


@pytest.mark.parametrize(
    ("drift", "said"),
    [
        ("rate", r"learning rate 0\.01\d* on rank 1, 0\.1\d* on rank 0"),
        ("momentum", r"momentum 0\.5 on rank 1, 0\.9 on rank 0"),
        ("weights", "parameter of layer .*kernel.* differs between rank 0 and rank 1"),
    ],
)
@on_ranks(2, env=ENV)
def test_a_rank_that_drifts_apart_is_named_in_the_next_exchange(drift: str, said: str) -> None:
    import keras
    from keras_checks import data, fit, model

    import gradcomp.tf as gc

    x, y, *_ = data()
    ours = model()
    optimizer = gc.DistributedOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9), compression="quantize:bits=4"
    )
    ours.compile(optimizer=optimizer, loss="mse", run_eagerly=True)
    fit(ours, x, y)  # eight exchanges: all variables are compared behind the first five
    if gc.rank() == 1:
        if drift == "rate":
            optimizer.learning_rate = 0.01
        elif drift == "momentum":
            optimizer.momentum = 0.5
        else:
            kernel = next(weight for weight in ours.trainable_weights if "kernel" in weight.path)
            kernel.assign_add(keras.ops.ones_like(kernel))
    with pytest.raises(gc.StateError, match=said):
        fit(ours, x, y)


@pytest.mark.full
@on_ranks(2, batch="torch", env={**ENV, "KERAS_BACKEND": "torch"})
def test_keras_on_torch_goes_through_the_other_frontend() -> None:
    import keras
    import torch
    from keras_checks import data, model

    import gradcomp.torch as gc
    from gradcomp.tf.optimizer import DistributedOptimizer

    assert keras.backend.backend() == "torch"
    with pytest.raises(gc.ConfigError, match=r"gradcomp\.torch"):
        DistributedOptimizer(keras.optimizers.SGD(0.1))
    x, y, _, _ = data()
    ours = model(seed=gc.rank())
    gc.broadcast_parameters(ours.state_dict())
    named = [(variable.path, variable.value) for variable in ours.trainable_variables]
    optimizer = gc.DistributedOptimizer(
        torch.optim.SGD(ours.parameters(), 0.1, momentum=0.9), named, gc.Quantize(bits=4)
    )
    losses = []
    for _ in range(4):
        for i in range(0, len(x), 4):
            optimizer.zero_grad()
            loss = torch.mean((ours(torch.tensor(x[i : i + 4])) - torch.tensor(y[i : i + 4])) ** 2)
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    assert np.mean(losses[-8:]) < np.mean(losses[:8])
    for name, parameter in named:
        first = gc.broadcast_object(parameter.detach())
        assert torch.equal(first, parameter.detach()), name
    assert optimizer.buckets()[0][0][0].startswith("dense") or "/" in optimizer.buckets()[0][0][0]


def test_another_backend_of_keras_has_another_frontend(monkeypatch: pytest.MonkeyPatch) -> None:
    import keras

    import gradcomp.tf as gc
    from gradcomp.core.errors import ConfigError

    optimizer = keras.optimizers.SGD(0.1)
    gc.init(log_level="warning")
    try:
        monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
        with pytest.raises(ConfigError, match=r"gradcomp\.torch"):
            gc.DistributedOptimizer(optimizer)
    finally:
        gc.shutdown()


def test_before_init() -> None:
    import keras

    from gradcomp.core.errors import StateError
    from gradcomp.tf.optimizer import DistributedOptimizer

    with pytest.raises(StateError, match="init"):
        DistributedOptimizer(keras.optimizers.SGD(0.1))


def test_a_world_of_one(tmp_path: Any) -> None:
    import keras
    from keras_checks import compression, fit, model

    import gradcomp.tf as gc

    gc.init(log_level="warning")
    try:
        generator = np.random.default_rng(1)
        x = generator.standard_normal((16, 8)).astype(np.float32)
        y = generator.standard_normal((16, 3)).astype(np.float32)
        weights = []
        for distributed in (True, False):
            ours = model()
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
            called = []
            if distributed:
                gc.DistributedOptimizer(optimizer, compression=compression())
                called = [
                    gc.callbacks.BroadcastGlobalVariables(0),
                    gc.callbacks.MetricAverage(),
                    gc.callbacks.Progress(),
                    gc.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False),
                ]
            ours.compile(optimizer=optimizer, loss="mse")
            fit(ours, x, y, epochs=2, callbacks=called)
            weights.append(ours.get_weights())
            if distributed:
                gc.save(tmp_path / "state", optimizer)
                assert optimizer.plan() is None
        assert all(np.array_equal(a, b) for a, b in zip(*weights, strict=True))
        resumed = model()
        resumed.compile(
            optimizer=gc.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), loss="mse"
        )
        history = fit(resumed, x, y, epochs=2, callbacks=[gc.callbacks.BackupAndRestore(tmp_path / "backup")])
        assert history.epoch == []
        assert all(np.array_equal(a, b) for a, b in zip(weights[0], resumed.get_weights(), strict=True))
    finally:
        gc.shutdown()


@on_ranks(2, env=ENV)
def test_gradients_are_recorded_before_compression() -> None:
    import tempfile
    from pathlib import Path

    from keras_checks import data, model

    import gradcomp.tf as gc
    from gradcomp.analysis import read

    x, y, _, _ = data()
    ours = model()
    policy = gc.Policy("topk:density=0.1", filter=gc.Filter(min_elements=1))
    optimizer = gc.DistributedOptimizer(_optimizer("SGD", {}), compression=policy)
    ours.compile(optimizer=optimizer, loss="mse")
    optimizer.build(ours.trainable_variables)
    made = tempfile.mkdtemp(prefix="gradcomp-recording-") if gc.rank() == 0 else ""
    path = Path(gc.broadcast_object(made)) / "run.npz"
    with gc.record_gradients(optimizer, path, every=2, layers="*") as recorder:
        for _ in range(3):
            ours.train_on_batch(x[:4], y[:4])
    assert recorder.steps == [0, 2]
    if gc.rank() == 0:
        recording = read(path)
        assert [layer.size for layer in recording.layers] == [
            int(np.prod(v.shape)) for v in ours.trainable_variables
        ]
        assert np.isfinite(recording.values).all()
        assert (recording.values != 0).all()
        assert not np.array_equal(recording.of(0, 0), recording.of(0, 1))


@on_ranks(2, env=ENV)
def test_passes_are_averaged_if_so_asked() -> None:
    import keras
    from keras_checks import assert_alike, data, fit, model

    import gradcomp.tf.keras as hvd

    x, y, whole_x, whole_y = data()
    ours, alone = model(), model()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1),
        "Distributed",
        backward_passes_per_step=2,
        average_aggregated_gradients=True,
    )
    ours.compile(optimizer=optimizer, loss="mse")
    fit(ours, x, y)
    assert_alike(ours.weights)
    if hvd.rank() == 0:
        alone.compile(optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), loss="mse")
        fit(alone, whole_x, whole_y, batch=8)
        for mine, other in zip(ours.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=2e-6)


@on_ranks(2, env=ENV)
@pytest.mark.parametrize("scales", [True, False])
def test_local_layers_learn_from_their_own_rank(scales: bool) -> None:
    import keras
    import tensorflow as tf
    from keras_checks import assert_alike, data, fit, model

    import gradcomp.tf.keras as hvd
    from gradcomp.core.errors import StateError

    x, y, _, _ = data(batches=1)
    ours = model()
    first, last = ours.layers
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), local_layers=last, scale_local_gradients=scales
    )
    optimizer.register_local_var(first.bias)
    before = [np.asarray(v) for v in ours.trainable_variables]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(ours(x) - y))
    gradients = tape.gradient(loss, [v.value for v in ours.trainable_variables])
    ours.compile(optimizer=optimizer, loss="mse")
    fit(ours, x, y)
    assert_alike([first.kernel])
    for variable, start, gradient in zip(ours.trainable_variables, before, gradients, strict=True):
        if variable is not first.kernel:
            step = 0.1 * np.asarray(gradient) / (2 if scales else 1)
            np.testing.assert_allclose(variable, start - step, rtol=1e-4, atol=1e-6)
    others = hvd.allgather(last.kernel.value[tf.newaxis])
    assert not np.array_equal(others[0], others[1])
    with pytest.raises(StateError, match="before"):
        optimizer.register_local_var(first.kernel)


def _momentum_acts(
    factor: Any, momentum: float, scaled: bool = False, fits: int = 2, **compiling: Any
) -> Any:
    """Weights after ``fits`` epochs under DGC; before the last of three the momentum is halved."""
    import keras
    from keras_checks import assert_alike, data, fit, model

    import gradcomp as gc
    from gradcomp.tf.optimizer import DistributedOptimizer

    x, y, _, _ = data()
    policy: Any = "none"
    if factor is not None:
        policy = gc.Policy(gc.DGC(1.0, momentum_factor=factor, mask=False), filter=gc.Filter(min_elements=1))
    inner = keras.optimizers.SGD(0.05, momentum=momentum)
    outer = keras.optimizers.LossScaleOptimizer(inner) if scaled else inner
    ours = model()
    ours.compile(DistributedOptimizer(outer, compression=policy), loss="mse", **compiling)
    for number in range(fits):
        if number == 2:
            inner.momentum = momentum = momentum / 2
        fit(ours, x, y)
        assert inner.momentum == inner.get_config()["momentum"] == momentum
    assert_alike(ours.weights, inner.variables)
    if factor == "optimizer":
        assert not any(np.any(slot) for slot in inner.momentums)
    return ours.get_weights()


@on_ranks(2, env=ENV)
def test_the_optimizers_momentum_taken_gives_the_bits_of_that_number_and_an_optimizer_without() -> None:
    for how in ({}, {"run_eagerly": True}, {"scaled": True}):
        taken, plain = _momentum_acts("optimizer", 0.9, **how), _momentum_acts(0.9, 0.0, **how)
        assert [w.tobytes() for w in taken] == [w.tobytes() for w in plain]
    # It is read at every step: this one falls in mid-run, in a train step that was traced before.
    taken, exact = (
        _momentum_acts("optimizer", 0.8, fits=3),
        _momentum_acts(None, 0.8, fits=3, run_eagerly=True),
    )
    for a, b in zip(taken, exact, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("eagerly", [False, True])
@on_ranks(2, env=ENV)
def test_momentum_that_acts_twice_or_cannot_be_taken_is_refused_before_a_weight_changes(
    eagerly: bool,
) -> None:
    import keras
    from keras_checks import data, fit, model

    import gradcomp as gc
    from gradcomp.tf.optimizer import DistributedOptimizer

    x, y, _, _ = data()
    for factor, inner, said in (
        (
            0.9,
            keras.optimizers.SGD(0.1, momentum=0.9),
            r"SGD has a momentum of 0\.9.*momentum_factor=.optimizer",
        ),
        (0.9, keras.optimizers.RMSprop(0.1, momentum=0.5), r"RMSprop has a momentum of 0\.5"),
        ("optimizer", keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True), "nesterov=False"),
        ("optimizer", keras.optimizers.Adam(0.1), "Adam does not add up"),
    ):
        ours = model()
        before = ours.get_weights()
        compression = gc.Policy(gc.DGC(0.5, momentum_factor=factor), filter=gc.Filter(min_elements=1))
        ours.compile(DistributedOptimizer(inner, compression=compression), loss="mse", run_eagerly=eagerly)
        with pytest.raises(gc.ConfigError, match=said):
            fit(ours, x, y)
        for a, b in zip(before, ours.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)


@on_ranks(2, env=ENV)
def test_the_optimizers_momentum_neither_leaves_local_layers_behind_nor_comes_and_goes() -> None:
    import keras
    import tensorflow as tf
    from keras_checks import data, fit, model
    from logs import logged

    import gradcomp.tf as gc

    x, y, _, _ = data()
    taken = gc.Policy(gc.DGC(0.5, momentum_factor="optimizer"), filter=gc.Filter(min_elements=1))
    ours = model()
    local = gc.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), compression=taken)
    local.register_local_var(ours.trainable_variables[0])
    ours.compile(local, loss="mse")
    with pytest.raises(gc.ConfigError, match="local variables"):
        fit(ours, x, y)
    ours = model()
    ours.compile(
        gc.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), compression=taken), loss="mse"
    )
    fit(ours, x, y)
    with pytest.raises(gc.ConfigError, match="cannot be added or removed"):
        ours.optimizer.set_compression("none")
    # A tape knows no optimizer.
    variable = tf.Variable([1.0, 2.0])
    with gc.DistributedGradientTape(tf.GradientTape(), compression=taken) as tape:
        loss = tf.reduce_sum(variable * variable)
    with pytest.raises(gc.ConfigError, match="none is known here"):
        tape.gradient(loss, [variable])
    ours = model()
    ours.compile(gc.DistributedOptimizer(keras.optimizers.Adam(0.1), compression=gc.DGC(0.5)), loss="mse")
    with logged() as lines:
        fit(ours, x, y)
    assert ("momentum_factor=0" in "".join(lines)) == (gc.rank() == 0)


def test_arguments_of_horovod_are_looked_at() -> None:
    import keras

    import gradcomp.tf as gc
    from gradcomp.tf.keras import PartialDistributedOptimizer

    gc.init(log_level="warning")
    try:
        for wrong, said in (
            *(
                ({"name": gc.TopK(density=0.5)}, "name must be a string"),
                ({"name": "topk:density=0.5"}, "compression="),
            ),
            *(({"device_dense": "fp16"}, "compression="), ({"groups": 0}, "groups must be")),
            *(({"groups": "all"}, "groups must be"), ({"num_groups": -1}, "num_groups must be")),
            ({"op": gc.Adasum}, "op must be"),
        ):
            with pytest.raises(gc.ConfigError, match=said):
                gc.DistributedOptimizer(keras.optimizers.SGD(0.1), **wrong)
        with pytest.raises(gc.ConfigError, match="local_layers"):
            PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=["dense"])
        sgd = keras.optimizers.SGD(0.1)
        given = (
            sgd,
            "name",
            True,
            "/gpu:0",
            "/cpu:0",
            gc.Compression.fp16,
            True,
            2,
            gc.Sum,
            1.0,
            True,
            2,
            [[]],
        )
        assert gc.DistributedOptimizer(*given) is sgd
    finally:
        gc.shutdown()

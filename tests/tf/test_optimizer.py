"""Keras optimizers on means over ranks."""

# ruff: noqa: E402

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batch import on_ranks
from logs import logged

tf = pytest.importorskip("tensorflow")

import keras
from keras.optimizers import SGD, LossScaleOptimizer
from keras_checks import (
    ENV,
    assert_alike,
    assert_close,
    assert_equal,
    compiled,
    compression,
    data,
    fit,
    model,
    new_names,
    world_of_one,
)

import gradcomp.tf as gc
import gradcomp.tf.keras as hvd
from gradcomp.tf.optimizer import Distributed

#: By name: the optimizer and its arguments, those of ``compile``.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "together": (
        "SGD",
        {
            "learning_rate": "schedule", "momentum": 0.9, "nesterov": True, "global_clipnorm": 0.05, "use_ema": True,
            "ema_overwrite_frequency": 3, "loss_scale_factor": 256.0,
        },
        {},
    ),
    "steps_per_execution": ("AdamW", {"weight_decay": 0.1, "epsilon": 1e-3}, {"steps_per_execution": 4}),
    "eager": ("SGD", {"momentum": 0.9, "gradient_accumulation_steps": 2, "clipnorm": 0.05}, {"run_eagerly": True}),
}  # fmt: skip


def optimizer_of(kind: str, arguments: dict[str, Any]) -> Any:
    arguments = {"learning_rate": 0.1, **arguments}
    if arguments["learning_rate"] == "schedule":
        arguments["learning_rate"] = keras.optimizers.schedules.ExponentialDecay(0.2, 2, 0.5)
    return getattr(keras.optimizers, kind)(**arguments)


def gradients_of(one: Any, x: Any, y: Any, variables: Any = None) -> Any:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(one(x) - y))
    return tape.gradient(loss, one.trainable_variables if variables is None else variables)


@pytest.mark.parametrize("name", CASES)
@on_ranks(2, env=ENV)
def test_fit_is_that_of_one_process_with_the_whole_batch(name: str) -> None:
    kind, arguments, compiling = CASES[name]
    x, y, whole_x, whole_y = data()
    ours, alone = model(), model()
    start = [w.copy() for w in ours.get_weights()]
    optimizer = gc.DistributedOptimizer(optimizer_of(kind, arguments))
    fit(compiled(optimizer, ours, **compiling), x, y)
    assert_alike(ours.weights, optimizer.variables)
    assert optimizer.statistics().steps == 8 // arguments.get("gradient_accumulation_steps", 1)
    if gc.rank() > 0:
        return  # its weights are rank 0's
    fit(compiled(optimizer_of(kind, arguments), alone, **compiling), whole_x, whole_y, batch=8)
    assert_close(ours.get_weights(), alone.get_weights())
    for mine, before in zip(ours.get_weights(), start, strict=True):
        assert np.abs(mine - before).max() > 1e-4  # there was something to agree about


@pytest.mark.parametrize(
    "name",
    ["accumulated", "scaled", *(pytest.param(n, marks=pytest.mark.full) for n in ("dense", "clipped"))],
)
@on_ranks(2, env=ENV)
def test_embeddings(name: str) -> None:
    def build() -> Any:
        new_names()
        keras.utils.set_random_seed(1)
        embedding = [keras.layers.Embedding(9, 5), keras.layers.Flatten()]
        return keras.Sequential([keras.layers.Input((4,)), *embedding, keras.layers.Dense(2)])

    def make() -> Any:
        passes, norm = 2 if name == "accumulated" else None, 0.1 if name == "clipped" else None
        inner = SGD(0.05, momentum=0.9, gradient_accumulation_steps=passes, global_clipnorm=norm)
        return LossScaleOptimizer(inner) if name == "scaled" else inner

    generator = np.random.default_rng(4)
    x, y = generator.integers(0, 9, (4, 2, 3, 4)), generator.standard_normal((4, 2, 3, 2)).astype(np.float32)
    optimizer = gc.DistributedOptimizer(make(), sparse_as_dense=name == "dense")
    ours, rank = compiled(optimizer, build()), gc.rank()
    fit(ours, x[:, rank].reshape(-1, 4), y[:, rank].reshape(-1, 2), batch=3)
    assert_alike(ours.weights, optimizer.variables)
    # Keras takes the norm of a row that comes twice for that of two rows, we send it once
    if name != "clipped" and rank == 0:
        alone = compiled(make(), build())
        fit(alone, x.reshape(-1, 4), y.reshape(-1, 2), batch=6)
        assert_close(ours.get_weights(), alone.get_weights(), atol=1e-5)


@pytest.mark.parametrize("policy", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.full)])
@on_ranks(2, env=ENV)
def test_mixed_precision_with_compression(policy: str) -> None:
    x, y, _, _ = data()
    optimizer = gc.DistributedOptimizer(keras.optimizers.Adam(0.02), compression=compression())
    ours = compiled(optimizer, model(policy=policy))
    losses = fit(ours, x, y, epochs=3).history["loss"]
    assert isinstance(ours.optimizer, Distributed)
    assert_alike(ours.weights, ours.optimizer.variables)
    assert losses[-1] < losses[0]
    assert optimizer.statistics().steps == 24
    assert optimizer.statistics().ratio > 1.5
    assert isinstance(ours.optimizer, LossScaleOptimizer) == (policy == "mixed_float16")


@on_ranks(2, env=ENV)
def test_an_overflow_on_one_rank_is_skipped_by_all() -> None:
    x, y, _, _ = data()
    optimizer = gc.DistributedOptimizer(LossScaleOptimizer(SGD(0.1, momentum=0.9), initial_scale=1024.0))
    ours = compiled(optimizer)
    fit(ours, x, y)
    assert float(optimizer.dynamic_scale) == 1024
    before = ours.get_weights()
    if gc.rank() == 1:
        x = x.copy()
        x[:4] = np.inf
    fit(ours, x[:4], y[:4])
    assert float(optimizer.dynamic_scale) == 512
    assert_equal(before, ours.get_weights())
    assert_alike(ours.weights, optimizer.variables)


@on_ranks(2, env=ENV)
def test_passes_are_averaged_if_so_asked() -> None:
    passes = {"backward_passes_per_step": 2}
    variable = keras.Variable(np.zeros(3, np.float32), name="weight")
    optimizer = hvd.DistributedOptimizer(SGD(1.0), "Distributed", average_aggregated_gradients=True, **passes)
    optimizer.build([variable])

    @tf.function
    def step(gradient: Any) -> None:
        optimizer.apply([tf.fill([3], gradient * (1 + gc.rank()))], [variable])

    for gradient in (1.0, 4.0):
        step(tf.constant(gradient))
    np.testing.assert_allclose(variable, [-3.75] * 3)
    with pytest.raises(gc.ConfigError, match="gradient_accumulation_steps=3"):
        gc.DistributedOptimizer(SGD(0.1, gradient_accumulation_steps=3), **passes)
    built = SGD(0.1)
    built.build([variable])
    with pytest.raises(gc.ConfigError, match="built without accumulators"):
        gc.DistributedOptimizer(built, **passes)


@on_ranks(2, env=ENV)
def test_nothing_is_traced_after_the_second_step() -> None:
    class Counting(keras.Model):
        traces = 0

        def train_step(self, batch: Any) -> Any:
            Counting.traces += 1
            return super().train_step(batch)

    x, y, _, _ = data()
    inner = model()
    ours = compiled(
        gc.DistributedOptimizer(keras.optimizers.Adam(0.1)), Counting(inner.inputs, inner.outputs)
    )
    counted = []
    for _ in range(6):
        ours.train_on_batch(x[:4], y[:4])
        counted.append(Counting.traces)
    assert counted[-1] == counted[1] <= 2
    assert_alike(ours.weights)


@on_ranks(2, env=ENV)
def test_loops_of_ones_own() -> None:
    x, y, _, _ = data()
    results = []
    for mode in (lambda function: function, tf.function):
        ours = model()
        optimizer = gc.DistributedOptimizer(SGD(0.1, momentum=0.9), compression=compression())

        @mode
        def step(a: Any, b: Any, ours: Any = ours, optimizer: Any = optimizer) -> None:
            optimizer.apply(gradients_of(ours, a, b), ours.trainable_variables)

        for i in range(0, len(x), 4):
            step(tf.constant(x[i : i + 4]), tf.constant(y[i : i + 4]))
        assert_alike(ours.weights, optimizer.variables)
        results.append(ours.get_weights())
    assert_close(*results, rtol=1e-3, atol=1e-4)


@on_ranks(2, env=ENV)
def test_two_optimizers_over_the_same_variables_leave_ranks_alike() -> None:
    """Each exchanges the gradients that it is given, into means of their own."""
    x, y, _, _ = data()
    ours = model()
    whole, stage = (gc.DistributedOptimizer(SGD(0.1), compression=compression()) for _ in range(2))
    for _ in range(4):
        for optimizer, first in ((whole, 0), (stage, -2)):
            variables = ours.trainable_variables[first:]
            optimizer.apply(gradients_of(ours, x, y, variables), variables)
    assert_alike(ours.weights)
    assert whole.statistics().steps == stage.statistics().steps == 4


@on_ranks(2, env=ENV)
def test_a_variable_that_no_rank_has_a_gradient_of_is_left_alone() -> None:
    x, y, _, _ = data()
    ours = model()
    unused = keras.Variable(np.ones(3, np.float32), name="unused")
    optimizer = gc.DistributedOptimizer(keras.optimizers.AdamW(0.1, weight_decay=0.5))
    variables = [unused, *ours.trainable_variables]
    for _ in range(2):
        with pytest.warns(UserWarning, match="Gradients do not exist"):
            optimizer.apply(gradients_of(ours, x, y, variables), variables)
    assert np.array_equal(np.asarray(unused), np.ones(3))
    assert_alike(variables)
    assert optimizer.statistics().steps == 2


@on_ranks(2, env=ENV)
def test_what_cannot_be_distributed() -> None:
    x, y, _, _ = data()
    optimizer = SGD(0.1)
    assert gc.DistributedOptimizer(optimizer) is optimizer
    assert isinstance(optimizer, Distributed)
    assert isinstance(optimizer, SGD)
    for again in (optimizer, LossScaleOptimizer(optimizer)):
        with pytest.raises(gc.StateError, match="already"):
            gc.DistributedOptimizer(again)
    for wrong in ("sgd", None, tf.Variable(1.0)):
        with pytest.raises(gc.ConfigError, match=r"expected a keras\.optimizers\.Optimizer"):
            gc.DistributedOptimizer(wrong)
    with pytest.raises(gc.StateError, match="not built"):
        optimizer.compression_state()
    with pytest.raises(gc.ConfigError, match="jit_compile=False"):
        compiled(optimizer, jit_compile=True)
    ours = compiled(optimizer)
    assert ours.jit_compile is False
    fit(ours, x, y)
    with pytest.raises(gc.StateError, match="needs a new optimizer"):
        fit(compiled(optimizer), x, y)
    by_hand = compiled(LossScaleOptimizer(gc.DistributedOptimizer(SGD(0.1))))
    with pytest.raises(gc.ConfigError, match="the other way round"):
        fit(by_hand, x, y)
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope(), pytest.raises(gc.ConfigError, match="strategies"):
        gc.DistributedOptimizer(SGD(0.1))
    plain = compiled("sgd", jit_compile=True)  # the layer around keras.Model leaves other optimizers alone
    assert plain.jit_compile
    fit(compiled("sgd", plain), x, y)


@on_ranks(2, env=ENV)
def test_ranks_that_start_from_different_weights_say_so_by_name() -> None:
    x, y, _, _ = data()
    ours = compiled(gc.DistributedOptimizer(SGD(0.1)), model(seed=gc.rank()))
    with pytest.raises(gc.StateError, match=r"dense.*/kernel"):
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
    x, y, *_ = data()
    optimizer = gc.DistributedOptimizer(SGD(0.1, momentum=0.9), compression="quantize:bits=4")
    ours = compiled(optimizer, run_eagerly=True)
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
    import torch

    import gradcomp.torch as gct

    assert keras.backend.backend() == "torch"
    with pytest.raises(gc.ConfigError, match=r"gradcomp\.torch"):
        gc.DistributedOptimizer(SGD(0.1))
    x, y, _, _ = data()
    ours = model(seed=gct.rank())
    gct.broadcast_parameters(ours.state_dict())
    named = [(variable.path, variable.value) for variable in ours.trainable_variables]
    inner = torch.optim.SGD(ours.parameters(), 0.1, momentum=0.9)
    optimizer = gct.DistributedOptimizer(inner, named, gct.Quantize(bits=4))
    losses = []
    for i in [*range(0, len(x), 4)] * 4:
        optimizer.zero_grad()
        loss = torch.mean((ours(torch.tensor(x[i : i + 4])) - torch.tensor(y[i : i + 4])) ** 2)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert np.mean(losses[-8:]) < np.mean(losses[:8])
    for name, parameter in named:
        first = gct.broadcast_object(parameter.detach())
        assert torch.equal(first, parameter.detach()), name
    assert optimizer.buckets()[0][0][0].startswith("dense") or "/" in optimizer.buckets()[0][0][0]


def test_another_backend_of_keras_has_another_frontend(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = SGD(0.1)
    with world_of_one():
        monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
        with pytest.raises(gc.ConfigError, match=r"gradcomp\.torch"):
            gc.DistributedOptimizer(optimizer)


def test_before_init() -> None:
    with pytest.raises(gc.StateError, match="init"):
        gc.DistributedOptimizer(SGD(0.1))


def test_a_world_of_one(tmp_path: Any) -> None:
    generator = np.random.default_rng(1)
    x = generator.standard_normal((16, 8)).astype(np.float32)
    y = generator.standard_normal((16, 3)).astype(np.float32)
    with world_of_one():
        alone = compiled(SGD(0.1, momentum=0.9))
        fit(alone, x, y, epochs=2)
        optimizer = gc.DistributedOptimizer(SGD(0.1, momentum=0.9), compression=compression())
        called = [
            gc.callbacks.BroadcastGlobalVariables(0),
            gc.callbacks.MetricAverage(),
            gc.callbacks.Progress(),
            gc.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False),
        ]
        ours = compiled(optimizer)
        fit(ours, x, y, epochs=2, callbacks=called)
        gc.save(tmp_path / "state", optimizer)
        assert optimizer.plan() is None
        assert_equal(ours.get_weights(), alone.get_weights())
        resumed = compiled(gc.DistributedOptimizer(SGD(0.1, momentum=0.9)))
        history = fit(resumed, x, y, epochs=2, callbacks=[gc.callbacks.BackupAndRestore(tmp_path / "backup")])
        assert history.epoch == []
        assert_equal(resumed.get_weights(), alone.get_weights())


@on_ranks(2, env=ENV)
def test_gradients_are_recorded_before_compression() -> None:
    from gradcomp.analysis import read

    x, y, _, _ = data()
    policy = gc.Policy("topk:density=0.1", filter=gc.Filter(min_elements=1))
    optimizer = gc.DistributedOptimizer(SGD(0.1), compression=policy)
    ours = compiled(optimizer)
    optimizer.build(ours.trainable_variables)
    made = tempfile.mkdtemp(prefix="gradcomp-recording-") if gc.rank() == 0 else ""
    path = Path(gc.broadcast_object(made)) / "run.npz"
    with gc.record_gradients(optimizer, path, every=2, layers="*") as recorder:
        for _ in range(3):
            ours.train_on_batch(x[:4], y[:4])
    assert recorder.steps == [0, 2]
    if gc.rank() == 0:
        recording = read(path)
        sizes = [int(np.prod(v.shape)) for v in ours.trainable_variables]
        assert [layer.size for layer in recording.layers] == sizes
        assert np.isfinite(recording.values).all()
        assert (recording.values != 0).all()
        assert not np.array_equal(recording.of(0, 0), recording.of(0, 1))


@on_ranks(2, env=ENV)
@pytest.mark.parametrize("scales", [True, False])
def test_local_layers_learn_from_their_own_rank(scales: bool) -> None:
    x, y, _, _ = data(batches=1)
    ours = model()
    first, last = ours.layers
    optimizer = hvd.PartialDistributedOptimizer(SGD(0.1), local_layers=last, scale_local_gradients=scales)
    optimizer.register_local_var(first.bias)
    before = [np.asarray(v) for v in ours.trainable_variables]
    gradients = gradients_of(ours, x, y, [v.value for v in ours.trainable_variables])
    fit(compiled(optimizer, ours), x, y)
    assert_alike([first.kernel])
    for variable, start, gradient in zip(ours.trainable_variables, before, gradients, strict=True):
        if variable is not first.kernel:
            step = 0.1 * np.asarray(gradient) / (2 if scales else 1)
            np.testing.assert_allclose(variable, start - step, rtol=1e-4, atol=1e-6)
    others = hvd.allgather(last.kernel.value[tf.newaxis])
    assert not np.array_equal(others[0], others[1])
    with pytest.raises(gc.StateError, match="before"):
        optimizer.register_local_var(first.kernel)


def momentum_acts(factor: Any, momentum: float, scaled: bool = False, fits: int = 2, **compiling: Any) -> Any:
    """Weights after ``fits`` epochs under DGC; before the last of three the momentum is halved."""
    x, y, _, _ = data(batches=3)
    policy: Any = "none"
    if factor is not None:
        policy = gc.Policy(gc.DGC(1.0, momentum_factor=factor, mask=False), filter=gc.Filter(min_elements=1))
    inner = SGD(0.05, momentum=momentum)
    outer = LossScaleOptimizer(inner) if scaled else inner
    ours = compiled(gc.DistributedOptimizer(outer, compression=policy), **compiling)
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
    for how in ({"run_eagerly": True}, {"scaled": True}):
        assert_equal(momentum_acts("optimizer", 0.9, **how), momentum_acts(0.9, 0.0, **how))
    # It is read at every step: this one falls in mid-run, in a train step that was traced before.
    exact = momentum_acts(None, 0.8, fits=3, run_eagerly=True)
    assert_close(momentum_acts("optimizer", 0.8, fits=3), exact, atol=1e-5)


@pytest.mark.parametrize("eagerly", [False, True])
@on_ranks(2, env=ENV)
def test_momentum_that_acts_twice_or_cannot_be_taken_is_refused_before_a_weight_changes(
    eagerly: bool,
) -> None:
    x, y, _, _ = data()
    for factor, inner, said in (
        (0.9, SGD(0.1, momentum=0.9), r"SGD has a momentum of 0\.9.*momentum_factor=.optimizer"),
        (0.9, keras.optimizers.RMSprop(0.1, momentum=0.5), r"RMSprop has a momentum of 0\.5"),
        ("optimizer", SGD(0.1, momentum=0.9, nesterov=True), "nesterov=False"),
        ("optimizer", keras.optimizers.Adam(0.1), "Adam does not add up"),
    ):
        policy = gc.Policy(gc.DGC(0.5, momentum_factor=factor), filter=gc.Filter(min_elements=1))
        ours = compiled(gc.DistributedOptimizer(inner, compression=policy), run_eagerly=eagerly)
        before = ours.get_weights()
        with pytest.raises(gc.ConfigError, match=said):
            fit(ours, x, y)
        assert_equal(before, ours.get_weights())


@on_ranks(2, env=ENV)
def test_the_optimizers_momentum_neither_leaves_local_layers_behind_nor_comes_and_goes() -> None:
    x, y, _, _ = data(batches=1)
    taken = gc.Policy(gc.DGC(0.5, momentum_factor="optimizer"), filter=gc.Filter(min_elements=1))
    local, kept = (gc.DistributedOptimizer(SGD(0.1, momentum=0.9), compression=taken) for _ in range(2))
    ours = compiled(local)
    local.register_local_var(ours.trainable_variables[0])
    with pytest.raises(gc.ConfigError, match="local variables"):
        fit(ours, x, y)
    fit(compiled(kept, run_eagerly=True), x, y)
    with pytest.raises(gc.ConfigError, match="cannot be added or removed"):
        kept.set_compression("none")
    # A tape knows no optimizer.
    variable = tf.Variable([1.0, 2.0])
    with gc.DistributedGradientTape(tf.GradientTape(), compression=taken) as tape:
        loss = tf.reduce_sum(variable * variable)
    with pytest.raises(gc.ConfigError, match="none is known here"):
        tape.gradient(loss, [variable])
    adam = gc.DistributedOptimizer(keras.optimizers.Adam(0.1), compression=gc.DGC(0.5))
    averages = compiled(adam, run_eagerly=True)
    with logged() as lines:
        fit(averages, x, y)
    assert ("momentum_factor=0" in "".join(lines)) == (gc.rank() == 0)


def test_arguments_of_horovod_are_looked_at() -> None:
    with world_of_one():
        for wrong, said in (
            ({"name": gc.TopK(density=0.5)}, "name must be a string"),
            ({"name": "topk:density=0.5"}, "compression="),
            ({"device_dense": "fp16"}, "compression="),
            ({"groups": 0}, "groups must be"),
            ({"groups": "all"}, "groups must be"),
            ({"num_groups": -1}, "num_groups must be"),
            ({"op": gc.Adasum}, "op must be"),
        ):
            with pytest.raises(gc.ConfigError, match=said):
                gc.DistributedOptimizer(SGD(0.1), **wrong)
        with pytest.raises(gc.ConfigError, match="local_layers"):
            hvd.PartialDistributedOptimizer(SGD(0.1), local_layers=["dense"])
        sgd = SGD(0.1)
        devices, half = ("/gpu:0", "/cpu:0"), gc.Compression.fp16
        given = (sgd, "name", True, *devices, half, True, 2, gc.Sum, 1.0, True, 2, [[]])
        assert gc.DistributedOptimizer(*given) is sgd

"""Callbacks of ``fit``, on two ranks."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import preloaded
import pytest
from batch import on_ranks
from launching import run_ranks
from logs import logged

pytest.importorskip("tensorflow")

ENV = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


@on_ranks(2, env=ENV)
def test_broadcast_makes_ranks_alike_before_the_first_step() -> None:
    import keras
    from keras_checks import assert_alike, data, fit, model

    from gradcomp.core.errors import ConfigError
    from gradcomp.job import runtime
    from gradcomp.tf import callbacks
    from gradcomp.tf.optimizer import DistributedOptimizer

    x, y, _, _ = data()
    ours = model(seed=runtime.rank())
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1 + runtime.rank(), momentum=0.9))
    ours.compile(optimizer=optimizer, loss="mse")
    fit(ours, x, y, callbacks=[callbacks.BroadcastGlobalVariables(1)])
    assert_alike(ours.weights, optimizer.variables)
    assert float(optimizer.learning_rate) == pytest.approx(1.1)  # rank 1's

    plain = model()
    plain.compile(optimizer="sgd", loss="mse")
    with pytest.raises(ConfigError, match="no DistributedOptimizer"):
        fit(plain, x, y, callbacks=[callbacks.BroadcastGlobalVariables(0)])


def _adversaries(seed: int, wrapped: tuple[bool, bool] = (True, True), built: bool = True) -> Any:
    """A generator and its critic, each with an optimizer of its own, in one model with its own ``train_step``."""
    import keras
    import tensorflow as tf
    from keras_checks import INPUTS, compression

    from gradcomp.tf.optimizer import DistributedOptimizer

    class Adversaries(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.generator = keras.Sequential(
                [keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3)]
            )
            self.critic = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])

        def compile(self, critic_optimizer: Any, others: Any) -> None:  # type: ignore[override]
            super().compile()
            self.critic_optimizer, self.others = critic_optimizer, others

        def train_step(self, batch: Any) -> Any:
            x, real = batch
            with tf.GradientTape(persistent=True) as tape:
                fake = self.critic(self.generator(x))
                loss = tf.reduce_mean(tf.square(fake))
                critic_loss = tf.reduce_mean(tf.square(fake - 1.0)) + tf.reduce_mean(
                    tf.square(self.critic(real))
                )
            for optimizer, part, its_loss in (
                (self.critic_optimizer, self.critic, critic_loss),
                (self.others["generator"], self.generator, loss),
            ):
                variables = part.trainable_variables
                optimizer.apply(tape.gradient(its_loss, variables), variables)
            return {"loss": loss}

    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    ours = Adversaries()
    if built:
        ours.critic(ours.generator(np.zeros((1, INPUTS), np.float32)))
    optimizers = [
        DistributedOptimizer(one, compression=compression()) if wrap else one
        for one, wrap in zip((keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1)), wrapped, strict=True)
    ]
    ours.compile(optimizers[0], {"generator": optimizers[1]})
    return ours


@on_ranks(2, env=ENV)
def test_a_model_with_two_optimizers_and_its_own_train_step() -> None:
    import keras
    from keras_checks import assert_alike, data, fit

    from gradcomp.core.errors import ConfigError, StateError
    from gradcomp.job import runtime
    from gradcomp.tf import callbacks

    class Look(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            assert_alike(self.model.weights)

    x, y, _, _ = data()
    for built in (True, False):
        ours = _adversaries(runtime.rank(), built=built)
        called = [callbacks.BroadcastGlobalVariables(1), *[Look()] * built, callbacks.MetricAverage()]
        with logged() as lines:
            fit(ours, x, y, callbacks=[*called, callbacks.Progress()])
        both = [ours.critic_optimizer, ours.others["generator"]]
        assert_alike(ours.weights, both[0].variables, both[1].variables)
        counted = [one.statistics() for one in both]
        ratio = sum(one.dense_bytes for one in counted) / sum(one.wire_bytes for one in counted)
        said = [line for line in lines if "steps/s" in line]
        assert len(said) == (1 if runtime.rank() == 0 else 0)
        assert all(line.endswith(f"ratio {ratio:.2f}") for line in said), (said, ratio)
        assert not any("not a DistributedOptimizer" in line for line in lines)

    with logged() as lines:
        fit(_adversaries(1, (True, False)), x, y, callbacks=[callbacks.BroadcastGlobalVariables(1)])
    assert any("others" in line and "not a DistributedOptimizer" in line for line in lines), lines
    with pytest.raises(ConfigError, match="no DistributedOptimizer"):
        fit(_adversaries(1, (False, False)), x, y, callbacks=[callbacks.BroadcastGlobalVariables(1)])
    with pytest.raises(StateError, match=r"dense.*/kernel"):  # as it is, not as TensorFlow's
        fit(_adversaries(runtime.rank()), x, y)


@on_ranks(2, env=ENV)
def test_broadcast_of_a_model_that_its_first_batch_builds() -> None:
    import keras
    from keras_checks import assert_alike, data, fit

    from gradcomp.core.errors import ConfigError
    from gradcomp.job import runtime
    from gradcomp.tf import callbacks
    from gradcomp.tf.optimizer import DistributedOptimizer

    x, y, _, _ = data()

    def unbuilt(**compiling: Any) -> Any:
        keras.utils.set_random_seed(runtime.rank())
        one = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(3)])
        one.compile(optimizer=DistributedOptimizer(keras.optimizers.Adam(0.1)), loss="mse", **compiling)
        return one

    ours = unbuilt()
    fit(ours, x, y, callbacks=[callbacks.BroadcastGlobalVariables(0)])
    assert_alike(ours.weights, ours.optimizer.variables)
    with pytest.raises(ConfigError, match="build it before fit"):
        fit(unbuilt(steps_per_execution=4), x, y, callbacks=[callbacks.BroadcastGlobalVariables(0)])


@on_ranks(2, env=ENV)
def test_metrics_are_means_over_ranks() -> None:
    import keras
    from keras_checks import data, fit, model

    from gradcomp.core.errors import PlanMismatchError
    from gradcomp.job import runtime
    from gradcomp.tf import callbacks
    from gradcomp.tf.optimizer import DistributedOptimizer

    class Own(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["mine"] = float(runtime.rank() * 2)
            logs["text"] = f"rank {runtime.rank()}"
            seen.append(logs["loss"])

    x, y, whole_x, whole_y = data()
    seen: list[float] = []
    ours = model()
    ours.compile(optimizer=DistributedOptimizer(keras.optimizers.SGD(0.0)), loss="mse")
    history = fit(ours, x, y, callbacks=[Own(), callbacks.MetricAverage()]).history
    assert history["mine"] == [1.0]
    assert history["text"] == [f"rank {runtime.rank()}"]
    assert history["loss"] == [pytest.approx(ours.evaluate(whole_x, whole_y, verbose=0), rel=1e-5)]
    assert seen[0] != history["loss"][0]

    average = callbacks.MetricAverage()
    average.set_model(ours)
    with pytest.raises(PlanMismatchError):
        average.on_epoch_end(0, {"loss": 1.0, f"only on {runtime.rank()}": 2.0})
    logs = {"loss": float(runtime.rank())}
    average.on_epoch_end(0, logs)  # the next call is sound again
    assert logs == {"loss": 0.5}


@on_ranks(2, env=ENV)
def test_learning_rates_follow_epochs() -> None:
    import keras
    from keras_checks import data, fit, model

    from gradcomp.core.errors import ConfigError
    from gradcomp.tf import callbacks
    from gradcomp.tf.optimizer import DistributedOptimizer

    class Rates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            rates.append(float(self.model.optimizer.learning_rate))

    x, y, _, _ = data(batches=4)
    rates: list[float] = []
    ours = model()
    ours.compile(optimizer=DistributedOptimizer(keras.optimizers.SGD(0.001, momentum=0.5)), loss="mse")
    steered = [
        callbacks.LearningRateWarmup(0.08, warmup_epochs=2, verbose=1),
        callbacks.LearningRateSchedule(0.08, 0.25, start_epoch=2, end_epoch=3),
        callbacks.LearningRateSchedule(0.08, lambda epoch: epoch, start_epoch=3, staircase=False),
        Rates(),
    ]
    history = fit(ours, x, y, epochs=4, callbacks=steered).history
    expected = [0.08 / 2 * ((i + 1) / 4 / 2 + 1) for i in range(8)]  # from 0.04 to 0.08
    expected += [0.02] * 4 + [0.08 * (3 + i / 4) for i in range(4)]
    assert rates == pytest.approx(expected, rel=1e-6)
    assert history["learning_rate"] == pytest.approx([expected[i] for i in (3, 7, 11, 15)], rel=1e-6)

    decaying = model()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.2, 2, 0.5)
    decaying.compile(optimizer=DistributedOptimizer(keras.optimizers.SGD(schedule)), loss="mse")
    with pytest.raises(ConfigError, match="which cannot be set"):
        fit(decaying, x, y, callbacks=[callbacks.LearningRateWarmup(0.1)])
    with pytest.raises(ConfigError, match="initial_lr"):
        callbacks.LearningRateSchedule(0.0, 1.0)


@on_ranks(2, env=ENV)
def test_momentum_is_corrected_in_a_traced_function() -> None:
    import keras
    from keras_checks import assert_alike, data, fit, model

    from gradcomp.job import runtime
    from gradcomp.tf import callbacks
    from gradcomp.tf.optimizer import DistributedOptimizer

    x, y, whole_x, whole_y = data(batches=6)
    rates, momentum = [0.1, 0.02, 0.3], 0.9
    ours, alone = model(), model()
    optimizer = DistributedOptimizer(keras.optimizers.SGD(rates[0], momentum=momentum))
    ours.compile(optimizer=optimizer, loss="mse")
    fit(ours, x, y, epochs=3, callbacks=[callbacks.LearningRateSchedule(1.0, rates.__getitem__)])
    assert_alike(ours.weights, optimizer.variables)
    if runtime.rank() > 0:
        return  # its weights are rank 0's
    # The same by hand: v = momentum * (new / old) v - new * g in the step that changes the rate.
    velocity = [np.zeros_like(w) for w in alone.get_weights()]
    import tensorflow as tf

    old = rates[0]
    for rate in rates:
        for i in range(0, len(whole_x), 8):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(alone(whole_x[i : i + 8]) - whole_y[i : i + 8]))
            gradients = tape.gradient(loss, alone.trainable_weights)
            velocity = [
                momentum * rate / old * v - rate * g.numpy() for v, g in zip(velocity, gradients, strict=True)
            ]
            alone.set_weights([w + v for w, v in zip(alone.get_weights(), velocity, strict=True)])
            old = rate
    for mine, other in zip(ours.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-3, atol=1e-5)


@on_ranks(2, env=ENV)
def test_progress_says_what_is_saved() -> None:
    import keras
    from keras_checks import compression, data, fit, model

    from gradcomp.job import runtime
    from gradcomp.tf import callbacks
    from gradcomp.tf.optimizer import DistributedOptimizer

    x, y, _, _ = data(batches=6)
    ours = model()
    ours.compile(
        optimizer=DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression()), loss="mse"
    )
    with logged() as lines:
        fit(ours, x, y, epochs=2, callbacks=[callbacks.Progress(every_steps=4)])
    said = [line for line in lines if "steps/s" in line]
    if runtime.rank() == 0:
        heads = [line.partition(":")[0] for line in said]
        assert heads == ["epoch 1, step 4", "epoch 1", "epoch 2, step 4", "epoch 2"]
        ratio = float(said[-1].rpartition("ratio ")[2])
        assert ratio == pytest.approx(ours.optimizer.statistics().ratio, rel=0.2)
        assert ratio > 1.5
    else:
        assert not said


class _Killed(Exception):
    """Stands for a kill."""


def _train(directory: str, epochs: int, after: Any = (), save_freq: Any = "epoch") -> Any:
    """A model with a random layer, trained from its beginning or from the backup; weights at the end of each epoch."""
    import keras
    from keras_checks import compression, data

    from gradcomp.job import runtime
    from gradcomp.tf import callbacks
    from gradcomp.tf.optimizer import DistributedOptimizer

    x, y, _, _ = data()
    keras.backend.clear_session()  # as in a new process: names of layers begin anew
    keras.utils.set_random_seed(3)
    ours = keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dropout(0.3, seed=runtime.rank()),
            keras.layers.Dense(3),
        ]
    )
    optimizer = DistributedOptimizer(keras.optimizers.Adam(0.01), compression=compression())
    ours.compile(optimizer=optimizer, loss="mse")
    backup = callbacks.BackupAndRestore(directory, save_freq=save_freq)
    history = ours.fit(
        x, y, batch_size=4, shuffle=False, verbose=0, epochs=epochs, callbacks=[backup, *after]
    )
    return ours, optimizer, history.epoch


@on_ranks(2, env=ENV)
def test_training_goes_on_after_a_kill_bit_for_bit() -> None:
    import keras
    from keras_checks import assert_alike, shared_directory

    from gradcomp.tf.objects import broadcast_object

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.seen == 19:  # in the middle of the third epoch
                raise _Killed
            self.seen += 1

        seen = 0

    from pathlib import Path

    directory, other = shared_directory(), shared_directory()
    whole, optimizer, _ = _train(other, 3)
    with pytest.raises(_Killed):
        _train(directory, 3, [Kill()])
    assert [path.name for path in Path(directory).glob("epoch-*")] == ["epoch-2-iteration-16"]
    resumed, again, epochs = _train(directory, 3)
    assert epochs == [2]
    for mine, theirs in zip(
        [*whole.weights, *optimizer.variables], [*resumed.weights, *again.variables], strict=True
    ):
        assert np.array_equal(np.asarray(mine), np.asarray(theirs)), mine.path
    state, resumed_state = optimizer.compression_state(), again.compression_state()
    assert state["step"] == resumed_state["step"] == 24
    assert state["rate"] == pytest.approx(0.01)
    assert any(np.abs(residual).max() > 0 for residual in state["residuals"].values())
    for name, residual in state["residuals"].items():
        assert np.array_equal(residual, resumed_state["residuals"][name]), name
    assert_alike(resumed.weights, again.variables)
    broadcast_object(None)  # rank 0 has removed what there was
    assert not Path(directory).exists()

    with pytest.raises(_Killed):
        _train(directory, 3, [Kill()], save_freq=3)
    assert [path.name for path in Path(directory).glob("epoch-*")] == ["epoch-2-iteration-18"]
    _, counted, epochs = _train(directory, 3)
    assert epochs == [2]  # from the beginning of the epoch, as with Keras
    assert int(counted.iterations) == counted.compression_state()["step"] == 18 + 8


@on_ranks(2, env=ENV)
def test_a_backup_of_several_optimizers() -> None:
    import keras
    from keras_checks import assert_alike, data, fit, shared_directory

    from gradcomp.core.errors import ConfigError
    from gradcomp.tf import callbacks

    class Kill(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise _Killed

    x, y, _, _ = data()

    def train(directory: str, after: Any = ()) -> list[Any]:
        ours = _adversaries(3)
        ours.built = True
        both = [ours.critic_optimizer, ours.others["generator"]]
        for one, part in zip(both, (ours.critic, ours.generator), strict=True):
            one.build(part.trainable_variables)
        fit(ours, x, y, epochs=3, callbacks=[callbacks.BackupAndRestore(directory), *after])
        assert [one.compression_state()["step"] for one in both] == [24, 24]
        residuals = [
            np.asarray(each) for one in both for each in one.compression_state()["residuals"].values()
        ]
        variables = [*ours.weights, *both[0].variables, *both[1].variables]
        assert_alike(variables)
        return [*map(np.asarray, variables), *residuals]

    directory = shared_directory()
    with pytest.raises(_Killed):
        train(directory, [Kill()])
    for mine, theirs in zip(train(directory), train(shared_directory()), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    ours = _adversaries(3)
    for message in ("a model that is built", r"build\(variables\) of critic_optimizer, others-generator"):
        with pytest.raises(ConfigError, match=message):
            fit(ours, x, y, callbacks=[callbacks.BackupAndRestore(shared_directory())])
        ours.built = True


@on_ranks(2, env=ENV)
def test_a_backup_that_was_not_finished_leaves_the_one_before() -> None:
    import json
    from pathlib import Path

    from keras_checks import shared_directory

    from gradcomp.core.errors import StateError
    from gradcomp.job import runtime
    from gradcomp.tf.callbacks import backup
    from gradcomp.tf.objects import broadcast_object

    directory = shared_directory()
    real, calls = backup.save, []

    def dies_the_second_time(path: Any, optimizer: Any) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise _Killed
        real(path, optimizer)

    def train_until_it_dies() -> None:
        calls.clear()
        backup.save = dies_the_second_time
        try:
            _train(directory, 3)
        finally:
            backup.save = real

    with pytest.raises(_Killed):
        train_until_it_dies()
    assert len(list(Path(directory).glob("epoch-*"))) == 2
    _, _, epochs = _train(directory, 2)
    assert epochs == [1]

    # Weights and compression state of different moments.
    with pytest.raises(_Killed):
        train_until_it_dies()
    if runtime.rank() == 0:
        metadata = Path(directory) / "epoch-1-iteration-8" / "training_metadata.json"
        found = json.loads(metadata.read_text())
        metadata.write_text(json.dumps({**found, "step": 7}))
    broadcast_object(None)
    with pytest.raises(StateError, match=r"step 7.*step 8"):
        _train(directory, 3)
    broadcast_object(None)
    if runtime.rank() == 0:
        (Path(directory) / "epoch-1-iteration-8" / "latest.weights.h5").write_bytes(b"no weights")
    broadcast_object(None)
    with pytest.raises(StateError, match="cannot be read"):
        _train(directory, 3)

    # A name that leads out of the directory.
    broadcast_object(None)
    if runtime.rank() == 0:
        (Path(directory) / "latest").write_text(f"../{Path(directory).name}/epoch-1-iteration-8")
    broadcast_object(None)
    with pytest.raises(StateError, match="not the name of a backup"):
        _train(directory, 3)


@on_ranks(2, env=ENV)
def test_random_states_that_one_rank_cannot_write_or_read_are_an_error_on_both() -> None:
    from pathlib import Path

    import keras
    import numpy as np
    from keras_checks import shared_directory

    from gradcomp.core.errors import GradcompError
    from gradcomp.job import runtime
    from gradcomp.tf.objects import broadcast_object

    directory = shared_directory()
    real = np.savez

    def on_a_full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    def kill_in_the_second(epoch: int, _: Any = None) -> None:
        if epoch == 1:
            raise _Killed

    if runtime.rank() == 1:
        np.savez = on_a_full_disk
    try:
        with pytest.raises(GradcompError, match=r"rank 1: .*No space left"):
            _train(directory, 1)
    finally:
        np.savez = real
    with pytest.raises(_Killed):
        _train(directory, 2, [keras.callbacks.LambdaCallback(on_epoch_begin=kill_in_the_second)])
    for file in Path(directory).rglob("random-1-of-2.npz") if runtime.rank() == 1 else ():
        file.write_bytes(b"no states")
    broadcast_object(None)
    with pytest.raises(GradcompError, match="rank 1: "):
        _train(directory, 2)


@on_ranks(2, env=ENV)
def test_bad_backups() -> None:
    import keras
    from keras_checks import data, fit, shared_directory

    from gradcomp.core.errors import ConfigError
    from gradcomp.tf.callbacks import BackupAndRestore
    from gradcomp.tf.optimizer import DistributedOptimizer

    for frequency in ("batch", 0, 1.5, False):
        with pytest.raises(ConfigError, match="save_freq"):
            BackupAndRestore("somewhere", save_freq=frequency)
    x, y, _, _ = data()
    unbuilt = keras.Sequential([keras.layers.Dense(3)])
    unbuilt.compile(optimizer=DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    with pytest.raises(ConfigError, match="built before fit"):
        fit(unbuilt, x, y, callbacks=[BackupAndRestore(shared_directory())])


@on_ranks(2, env=ENV)
def test_callbacks_under_horovods_names() -> None:
    import keras
    from keras_checks import assert_alike, data, fit, model

    import gradcomp.tf.keras as hvd
    from gradcomp.core.errors import ConfigError

    x, y, _, _ = data(batches=2)
    ours = model(seed=hvd.rank())
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.4))
    ours.compile(optimizer=optimizer, loss="mse")
    own = ours.layers[1].bias
    own.assign([float(hvd.rank())] * 3)
    optimizer.register_local_var(own)
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            seen.append(np.asarray(own).tolist())

    called = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(1, "", [own]),
        Look(),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(0.4, 2),
        hvd.callbacks.LearningRateScheduleCallback(0.4, 0.5, start_epoch=2, momentum_correction=False),
    ]
    history = fit(ours, x, y, epochs=4, callbacks=called).history
    assert seen == [[float(hvd.rank())] * 3]
    assert_alike([v for v in ours.weights if v is not own], optimizer.variables)
    np.testing.assert_allclose(history["lr"], [0.3, 0.4, 0.4, 0.2], rtol=1e-6)
    np.testing.assert_allclose(history["loss"], hvd.allreduce(history["loss"]), rtol=1e-6)
    with pytest.raises(ConfigError, match="local_variables"):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[1.0])


A_LOSS_THAT_IS_NO_NUMBER = """
import sys
import keras
from keras_checks import data, fit, model
import gradcomp.tf as gc
from gradcomp.exchange import deadlock

deadlock.PROOF_SECONDS = 1.0
gc.init(timeout_seconds=60)
ours = model()
ours.compile(optimizer=gc.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
x, y, _, _ = data()
if gc.rank() == 0:
    x[4:8] = float("nan")
callbacks = [gc.callbacks.BroadcastGlobalVariables(0), gc.callbacks.MetricAverage(), keras.callbacks.TerminateOnNaN()]
try:
    fit(ours, x, y, callbacks=callbacks)
    print("no error")
except gc.TransportError as error:
    print(error)
"""


def test_ranks_of_which_one_stops_at_a_loss_that_is_no_number_end_together() -> None:
    """It waits in the average of the epoch's metrics, and the others in the next batch's step."""
    ends = run_ranks(A_LOSS_THAT_IS_NO_NUMBER, 2, env=ENV, timeout=60, imported=preloaded.TENSORFLOW)
    for end in ends:
        assert end.returncode == 0, end.stderr
        assert "the ranks wait for each other, and none can go on" in end.stdout, end.stdout + end.stderr
        assert re.search(r"rank 0 \(host \S+\) waits in MetricAverage", end.stdout)
        assert re.search(r"rank 1 \(host \S+\) waits in step 2", end.stdout)

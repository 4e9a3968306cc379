"""Callbacks of ``fit``, on two ranks."""

# ruff: noqa: E402

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import preloaded
import pytest
from batch import on_ranks
from launching import run_ranks
from logs import logged

tf = pytest.importorskip("tensorflow")

import keras
from keras.callbacks import Callback
from keras.optimizers import SGD
from keras_checks import (
    ENV,
    INPUTS,
    assert_alike,
    assert_close,
    assert_equal,
    compiled,
    compression,
    data,
    fit,
    model,
    new_names,
    shared_directory,
)

import gradcomp.tf as gc
import gradcomp.tf.keras as hvd
from gradcomp.job import preemption
from gradcomp.tf import backup, callbacks


def begins(look: Any) -> Any:
    """A callback that looks when training begins."""
    return keras.callbacks.LambdaCallback(on_train_begin=lambda _: look())


@on_ranks(2, env=ENV)
def test_broadcast_makes_ranks_alike_before_the_first_step() -> None:
    x, y, _, _ = data()
    optimizer = gc.DistributedOptimizer(SGD(0.1 + gc.rank(), momentum=0.9))
    ours = compiled(optimizer, model(seed=gc.rank()))
    fit(ours, x, y, callbacks=[callbacks.BroadcastGlobalVariables(1)])
    assert_alike(ours.weights, optimizer.variables)
    assert float(optimizer.learning_rate) == pytest.approx(1.1)  # rank 1's
    with pytest.raises(gc.ConfigError, match="no DistributedOptimizer"):
        fit(compiled("sgd"), x, y, callbacks=[callbacks.BroadcastGlobalVariables(0)])


def adversaries(
    seed: int, wrapped: tuple[bool, bool] = (True, True), built: bool = True, eagerly: bool = True
) -> Any:
    """A generator and its critic, each with an optimizer of its own, in one model with its own ``train_step``."""

    def mean_square(x: Any) -> Any:
        return tf.reduce_mean(tf.square(x))

    class Adversaries(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.generator, self.critic = (
                keras.Sequential([keras.layers.Dense(inner, activation="tanh"), keras.layers.Dense(outer)])
                for inner, outer in ((16, 3), (8, 1))
            )

        def compile(self, critic_optimizer: Any, others: Any) -> None:  # type: ignore[override]
            super().compile(run_eagerly=eagerly)
            self.critic_optimizer, self.others = critic_optimizer, others

        def train_step(self, batch: Any) -> Any:
            x, real = batch
            with tf.GradientTape(persistent=True) as tape:
                fake = self.critic(self.generator(x))
                loss = mean_square(fake)
                critic_loss = mean_square(fake - 1.0) + mean_square(self.critic(real))
            for optimizer, part, its_loss in (
                (self.critic_optimizer, self.critic, critic_loss),
                (self.others["generator"], self.generator, loss),
            ):
                variables = part.trainable_variables
                optimizer.apply(tape.gradient(its_loss, variables), variables)
            return {"loss": loss}

    new_names()
    keras.utils.set_random_seed(seed)
    ours = Adversaries()
    if built:
        ours.critic(ours.generator(np.zeros((1, INPUTS), np.float32)))
    optimizers = [
        gc.DistributedOptimizer(one, compression=compression()) if wrap else one
        for one, wrap in zip((keras.optimizers.Adam(0.01), SGD(0.1)), wrapped, strict=True)
    ]
    ours.compile(optimizers[0], {"generator": optimizers[1]})
    return ours


@on_ranks(2, env=ENV)
def test_a_model_with_two_optimizers_and_its_own_train_step() -> None:
    x, y, _, _ = data(batches=3)
    for built in (True, False):
        ours = adversaries(gc.rank(), built=built, eagerly=not built)
        called = [callbacks.BroadcastGlobalVariables(1), callbacks.MetricAverage(), callbacks.Progress()]
        if built:
            called.insert(1, begins(lambda ours=ours: assert_alike(ours.weights)))
        with logged() as lines:
            fit(ours, x, y, callbacks=called)
        both = [ours.critic_optimizer, ours.others["generator"]]
        assert_alike(ours.weights, both[0].variables, both[1].variables)
        counted = [one.statistics() for one in both]
        ratio = sum(one.dense_bytes for one in counted) / sum(one.wire_bytes for one in counted)
        said = [line for line in lines if "steps/s" in line]
        assert len(said) == (1 if gc.rank() == 0 else 0)
        assert all(line.endswith(f"ratio {ratio:.2f}") for line in said), (said, ratio)
        assert not any("not a DistributedOptimizer" in line for line in lines)

    with logged() as lines:
        fit(adversaries(1, (True, False)), x, y, callbacks=[callbacks.BroadcastGlobalVariables(1)])
    assert any("others" in line and "not a DistributedOptimizer" in line for line in lines), lines
    with pytest.raises(gc.ConfigError, match="no DistributedOptimizer"):
        fit(adversaries(1, (False, False)), x, y, callbacks=[callbacks.BroadcastGlobalVariables(1)])
    with pytest.raises(gc.StateError, match=r"dense.*/kernel"):  # as it is, not as TensorFlow's
        fit(adversaries(gc.rank(), eagerly=False), x, y)


@on_ranks(2, env=ENV)
def test_broadcast_of_a_model_that_its_first_batch_builds() -> None:
    x, y, _, _ = data()

    def unbuilt(**compiling: Any) -> Any:
        keras.utils.set_random_seed(gc.rank())
        one = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(3)])
        return compiled(gc.DistributedOptimizer(keras.optimizers.Adam(0.1)), one, **compiling)

    ours = unbuilt()
    fit(ours, x, y, callbacks=[callbacks.BroadcastGlobalVariables(0)])
    assert_alike(ours.weights, ours.optimizer.variables)
    with pytest.raises(gc.ConfigError, match="build it before fit"):
        fit(unbuilt(steps_per_execution=4), x, y, callbacks=[callbacks.BroadcastGlobalVariables(0)])


@on_ranks(2, env=ENV)
def test_metrics_are_means_over_ranks() -> None:
    def own(epoch: int, logs: Any) -> None:
        logs |= {"mine": float(gc.rank() * 2), "text": f"rank {gc.rank()}"}
        seen.append(logs["loss"])

    x, y, whole_x, whole_y = data()
    seen: list[float] = []
    ours = compiled(gc.DistributedOptimizer(SGD(0.0)))
    average = callbacks.MetricAverage()
    called = [keras.callbacks.LambdaCallback(on_epoch_end=own), average]
    history = fit(ours, x, y, callbacks=called).history
    assert history["mine"] == [1.0]
    assert history["text"] == [f"rank {gc.rank()}"]
    assert history["loss"] == [pytest.approx(ours.evaluate(whole_x, whole_y, verbose=0), rel=1e-5)]
    assert seen[0] != history["loss"][0]
    with pytest.raises(gc.PlanMismatchError):
        average.on_epoch_end(0, {"loss": 1.0, f"only on {gc.rank()}": 2.0})
    logs = {"loss": float(gc.rank())}
    average.on_epoch_end(0, logs)  # the next call is sound again
    assert logs == {"loss": 0.5}


@on_ranks(2, env=ENV)
def test_learning_rates_follow_epochs() -> None:
    class Rates(Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            rates.append(float(self.model.optimizer.learning_rate))

    x, y, _, _ = data(batches=4)
    rates: list[float] = []
    called = [
        callbacks.LearningRateWarmup(0.08, warmup_epochs=2, verbose=1),
        callbacks.LearningRateSchedule(0.08, 0.25, start_epoch=2, end_epoch=3),
        callbacks.LearningRateSchedule(0.08, lambda epoch: epoch, start_epoch=3, staircase=False),
        Rates(),
    ]
    ours = compiled(gc.DistributedOptimizer(SGD(0.001, momentum=0.5)))
    history = fit(ours, x, y, epochs=4, callbacks=called).history
    expected = [0.08 / 2 * ((i + 1) / 4 / 2 + 1) for i in range(8)]  # from 0.04 to 0.08
    expected += [0.02] * 4 + [0.08 * (3 + i / 4) for i in range(4)]
    assert rates == pytest.approx(expected, rel=1e-6)
    assert history["learning_rate"] == pytest.approx([expected[i] for i in (3, 7, 11, 15)], rel=1e-6)

    schedule = keras.optimizers.schedules.ExponentialDecay(0.2, 2, 0.5)
    decaying = compiled(gc.DistributedOptimizer(SGD(schedule)))
    with pytest.raises(gc.ConfigError, match="which cannot be set"):
        fit(decaying, x, y, callbacks=[callbacks.LearningRateWarmup(0.1)])
    with pytest.raises(gc.ConfigError, match="initial_lr"):
        callbacks.LearningRateSchedule(0.0, 1.0)


@on_ranks(2, env=ENV)
def test_momentum_is_corrected_in_a_traced_function() -> None:
    x, y, whole_x, whole_y = data(batches=6)
    rates, momentum = [0.1, 0.02, 0.3], 0.9
    ours, alone = model(), model()
    optimizer = gc.DistributedOptimizer(SGD(rates[0], momentum=momentum))
    schedule = callbacks.LearningRateSchedule(1.0, rates.__getitem__)
    fit(compiled(optimizer, ours), x, y, epochs=3, callbacks=[schedule])
    assert_alike(ours.weights, optimizer.variables)
    if gc.rank() > 0:
        return  # its weights are rank 0's
    # The same by hand: v = momentum * (new / old) v - new * g in the step that changes the rate.
    velocity = [np.zeros_like(w) for w in alone.get_weights()]
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
    assert_close(ours.get_weights(), alone.get_weights(), rtol=1e-3, atol=1e-5)


@on_ranks(2, env=ENV)
def test_progress_says_what_is_saved() -> None:
    x, y, _, _ = data(batches=6)
    ours = compiled(gc.DistributedOptimizer(SGD(0.1), compression=compression()))
    with logged() as lines:
        fit(ours, x, y, epochs=2, callbacks=[callbacks.Progress(every_steps=4)])
    said = [line for line in lines if "steps/s" in line]
    if gc.rank() > 0:
        assert not said
        return
    heads = [line.partition(":")[0] for line in said]
    assert heads == ["epoch 1, step 4", "epoch 1", "epoch 2, step 4", "epoch 2"]
    ratio = float(said[-1].rpartition("ratio ")[2])
    assert ratio == pytest.approx(ours.optimizer.statistics().ratio, rel=0.2)
    assert ratio > 1.5


@on_ranks(2, env=ENV)
def test_the_pages_callbacks_write_the_metrics_of_epochs_and_batches() -> None:
    x, y, _, _ = data(batches=20)
    ours = compiled(gc.DistributedOptimizer(SGD(0.1), compression=compression()))
    names = set(ours.optimizer.compression_metrics())
    with pytest.raises(gc.ConfigError, match="every_steps must be at least 1, got 0"):
        callbacks.CompressionMetrics(0)
    page = (Path(__file__).resolve().parents[2] / "docs/watch.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^### Keras\n+```python\n(.*?)```", page, re.M | re.S)
    folder = Path(shared_directory()) / str(gc.rank())
    folder.mkdir()
    has_tensorboard = find_spec("tensorboard") is not None  # without it, Keras cannot write these files
    if not has_tensorboard:
        code = re.sub(r"\n.*TensorBoard.*", "", code)
    for file in ("history.csv", "runs"):
        code = code.replace(f'"{file}"', f'"{folder / file}"')
    found = {"gc": gc, "keras": keras, "model": ours, "x": x, "y": y}
    exec(code.replace("epochs=2", "epochs=2, verbose=0"), found)
    history = found["history"].history
    assert names <= history.keys()
    assert history["gradcomp/steps"] == [20, 40]
    assert all(ratio > 1.5 for ratio in history["gradcomp/ratio"])
    rows = (folder / "history.csv").read_text().splitlines()
    assert names <= set(rows[0].split(","))
    assert len(rows) == 3
    if has_tensorboard:
        files = map(str, (folder / "runs").rglob("events.*"))
        events = [event for file in files for event in tf.compat.v1.train.summary_iterator(file)]
        written = [value.tag for event in events for value in event.summary.value]
        assert written.count("epoch_gradcomp/ratio") == 2
        assert written.count("batch_gradcomp/ratio") == 4, "the tenth and the twentieth batch of two epochs"


class Killed(Exception):
    """Stands for a kill."""


class Kill(Callback):
    """Kills training where ``count`` batches have ended and the next one is about to, or before an epoch."""

    def __init__(self, count: int = -1, epoch: int = -1) -> None:
        super().__init__()
        self.count, self.epoch = count, epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.count == 0:
            raise Killed
        self.count -= 1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == self.epoch:
            raise Killed


def train(
    directory: str,
    epochs: int,
    after: Any = (),
    *,
    save_freq: Any = "epoch",
    batches: int = 3,
    eagerly: bool = True,
) -> Any:
    """A model with a random layer, trained from its beginning or from the backup; and the epochs that it trained."""
    x, y, _, _ = data(batches=batches)
    optimizer = gc.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=compression())
    ours = compiled(optimizer, model(3, dropout=0.3), run_eagerly=eagerly)
    called = [callbacks.BackupAndRestore(directory, save_freq=save_freq), *after]
    return ours, optimizer, fit(ours, x, y, epochs=epochs, callbacks=called).epoch


def backups(directory: str) -> list[str]:
    return [path.name for path in Path(directory).glob("epoch-*")]


@on_ranks(2, env=ENV)
def test_training_goes_on_after_a_kill_bit_for_bit() -> None:
    directory, other = shared_directory(), shared_directory()
    traced = {"batches": 8, "eagerly": False}
    whole, optimizer, _ = train(other, 3, **traced)
    with pytest.raises(Killed):
        train(directory, 3, [Kill(19)], **traced)  # in the middle of the third epoch
    assert backups(directory) == ["epoch-2-iteration-16"]
    resumed, again, epochs = train(directory, 3, **traced)
    assert epochs == [2]
    assert_equal([*whole.weights, *optimizer.variables], [*resumed.weights, *again.variables])
    state, resumed_state = optimizer.compression_state(), again.compression_state()
    assert state["step"] == resumed_state["step"] == 24
    assert state["rate"] == pytest.approx(0.01)
    assert any(np.abs(residual).max() > 0 for residual in state["residuals"].values())
    for name, residual in state["residuals"].items():
        assert np.array_equal(residual, resumed_state["residuals"][name]), name
    assert_alike(resumed.weights, again.variables)
    gc.broadcast_object(None)  # rank 0 has removed what there was
    assert not Path(directory).exists()

    with pytest.raises(Killed):
        train(directory, 3, [Kill(8)], save_freq=2)
    assert backups(directory) == ["epoch-2-iteration-8"]
    _, counted, epochs = train(directory, 3)
    assert epochs == [2]  # from the beginning of the epoch, as with Keras
    assert int(counted.iterations) == counted.compression_state()["step"] == 8 + 3


@contextmanager
def told_nothing() -> Iterator[None]:
    """The process handles SIGTERM, and begins as one that was told nothing."""
    process = preemption.process
    gc.handle_preemption()
    try:
        yield
    finally:
        preemption.restore()
        process.requested = process.agreed = False


class Preempt(Callback):
    """Rank 1 gets SIGTERM before the batch with this number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0 and gc.rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)


@on_ranks(2, env=ENV)
def test_a_preempted_fit_backs_up_and_ends_after_the_same_batch() -> None:
    directory, other = shared_directory(), shared_directory()
    traced = {"batches": 8, "eagerly": False}
    whole, optimizer, _ = train(other, 3, **traced)
    for number, backed_up, left in ((8, "epoch-1-iteration-8", [1, 2]), (12, "epoch-1-iteration-12", [1])):
        with told_nothing():
            _, _, epochs = train(directory, 3, [Preempt(number)], **traced)
            assert gc.preempted()
        assert epochs == [0, 1][: -(-number // 8)]
        assert backups(directory) == [backed_up]
        if number == 8:  # with its last batch the epoch is over
            resumed, again, epochs = train(directory, 3, **traced)
            assert_equal([*whole.weights, *optimizer.variables], [*resumed.weights, *again.variables])
        else:
            _, again, epochs = train(directory, 2, **traced)
            assert int(again.iterations) == again.compression_state()["step"] == 12 + 8
        assert epochs == left
        gc.broadcast_object(None)  # rank 0 has removed the backup


@on_ranks(2, env=ENV)
def test_a_tape_tells_the_others_and_a_function_cannot_ask() -> None:
    weight = tf.Variable([1.0, 2.0])
    with told_nothing():
        if gc.rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        assert not gc.preempted()
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight**2)
        gc.DistributedGradientTape(tape).gradient(loss, [weight])
        assert gc.preempted()
        with pytest.raises(gc.StateError, match="would be a constant"):
            tf.function(gc.preempted, autograph=False)()


@on_ranks(2, env=ENV)
def test_a_backup_of_several_optimizers() -> None:
    x, y, _, _ = data(batches=2)

    def train_both(directory: str, after: Any = ()) -> list[Any]:
        ours = adversaries(3)
        ours.built = True
        both = [ours.critic_optimizer, ours.others["generator"]]
        for one, part in zip(both, (ours.critic, ours.generator), strict=True):
            one.build(part.trainable_variables)
        fit(ours, x, y, epochs=3, callbacks=[callbacks.BackupAndRestore(directory), *after])
        states = [one.compression_state() for one in both]
        assert [state["step"] for state in states] == [6, 6]
        variables = [*ours.weights, *both[0].variables, *both[1].variables]
        assert_alike(variables)
        return [*map(np.asarray, variables), *(each for s in states for each in s["residuals"].values())]

    directory = shared_directory()
    with pytest.raises(Killed):
        train_both(directory, [Kill(epoch=2)])
    assert_equal(train_both(directory), train_both(shared_directory()))
    ours = adversaries(3)
    for message in ("a model that is built", r"build\(variables\) of critic_optimizer, others-generator"):
        with pytest.raises(gc.ConfigError, match=message):
            fit(ours, x, y, callbacks=[callbacks.BackupAndRestore(shared_directory())])
        ours.built = True


@on_ranks(2, env=ENV)
def test_a_backup_that_was_not_finished_leaves_the_one_before() -> None:
    directory = shared_directory()
    first = Path(directory) / "epoch-1-iteration-3"
    real, calls = backup.save, []

    def dies_the_second_time(path: Any, optimizer: Any) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise Killed
        real(path, optimizer)

    def train_until_it_dies() -> None:
        calls.clear()
        backup.save = dies_the_second_time
        try:
            with pytest.raises(Killed):
                train(directory, 3)
        finally:
            backup.save = real

    train_until_it_dies()
    assert len(backups(directory)) == 2
    assert train(directory, 2)[2] == [1]
    train_until_it_dies()

    def of_another_moment() -> None:
        metadata = first / "training_metadata.json"
        metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "step": 2}))

    def leads_out_of_the_directory() -> None:
        (Path(directory) / "latest").write_text(f"../{Path(directory).name}/{first.name}")

    for spoil, said in (
        (of_another_moment, r"step 2.*step 3"),
        (lambda: (first / "latest.weights.h5").write_bytes(b"no weights"), "cannot be read"),
        (leads_out_of_the_directory, "not the name of a backup"),
    ):
        gc.broadcast_object(None)
        if gc.rank() == 0:
            spoil()
        gc.broadcast_object(None)
        with pytest.raises(gc.StateError, match=said):
            train(directory, 3)


@on_ranks(2, env=ENV)
def test_random_states_that_one_rank_cannot_write_or_read_are_an_error_on_both() -> None:
    directory = shared_directory()

    def on_a_full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if gc.rank() == 1:
            patch.setattr(np, "savez", on_a_full_disk)
        with pytest.raises(gc.GradcompError, match=r"rank 1: .*No space left"):
            train(directory, 1)
    with pytest.raises(Killed):
        train(directory, 2, [Kill(epoch=1)])
    for file in Path(directory).rglob("random-1-of-2.npz") if gc.rank() == 1 else ():
        file.write_bytes(b"no states")
    gc.broadcast_object(None)
    with pytest.raises(gc.GradcompError, match="rank 1: "):
        train(directory, 2)


@on_ranks(2, env=ENV)
def test_bad_backups() -> None:
    for frequency in ("batch", 0, 1.5, False):
        with pytest.raises(gc.ConfigError, match="save_freq"):
            callbacks.BackupAndRestore("somewhere", save_freq=frequency)
    x, y, _, _ = data()
    unbuilt = compiled(gc.DistributedOptimizer(SGD(0.1)), keras.Sequential([keras.layers.Dense(3)]))
    with pytest.raises(gc.ConfigError, match="built before fit"):
        fit(unbuilt, x, y, callbacks=[callbacks.BackupAndRestore(shared_directory())])


@on_ranks(2, env=ENV)
def test_callbacks_under_horovods_names() -> None:
    x, y, _, _ = data(batches=2)
    optimizer = hvd.DistributedOptimizer(SGD(0.4))
    ours = compiled(optimizer, model(seed=hvd.rank()))
    own, seen = ours.layers[1].bias, []
    own.assign([float(hvd.rank())] * 3)
    optimizer.register_local_var(own)
    called = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(1, "", [own]),
        begins(lambda: seen.append(np.asarray(own).tolist())),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(0.4, 2),
        hvd.callbacks.LearningRateScheduleCallback(0.4, 0.5, start_epoch=2, momentum_correction=False),
    ]
    history = fit(ours, x, y, epochs=4, callbacks=called).history
    assert seen == [[float(hvd.rank())] * 3]
    assert_alike([v for v in ours.weights if v is not own], optimizer.variables)
    np.testing.assert_allclose(history["lr"], [0.3, 0.4, 0.4, 0.2], rtol=1e-6)
    np.testing.assert_allclose(history["loss"], hvd.allreduce(history["loss"]), rtol=1e-6)
    with pytest.raises(gc.ConfigError, match="local_variables"):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[1.0])


A_LOSS_THAT_IS_NO_NUMBER = """
import sys
import keras
from keras_checks import compiled, data, fit
import gradcomp.tf as gc
from gradcomp.exchange import deadlock

deadlock.PROOF_SECONDS = 1.0
gc.init(timeout_seconds=60)
ours = compiled(gc.DistributedOptimizer(keras.optimizers.SGD(0.1)))
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

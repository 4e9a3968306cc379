"""Saved models, copies, and compression state in TensorFlow's checkpoints."""

# ruff: noqa: E402

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from batch import on_ranks

tf = pytest.importorskip("tensorflow")

import keras
from keras.optimizers import SGD, Adam, LossScaleOptimizer
from keras_checks import (
    ENV,
    assert_alike,
    assert_equal,
    compiled,
    compression,
    data,
    fit,
    model,
    shared_directory,
    world_of_one,
)

import gradcomp.tf as gc
import gradcomp.tf.keras as hvd
from gradcomp.exchange.checkpoint_manager import checkpoint_manager_of
from gradcomp.tf.optimizer import Distributed

#: Loads a model, and trains it on, where gradcomp cannot be imported.
WITHOUT_GRADCOMP = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "gradcomp":
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
import keras, numpy, pickle
try:
    import gradcomp
except ImportError:
    pass
else:
    raise SystemExit("gradcomp could be imported")
model = keras.saving.load_model(sys.argv[1])
assert type(model.optimizer) is keras.optimizers.Adam, type(model.optimizer)
assert int(model.optimizer.iterations) == 8, model.optimizer.iterations
assert any(numpy.abs(v.numpy()).max() > 0 for v in model.optimizer.variables[2:])
model.fit(numpy.ones((8, 8), "float32"), numpy.ones((8, 3), "float32"), verbose=0)
with open(sys.argv[2], "rb") as stream:
    assert type(pickle.load(stream)) is keras.optimizers.Adam
print("trained on")
"""


def trained() -> tuple[Any, Any]:
    """A model and its distributed optimizer after 8 steps."""
    x, y, _, _ = data()
    optimizer = gc.DistributedOptimizer(Adam(0.01), compression=compression())
    ours = compiled(optimizer, metrics=["mae"])
    fit(ours, x, y)
    return ours, optimizer


@keras.saving.register_keras_serializable(package="tests")
class Custom(SGD):
    """An optimizer of the user's."""


@on_ranks(2, env=ENV)
def test_it_serialises_as_the_plain_optimizer() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.2, 2, 0.5)
    for optimizer in (
        SGD(0.1, momentum=0.9),
        keras.optimizers.AdamW(schedule, weight_decay=0.1, use_ema=True),
        LossScaleOptimizer(Adam(0.1)),
        Custom(0.1),
    ):
        before, config = keras.saving.serialize_keras_object(optimizer), optimizer.get_config()
        gc.DistributedOptimizer(optimizer, compression="quantize:bits=4")
        assert isinstance(optimizer, Distributed)
        assert keras.saving.serialize_keras_object(optimizer) == before
        assert optimizer.get_config() == config
        for made in (
            copy.copy(optimizer),
            copy.deepcopy(optimizer),
            keras.saving.deserialize_keras_object(before),
        ):
            assert not isinstance(made, Distributed)
            assert type(made) is optimizer.__class__
            assert made.get_config() == config
    assert type(pickle.loads(pickle.dumps(gc.DistributedOptimizer(SGD(0.1))))) is SGD


@pytest.mark.full
@on_ranks(2, env=ENV)
def test_a_saved_model_loads_without_gradcomp() -> None:
    directory = Path(shared_directory())
    ours, optimizer = trained()
    if gc.rank() == 0:  # meanwhile the other rank is done
        saved = directory / "model.keras", directory / "optimizer.pickle"
        ours.save(saved[0])
        saved[1].write_bytes(pickle.dumps(optimizer))
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        command = [sys.executable, "-c", WITHOUT_GRADCOMP, *map(str, saved)]
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=50, check=False
        )
        assert ended.stdout == "trained on\n", ended.stderr[-2000:]


@on_ranks(2, env=ENV)
def test_a_loaded_model_trains_on() -> None:
    directory = Path(shared_directory())
    ours, optimizer = trained()
    bare = model()  # on all ranks: Keras numbers layers
    if gc.rank() == 0:
        ours.save(directory / "model.keras")
        bare.save(directory / "bare.keras")
    gc.save(directory / "compression", optimizer)
    without = gc.load_model(directory / "model.keras", compression())
    checkpoint_manager = checkpoint_manager_of(without.optimizer)
    assert checkpoint_manager.awaited is True  # the first step says that there is more
    state = directory / "compression"
    again = gc.load_model(directory / "model.keras", compression(), compression_state=state)
    assert isinstance(again.optimizer, Distributed)
    assert checkpoint_manager_of(again.optimizer).awaited is False
    x, y, _, _ = data(seed=6)
    for one in (ours, again):
        fit(one, x, y)
    assert_equal([*ours.weights, *optimizer.variables], [*again.weights, *again.optimizer.variables])
    assert_alike(again.weights)
    assert "mae" in again.history.history
    gc.broadcast_object(None)
    with pytest.raises(gc.ConfigError, match="without an optimizer"):
        gc.load_model(directory / "bare.keras")

    scaled = compiled(gc.DistributedOptimizer(LossScaleOptimizer(SGD(0.1)), compression=compression()))
    scaled.optimizer.build(scaled.trainable_variables)
    if gc.rank() == 0:
        scaled.save(directory / "scaled.keras")
    gc.broadcast_object(None)
    loaded = gc.load_model(directory / "scaled.keras", compression())
    assert isinstance(loaded.optimizer, LossScaleOptimizer)
    fit(loaded, x, y)
    assert_alike(loaded.weights, loaded.optimizer.variables)


@on_ranks(2, env=ENV)
def test_compression_state_in_a_checkpoint_of_tensorflow() -> None:
    path = str(Path(shared_directory()) / f"rank-{gc.rank()}")
    ours, optimizer = trained()
    saved = tf.train.Checkpoint(model=ours, optimizer=optimizer, compression=gc.CompressionState(optimizer))
    where = saved.write(path)
    other = gc.DistributedOptimizer(Adam(0.5), compression=compression())
    with pytest.raises(gc.StateError, match="not built"):
        gc.CompressionState(other).serialize()
    again = compiled(other, model(seed=9), metrics=["mae"])
    other.build(again.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=again, optimizer=other, compression=gc.CompressionState(other))
    checkpoint.read(where).assert_existing_objects_matched()
    x, y, _, _ = data(seed=6)
    for one in (ours, again):
        fit(one, x, y)
    assert_equal([*ours.weights, *optimizer.variables], [*again.weights, *other.variables])
    residuals, read = (one.compression_state()["residuals"] for one in (optimizer, other))
    assert residuals.keys() == read.keys()
    assert_equal(residuals.values(), read.values())
    with pytest.raises(gc.ConfigError, match="DistributedOptimizer"):
        gc.CompressionState(SGD(0.1))
    with pytest.raises(gc.StateError):
        other.load_compression_state({"residuals": {}})


def test_horovods_load_model_knows_optimizers_of_ones_own(tmp_path: Path) -> None:
    class Own(SGD):
        pass

    with world_of_one():
        compiled(Own(0.25)).save(tmp_path / "model.keras")
        found = hvd.load_model(tmp_path / "model.keras", custom_optimizers=[Own], compression="fp16")
        assert isinstance(found.optimizer, Distributed)
        assert isinstance(found.optimizer, Own)
        assert float(found.optimizer.learning_rate) == 0.25
        with pytest.raises(hvd.ConfigError, match="legacy"):
            hvd.load_model(tmp_path / "model.keras", legacy_opts=True)


@pytest.mark.parametrize("eagerly", [True, False])
def test_in_a_world_of_one_a_state_without_its_model_is_refused(eagerly: bool, tmp_path: Path) -> None:
    with world_of_one():
        x, y, _, _ = data()
        one = compiled(gc.DistributedOptimizer(SGD(0.1), compression=compression()), run_eagerly=eagerly)
        fit(one, x, y)
        gc.save(tmp_path, one.optimizer)
        other = compiled(gc.DistributedOptimizer(SGD(0.1), compression=compression()), run_eagerly=eagerly)
        other.optimizer.build(other.trainable_variables)
        gc.load(tmp_path, other.optimizer)
        with pytest.raises(gc.StateError, match="is not what it was at step"):
            fit(other, x, y)
        other.set_weights(one.get_weights())
        fit(other, x, y)

"""Saved models, copies, and compression state in TensorFlow's checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batch import on_ranks

pytest.importorskip("tensorflow")

ENV = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}

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


def _trained() -> tuple[Any, Any]:
    """A model and its distributed optimizer after 8 steps."""
    import keras
    from keras_checks import compression, data, fit, model

    from gradcomp.tf.optimizer import DistributedOptimizer

    x, y, _, _ = data()
    ours = model()
    opt = DistributedOptimizer(keras.optimizers.Adam(0.01), compression=compression())
    ours.compile(optimizer=opt, loss="mse", metrics=["mae"])
    fit(ours, x, y)
    return ours, opt


@on_ranks(2, env=ENV)
def test_it_serialises_as_the_plain_optimizer() -> None:
    import copy
    import pickle

    import keras

    from gradcomp.tf.optimizer import Distributed, DistributedOptimizer

    @keras.saving.register_keras_serializable(package="tests")
    class Custom(keras.optimizers.SGD):
        """An optimizer of the user's."""

    schedule = keras.optimizers.schedules.ExponentialDecay(0.2, 2, 0.5)
    for make in (
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.AdamW(schedule, weight_decay=0.1, use_ema=True),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1)),
        lambda: Custom(0.1),
    ):
        optimizer = make()
        before, config = keras.saving.serialize_keras_object(optimizer), optimizer.get_config()
        DistributedOptimizer(optimizer, compression="quantize:bits=4")
        assert isinstance(optimizer, Distributed)
        assert keras.saving.serialize_keras_object(optimizer) == before
        assert optimizer.get_config() == config
        for twin in (
            copy.copy(optimizer),
            copy.deepcopy(optimizer),
            keras.saving.deserialize_keras_object(before),
        ):
            assert not isinstance(twin, Distributed)
            assert type(twin) is optimizer.__class__
            assert twin.get_config() == config
    assert type(pickle.loads(pickle.dumps(DistributedOptimizer(keras.optimizers.SGD(0.1))))) is (
        keras.optimizers.SGD
    )


@pytest.mark.full
@on_ranks(2, env=ENV)
def test_a_saved_model_loads_without_gradcomp() -> None:
    import pickle
    from pathlib import Path

    from keras_checks import shared_directory

    from gradcomp.job import runtime

    directory = Path(shared_directory())
    ours, optimizer = _trained()
    if runtime.rank() == 0:  # meanwhile the other rank is done
        ours.save(directory / "model.keras")
        (directory / "optimizer.pickle").write_bytes(pickle.dumps(optimizer))
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        ended = subprocess.run(
            [
                sys.executable,
                "-c",
                textwrap.dedent(WITHOUT_GRADCOMP),
                str(directory / "model.keras"),
                str(directory / "optimizer.pickle"),
            ],
            env=environment,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        assert ended.stdout == "trained on\n", ended.stderr[-2000:]


@on_ranks(2, env=ENV)
def test_a_loaded_model_trains_on() -> None:
    from pathlib import Path

    import keras
    from keras_checks import assert_alike, compression, data, fit, model, shared_directory

    from gradcomp.core.errors import ConfigError
    from gradcomp.exchange.checkpoint_manager import checkpoint_manager_of
    from gradcomp.job import runtime
    from gradcomp.job.checkpoint import save
    from gradcomp.tf.objects import broadcast_object
    from gradcomp.tf.optimizer import Distributed, DistributedOptimizer
    from gradcomp.tf.saving import load_model

    directory = Path(shared_directory())
    ours, optimizer = _trained()
    bare = model()  # on all ranks: Keras numbers layers
    if runtime.rank() == 0:
        ours.save(directory / "model.keras")
        bare.save(directory / "bare.keras")
    save(directory / "compression", optimizer)
    without = load_model(directory / "model.keras", compression())
    checkpoint_manager = checkpoint_manager_of(without.optimizer)
    assert checkpoint_manager.awaited is True  # the first step says that there is more
    again = load_model(directory / "model.keras", compression(), compression_state=directory / "compression")
    assert isinstance(again.optimizer, Distributed)
    assert checkpoint_manager_of(again.optimizer).awaited is False
    x, y, _, _ = data(seed=6)
    for one in (ours, again):
        fit(one, x, y)
    for mine, other in zip(
        [*ours.weights, *optimizer.variables], [*again.weights, *again.optimizer.variables], strict=True
    ):
        assert np.array_equal(np.asarray(mine), np.asarray(other)), mine.path
    assert_alike(again.weights)
    assert "mae" in again.history.history
    broadcast_object(None)
    with pytest.raises(ConfigError, match="without an optimizer"):
        load_model(directory / "bare.keras")

    scaled = model()
    inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    scaled.compile(optimizer=DistributedOptimizer(inner, compression=compression()), loss="mse")
    scaled.optimizer.build(scaled.trainable_variables)
    if runtime.rank() == 0:
        scaled.save(directory / "scaled.keras")
    broadcast_object(None)
    loaded = load_model(directory / "scaled.keras", compression())
    assert isinstance(loaded.optimizer, keras.optimizers.LossScaleOptimizer)
    fit(loaded, x, y)
    assert_alike(loaded.weights, loaded.optimizer.variables)


@on_ranks(2, env=ENV)
def test_compression_state_in_a_checkpoint_of_tensorflow() -> None:
    from pathlib import Path

    import keras
    import tensorflow as tf
    from keras_checks import compression, data, fit, model, shared_directory

    from gradcomp.core.errors import ConfigError, StateError
    from gradcomp.job import runtime
    from gradcomp.tf.optimizer import DistributedOptimizer
    from gradcomp.tf.saving import CompressionState

    path = str(Path(shared_directory()) / f"rank-{runtime.rank()}")
    ours, optimizer = _trained()
    saved = tf.train.Checkpoint(model=ours, optimizer=optimizer, compression=CompressionState(optimizer))
    where = saved.write(path)
    again = model(seed=9)
    other = DistributedOptimizer(keras.optimizers.Adam(0.5), compression=compression())
    with pytest.raises(StateError, match="not built"):
        CompressionState(other).serialize()
    other.build(again.trainable_variables)
    again.compile(optimizer=other, loss="mse", metrics=["mae"])
    checkpoint = tf.train.Checkpoint(model=again, optimizer=other, compression=CompressionState(other))
    checkpoint.read(where).assert_existing_objects_matched()
    x, y, _, _ = data(seed=6)
    for one in (ours, again):
        fit(one, x, y)
    for mine, theirs in zip(
        [*ours.weights, *optimizer.variables], [*again.weights, *other.variables], strict=True
    ):
        assert np.array_equal(np.asarray(mine), np.asarray(theirs)), mine.path
    state = optimizer.compression_state()
    for name, residual in other.compression_state()["residuals"].items():
        assert np.array_equal(residual, state["residuals"][name]), name
    with pytest.raises(ConfigError, match="DistributedOptimizer"):
        CompressionState(keras.optimizers.SGD(0.1))
    with pytest.raises(StateError):
        other.load_compression_state({"residuals": {}})


def test_horovods_load_model_knows_optimizers_of_ones_own(tmp_path: Path) -> None:
    import keras
    from keras_checks import model

    import gradcomp.tf.keras as hvd
    from gradcomp.tf.optimizer import Distributed

    class Own(keras.optimizers.SGD):
        pass

    hvd.init(log_level="warning")
    try:
        ours = model()
        ours.compile(optimizer=Own(0.25), loss="mse")
        ours.save(tmp_path / "model.keras")
        found = hvd.load_model(tmp_path / "model.keras", custom_optimizers=[Own], compression="fp16")
        assert isinstance(found.optimizer, Distributed)
        assert isinstance(found.optimizer, Own)
        assert float(found.optimizer.learning_rate) == 0.25
        with pytest.raises(hvd.ConfigError, match="legacy"):
            hvd.load_model(tmp_path / "model.keras", legacy_opts=True)
    finally:
        hvd.shutdown()

"""Ray Train's TorchTrainer and TensorflowTrainer, with the real library and two workers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from documented import block, needs
from launching import run_command

#: Ray gives up where its own processes need more than 30 seconds to start.
pytestmark = [pytest.mark.full, pytest.mark.alone, needs("ray"), needs("pyarrow", "ray")]

#: One Ray serves a run without a failure, and one in which the workers fail once and are started anew.
PROLOGUE = """
import hashlib, json, os, sys
from pathlib import Path
import ray, ray.train
from ray.train import FailureConfig, RunConfig
os.chdir(sys.argv[1])
here = sys.argv[1]

def keep(config, weights):
    rank = ray.train.get_context().get_world_rank()
    Path(f"{config['result']}-{rank}.txt").write_text(hashlib.sha256(weights).hexdigest())

def fail_once(config):
    mark = Path(config["mark"] + str(ray.train.get_context().get_world_rank()))
    if config["fails"] and not mark.exists():
        mark.touch()
        raise RuntimeError("the worker fails")
"""
EPILOGUE = """
ray.init(num_cpus=2, include_dashboard=False, logging_level="error")
for fails in (False, True):
    name = f"fails-{fails}"
    config = {"fails": fails, "mark": f"{here}/mark", "result": f"{here}/{name}", "backup": f"{here}/backup-{name}"}
    run_config = RunConfig(storage_path=here, name=name, failure_config=FailureConfig(max_failures=1))
    run()
    if result.metrics is not None:  # those that were reported with a checkpoint
        Path(f"{name}-fit.json").write_text(json.dumps(result.metrics))
ray.shutdown()
"""
TORCH = """
import torch
from ray.train.torch import TorchTrainer

def make_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

def one_epoch(config, model, optimizer, epoch):
    if epoch == 2:
        fail_once(config)
    source = torch.Generator().manual_seed(10 * epoch + ray.train.get_context().get_world_rank())
    for _ in range(3):
        optimizer.zero_grad()
        inputs, targets = torch.randn(16, 64, generator=source), torch.randint(10, (16,), generator=source)
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()
    keep(config, weights)
    return loss.item()
"""
KERAS = """
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras
import numpy as np
from ray.train.tensorflow import TensorflowTrainer

def make_model():
    keras.utils.set_random_seed(1 + ray.train.get_context().get_world_rank())
    model = keras.Sequential([keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10, activation="softmax")])
    model.build((None, 64))
    return model

def make_data():
    import tensorflow as tf
    source = np.random.default_rng(ray.train.get_context().get_world_rank())
    return tf.data.Dataset.from_tensor_slices(
        (source.normal(size=(48, 64)).astype("float32"), source.integers(10, size=48))
    ).batch(16)

class Reports(keras.callbacks.Callback):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            fail_once(self.config)

    def on_epoch_end(self, epoch, logs=None):
        ray.train.report({**logs, **self.model.optimizer.compression_metrics()})

    def on_train_end(self, logs=None):
        weights = b"".join(np.asarray(weight).tobytes() for weight in self.model.get_weights())
        keep(self.config, weights)
        if ray.train.get_context().get_world_rank() == 0:
            Path(f"{self.config['result']}-fit.json").write_text(json.dumps(self.model.optimizer.compression_metrics()))
"""


def runs(directory: Path, prologue: str, code: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """The weights that both workers have in the end, and metrics, of the run without and with a failure."""
    body, _, call = code.partition("\n\n\n")
    # The module is a script: Ray sends its functions to the workers by value.
    text = "\n".join([
        PROLOGUE, prologue, body, "", "def run():", "    global result",
        *(f"    {line}" for line in call.splitlines()), EPILOGUE,
    ])  # fmt: skip
    script = directory / "script.py"
    script.write_text(text)
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300"}
    ended = run_command([sys.executable, str(script), str(directory)], env=variables, timeout=540)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    found = {}
    for name in ("fails-False", "fails-True"):
        weights, others = [(directory / f"{name}-{rank}.txt").read_text() for rank in range(2)]
        assert weights == others
        found[name] = (weights, json.loads((directory / f"{name}-fit.json").read_text()))
        assert found[name][1]["gradcomp/ratio"] > 3
    assert (directory / "mark0").exists()
    assert (directory / "mark1").exists()
    return found


@pytest.mark.timeout(600)
def test_pytorch_workers_that_fail_go_on_bit_for_bit(tmp_path: Path) -> None:
    found = runs(tmp_path, TORCH, block("Ray Train with PyTorch"))
    (weights, metrics), (resumed, metrics_of_resumed) = found.values()
    assert resumed == weights
    assert (metrics["gradcomp/steps"], metrics_of_resumed["gradcomp/steps"]) == (9, 3)
    assert metrics["loss"] == metrics_of_resumed["loss"]


@pytest.mark.timeout(600)
@needs("tensorflow", "tf")
def test_keras_workers_that_fail_go_on_bit_for_bit(tmp_path: Path) -> None:
    found = runs(tmp_path, KERAS, block("Ray Train with TensorFlow"))
    (weights, metrics), (resumed, metrics_of_resumed) = found.values()
    assert resumed == weights
    assert (metrics["gradcomp/steps"], metrics_of_resumed["gradcomp/steps"]) == (9, 3)

"""What tests of TensorFlow and Keras have in common."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import gradcomp.tf as gc
from gradcomp.job.settings import Arguments
from gradcomp.tf.exchange import Exchange

INPUTS, OUTPUTS = 8, 3
#: For ranks, which have no GPU; and for those with one thread for ops.
ENV = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
ONE_THREAD = {**ENV, "ONE_INTER_OP_THREAD": "1"}
if "ONE_INTER_OP_THREAD" in os.environ:
    tf.config.threading.set_inter_op_parallelism_threads(1)

#: Makes a function run in one of the two ways.
MODES: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "eager": lambda function: function,
    "graph": tf.function,
}


@contextmanager
def world_of_one() -> Iterator[None]:
    gc.init(log_level="warning")
    try:
        yield
    finally:
        gc.shutdown()


def new_names() -> None:
    """Let names of layers begin anew, as in a new process. The garbage that Keras would collect costs more than it."""
    keras.backend.clear_session(free_memory=False)


def model(seed: int = 1, policy: str = "float32", dropout: float | None = None) -> Any:
    """A built perceptron whose initial weights depend on the seed alone."""
    new_names()
    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy(policy)
    try:
        hidden = [keras.layers.Dense(16, activation="tanh")]
        if dropout is not None:
            hidden.append(keras.layers.Dropout(dropout, seed=gc.rank()))
        layers = [keras.layers.Input((INPUTS,)), *hidden, keras.layers.Dense(OUTPUTS)]
        return keras.Sequential(layers, name="model")
    finally:
        keras.config.set_dtype_policy("float32")


def compiled(optimizer: Any, one: Any = None, **compiling: Any) -> Any:
    """A model, by default a new one, that trains with this optimizer."""
    one = model() if one is None else one
    one.compile(optimizer=optimizer, loss="mse", **compiling)
    return one


def data(batches: int = 8, per_rank: int = 4, seed: int = 5) -> tuple[Any, Any, Any, Any]:
    """This rank's part of every batch, as x and y, and the whole of all batches."""
    rank, size = gc.rank(), gc.size()
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((batches, size, per_rank, INPUTS)).astype(np.float32)
    y = generator.standard_normal((batches, size, per_rank, OUTPUTS)).astype(np.float32)
    return (
        x[:, rank].reshape(-1, INPUTS),
        y[:, rank].reshape(-1, OUTPUTS),
        x.reshape(-1, INPUTS),
        y.reshape(-1, OUTPUTS),
    )


def fit(one: Any, x: Any, y: Any, batch: int = 4, **arguments: Any) -> Any:
    """Quiet, in order."""
    return one.fit(x, y, batch_size=batch, shuffle=False, verbose=0, **arguments)


def compression() -> Any:
    """Few bits and a residual, also for layers that are as small as these."""
    return gc.Policy(gc.ErrorFeedback(gc.Quantize(bits=4)), filter=gc.Filter(min_elements=1))


def exchange(variables: Any, compression: Any = "none", **arguments: Any) -> Any:
    """The exchange of these variables with these arguments of a wrapper."""
    return Exchange(variables, Arguments(compression, **arguments))


def assert_alike(*lists: Any) -> None:
    """The variables have the same bytes on all ranks."""
    own = [
        (getattr(v, "path", v.name), hashlib.sha256(np.asarray(v).tobytes()).hexdigest())
        for variables in lists
        for v in variables
    ]
    first = gc.broadcast_object([list(one) for one in own])
    different = [name for (name, digest), (_, other) in zip(own, first, strict=True) if digest != other]
    assert not different, different


def assert_equal(ours: Any, theirs: Any) -> None:
    """The variables have the same values, bit for bit."""
    for mine, other in zip(ours, theirs, strict=True):
        assert np.array_equal(np.asarray(mine), np.asarray(other)), getattr(mine, "path", "")


def assert_close(ours: Any, theirs: Any, rtol: float = 1e-4, atol: float = 2e-6) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=rtol, atol=atol)


def shared_directory() -> str:
    """A new directory, the same on all ranks."""
    return str(gc.broadcast_object(tempfile.mkdtemp(prefix="gradcomp-test-")))

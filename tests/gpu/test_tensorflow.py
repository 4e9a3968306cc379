"""TensorFlow's gradients on a GPU: whose memory they are in, what order they need, and the host's bytes."""

# ruff: noqa: E402

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batch import HOST_KERNELS, on_ranks

tf: Any = pytest.importorskip("tensorflow")
pytest.importorskip("torch")  # through which the ranks meet

from keras_checks import exchange as Exchange

from gradcomp import Filter, Policy
from gradcomp.job import runtime
from gradcomp.kernels import devices
from gradcomp.tf.memory import address_of, place_of

GPUS = tf.config.list_physical_devices("GPU")
for each in GPUS:
    tf.config.experimental.set_memory_growth(each, True)  # else TensorFlow takes all of it

pytestmark = pytest.mark.skipif(not GPUS, reason="TensorFlow sees no GPU; tensorflow-cpu never does")

ENV = {"TF_CPP_MIN_LOG_LEVEL": "3", **HOST_KERNELS}
MODES: dict[str, Any] = {"eager": lambda function: function, "graph": tf.function}
COMPRESSIONS = ["quantize:bits=4,bucket_size=64", "topk:density=0.1", "none"]
SHAPES = [(300, 200), (133,), (), (0, 3)]


def exchange_on(where: str, compression: str = COMPRESSIONS[0], dtype: str = "float32") -> Exchange:
    with tf.device(where):
        variables = [tf.Variable(tf.zeros(shape, dtype), name=f"w{i}") for i, shape in enumerate(SHAPES)]
    exchange = Exchange(variables, Policy(compression, filter=Filter(min_elements=64)))
    assert exchange.exchanger is not None
    assert exchange.exchanger.pipeline.device is (devices.cuda(0) if "GPU" in where else devices.HOST)
    return exchange


def means_on(where: str, compression: str, mode: str, dtype: str = "float32") -> bytes:
    exchange, found = exchange_on(where, compression, dtype), b""
    average = MODES[mode](lambda *gradients: exchange.exchange([2 * gradient for gradient in gradients]))
    for step in range(4):
        generator = np.random.default_rng([runtime.rank(), step])
        with tf.device(where):
            given = [tf.cast(tf.constant(generator.standard_normal(shape)), dtype) for shape in SHAPES]
            means = average(*given)
        if "GPU" in where:
            assert all(mean.backing_device.endswith(where) for mean in means)
        found += b"".join(mean.numpy().tobytes() for mean in means)
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("compression", COMPRESSIONS)
@on_ranks(2, env=ENV)
def test_a_gpu_gives_the_bytes_of_the_host(compression: str, mode: str) -> None:
    alone = means_on("CPU:0", compression, mode)
    assert means_on("GPU:0", compression, mode) == alone
    assert means_on("CPU:0" if runtime.rank() == 0 else "GPU:0", compression, mode) == alone


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@on_ranks(2, env=ENV)
def test_other_dtypes(dtype: str) -> None:
    assert means_on("GPU:0", COMPRESSIONS[0], "graph", dtype) == means_on(
        "CPU:0", COMPRESSIONS[0], "graph", dtype
    )


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2, env=ENV)
def test_gradients_that_are_still_being_computed_are_waited_for(mode: str) -> None:
    exchange = exchange_on("GPU:0", "none")

    def late(slow: Any, *gradients: Any) -> Any:
        for _ in range(40):
            slow = tf.linalg.matmul(slow, slow)
        return exchange.exchange([gradient + slow[0, 0] for gradient in gradients])

    with tf.device("GPU:0"):
        ones = [tf.ones(shape) for shape in SHAPES]
        slow = tf.eye(4096)
        for _ in range(3):
            for mean in MODES[mode](late)(slow, *ones):
                np.testing.assert_array_equal(mean.numpy(), 2.0)


def test_where_a_variable_lies() -> None:
    for gpu in tf.config.list_logical_devices("GPU"):
        with tf.device(gpu.name):
            variable = tf.Variable(tf.ones([1000]))
        place = place_of([variable])
        assert place is not None
        name, device = place
        assert name == tf.convert_to_tensor(variable).backing_device
        assert device.driver is not None
        assert device.driver.reaches(address_of(tf.convert_to_tensor(variable)))
    with tf.device("CPU:0"):
        assert place_of([variable, tf.Variable(tf.ones([1000]))]) is None

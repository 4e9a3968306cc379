"""Gradients of TensorFlow on a device. The stand-in's device takes the CPU's tensors for its own."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from batch import on_ranks
from cuda_on_cpu.driver import CpuDriver
from kernels.standin import FOLDER

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow: pip install gradcomp[tf]")
pytest.importorskip("torch", reason="needs torch: pip install gradcomp[torch]")

from gradcomp import Filter, Policy
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.job import runtime
from gradcomp.kernels import bodies
from gradcomp.kernels import devices as kernel_devices
from gradcomp.kernels.devices import HOST
from gradcomp.tf import bridge, devices
from gradcomp.tf.devices import Place, address_of, place_of
from gradcomp.tf.exchange import Exchange
from gradcomp.tf.memory import DeviceMemory, HostMemory

ENV = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
CPU = "/job:localhost/replica:0/task:0/device:CPU:0"

Mode = Callable[[Callable[..., Any]], Callable[..., Any]]
MODES: dict[str, Mode] = {"eager": lambda function: function, "graph": tf.function}

SHAPES = [(40, 30), (33,), (), (0, 3)]
COMPRESSIONS = ["quantize:bits=4,bucket_size=64", "topk:density=0.1", "none"]


class _Everything(CpuDriver):
    """All memory is the device's: whatever TensorFlow allocates."""

    def reaches(self, address: int) -> bool:
        return True


@contextmanager
def on_device(here: bool = True) -> Iterator[Any]:
    """Exchanges that are made inside find their variables on a GPU, if this rank is one of those; gives the driver."""
    if not here:
        yield None
        return
    driver = _Everything(FOLDER, order=2)
    device = kernel_devices.on("cuda:0", driver)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.config, "list_logical_devices", lambda kind: [kind])
        patch.setattr(devices, "_is_gpu", lambda name: True)
        patch.setattr(kernel_devices, "cuda_at", lambda address: device)
        try:
            yield driver
        finally:
            bodies.take_away("cuda:0")


def variables(shapes: Any = SHAPES, dtype: str = "float32") -> list[Any]:
    return [tf.Variable(tf.zeros(shape, dtype), name=f"layer{i}") for i, shape in enumerate(shapes)]


def draw(step: int, shapes: Any = SHAPES, dtype: str = "float32") -> list[Any]:
    generator = np.random.default_rng([runtime.rank(), step])
    return [tf.cast(tf.constant(generator.standard_normal(shape)), dtype) for shape in shapes]


def bytes_after(steps: int, compression: str, mode: str, dtype: str, here: bool) -> bytes:
    """Of all means of some steps."""
    everything = b""
    with on_device(here) as driver:
        exchange = Exchange(variables(dtype=dtype), Policy(compression, filter=Filter(min_elements=64)))
        average = MODES[mode](lambda *gradients: exchange.exchange(gradients))
        for step in range(steps):
            for mean, shape in zip(average(*draw(step, dtype=dtype)), SHAPES, strict=True):
                assert (mean.dtype.name, tuple(mean.shape)) == (dtype, shape)
                everything += mean.numpy().tobytes()
        assert exchange.exchanger is not None
        assert (exchange.exchanger.pipeline.device is HOST) is not here
        assert not here or driver.launched
    return everything


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("compression", COMPRESSIONS)
@on_ranks(2, env=ENV)
def test_a_device_gives_the_bytes_of_the_host(compression: str, mode: str) -> None:
    alone = bytes_after(3, compression, mode, "float32", here=False)
    assert bytes_after(3, compression, mode, "float32", here=True) == alone
    assert bytes_after(3, compression, mode, "float32", here=runtime.rank() == 1) == alone

"""The CUDA kernels as one more backend: run by the stand-in for a GPU, see tests/cuda_on_cpu, or by a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from cuda_on_cpu.driver import CpuDriver
from kernels import gpu
from kernels.carried import Carried

from gradcomp.kernels import devices
from gradcomp.kernels.cuda.backend import CudaKernels
from gradcomp.kernels.devices import HOST, Device
from gradcomp.kernels.dispatch import Kernels
from gradcomp.kernels.segments import is_table

GPU = -1
"""Stands for the order of threads that a GPU chooses."""

ORDERS = {"cuda": 2} | ({"gpu": GPU} if gpu.problem() is None else {})
"""Names of backends, and the order in which their threads run: shuffled shows most of what barriers are missing."""


ADDRESSES = ("gradient", "residual", "next_residual", "output")
"""What a table refers to."""

FOLDER = Path(__file__).resolve().parents[2] / "build" / "cuda_on_cpu"
"""Where compiled kernels are kept, by what they are made of."""


class _OnGpu:
    """The kernels of the first GPU, which is not touched before the first of them is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        driver = devices.cuda(0).driver
        return getattr(Carried(CudaKernels(driver), driver), name)


@cache
def cuda_backend(order: int = 0) -> Any:
    """The kernels, in a thread order; for tables of the host's memory."""
    return _OnGpu() if order == GPU else CudaKernels(CpuDriver(FOLDER, order))


def is_gpu(value: Any) -> bool:
    """Whether a parameter of a test stands for the GPU: its name in ORDERS, or its kernels."""
    return isinstance(value, _OnGpu) or (isinstance(value, str) and value == "gpu")


class _Strict:
    """Kernels that refuse tables in which an address is not the device's."""

    def __init__(self, backend: CudaKernels, driver: CpuDriver) -> None:
        self._backend, self._driver = backend, driver
        self.called: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self._backend, name)

        def call(*arguments: Any, **settings: Any) -> Any:
            self.called.add(name)
            for table in arguments:
                if is_table(table):
                    for column in ADDRESSES:
                        for address in table[column][table["length"] > 0].tolist():
                            assert not address or self._driver.reaches(address), (
                                f"{name}: a {column} of the host"
                            )
            return kernel(*arguments, **settings)

        return call


class _Refusing:
    """A kernel of the host that refuses arrays of the device, and tables in which an address is the device's.

    The stand-in's memory is the host's too, so that a kernel of the host would take a gradient of the device.
    """

    def __init__(self, name: str, driver: CpuDriver) -> None:
        self._name, self._kernel, self._driver = name, getattr(HOST.kernels, name), driver

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        for each in arguments:
            for array in each if isinstance(each, list | tuple) else (each,):
                assert not hasattr(array, "__cuda_array_interface__"), f"{self._name}: an array of the device"
        for table in filter(is_table, arguments):
            for column in ADDRESSES:
                for address in table[column][table["length"] > 0].tolist():
                    assert not address or not self._driver.reaches(address), (
                        f"{self._name}: a {column} of the device"
                    )
        return self._kernel(*arguments, **settings)


@contextmanager
def lists_for_kernels_alone() -> Iterator[None]:
    """At the end, nothing was written into what only a device's kernels may touch."""
    made: list[Any] = []
    make = devices.mirror

    def noted(*given: Any) -> Any:
        made.append(make(*given))
        return made[-1]

    devices.mirror = noted
    try:
        yield
    finally:
        devices.mirror = make
    assert not any(np.array(each).any() for each in made), "written on the host"


@contextmanager
def device(name: str = "stand-in", order: int = 0) -> Iterator[tuple[Device, Any]]:
    """A device of the stand-in, and its kernels, which note in ``called`` what ran; its memory is ``zeros`` only."""
    driver = CpuDriver(FOLDER, order)
    place = devices.on(name, driver)
    strict = _Strict(place.kernels, driver)
    refusing = {
        name: _Refusing(name, driver)
        for name, each in vars(Kernels).items()
        if isinstance(each, staticmethod)
    }
    with lists_for_kernels_alone(), patch.multiple(HOST.kernels, **refusing):
        yield replace(place, kernels=strict), strict

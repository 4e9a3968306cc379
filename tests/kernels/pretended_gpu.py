"""A plugin of pytest that pretends there is a GPU, the stand-in. A case marked `gpu` fails unless it takes it."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
from kernels import gpu

from gradcomp.kernels import devices

_taken: list[int] = []


@functools.cache
def _standing_in(index: int) -> Any:
    from cuda_on_cpu.driver import CpuDriver
    from kernels.standin import FOLDER

    return devices.Device(f"cuda:{index}", driver=CpuDriver(FOLDER))


def _cuda(index: int) -> Any:
    _taken.append(index)
    return _standing_in(index)


gpu.problem = lambda: None
devices.cuda = _cuda
if importlib.util.find_spec("cuda") is not None:
    from gradcomp.kernels.cuda import over_bindings

    over_bindings.driver = lambda index: _standing_in(index).driver


def pytest_collection_finish() -> None:
    assert not _taken, "a device is taken while tests are collected"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _taken.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    found = yield
    assert _taken or item.get_closest_marker("gpu") is None, "marked gpu, and takes no device"
    return found

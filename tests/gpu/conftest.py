"""Everything in this folder needs a GPU; tests/conftest.py says what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kernels.carried import Carried

from gradcomp.kernels import devices
from gradcomp.kernels.cuda.backend import CudaKernels

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def driver() -> Any:
    """The driver of the first GPU."""
    return devices.cuda(0).driver


@pytest.fixture
def body(driver: Any) -> Any:
    """Its kernels, for tables of the host's memory."""
    return Carried(CudaKernels(driver), driver)

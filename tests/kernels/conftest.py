"""Where there is a GPU, it is one more backend in the tests of all backends; `make test-gpu` runs these cases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kernels.backends import running
from kernels.standin import is_gpu

HERE = Path(__file__).parent


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Kernels by name, see `kernels.backends`."""
    with running(request.param) as found:
        yield found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and any(map(is_gpu, parameters_of(item))):
            item.add_marker(pytest.mark.gpu)


def parameters_of(item: pytest.Item) -> list[object]:
    return [*item.callspec.params.values()] if hasattr(item, "callspec") else []
